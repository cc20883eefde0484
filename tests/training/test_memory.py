"""The plan counts what the engine really holds."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.config import TrainingConfig, build_config
from shoal.errors import ConfigError
from shoal.policy import bundled_directory
from shoal.policy.directory import ModelError, read_config
from shoal.policy.memory import NotEnoughMemoryError
from shoal.training import Group, Sample, Trainer
from shoal.training.memory import ModelShape, check_training_memory, model_shape, plan_memory, shape_of
from shoal.training.model.distributed import World
from shoal.training.model.model import load_policy
from shoal.training.packing.bins import build_packed
from shoal.training.packing.packing import group_by_prompt
from support.allocations import PeakBytes

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"


def test_known_models_have_their_published_sizes() -> None:
    names = ["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen/QwQ-32B"]
    sizes = {name: round(model_shape(name, SHAPES).parameters / 1e9, 1) for name in names}
    assert sizes == {"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7.6, "Qwen/QwQ-32B": 32.8}


def test_bundled_model_is_counted_exactly() -> None:
    shape = model_shape("bundled")
    policy = load_policy(bundled_directory(), temperature=1.0, world=World())
    assert shape.parameters == sum(parameter.numel() for parameter in policy.parameters())
    assert shape.layers * shape.layer_parameters + shape.root_parameters == shape.parameters


@pytest.mark.parametrize("checkpointing", [False, True])
def test_planned_activations_are_what_autograd_saves(checkpointing: bool) -> None:
    shape = model_shape("bundled")
    policy = load_policy(bundled_directory(), temperature=1.0, world=World(), activation_checkpointing=checkpointing)
    tokens = 400
    batch = build_packed(group_by_prompt([[2] * 20], [[3] * (tokens - 19)], 1000), [[2] * 20], [[3] * (tokens - 19)])
    known = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(batch)
    measured = sum(size for size, _ in saved.values())
    config = TrainingConfig(micro_batch_tokens=tokens, activation_checkpointing=checkpointing)
    planned = plan_memory(shape, config, ranks=1, on_gpu=False).parts["activations"]
    if checkpointing:  # the plan also counts the one block that is recomputed
        assert measured < planned
    else:
        assert planned == pytest.approx(measured, rel=0.25)


def test_more_ranks_and_less_keeping_need_less() -> None:
    shape = model_shape("Qwen/QwQ-32B", SHAPES)
    config = TrainingConfig(micro_batch_tokens=32768, activation_checkpointing=True)
    one, many = plan_memory(shape, config, ranks=8), plan_memory(shape, config, ranks=32)
    assert many.total_bytes < one.total_bytes
    assert many.parts["weights (fp32)"] * 32 == pytest.approx(4 * shape.parameters, rel=1e-6)
    no_kl = plan_memory(shape, config.model_copy(update={"kl_beta": 0.0}), ranks=8)
    assert no_kl.parts["reference policy"] == 0
    eager = plan_memory(shape, config.model_copy(update={"activation_checkpointing": False}), ranks=8)
    assert eager.parts["activations"] > 10 * one.parts["activations"]


TINY = (
    {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 512},
    {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 2048},
)
TOKENS = 512


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sizes", TINY, ids=["small", "deeper"])
def test_the_plan_is_within_a_tenth_of_the_measured_peak(
    tmp_path: Path, sizes: dict[str, int], checkpointing: bool, dtype: str
) -> None:
    rows = [[(7 * row + place) % sizes["vocab_size"] for place in range(TOKENS // 4 - 8)] for row in range(16)]
    planned, measured = planned_and_measured(tmp_path, sizes, rows, checkpointing=checkpointing, dtype=dtype)
    assert planned == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sizes", TINY, ids=["small", "deeper"])
def test_completions_that_share_most_of_their_tokens_stay_within_the_plan(
    tmp_path: Path, sizes: dict[str, int], checkpointing: bool, dtype: str
) -> None:
    beginning = [place % sizes["vocab_size"] for place in range(200)]
    rows = [[*beginning, row, *range(row % 4)] for row in range(16)]
    planned, measured = planned_and_measured(tmp_path, sizes, rows, checkpointing=checkpointing, dtype=dtype)
    assert measured < 1.1 * planned


def planned_and_measured(
    tmp_path: Path, sizes: dict[str, int], rows: list[list[int]], *, checkpointing: bool, dtype: str
) -> tuple[int, int]:
    """Bytes at the peak of a step; the second one, so that moments are there when activations are at their highest."""
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    training = TrainingConfig.model_validate(
        {"device": "cpu", "kl_beta": 0.0, "micro_batch_tokens": TOKENS, "minibatches": 1, "learning_rate": 1e-6}
        | {"activation_checkpointing": checkpointing, "compute_dtype": dtype}
    )
    trainer = Trainer(training, tmp_path / "model", work_dir=tmp_path, temperature=1.0, seed=0)
    groups = [
        Group(
            f"0/0/{number}",
            [Sample([1, 2, 3, 4], rows[4 * number + place], float(place % 2), float(place % 2)) for place in range(4)],
        )
        for number in range(4)
    ]
    trainer.train_step(groups)  # makes the moments
    moments = [tensor for state in trainer._optimiser.state.values() for tensor in state.values()]
    with PeakBytes([*trainer.policy.parameters(), *moments]) as measured:
        trainer.train_step(groups)
    shape = shape_of(read_config(tmp_path / "model"), "tiny")
    return plan_memory(shape, training, ranks=1, on_gpu=False).total_bytes, measured.peak


def test_rows_longer_than_a_bin_are_planned_for() -> None:
    """They ran out of memory: the plan counted a bin, and a completion is never cut."""
    shape = model_shape("Qwen/QwQ-32B", SHAPES)
    config = TrainingConfig(micro_batch_tokens=4096, activation_checkpointing=True)
    short, long = (plan_memory(shape, config, ranks=8, longest_row=rows) for rows in (2048, 32_768))
    assert short == plan_memory(shape, config, ranks=8)
    assert long.parts["activations"] == 8 * short.parts["activations"]


def test_a_training_that_does_not_fit_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = model_shape("bundled")
    config = build_config(
        {"rollouts": {"max_new_tokens": 40_000}, "training": {"micro_batch_tokens": 512, "device": "cpu"}}
    )
    needed = plan_memory(shape, config.training, ranks=1, on_gpu=False, longest_row=40_512).total_bytes
    monkeypatch.setattr("shoal.training.memory.available_bytes", lambda device: needed)
    check_training_memory(config, shape, World())
    monkeypatch.setattr("shoal.training.memory.available_bytes", lambda device: needed - 1)
    with pytest.raises(NotEnoughMemoryError, match=r"(?s)activations.*40512 tokens.*rollouts.max_new_tokens"):
        check_training_memory(config, shape, World())


def test_text_has_a_line_per_part_and_the_total() -> None:
    shape = ModelShape(10**9, 10, 9 * 10**7, 10**7, 1024, 4096, 32000)
    text = plan_memory(shape, TrainingConfig(), ranks=2).as_text()
    assert "total per rank" in text
    assert text.count("GiB") == 11


def test_every_run_file_is_valid_and_has_a_plan() -> None:
    from shoal.config import load_config

    files = sorted(SHAPES.parent.glob("*.toml"))
    assert {"qwen-7b-8gpu.toml", "intellect2-32b.toml"} <= {file.name for file in files}
    for file in files:
        config = load_config(file)
        assert plan_memory(model_shape(config.model.path, SHAPES), config.training, ranks=8).total_bytes > 0


def written_config(directory: Path, **changes: object) -> str:
    settings = json.loads((bundled_directory() / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | changes))
    return str(directory)


def test_a_config_alone_is_enough_for_a_plan(tmp_path: Path) -> None:
    assert model_shape(written_config(tmp_path)) == model_shape("bundled")


@pytest.mark.parametrize("changes", [{"hidden_size": "many"}, {"hidden_size": -5}, {"model_type": "no_such"}])
def test_a_config_that_makes_no_sense_is_refused_in_a_sentence(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ModelError, match="not understood"):
        model_shape(written_config(tmp_path, **changes))


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layers"):
        model_shape(written_config(tmp_path, num_hidden_layers=0))
