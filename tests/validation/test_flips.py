"""Honest rounding has an expected likelihood ratio of at most 1; coarser numerics and other temperatures add up."""

import math

import pytest
import torch

from shoal.policy.engine import Scored
from shoal.proofs import choose_tokens, token_margins
from shoal.validation import flips

VOCABULARY = 24
SCALE = 0.04


def work(
    error: float, *, tokens: int = 40_000, seed: int = 0, heat: float = 1.0, tail: float = flips.TAIL_SHARE
) -> Scored:
    """Tokens that a worker draws from logits which its numerics have moved; errors have the shape of the model."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(tokens, VOCABULARY, generator=generator)
    wide = torch.where(torch.rand(tokens, 1, generator=generator) < tail, flips.TAIL_WIDTH, 1.0)
    moved = logits + wide * error / math.sqrt(2) * torch.randn(tokens, VOCABULARY, generator=generator)
    seeds, places = torch.arange(tokens) + 1_000_000 * seed, torch.zeros(tokens, dtype=torch.int64)
    drawn, _ = choose_tokens(moved, seeds, places, heat)
    margins, logprobs, rivals = token_margins(logits, seeds, places, drawn, 1.0)
    return Scored(margins, logprobs, torch.zeros(tokens, 1), rivals)


def parts(scored: Scored, size: int) -> list[Scored]:
    count = len(scored.margins) // size
    return [Scored(*(field[at * size : (at + 1) * size] for field in vars(scored).values())) for at in range(count)]


@pytest.mark.parametrize("error", [SCALE, 0.5 * SCALE, 0.1 * SCALE, 0.0])
def test_honest_work_has_an_expected_ratio_of_at_most_one(error: float) -> None:
    found = torch.tensor([flips.evidence([part], SCALE) for part in parts(work(error), 100)]).double().exp()
    means, deviations = found.mean(0), found.std(0) / len(found) ** 0.5
    assert (means <= 1 + 3 * deviations).all(), means


def test_honest_errors_without_a_tail_are_no_more_suspicious() -> None:
    found = torch.tensor([flips.evidence([part], SCALE) for part in parts(work(SCALE, tail=0.0), 100)]).double().exp()
    assert (found.mean(0) <= 1.02).all()


@pytest.mark.parametrize(
    ("alternative", "error", "heat"),
    [
        ("coarser_x1.5", 1.5, 1.0),
        ("coarser_x2.5", 2.5, 1.0),
        ("coarser_x6", 8.0, 1.0),
        ("colder", 1.0, 0.95),
        ("hotter", 1.0, 1.05),
    ],
)
def test_each_alternative_finds_what_it_is_for(alternative: str, error: float, heat: float) -> None:
    sums = flips.evidence([work(error * SCALE, tokens=16_000, heat=heat)], SCALE)
    found = dict(zip(flips.ALTERNATIVES, sums, strict=True))
    assert found[alternative] > 20
    assert found[alternative] == max(found.values())


@pytest.mark.parametrize("margin", [0.5, 5.0, 1e9, math.inf])
def test_one_outlier_counts_no_more_than_the_bound(margin: float) -> None:
    rivals = torch.tensor([[min(margin, 3.0), 4.0, 1.0, 2.0]])
    outlier = Scored(torch.tensor([margin]), torch.zeros(1), torch.zeros(1, 1), rivals)
    found = flips.evidence([outlier], SCALE)
    assert all(math.isfinite(value) and value <= flips.LARGEST_LLR for value in found)


@pytest.mark.parametrize("value", [0.0, math.inf, 1e30, 1e-30])
def test_gaps_at_the_ends_give_numbers(value: float) -> None:
    rivals = torch.full((6, 4), value)
    margins = torch.tensor([0.0, value, math.inf, 0.0, 1e-9, 3.0])
    found = flips.evidence([Scored(margins, torch.zeros(6), torch.zeros(6, 1), rivals)], SCALE)
    assert all(math.isfinite(one) for one in found)
    assert max(found) <= 6 * flips.LARGEST_LLR


def test_no_token_is_no_evidence() -> None:
    empty = Scored(torch.zeros(0), torch.zeros(0), torch.zeros(0, 1), torch.zeros(0, 4))
    assert flips.evidence([empty], SCALE) == [0.0] * len(flips.ALTERNATIVES)


def test_what_is_left_out_as_no_near_tie_changes_nothing() -> None:
    draws = flips.Draws.of([work(SCALE, tokens=4000)])
    for alternative in flips.ALTERNATIVES.values():
        whole = flips.ratios(draws, SCALE, [alternative]).sum()
        near = flips.ratios(flips.close_draws(draws, SCALE), SCALE, [alternative]).sum()
        assert float(near) == pytest.approx(float(whole), abs=1e-6)


def test_the_scale_of_honest_work_is_found() -> None:
    likely, upper = flips.fit_scale(flips.Draws.of([work(SCALE)]))
    assert likely == pytest.approx(SCALE, rel=0.15)
    assert likely < upper < 1.4 * SCALE


def test_the_fewer_tokens_the_wider_the_scale_may_be() -> None:
    none_lost = work(0.0, tokens=2000)
    few, many = flips.Draws.of([parts(none_lost, 200)[0]]), flips.Draws.of([none_lost])
    assert flips.fit_scale(few)[1] > 2 * flips.fit_scale(many)[1]


def test_a_worker_that_steers_wider_ties_than_allowed_is_found() -> None:
    honest = flips.Draws.of([work(0.0, tokens=100_000)])

    def steered(width: float) -> float:
        lost = (honest.gaps_N2[:, 0] < width * SCALE).long()
        draws = flips.Draws(lost, honest.gaps_N2, honest.logit_gaps_N2)
        kinds = [one for one in flips.ALTERNATIVES.values() if not one.tilt]
        coarser = [ratios_N.sum() for ratios_N in flips.ratios(draws, SCALE, kinds)]
        return max(map(float, coarser))

    assert steered(0.8 * flips.steerable_gap()) < 0 < steered(1.3 * flips.steerable_gap())
