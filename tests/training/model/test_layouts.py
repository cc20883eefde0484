"""Layouts are tried past the thresholds that the run's rows can pass, and an error tries the next one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, LlamaConfig, Phi3Config, Qwen2MoeConfig

from shoal.training import UnsupportedModelError, World
from shoal.training.model import attention
from shoal.training.model.layouts import choose_layout
from shoal.training.model.model import PolicyModel
from shoal.training.model.probes import LOWERED, probe_model, reached, rows_past

SHAPES = Path(__file__).parents[3] / "configs" / "shapes"
SMALL: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}


def phi3(**rope: Any) -> Phi3Config:
    positions = {"max_position_embeddings": 16_384, "original_max_position_embeddings": 4096}
    return Phi3Config(**SMALL, **positions, rope_parameters={**rope, "original_max_position_embeddings": 4096})


def chosen_layout(config: Any, longest_row: int = 0) -> str:
    torch.manual_seed(0)
    policy = PolicyModel(AutoModelForCausalLM.from_config(config).eval(), temperature=1.0)
    choose_layout(policy, World(), longest_row=longest_row)
    return policy.layout


def windowed(window: int) -> Qwen2MoeConfig:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    }
    window_settings = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    return Qwen2MoeConfig(**SMALL, **experts, **window_settings)


def test_a_window_that_the_attention_does_not_get_is_seen_however_long_it_is() -> None:
    """It was packed, and wrong by nats past the window."""
    assert chosen_layout(windowed(4096)) != "packed"


def test_a_window_that_no_row_can_pass_does_not_matter() -> None:
    assert chosen_layout(windowed(4096), longest_row=4096) == "packed"


def test_positions_that_are_stretched_for_long_rows_are_computed_row_by_row() -> None:
    """A short row beside a long one was computed with the positions of the long one."""
    assert chosen_layout(phi3(**LONG), longest_row=4000) == "packed"
    assert chosen_layout(phi3(**LONG), longest_row=8000).startswith("single")


def dynamic() -> LlamaConfig:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return LlamaConfig(**SMALL, max_position_embeddings=64, rope_parameters=rope)


def test_logits_that_depend_on_what_was_computed_before_are_refused() -> None:
    assert chosen_layout(dynamic(), longest_row=64) == "packed"
    with pytest.raises(UnsupportedModelError, match="computed before"):
        chosen_layout(dynamic(), longest_row=65)


def test_positions_that_no_copy_could_show_are_refused_where_rows_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emu3 with dynamic positions was run row by row, and was wrong after a longer row."""
    monkeypatch.setattr("shoal.training.model.layouts.probe_model", lambda config, longest_row: (None, []))
    with pytest.raises(UnsupportedModelError, match="no small copy"):
        chosen_layout(dynamic(), longest_row=65)
    assert chosen_layout(dynamic(), longest_row=64).startswith("single")


def test_a_model_that_looks_ahead_is_refused() -> None:
    config = BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    with pytest.raises(UnsupportedModelError):
        chosen_layout(config)


def test_an_error_in_one_layout_tries_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise IndexError("too many indices")

    monkeypatch.setattr(attention, "_attend_block", broken)
    assert chosen_layout(LlamaConfig(**SMALL)) == "padded"


def test_a_difference_within_the_tolerance_of_bf16_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts were compared in fp32 at the tolerance of bf16: leaked state passed."""
    attend = attention._attend_block

    def leaking(query_T: Any, key_T: Any, value_T: Any, *others: Any) -> Any:
        return attend(query_T, key_T, value_T, *others) + 0.05 * value_T[0].abs().mean()

    monkeypatch.setattr(attention, "_attend_block", leaking)
    assert chosen_layout(LlamaConfig(**SMALL)) == "padded"


@pytest.mark.parametrize("name", sorted(path.stem for path in SHAPES.glob("*.json")))
def test_the_copy_of_a_large_model_is_small_and_has_all_its_layers(name: str) -> None:
    settings = json.loads((SHAPES / f"{name}.json").read_bytes())
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    copy, thresholds = probe_model(config, 40_000)
    assert copy is not None
    assert sum(parameter.numel() for parameter in copy.parameters()) < 200_000_000
    assert len(copy.model.layers) == config.num_hidden_layers  # type: ignore[arg-type, union-attr]
    assert all(threshold <= LOWERED for threshold in thresholds)


def test_rows_end_before_at_and_beyond_each_threshold() -> None:
    rows = rows_past([9])
    lengths = {len(prompt) + len(output) for prompt, output in zip(rows.prompts, rows.outputs, strict=True)}
    assert {9, 11, 14, 22} <= lengths
    assert max(token for row in (*rows.prompts, *rows.outputs) for token in row) < 24


def test_thresholds_are_found_wherever_a_config_names_them() -> None:
    assert reached(phi3(**LONG)) == [4096]
    assert reached(windowed(77)) == [77]
    assert reached(windowed(77), longest_row=77) == []
    assert reached(LlamaConfig(**SMALL)) == []
