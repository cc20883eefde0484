from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from shoal.policy import GenerationRequest, ScoreRequest, TorchEngine
from shoal.policy.embedded import linear, runner
from shoal.policy.embedded.linear import FEWEST_WIDENED, Linear, choose_reordered, has_slow_products
from shoal.policy.embedded.widening import Widener
from support.tiny_models import EOS

Directory = Callable[..., Path]
REQUESTS = [GenerationRequest(tuple(range(3, 3 + 2 * number)), number, 24) for number in range(1, 9)]


def layer(rows: int = 96, columns: int = 48, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> Linear:
    torch.manual_seed(0)
    return Linear(torch.randn(rows, columns, dtype=dtype), torch.randn(rows, dtype=dtype) if bias else None)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_packed_weights_give_the_same_layer(bias: bool, rows: int) -> None:
    plain, reordered = layer(bias=bias), layer(bias=bias)
    reordered.reorder()
    inputs, residual = torch.randn(rows, 48), torch.randn(rows, 96)
    expected = F.linear(inputs, plain.weight, plain.bias)
    torch.testing.assert_close(reordered(inputs), expected)
    torch.testing.assert_close(plain.add_to(residual, inputs), expected + residual)
    torch.testing.assert_close(reordered.add_to(residual, inputs), expected + residual)


def test_reordering_again_follows_weights_that_were_written_in_place() -> None:
    one = layer()
    one.reorder()
    one.weight.mul_(2)
    inputs = torch.randn(4, 48)
    assert not torch.allclose(one(inputs), F.linear(inputs, one.weight, one.bias))
    one.reorder()
    torch.testing.assert_close(one(inputs), F.linear(inputs, one.weight, one.bias))


def test_only_large_float32_matrices_are_copied_and_only_where_memory_is_plentiful(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, small, coarse = layer(1024, 512), layer(), layer(1024, 512, dtype=torch.bfloat16)
    assert choose_reordered([large, small, coarse]) == [large]
    monkeypatch.setattr(linear, "available_bytes", lambda device: 7 * large.weight.nbytes // 2)
    assert choose_reordered([large]) == []


@pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen2", "qwen3"])
def test_an_engine_with_reordered_weights_makes_the_same_completions_before_and_after_a_swap(
    model_directory: Directory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def engine(directory: Path) -> TorchEngine:
        return TorchEngine(directory, eos_token_ids=(EOS,))

    first, second = model_directory(name), model_directory(name, seed=1)
    expected = [engine(directory).generate(REQUESTS, temperature=0.9) for directory in (first, second)]
    monkeypatch.setattr(linear, "SMALLEST", 1)
    swapped = engine(first)
    assert len(swapped._runner._reordered) == 9  # type: ignore[attr-defined]  # a transformer's
    found = [swapped.generate(REQUESTS, temperature=0.9)]
    swapped.load(second)
    found.append(swapped.generate(REQUESTS, temperature=0.9))
    for one, other in zip(found, expected, strict=True):
        assert [completion.tokens for completion in one] == [completion.tokens for completion in other]
    assert [completion.tokens for completion in found[0]] != [completion.tokens for completion in found[1]]


def narrow_layers(*, bias: bool) -> tuple[Linear, Linear]:
    """The same bf16 layer by torch's own product and by a widened one."""
    plain = layer(96, 512, bias=bias, dtype=torch.bfloat16)
    return plain, Linear(plain.weight, plain.bias, widener=Widener())


def within_one_rounding(found: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor) -> bool:
    """Apart from the order of float32 sums of such size; 2⁻⁷ is the largest relative distance of two bf16 neighbours."""
    largest = torch.maximum(found.float().abs(), expected.float().abs())
    return bool(((found.float() - expected.float()).abs() <= 2**-7 * largest + 1e-6 * terms).all())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [FEWEST_WIDENED, 200])
def test_a_widened_product_of_bf16_is_that_of_torch_to_one_rounding(bias: bool, rows: int) -> None:
    plain, widened = narrow_layers(bias=bias)
    inputs, residual = torch.randn(rows, 512).bfloat16(), torch.randn(rows, 96).bfloat16()
    terms = inputs.float().abs() @ plain.weight.float().abs().t() + residual.float().abs()
    for found, expected in (
        (widened(inputs), plain(inputs)),
        (widened.add_to(residual, inputs), plain.add_to(residual, inputs)),
    ):
        assert found.dtype == torch.bfloat16
        # torch adds a bias to what it has rounded
        assert within_one_rounding(found, expected, terms * (1 if not bias else 2**-7 / 1e-6))
    exact = F.linear(inputs.double(), plain.weight.double(), None if plain.bias is None else plain.bias.double())
    assert within_one_rounding(widened(inputs), exact.bfloat16(), terms)


def test_few_rows_are_multiplied_as_torch_does() -> None:
    plain, widened = narrow_layers(bias=True)
    inputs = torch.randn(FEWEST_WIDENED - 1, 512).bfloat16()
    assert torch.equal(widened(inputs), plain(inputs))


def test_only_bf16_on_a_cpu_can_have_slow_products() -> None:
    cpu = torch.device("cpu")
    assert not has_slow_products(torch.float32, cpu)
    assert not has_slow_products(torch.bfloat16, torch.device("meta"))
    assert has_slow_products(torch.bfloat16, cpu) is not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_an_engine_in_bf16_generates_and_scores_alike_with_either_product(
    model_directory: Directory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def engine(slow: bool) -> TorchEngine:
        monkeypatch.setattr(runner, "has_slow_products", lambda dtype, device: slow)
        return TorchEngine(model_directory(name), eos_token_ids=(EOS,), dtype="bfloat16")

    plain, widened = engine(False), engine(True)
    assert {parameter.dtype for parameter in widened._runner.model.parameters()} == {torch.bfloat16}
    made = plain.generate(REQUESTS, temperature=0.9)
    asked = [
        ScoreRequest(request.prompt_tokens, tuple(row.tokens), request.seed)
        for request, row in zip(REQUESTS, made, strict=True)
    ]
    for one, other in zip(*(each.score(asked, temperature=0.9) for each in (plain, widened)), strict=True):
        assert other.states.dtype == torch.bfloat16
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=0.05, rtol=0.05)
    agreeing = sum(a.tokens == b.tokens for a, b in zip(made, widened.generate(REQUESTS, temperature=0.9), strict=True))
    assert agreeing >= len(REQUESTS) // 2
