"""How much memory a trainer needs per rank, before anything is loaded.

Parameter counts are exact, from the module built without memory. Activations follow a formula for gated decoder blocks that was
fitted to what autograd saves: c·(11·D + 4·I) bytes per token and layer, c the bytes of the compute dtype, plus 12·D for norms
that run in fp32 under bf16. Shapes: D model width, I width of the feed-forward part, V vocabulary.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from shoal.broadcast.codec.pieces import ITEM_BYTES
from shoal.config import LoraConfig, ShoalConfig, TrainingConfig
from shoal.errors import ConfigError
from shoal.files import CONFIG_FILE
from shoal.policy.architecture import decoder_blocks, meta_model
from shoal.policy.directory import read_config, resolve_model
from shoal.policy.lora.files import factor_shapes
from shoal.policy.lora.targets import target_names
from shoal.policy.memory import NotEnoughMemoryError, available_bytes
from shoal.policy.weights import stored_dtype
from shoal.training.model.distributed import World
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
    config, directory = model_config(model, shapes)
    shape = shape_of(config, Path(model).name, lora)
    return replace(shape, stored_bytes=ITEM_BYTES[stored_dtype(directory)]) if directory is not None else shape


def model_config(model: str, shapes: Path | None = None) -> tuple[Any, Path | None]:
    """The Transformers config of a model, and its directory unless its shape alone is known."""
    known = shapes / f"{Path(model).name}.json" if shapes is not None else None
    if known is not None and known.is_file():
        return _read_shape(known), None
    alone = Path(model)
    if (alone / CONFIG_FILE).is_file() and not any(alone.glob("*.safetensors")):
        return read_config(alone), None  # a plan needs no weights
    directory = resolve_model(model)
    return read_config(directory), directory


def shape_of(config: Any, name: str, lora: LoraConfig | None = None) -> ModelShape:
    """Of a Transformers config."""
    skeleton = meta_model(config)
    blocks = decoder_blocks(skeleton)
    if not blocks:
        raise ConfigError(f"{name} does not say which modules are its layers.")
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
    )


def _adapter_size(skeleton: nn.Module, lora: LoraConfig) -> int:
    return sum(map(math.prod, factor_shapes(skeleton, target_names(skeleton, lora), lora.rank).values()))


def _read_shape(path: Path) -> Any:
    from transformers import AutoConfig

    settings = json.loads(path.read_bytes())
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def plan_memory(
    shape: ModelShape, config: TrainingConfig, *, ranks: int, on_gpu: bool = True, longest_row: int = 0
) -> TrainerMemory:
    """What one of `ranks` trainer processes will hold at its peak. A row that is longer than a bin has a bin of its own."""
    tokens = max(config.micro_batch_tokens, longest_row)
    bf16 = config.compute_dtype == "bfloat16" or (config.compute_dtype == "auto" and on_gpu)
    compute_bytes = 2 if bf16 else 4
    trained = shape.adapter or shape.parameters
    share, frozen = -(-trained // ranks), -(-shape.parameters // ranks) if shape.adapter else 0
    published_bytes = 4 * shape.adapter or 2 * shape.parameters
    parts = {
        **({"frozen base": shape.stored_bytes * frozen} if shape.adapter else {}),
        "weights (fp32)": 4 * share,
        "gradients (fp32)": 4 * share,
        "optimiser (2 × fp32)": 8 * share,
        # An adapter's reference is its own base.
        "reference policy": compute_bytes * share if config.kl_beta and not shape.adapter else 0,
        "gathered or cast weights": _working_copies(shape, config, ranks, compute_bytes, bf16),
        **(_checkpointed if config.activation_checkpointing else _activations)(shape, compute_bytes, tokens),
        "tensor being published": 0 if shape.adapter else 2 * 2 * shape.largest_tensor,
    }
    return TrainerMemory(ranks, parts, host_bytes=12 * share, published_bytes=published_bytes)


def _working_copies(shape: ModelShape, config: TrainingConfig, ranks: int, compute_bytes: int, bf16: bool) -> int:
    if ranks == 1 and shape.adapter:  # one layer at a time is widened or cast
        return compute_bytes * shape.largest_tensor if shape.stored_bytes != compute_bytes else 0
    if ranks == 1:
        cast = shape.layer_parameters + shape.root_parameters if config.activation_checkpointing else shape.parameters
        return compute_bytes * cast if bf16 else 0
    # This block and the next one being gathered, the root, and the gradient of one unit on its way to be reduced.
    unit = max(shape.layer_parameters, shape.root_parameters)
    return compute_bytes * (2 * shape.layer_parameters + shape.root_parameters) + (compute_bytes + 4) * unit


def _logits(shape: ModelShape, tokens: int) -> int:
    """Six fp32 tables of one chunk in the backward pass: logits, their log-softmax, probabilities, gradient, and two in between."""
    return 6 * 4 * min(max(CHUNK_ELEMENTS, shape.vocabulary), tokens * shape.vocabulary)


def _layer(shape: ModelShape, compute_bytes: int) -> int:
    """What autograd keeps of one token in one block."""
    return compute_bytes * (11 * shape.width + 4 * shape.inner_width) + (12 * shape.width if compute_bytes == 2 else 0)


def _activations(shape: ModelShape, compute_bytes: int, tokens: int) -> dict[str, int]:
    """Kept for the backward pass, and the logits that it begins with."""
    layers = tokens * _layer(shape, compute_bytes) * shape.layers
    return {"activations": layers, "logits of one chunk": _logits(shape, tokens)}


def _checkpointed(shape: ModelShape, compute_bytes: int, tokens: int) -> dict[str, int]:
    """The inputs of all blocks, and one block that is computed again, with the gradients inside it. The logits are
    gone by then: what is larger counts."""
    gradients = compute_bytes * (11 * shape.width + 4 * shape.inner_width) // 2
    block = tokens * (_layer(shape, compute_bytes) + gradients)
    inputs = compute_bytes * tokens * shape.width * shape.layers
    return {"activations": inputs + block, "logits of one chunk": max(0, _logits(shape, tokens) - block)}


def check_training_memory(config: ShoalConfig, shape: ModelShape, world: World) -> None:
    """Refuse a training that cannot fit, before anything is loaded, with every part that it needs."""
    longest, bin_tokens = config.rollouts.longest_row, config.training.micro_batch_tokens
    on_gpu, available = world.device.type == "cuda", available_bytes(world.device)
    plan = plan_memory(shape, config.training, ranks=world.size, on_gpu=on_gpu, longest_row=longest)
    if plan.total_bytes <= available:
        return
    long_rows = (
        f" A prompt with its completion may have {longest} tokens, more than training.micro_batch_tokens = {bin_tokens},"
        " and cannot be cut: lower rollouts.max_new_tokens."
    )
    raise NotEnoughMemoryError(
        f"Training does not fit into {available / 2**30:.1f} GiB:\n{plan.as_text()}\n",
        hint="Use more ranks, training.activation_checkpointing, or fewer training.micro_batch_tokens."
        + (long_rows if longest > bin_tokens else ""),
    )
