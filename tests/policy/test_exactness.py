"""Float32 products are exact or the engine does not start."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.policy import GenerationRequest, ScoreRequest
from shoal.policy.embedded.engine import TorchEngine
from shoal.policy.exactness import PRODUCTS, InexactProductsError, require_exact
from support.tiny_run import save_policy

CPU = torch.device("cpu")
BACKENDS: Any = torch.backends


def rounded(bits: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Products whose inputs keep N bits of the mantissa: 10 are TF32, 7 are bfloat16."""
    mask = -1 << (23 - bits)

    def product(inputs: Tensor, weight: Tensor) -> Tensor:
        cut = (inputs.view(torch.int32) & mask).view(torch.float32)
        return F.linear(cut, weight)

    return product


def bfloat16_pairs(inputs: Tensor, weight: Tensor) -> Tensor:
    """oneDNN's finer reduction: two bfloat16 terms, 16 bits."""
    high = inputs.bfloat16().float()
    return F.linear(high, weight) + F.linear((inputs - high).bfloat16().float(), weight)


def only_for_many_rows(inputs: Tensor, weight: Tensor) -> Tensor:
    return rounded(7)(inputs, weight) if len(inputs) >= 64 else F.linear(inputs, weight)


def test_products_of_this_machine_are_exact() -> None:
    require_exact(CPU, PRODUCTS)


@pytest.mark.parametrize("product", [rounded(7), rounded(10), rounded(22), bfloat16_pairs, only_for_many_rows])
def test_every_kind_of_reduced_product_is_noticed(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(
        InexactProductsError, match=r"products on this machine's cpu are reduced .* NVIDIA_TF32_OVERRIDE"
    ):
        require_exact(CPU, {"linear": product})


def test_an_engine_on_a_machine_that_reduces_products_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = save_policy(tmp_path / "policy", seed=0)
    monkeypatch.setitem(PRODUCTS, "linear", rounded(10))
    with pytest.raises(InexactProductsError):
        TorchEngine(policy, eos_token_ids=(1,))


def test_an_engine_asks_for_exact_products_whatever_was_set_before(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", seed=0)
    torch.set_float32_matmul_precision("medium")
    TorchEngine(policy, eos_token_ids=(1,))
    assert torch.get_float32_matmul_precision() == "highest"


MODES = {
    "set_float32_matmul_precision": "torch.set_float32_matmul_precision('medium')",
    "matrix products of oneDNN": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "all of oneDNN": "torch.backends.mkldnn.fp32_precision = 'bf16'",
    "every backend": "torch.backends.fp32_precision = 'tf32'",
    "matrix products of CUDA": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "the old flag of CUDA": "torch.backends.cuda.matmul.allow_tf32 = True",
}


@pytest.fixture
def modes() -> Iterator[None]:
    yield
    BACKENDS.fp32_precision = "none"
    BACKENDS.mkldnn.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


def precisions() -> Sequence[str]:
    return BACKENDS.mkldnn.matmul.fp32_precision, BACKENDS.cuda.matmul.fp32_precision


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_that_a_library_sets_later_is_taken_back_before_every_pass(
    tmp_path: Path, mode: str, modes: None
) -> None:
    engine = TorchEngine(save_policy(tmp_path / "policy", seed=0), eos_token_ids=(1,))
    generation, scoring = GenerationRequest((2, 3, 4), 7, 4), ScoreRequest((2, 3, 4), (5, 6), 7)
    exec(MODES[mode])
    engine.generate([generation], temperature=1.0)
    assert precisions() == ("ieee", "ieee")
    exec(MODES[mode])
    engine.score([scoring], temperature=1.0)
    assert precisions() == ("ieee", "ieee")


def test_a_machine_that_begins_to_reduce_products_gets_no_further_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = save_policy(tmp_path / "policy", seed=0)
    engine = TorchEngine(policy, eos_token_ids=(1,))
    engine.load(policy)
    monkeypatch.setitem(PRODUCTS, "reordered", rounded(7))
    with pytest.raises(InexactProductsError):
        engine.load(policy)
