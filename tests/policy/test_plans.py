"""The plan of an engine's memory against what the engine holds."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.policy import GenerationRequest, ScoreRequest, TorchEngine
from shoal.policy.directory import read_config
from shoal.policy.embedded import runner
from shoal.policy.plans import EngineShape, memory_table, scorer_memory, worker_memory
from shoal.training.memory import model_config
from support.allocations import PeakBytes

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
WITHIN = 0.10


def llama(width: int, layers: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
    )


@pytest.fixture(params=[(256, 4, 4096), (128, 8, 16384)])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    LlamaForCausalLM(llama(*request.param)).to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def held(engine: TorchEngine) -> list[torch.Tensor]:
    return list(engine._runner.model.parameters())


def test_a_validator_holds_what_is_planned(model: Path) -> None:
    shape = EngineShape.of(read_config(model))
    engine = TorchEngine(model, eos_token_ids=(0,), stored="bfloat16")
    with PeakBytes(held(engine)) as watched:
        engine.score([ScoreRequest((5,) * 2048, (7,) * 2048, seed) for seed in range(2)], temperature=1.0)
    planned = scorer_memory(shape)
    planned.pop("one tensor of the next version")  # nothing is loaded here
    assert watched.peak == pytest.approx(sum(planned.values()), rel=WITHIN)


@pytest.mark.parametrize(("dtype", "dtype_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_a_worker_holds_what_is_planned(
    model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, dtype_bytes: int
) -> None:
    monkeypatch.setattr(runner, "has_slow_products", lambda of, device: of == torch.bfloat16)
    shape, rows, longest = EngineShape.of(read_config(model)), 32, 256
    engine = TorchEngine(model, eos_token_ids=(shape.vocabulary - 1,), dtype=dtype)
    asked = [GenerationRequest((5, seed), seed, longest - 2) for seed in range(rows)]
    with PeakBytes(held(engine)) as watched:
        engine.generate(asked, temperature=1.0)
    planned = worker_memory(shape, rows=rows, prompt=2, longest=longest, dtype_bytes=dtype_bytes)
    planned.pop("one tensor of the next version")
    assert watched.peak == pytest.approx(sum(planned.values()), rel=WITHIN)


def test_a_validator_of_32b_needs_half_of_what_float32_weights_would() -> None:
    shape = EngineShape.of(model_config("Qwen/QwQ-32B", SHAPES)[0])
    narrow, wide = (sum(scorer_memory(shape, stored_bytes=size).values()) for size in (2, 4))
    assert narrow < 0.6 * wide
    assert round(scorer_memory(shape)["weights as published"] / 2**30) == 61
    assert "weights as published" in memory_table(scorer_memory(shape))


def test_shapes_of_grouped_heads_are_read(model: Path) -> None:
    shape = EngineShape.of(read_config(model))
    assert (shape.heads, shape.kv_heads) == (8, 4)
    assert shape.cached_values == 2 * shape.layers * 4 * shape.head_size
