from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from shoal.policy import GenerationRequest, TorchEngine
from shoal.policy.embedded import linear
from shoal.policy.embedded.linear import Linear, choose_reordered
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
