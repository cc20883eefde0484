"""An adapted layer computes what PEFT computes, and the base when its adapter is off."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shoal.policy.lora.files import as_factors, factor_shapes, merge, read_factors, read_settings, trained_factors
from shoal.policy.lora.layers import adapt, adapted_layers, adapter_off
from shoal.policy.lora.targets import target_names

VECTORS = Path(__file__).parent / "vectors"


def peft_policy() -> Any:
    """The base with the adapter that PEFT saved, as a trainer holds it."""
    model: Any = AutoModelForCausalLM.from_pretrained(VECTORS / "base")
    lora = read_settings(VECTORS / "adapter")
    names = target_names(model, lora)
    given = read_factors(VECTORS / "adapter", factor_shapes(model, names, lora.rank))
    adapt(model, names, lora, trained=True)
    with torch.no_grad():
        for name, factor in trained_factors(model).items():
            factor.copy_(given[name])
    return model


def test_logits_are_those_of_peft() -> None:
    batch = load_file(VECTORS / "batch.safetensors")
    logits = peft_policy()(input_ids=batch["ids"]).logits
    torch.testing.assert_close(logits, batch["logits"], atol=1e-5, rtol=1e-5)


def test_gradients_of_every_factor_are_those_of_peft() -> None:
    ids, model = load_file(VECTORS / "batch.safetensors")["ids"], peft_policy()
    logprobs = torch.log_softmax(model(input_ids=ids).logits[:, :-1], dim=-1)
    torch.autograd.backward(-logprobs.gather(2, ids[:, 1:, None]).sum())
    expected, factors = load_file(VECTORS / "gradients.safetensors"), trained_factors(model)
    assert factors.keys() == expected.keys()
    for name, factor in factors.items():
        scale = float(expected[name].abs().max())
        assert factor.grad is not None
        assert float((factor.grad - expected[name]).abs().max()) <= 1e-5 * max(1.0, scale), name
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if ".lora_" not in name)


def test_adapter_off_is_the_base_bit_for_bit() -> None:
    ids, model = load_file(VECTORS / "batch.safetensors")["ids"], peft_policy()
    base: Any = AutoModelForCausalLM.from_pretrained(VECTORS / "base")
    with adapter_off(model):
        off = model(input_ids=ids).logits
    assert torch.equal(off, base(input_ids=ids).logits)
    assert not torch.equal(off, model(input_ids=ids).logits)


def test_adapter_is_on_again_after_an_error() -> None:
    model = peft_policy()
    with pytest.raises(RuntimeError), adapter_off(model):
        raise RuntimeError
    assert all(layer.is_on for layer in adapted_layers(model).values())


def test_a_merged_base_computes_the_same() -> None:
    ids, model = load_file(VECTORS / "batch.safetensors")["ids"], peft_policy()
    merged: Any = AutoModelForCausalLM.from_pretrained(VECTORS / "base")
    lora = read_settings(VECTORS / "adapter")
    names = target_names(merged, lora)
    factors = {name: factor.detach() for name, factor in trained_factors(model).items()}
    merge(merged, as_factors(factors, names, lora.scale))
    torch.testing.assert_close(merged(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


def test_a_base_in_bf16_is_widened_for_the_product_and_saved_as_it_is() -> None:
    layer = torch.nn.Linear(24, 16, bias=False).to(torch.bfloat16)
    model = torch.nn.ModuleDict({"layer": layer})
    lora = read_settings(VECTORS / "adapter")
    adapt(model, ["layer"], lora, trained=True)
    inputs = torch.randn(3, 5, 24, requires_grad=True)
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = model["layer"](inputs)
    assert all(tensor.dtype == torch.bfloat16 for tensor in saved if tensor.shape == layer.weight.shape)
    torch.autograd.backward(outputs.sum())
    widened = torch.nn.functional.linear(inputs, layer.weight.float())
    adapted: Any = model["layer"]
    expected = widened + lora.scale * adapted.lora_B(adapted.lora_A(inputs))
    torch.testing.assert_close(outputs, expected)
    (gradient,) = torch.autograd.grad(expected.sum(), inputs)
    torch.testing.assert_close(inputs.grad, gradient)
