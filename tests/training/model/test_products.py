"""Layers with other products are trained like those of torch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.policy import products as choice
from shoal.training.model import products
from shoal.training.model.products import TrainedLinear, use_fast_products

Directory = Callable[..., Path]


@pytest.fixture
def slow_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product goes to oneDNN."""
    for module in (choice, products):
        monkeypatch.setattr(module, "has_slow_mkl", lambda: True)
    monkeypatch.setattr(choice, "SMALLEST", 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(40, 24), (2, 20, 24), (1, 24)])
def test_outputs_and_gradients_are_those_of_a_linear_layer(slow_mkl: None, bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 56, bias=bias)
    found = list[list[torch.Tensor]]()
    weights = torch.randn(*shape[:-1], 56)
    inputs = torch.randn(shape)
    for layer in (linear, TrainedLinear.of(linear)):
        linear.zero_grad()
        given = inputs.clone().requires_grad_()
        outputs = layer(given)
        (outputs * weights).sum().backward()
        assert given.grad is not None
        gradients = [parameter.grad.clone() for parameter in linear.parameters() if parameter.grad is not None]
        assert len(gradients) == 1 + bias
        found.append([outputs.detach(), given.grad, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_what_needs_no_gradient_gets_none(slow_mkl: None) -> None:
    layer = TrainedLinear.of(nn.Linear(8, 8)).requires_grad_(False)
    inputs = torch.randn(4, 8, requires_grad=True)
    layer(inputs).sum().backward()
    assert inputs.grad is not None
    assert layer.weight.grad is None
    frozen = TrainedLinear.of(nn.Linear(8, 8))
    frozen(torch.randn(4, 8)).sum().backward()
    assert frozen.weight.grad is not None


def test_other_precisions_are_left_to_torch(slow_mkl: None) -> None:
    layer, inputs = TrainedLinear.of(nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16
    double = TrainedLinear.of(nn.Linear(8, 8, dtype=torch.float64))
    assert double(inputs.double()).dtype == torch.float64


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())])
        self.own = OwnLinear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


class OwnLinear(nn.Linear):
    """A subclass may compute something else."""


def test_parameters_and_their_names_stay_and_head_and_subclasses_too(slow_mkl: None) -> None:
    model = Small()
    before = dict(model.named_parameters())
    use_fast_products(model, torch.float32)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert sum(type(module) is TrainedLinear for module in model.modules()) == 2
    assert (type(model.head), type(model.own)) == (nn.Linear, OwnLinear)


def test_nothing_is_replaced_where_torch_is_fast_or_another_type_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_slow_mkl", lambda: True)
    narrow = Small()
    use_fast_products(narrow, torch.bfloat16)
    monkeypatch.setattr(products, "has_slow_mkl", lambda: False)
    fast = Small()
    use_fast_products(fast, torch.float32)
    for model in (narrow, fast):
        assert not any(isinstance(module, TrainedLinear) for module in model.modules())
