"""How much memory an engine needs, before anything is loaded: of a worker that generates, or of a validator that scores.

Parameter counts are exact, from the module built without memory. Keys and values follow the config. What a pass holds beside
them is the larger of two: one gated decoder block (per token 3·D values and either 3·I or the attention's own), or the states of
all tokens with one chunk of logits.
Shapes: D model width, I width of the feed-forward part, H query heads, K key-value heads, d head size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

from shoal.metrics.units import memory
from shoal.policy.architecture import meta_model
from shoal.policy.embedded.engine import CAPACITY_STEP
from shoal.policy.embedded.head import BLOCK_VALUES
from shoal.policy.scoring import LOGITS_CHUNK
from shoal.policy.weights import unique_tensors

PREFILL_TOKENS = 4096
"""Of one pass of the embedded engine."""
KEYS_AND_VALUES = "keys and values"


@dataclass(frozen=True)
class EngineShape:
    parameters: int
    largest_matrix: int
    layers: int
    width: int
    inner_width: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> "EngineShape":
        """Of a Transformers config."""
        text = config.get_text_config()
        sizes = [tensor.numel() for tensor in unique_tensors(meta_model(config)).values()]
        heads = getattr(text, "num_attention_heads", 1)
        return cls(
            parameters=sum(sizes),
            largest_matrix=max(sizes),
            layers=getattr(text, "num_hidden_layers", 1),
            width=text.hidden_size,
            inner_width=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocabulary=text.vocab_size,
        )

    @property
    def cached_values(self) -> int:
        """Keys and values of one position."""
        return 2 * self.layers * self.kv_heads * self.head_size

    def pass_bytes(self, tokens: int, value_bytes: int, logits: int) -> int:
        """What a pass over `tokens` holds at its peak, with `logits` values of them at once."""
        attention = 3 * (self.heads + 2 * self.kv_heads) * self.head_size
        block = value_bytes * tokens * (3 * self.width + max(attention, 3 * self.inner_width))
        return max(block, 3 * value_bytes * tokens * self.width + 3 * 4 * logits)

    def widened_bytes(self, tokens: int) -> int:
        """Gate and up, joined, in float32, with their operands or with a block of the LM head."""
        operands, head = tokens * (self.width + 2 * self.inner_width), min(BLOCK_VALUES, self.width * self.vocabulary)
        return 4 * (2 * self.width * self.inner_width + max(operands, head))


def worker_memory(
    shape: EngineShape, *, rows: int, prompt: int, longest: int, dtype_bytes: int, adapter: int = 0
) -> dict[str, int]:
    """Bytes by purpose of an engine that generates `rows` sequences of up to `longest` tokens at once, the prompt included."""
    tokens = max(rows, min(PREFILL_TOKENS, rows * prompt))
    capacity = -(-longest // CAPACITY_STEP) * CAPACITY_STEP
    return {
        "weights": dtype_bytes * shape.parameters,
        **({"adapters (two)": 2 * dtype_bytes * adapter} if adapter else {}),
        KEYS_AND_VALUES: dtype_bytes * rows * capacity * shape.cached_values,
        "a pass, or logits": shape.pass_bytes(tokens, dtype_bytes, rows * shape.vocabulary),
        "one product, widened (CPUs without bf16)": shape.widened_bytes(tokens) if dtype_bytes == 2 else 0,
        "one tensor of the next version": 2 * shape.largest_matrix,
    }


def scorer_memory(shape: EngineShape, *, stored_bytes: int = 2, adapter: int = 0) -> dict[str, int]:
    """Bytes by purpose of an engine that scores in float32 with weights as they are published."""
    chunk = max(1, LOGITS_CHUNK // shape.vocabulary) * shape.vocabulary
    return {
        "weights as published": stored_bytes * shape.parameters,
        **({"adapters (two)": 2 * 4 * adapter} if adapter else {}),
        "one layer, widened": 4 * shape.largest_matrix if stored_bytes < 4 else 0,
        KEYS_AND_VALUES: 4 * PREFILL_TOKENS * shape.cached_values,
        "a pass, or logits": shape.pass_bytes(PREFILL_TOKENS, 4, chunk),
        "one tensor of the next version": 2 * shape.largest_matrix,
    }


def memory_table(parts: dict[str, int]) -> str:
    rows = [*parts.items(), ("total", sum(parts.values()))]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {memory(size):>12}" for name, size in rows if size)
