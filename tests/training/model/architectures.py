"""A tiny config of every architecture of the installed Transformers that has a causal language model, as far as one can be made.

Sizes are set by the names that architectures share; what an architecture needs besides is in `SPECIAL`. A variant adds a threshold
within reach of a few tokens: a window, positions that are stretched.
"""

import re
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, WINDOW, ORIGINAL = 48, 5, 12
HEAD_DIM = 8
EXACT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "n_embd": 32, "d_model": 32, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2,
    "num_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2,
    "head_dim": HEAD_DIM, "max_position_embeddings": 96, "n_positions": 96, "n_ctx": 96, "max_seq_len": 96,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "lm_head_dim": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "n_inner": 48, "d_ff": 48,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 2,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "embedding_size": 32, "state_size": 4, "mamba_d_state": 4,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "ssm_state_size": 4, "time_step_rank": 4, "lru_width": 32,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "attention_window_size": WINDOW,
    "expert_layer_period": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "conv_L_cache": 3, "global_attn_every_n_layers": 2,
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW, "intermediate_size": 48},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    "bert": {"is_decoder": True}, "electra": {"is_decoder": True}, "roberta": {"is_decoder": True},
    "cohere2": {"sliding_window": WINDOW}, "gemma2": {"sliding_window": WINDOW}, "gemma3_text": {"sliding_window": WINDOW},
    "deepseek_v3": {"num_key_value_heads": 4}, "axk1": {"num_key_value_heads": 4}, "axk2": {"num_key_value_heads": 4},
    "modernbert-decoder": {"local_attention": 6}, "recurrent_gemma": {"num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]}, "gemma3n_text": {"num_kv_shared_layers": 0},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
}  # fmt: skip
VARIANTS = ("plain", "window", "dynamic", "longrope")
LONG = {"short_factor": [1.0] * (HEAD_DIM // 2), "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0}


def model_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, variant: str = "plain") -> Any | None:
    """None where the variant does not apply. Raises what the config does where no tiny one is known."""
    config = CONFIG_MAPPING[model_type]()
    text = config.get_text_config()
    for name in [*vars(text), *text.attribute_map]:
        value = getattr(text, name, None)
        if name in EXACT:
            _set(text, name, EXACT[name])
        elif isinstance(value, int) and not isinstance(value, bool):
            if re.search(r"intermediate_size|ffn_hidden", name):
                setattr(text, name, 48)
            elif re.search(r"num_(local_)?experts$|n_routed_experts", name):
                setattr(text, name, 4)
            elif name.endswith("_token_id"):
                setattr(text, name, 0)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "layer_mlp_types"):
        if isinstance(kinds := vars(text).get(name), list):
            setattr(text, name, _two_kinds(kinds))
    for name, value in SPECIAL.get(model_type, {}).items():
        setattr(text, name, value)
    return config if variant == "plain" else _varied(config, text, variant)


def _set(text: Any, name: str, value: Any) -> None:
    """Some configs insist on a number where others want none."""
    try:
        setattr(text, name, value)
    except StrictDataclassError:
        setattr(text, name, 0)


def _two_kinds(kinds: list[str]) -> list[str]:
    """One layer of each of the first two kinds."""
    distinct = list(dict.fromkeys(kinds))
    return (distinct * 2)[:2]


def _varied(config: Any, text: Any, variant: str) -> Any | None:
    if variant == "window":
        if "sliding_window" not in vars(text):
            return None
        text.sliding_window = WINDOW
        if hasattr(text, "use_sliding_window"):
            text.use_sliding_window = True
        if hasattr(text, "max_window_layers"):
            text.max_window_layers = 1
        if isinstance(getattr(text, "layer_types", None), list) and "sliding_attention" not in text.layer_types:
            text.layer_types = ["full_attention", "sliding_attention"]
        return config
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return None
    kind = {"rope_type": "dynamic", "factor": 4.0} if variant == "dynamic" else {"rope_type": "longrope", **LONG}
    text.max_position_embeddings = ORIGINAL if variant == "dynamic" else 4 * ORIGINAL
    text.rope_parameters = {**rope, **kind, "original_max_position_embeddings": ORIGINAL}
    if hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = ORIGINAL
    return config
