"""How much memory a trainer needs per rank, before anything is loaded.

Parameter counts are exact, from the module built without memory. Activations follow a formula for gated decoder blocks that was
fitted to what autograd saves: c·(11·D + 4·I) bytes per token and layer, c the bytes of the compute dtype, plus 12·D for norms
that run in fp32 under bf16. Shapes: D model width, I width of the feed-forward part, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.config import TrainingConfig
from shoal.errors import ConfigError
from shoal.policy import resolve_model
from shoal.training.model.logprobs import CHUNK_ELEMENTS


def _qwen2(width: int, inner_width: int, layers: int, heads: int, key_heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "hidden_size": width,
        "intermediate_size": inner_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
    }


KNOWN_MODELS = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _qwen2(3584, 18944, 28, 28, 4),
    "Qwen/QwQ-32B": _qwen2(5120, 27648, 64, 40, 8),
}
"""Shapes of the models named in configs/, so that a plan needs no download."""


@dataclass(frozen=True)
class ModelShape:
    parameters: int
    layers: int
    layer_parameters: int
    """Of the largest decoder block."""
    largest_tensor: int
    width: int
    inner_width: int
    vocabulary: int

    @property
    def root_parameters(self) -> int:
        """Embedding, final norm and head."""
        return self.parameters - self.layers * self.layer_parameters


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on the training device of one rank, by purpose, and bytes of host memory for the checkpoint copy."""

    ranks: int
    parts: dict[str, int]
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    def as_text(self) -> str:
        rows = [*self.parts.items(), ("total per rank", self.total_bytes), ("host memory per rank", self.host_bytes)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {size / 2**30:8.2f} GiB" for name, size in rows)


def model_shape(model: str) -> ModelShape:
    """Shape of `bundled`, a directory, a model known from configs/, or a Hugging Face id."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if model in KNOWN_MODELS:
        settings = dict(KNOWN_MODELS[model])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    else:
        config = AutoConfig.from_pretrained(resolve_model(model), local_files_only=True)
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config)
    blocks = [module for module in skeleton.modules() if type(module).__name__ in set(skeleton._no_split_modules or ())]
    if not blocks:
        raise ConfigError(f"{Path(model).name} does not say which modules are its layers.")
    text = config.get_text_config()
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        layers=len(blocks),
        layer_parameters=max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks),
        largest_tensor=max(parameter.numel() for parameter in skeleton.parameters()),
        width=text.hidden_size,
        inner_width=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
    )


def plan_memory(shape: ModelShape, config: TrainingConfig, *, ranks: int, on_gpu: bool = True) -> TrainerMemory:
    """What one of `ranks` trainer processes will hold at its peak."""
    bf16 = config.compute_dtype == "bfloat16" or (config.compute_dtype == "auto" and on_gpu)
    compute_bytes = 2 if bf16 else 4
    share = -(-shape.parameters // ranks)
    parts = {
        "weights (fp32)": 4 * share,
        "gradients (fp32)": 4 * share,
        "optimiser (2 × fp32)": 8 * share,
        "reference policy": compute_bytes * share if config.kl_beta else 0,
        "gathered or cast weights": _working_copies(shape, ranks, compute_bytes, bf16),
        "activations": _activations(shape, config, compute_bytes),
        "logits of one chunk": 3 * 4 * max(CHUNK_ELEMENTS, shape.vocabulary),
        "tensor being published": 2 * 2 * shape.largest_tensor,
    }
    return TrainerMemory(ranks, parts, host_bytes=12 * share)


def _working_copies(shape: ModelShape, ranks: int, compute_bytes: int, bf16: bool) -> int:
    if ranks == 1:
        return compute_bytes * shape.parameters if bf16 else 0
    # This block and the next one being gathered, the root, and the gradient of one unit on its way to be reduced.
    unit = max(shape.layer_parameters, shape.root_parameters)
    return compute_bytes * (2 * shape.layer_parameters + shape.root_parameters) + (compute_bytes + 4) * unit


def _activations(shape: ModelShape, config: TrainingConfig, compute_bytes: int) -> int:
    layer = compute_bytes * (11 * shape.width + 4 * shape.inner_width) + (12 * shape.width if compute_bytes == 2 else 0)
    per_token = (
        compute_bytes * shape.width * shape.layers + layer if config.activation_checkpointing else layer * shape.layers
    )
    return config.micro_batch_tokens * per_token
