"""Engine and trainer share one formula for logits, and it is that of the models."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma3TextConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
)

from shoal.policy import ModelError
from shoal.policy.architecture import HeadLogits, causal_mask, decoder_blocks, meta_model
from support.tiny_models import SHAPE

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE),
    "cohere multiplies": CohereConfig(**SHAPE, logit_scale=0.25),
    "granite divides": GraniteConfig(**SHAPE, logits_scaling=4.0),
    "hyperclovax multiplies by the same setting": HyperCLOVAXConfig(**SHAPE, logits_scaling=4.0),
    "gemma caps": Gemma3TextConfig(**SHAPE, head_dim=8, final_logit_softcapping=0.05),
    "falcon-h1 multiplies": FalconH1Config(**SHAPE, lm_head_multiplier=3.0, mamba_d_ssm=32, mamba_n_heads=4),
}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_are_those_of_the_models_own_forward_pass(name: str) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    ids = torch.arange(6)[None]
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    logits = HeadLogits.of(model.config)(model.get_output_embeddings()(states))
    torch.testing.assert_close(logits, model(input_ids=ids, use_cache=False).logits)


def test_scaling_comes_before_the_cap() -> None:
    """As in MuseGlimmer, the only architecture with both."""
    config = LlamaConfig(**SHAPE)
    config.output_multiplier, config.final_logit_softcapping = 0.5, 2.0
    products = torch.linspace(-9, 9, 7)
    torch.testing.assert_close(HeadLogits.of(config)(products), 2.0 * torch.tanh(products * 0.5 / 2.0))


@pytest.mark.parametrize("head", [HeadLogits(), HeadLogits(0.3), HeadLogits(cap=2.0), HeadLogits(3.0, 2.0)])
def test_the_backward_pass_is_that_of_autograd(head: HeadLogits) -> None:
    products = torch.linspace(-4, 4, 9, requires_grad=True)
    logits, weights = head(products), torch.linspace(1, 2, 9)
    (expected,) = torch.autograd.grad((logits * weights).sum(), products)
    torch.testing.assert_close(head.backward(weights.clone(), 1.7 * logits.detach(), 1.7), expected)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_a_query_sees_itself_and_what_lies_within_its_window(window: int | None) -> None:
    mask = causal_mask(5, window, torch.device("cpu"))
    for query in range(5):
        seen = [key for key in range(5) if key <= query and (window is None or query - key < window)]
        assert mask[query].nonzero()[:, 0].tolist() == seen


def test_a_meta_model_has_blocks_and_shapes_but_no_memory() -> None:
    model = meta_model(LlamaConfig(**SHAPE))
    assert len(decoder_blocks(model)) == SHAPE["num_hidden_layers"]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_is_no_language_model_is_named() -> None:
    from transformers import ViTConfig

    with pytest.raises(ModelError, match="no causal language model"):
        meta_model(ViTConfig())
