"""Which library multiplies follows from processor and shapes; what comes out is the product either way."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from shoal.policy import products
from shoal.policy.products import SMALLEST, has_onednn, has_slow_mkl, is_faster_by_onednn, onednn_product, product

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")
LARGE = (1024, 256, SMALLEST // (1024 * 256))
"""Rows, inputs and outputs at the limit."""


@pytest.fixture
def slow_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_slow_mkl", lambda: True)


@pytest.fixture
def asked_again() -> Iterator[None]:
    has_slow_mkl.cache_clear()
    yield
    has_slow_mkl.cache_clear()


def operands(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)


@pytest.mark.parametrize("shape", [LARGE, (3, 5, 7), (1, 384, 128), (200, 48, 96)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_both_libraries_give_the_same_product(shape: tuple[int, int, int], has_bias: bool, slow_mkl: None) -> None:
    inputs, weight, bias = operands(*shape)
    chosen = bias if has_bias else None
    expected = F.linear(inputs.double(), weight.double(), None if chosen is None else chosen.double()).float()
    for found in (product(inputs, weight, chosen), onednn_product(inputs, weight, chosen)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_views_of_transposed_matrices_are_multiplied_as_what_they_show(slow_mkl: None) -> None:
    inputs, weight, _ = operands(*LARGE)
    gradient = product(inputs, weight)
    torch.testing.assert_close(product(gradient, weight.t()), gradient @ weight, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(product(gradient.t(), inputs.t()), gradient.t() @ inputs, rtol=1e-5, atol=1e-1)


def test_only_large_float32_products_on_a_slow_cpu_leave_torch(slow_mkl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weight, _ = operands(*LARGE)
    assert is_faster_by_onednn(inputs, weight)
    assert is_faster_by_onednn(inputs.view(4, 256, 256), weight), "rows are rows, however they are arranged"
    assert not is_faster_by_onednn(inputs[1:], weight)
    assert not is_faster_by_onednn(inputs, weight[1:])
    assert not is_faster_by_onednn(inputs.bfloat16(), weight.bfloat16())
    assert not is_faster_by_onednn(inputs.to("meta"), weight.to("meta"))
    monkeypatch.setattr(products, "has_slow_mkl", lambda: False)
    assert not is_faster_by_onednn(inputs, weight)


@pytest.mark.parametrize(
    ("facts", "capability", "is_slow"),
    [
        ("vendor_id\t: AuthenticAMD\n", "AVX512", True),
        ("vendor_id\t: GenuineIntel\n", "AVX512", False),
        ("vendor_id\t: AuthenticAMD\n", "AVX2", False),
        ("CPU implementer\t: 0x41\n", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_mkl_is_slow_on_processors_with_avx512_of_other_makers(
    asked_again: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    facts: str | None,
    capability: str,
    is_slow: bool,
) -> None:
    """Where nothing is known torch's own choice stays."""
    file = tmp_path / "cpuinfo"
    if facts is not None:
        file.write_text(f"processor\t: 0\n{facts}")
    monkeypatch.setattr(products, "CPU_FACTS", file)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch, "has_mkl", True)
    assert has_slow_mkl() is is_slow
