"""How much memory a trainer needs per rank, before anything is loaded.

Parameter counts are exact, from the module built without memory. Activations follow a formula for gated decoder blocks that was
fitted to what autograd saves: c·(11·D + 4·I) bytes per token and layer, c the bytes of the compute dtype, plus 12·D for norms
that run in fp32 under bf16. Shapes: D model width, I width of the feed-forward part, V vocabulary.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shoal.broadcast.codec.pieces import ITEM_BYTES
from shoal.config import LoraConfig, TrainingConfig
from shoal.errors import ConfigError
from shoal.policy.architecture import decoder_blocks, meta_model
from shoal.policy.directory import read_config, resolve_model
from shoal.policy.lora.files import factor_shapes
from shoal.policy.lora.targets import target_names
from shoal.policy.weights import stored_dtype
from shoal.training.model.logprobs import CHUNK_ELEMENTS


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
    adapter: int = 0
    """Parameters of the adapter that is trained, if not all are."""
    stored_bytes: int = 2
    """Of one parameter in the files, in which a frozen base stays."""

    @property
    def root_parameters(self) -> int:
        """Embedding, final norm and head."""
        return self.parameters - self.layers * self.layer_parameters


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on the training device of one rank, by purpose, and bytes of host memory.

    Every rank copies its share for a checkpoint; the main rank alone also holds the version that is being published.
    """

    ranks: int
    parts: dict[str, int]
    host_bytes: int
    published_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    def as_text(self) -> str:
        rows = [
            *self.parts.items(),
            ("total per rank", self.total_bytes),
            ("host memory per rank", self.host_bytes),
            ("more on the main rank", self.published_bytes),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {size / 2**30:8.2f} GiB" for name, size in rows)


def model_shape(model: str, shapes: Path | None = None, lora: LoraConfig | None = None) -> ModelShape:
    """Shape of `bundled`, a directory or a Hugging Face id. `shapes`/NAME.json spares the download of org/NAME, whose weights are
    then taken to be stored in bf16."""
    known = shapes / f"{Path(model).name}.json" if shapes is not None else None
    is_known = known is not None and known.is_file()
    config = _read_shape(known) if known is not None and is_known else read_config(resolve_model(model))
    skeleton = meta_model(config)
    blocks = decoder_blocks(skeleton)
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
        adapter=_adapter_size(skeleton, lora) if lora is not None else 0,
        stored_bytes=2 if is_known else ITEM_BYTES[stored_dtype(resolve_model(model))],
    )


def _adapter_size(skeleton: nn.Module, lora: LoraConfig) -> int:
    return sum(map(math.prod, factor_shapes(skeleton, target_names(skeleton, lora), lora.rank).values()))


def _read_shape(path: Path) -> Any:
    from transformers import AutoConfig

    settings = json.loads(path.read_bytes())
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def plan_memory(shape: ModelShape, config: TrainingConfig, *, ranks: int, on_gpu: bool = True) -> TrainerMemory:
    """What one of `ranks` trainer processes will hold at its peak."""
    bf16 = config.compute_dtype == "bfloat16" or (config.compute_dtype == "auto" and on_gpu)
    compute_bytes = 2 if bf16 else 4
    trained = shape.adapter or shape.parameters
    share, frozen = -(-trained // ranks), -(-shape.parameters // ranks) if shape.adapter else 0
    published_bytes = 4 * shape.adapter or 2 * shape.parameters
    parts = {
        "frozen base": shape.stored_bytes * frozen,
        "weights (fp32)": 4 * share,
        "gradients (fp32)": 4 * share,
        "optimiser (2 × fp32)": 8 * share,
        # An adapter's reference is its own base.
        "reference policy": compute_bytes * share if config.kl_beta and not shape.adapter else 0,
        "gathered or cast weights": _working_copies(shape, ranks, compute_bytes, bf16),
        "activations": _activations(shape, config, compute_bytes),
        "logits of one chunk": 3 * 4 * max(CHUNK_ELEMENTS, shape.vocabulary),
        "tensor being published": 0 if shape.adapter else 2 * 2 * shape.largest_tensor,
    }
    return TrainerMemory(ranks, parts, host_bytes=12 * share, published_bytes=published_bytes)


def _working_copies(shape: ModelShape, ranks: int, compute_bytes: int, bf16: bool) -> int:
    if ranks == 1 and shape.adapter:  # one layer at a time is widened or cast
        return compute_bytes * shape.largest_tensor if shape.stored_bytes != compute_bytes else 0
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
