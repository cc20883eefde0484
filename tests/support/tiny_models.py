"""Tiny random models of several architectures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 64
RUNNABLE = (
    "llama",
    "llama-biased",
    "qwen2",
    "qwen2-windowed",
    "qwen3",
    "mistral",
    "gemma3",
    "granite",
    "qwen3-moe",
    "deepseek-v3",
    "gpt-neox",
)
"""Architectures that the embedded engine runs."""
EOS = 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-32": lambda: LlamaConfig(**SHAPE, head_dim=32, tie_word_embeddings=True),
    "llama-biased": lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen2-windowed": lambda: Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "mistral": lambda: MistralConfig(**SHAPE, head_dim=12, sliding_window=8),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, head_dim=12, sliding_window=8),
    "granite": lambda: GraniteConfig(**SHAPE, logits_scaling=4.0),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=12, num_experts=4),
    "deepseek-v3": lambda: DeepseekV3Config(**{**SHAPE, "num_key_value_heads": 4}, **EXPERTS, **LATENT),
    "gpt-neox": lambda: GPTNeoXConfig(
        **{key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}, tie_word_embeddings=False
    ),
    "gemma2": lambda: Gemma2Config(**SHAPE, head_dim=12),
    "mamba": lambda: MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2),
}


def save_model(name: str, directory: Path, *, seed: int = 0) -> Path:
    """A random model with weights large enough to have opinions, in bf16 as on the wire, with a tokenizer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    model.to(torch.bfloat16).save_pretrained(directory)
    vocabulary = {f"t{token}": token for token in range(VOCAB_SIZE)}
    Tokenizer(WordLevel(vocabulary, unk_token="t0")).save(str(directory / "tokenizer.json"))
    return directory


def save_llama(directory: Path, vocabulary: int, **changes: Any) -> Path:
    """A Llama of two layers whose random weights have opinions, always the same."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    }
    AutoModelForCausalLM.from_config(LlamaConfig(**shape | changes)).save_pretrained(directory)
    return directory
