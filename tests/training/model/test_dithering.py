import pytest
import torch
from torch import Tensor

from shoal.training.model import dithering
from shoal.training.model.dithering import BLOCK_ELEMENTS, dither, dither_masters, noise_of_rows


def bf16_masters(count: int = 20_000) -> Tensor:
    torch.manual_seed(0)
    return (0.05 * torch.randn(count)).to(torch.bfloat16).float()


def dithered(masters: Tensor, seed: int = 0) -> Tensor:
    moved = masters.clone()
    dither_masters([("weight", moved)], seed)
    return moved


def published(masters: Tensor) -> Tensor:
    return masters.to(torch.bfloat16).float()


def test_what_is_published_stays_the_same_bit_for_bit() -> None:
    masters = bf16_masters()
    moved = dithered(masters)
    assert torch.equal(published(moved), masters)
    assert (moved != masters).float().mean() > 0.99


def test_published_weights_follow_a_small_step_in_the_mean_where_exact_masters_hide_it() -> None:
    masters = published(torch.full((50_000,), 0.05) + 0.001 * torch.rand(50_000))
    interval = 2.0**-5 * 2.0**-7  # of numbers from 2⁻⁵ to 2⁻⁴
    step = 0.1 * interval
    assert torch.equal(published(masters + step), masters)
    followed = published(dithered(masters) + step) - masters
    assert abs(float(followed.mean()) - step) < 0.05 * step
    assert abs(float((followed != 0).float().mean()) - 0.1) < 0.01


def test_masters_that_are_no_bf16_numbers_are_left_alone() -> None:
    masters = bf16_masters()
    masters[::2] *= 1.0001
    moved = dithered(masters)
    free = masters != published(masters)
    assert free.any()
    assert torch.equal(moved[free], masters[free])


def test_zero_powers_of_two_and_the_ends_of_the_range_keep_their_value() -> None:
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-126, 3.38e38, -3.38e38]).to(torch.bfloat16).float()
    for noise in (-0.5, -0.499, -0.3, 0.3, 0.499):
        moved = edges.clone()
        dither(moved, torch.full_like(moved, noise))
        assert torch.equal(moved.to(torch.bfloat16).view(torch.int16), edges.to(torch.bfloat16).view(torch.int16))
        assert moved.isfinite().all()


def test_the_place_depends_on_seed_and_name_alone() -> None:
    masters = bf16_masters()
    assert torch.equal(dithered(masters), dithered(masters))
    assert not torch.equal(dithered(masters), dithered(masters, seed=1))
    other = masters.clone()
    dither_masters([("another", other)], 0)
    assert not torch.equal(other, dithered(masters))


@pytest.mark.parametrize("shape", [(1000, 300), (5, 7, 3), (200_000,), (3, 200_000), ()])
def test_rows_have_the_same_noise_on_every_rank(shape: tuple[int, ...]) -> None:
    whole = noise_of_rows("weight", torch.Size(shape))
    assert whole.shape == shape
    assert whole.abs().max() <= 0.5
    for first, last in ((0, 1), (1, 3), (2, 3), (3, 5), (998, 1000)):
        if shape and last <= shape[0]:
            part = noise_of_rows("weight", torch.Size((last - first, *shape[1:])), first)
            assert torch.equal(part, whole[first:last])


def test_a_rank_draws_its_own_noise_and_no_more_than_a_block_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank drew the noise of the whole model."""
    drawn: list[int] = []
    block = dithering._block

    def counted(name: str, number: int, elements: int) -> Tensor:
        drawn.append(elements)
        return block(name, number, elements)

    monkeypatch.setattr(dithering, "_block", counted)
    own = torch.Size((1000, 512))  # of 8,000 rows
    noise_of_rows("weight", own, 3000)
    assert sum(drawn) <= own.numel() + 2 * BLOCK_ELEMENTS
