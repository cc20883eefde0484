"""Which layers are adapted, and every refusal with its reason."""

from typing import Any

import pytest
from transformers import GPT2Config

from shoal.config import LoraConfig
from shoal.policy.architecture import meta_model
from shoal.policy.lora.targets import LoraError, target_names
from support.tiny_models import CONFIGS, SHAPE


def names(model: str, **settings: Any) -> list[str]:
    return target_names(meta_model(CONFIGS[model]()), LoraConfig(rank=settings.pop("rank", 4), **settings))


def test_all_linear_layers_but_the_head_are_adapted() -> None:
    found = names("llama")
    assert len(found) == 7 * SHAPE["num_hidden_layers"]
    assert "lm_head" not in found


def test_targets_are_ends_of_names_or_whole_paths() -> None:
    assert names("llama", target_modules=("q_proj", "model.layers.1.mlp.up_proj")) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    ]


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ("llama", {"target_modules": ("q_porj",)}, "q_porj.*Nearest: q_proj"),
        ("llama", {"target_modules": ("proj",)}, "does not have.*Nearest"),
        ("llama", {"target_modules": ("../../../etc/passwd",)}, "does not have.*Nearest"),
        ("llama", {"target_modules": ("q_proj", "")}, "has an empty name"),
        ("llama", {"target_modules": (".*_proj",)}, "does not have.*Nearest: .*_proj"),
        ("llama", {"target_modules": ("self_attn",)}, "is a LlamaAttention and not a linear layer"),
        ("llama", {"target_modules": ("q_proj", "lm_head")}, "the LM head, which cannot be adapted"),
        ("llama", {"target_modules": ("embed_tokens",)}, "is a Embedding and not a linear layer"),
        ("llama", {"rank": 49}, "Rank 49 does not fit LlamaForCausalLM: the largest rank of a layer to adapt is 48"),
        ("llama", {"rank": 0}, "Rank 0 does not fit"),
        ("qwen3-moe", {}, "cannot be adapted as a whole.*experts.*are no linear layers.*Name the layers"),
        ("mamba", {}, "cannot be adapted as a whole"),
    ],
)
def test_refused_with_the_reason(model: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(LoraError, match=f"(?s){says}"):
        names(model, **settings)


def test_a_family_without_linear_layers_is_refused() -> None:
    model = meta_model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32))
    with pytest.raises(LoraError, match=r"GPT2LMHeadModel cannot be adapted.*Train all weights"):
        target_names(model, LoraConfig(rank=2))


def test_attention_of_a_mixture_of_experts_can_be_adapted_by_name() -> None:
    assert len(names("qwen3-moe", target_modules=("q_proj", "v_proj"))) == 2 * SHAPE["num_hidden_layers"]


def test_full_rank_of_the_largest_layer_fits() -> None:
    assert names("llama", rank=48)
