"""Training an adapter: the base stays as it is, factors resume bit for bit, and the reference is the base."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.config import LoraConfig, TrainingConfig
from shoal.curation.fitting import FitSettings
from shoal.curation.sft import Example, WarmStart, write_policy
from shoal.policy import build_model
from shoal.policy.directory import base_of
from shoal.policy.lora.checks import check_start
from shoal.policy.lora.files import base_digest_of, read_settings, write_adapter
from shoal.policy.lora.targets import LoraError
from shoal.policy.weights import base_digest
from shoal.training import ExportError, Group, RunFacts, Trainer, export_policy, model_shape, plan_memory

Groups = Callable[..., list[Group]]
LORA = LoraConfig(rank=4, alpha=8)


def make_trainer(
    model_dir: Path, work_dir: Path, lora: LoraConfig = LORA, start: Path | None = None, **settings: Any
) -> Trainer:
    config = TrainingConfig(**{"learning_rate": 1e-2, "warmup_steps": 2, "kl_beta": 0.01, "device": "cpu", **settings})
    return Trainer(config, model_dir, work_dir=work_dir, temperature=0.9, seed=3, lora=lora, start=start)


def published(trainer: Trainer) -> dict[str, bytes]:
    return {tensor.name: bytes(tensor.data) for tensor in trainer.wire_tensors()}


@pytest.fixture
def bf16_dir(model_dir: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(model_dir, tmp_path / "bf16"))
    tensors = load_file(copy / "model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()}, copy / "model.safetensors", {"format": "pt"}
    )
    return copy


def test_only_factors_are_trained_and_published(bf16_dir: Path, tmp_path: Path, groups: Groups) -> None:
    trainer = make_trainer(bf16_dir, tmp_path / "work")
    frozen = {
        name: parameter.detach().clone()
        for name, parameter in trainer.policy.named_parameters()
        if not parameter.requires_grad
    }
    before = published(trainer)
    trainer.train_step(groups(1))
    after = trainer.wire_tensors()
    assert {tensor.dtype for tensor in after} == {"float32"}
    assert len(after) == 2 * 7 * 2
    assert all(tensor.name.startswith("base_model.model.model.layers.") for tensor in after)
    assert sum(before[tensor.name] != bytes(tensor.data) for tensor in after) == len(after)
    parameters = dict(trainer.policy.named_parameters())
    assert all(torch.equal(parameters[name], tensor) for name, tensor in frozen.items())
    matrices = [tensor for tensor in frozen.values() if tensor.dim() > 1]
    assert {tensor.dtype for tensor in matrices} == {torch.bfloat16}
    assert trainer.policy.packed


def test_version_0_computes_what_the_base_computes(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    report = make_trainer(model_dir, tmp_path, minibatches=1).train_step(groups(1))
    assert report.kl_reference == 0.0
    assert report.ratio_max == 1.0


def test_the_reference_is_the_base_and_needs_no_second_model(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    trainer.train_step(groups(1))
    assert trainer.train_step(groups(2)).kl_reference > 0
    assert trainer._reference.copy is None


def test_a_bf16_base_trains_like_its_widened_copy(bf16_dir: Path, tmp_path: Path, groups: Groups) -> None:
    wide = Path(shutil.copytree(bf16_dir, tmp_path / "wide"))
    tensors = load_file(wide / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in tensors.items()}, wide / "model.safetensors", {"format": "pt"})
    one, two = make_trainer(bf16_dir, tmp_path / "a"), make_trainer(wide, tmp_path / "b")
    one.train_step(groups(1))
    two.train_step(groups(1))
    first, second = published(one), published(two)
    for name, data in first.items():
        torch.testing.assert_close(
            torch.frombuffer(bytearray(data), dtype=torch.float32),
            torch.frombuffer(bytearray(second[name]), dtype=torch.float32),
            atol=1e-5,
            rtol=1e-4,
        )


def test_a_killed_and_resumed_run_has_the_same_bits(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    straight = make_trainer(model_dir, tmp_path / "straight", dither_masters=True)
    for step in range(4):
        straight.train_step(groups(step))
    with make_trainer(model_dir, tmp_path / "killed") as first:
        for step in range(2):
            first.train_step(groups(step))
            first.save()
        first.train_step(groups(2))
    second = make_trainer(model_dir, tmp_path / "killed")
    assert second.resume()
    assert second.step == 2
    for step in range(2, 4):
        second.train_step(groups(step))
    assert published(second) == published(straight)


def test_checkpoints_hold_no_base(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    with make_trainer(model_dir, tmp_path) as trainer:
        trainer.train_step(groups(1))
        path = trainer.save()
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    assert names
    assert all(".lora_" in name for name in names if name.startswith("model."))


def test_activation_checkpointing_gives_the_same_update(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    plain = make_trainer(model_dir, tmp_path / "a")
    saving = make_trainer(model_dir, tmp_path / "b", activation_checkpointing=True)
    plain.train_step(groups(1))
    saving.train_step(groups(1))
    assert published(plain) == published(saving)


def test_a_run_starts_from_a_peft_adapter(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    first = make_trainer(model_dir, tmp_path / "first")
    first.train_step(groups(1))
    factors = {
        tensor.name: torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).view(tensor.shape).clone()
        for tensor in first.wire_tensors()
    }
    write_adapter(tmp_path / "adapter", factors, LORA, base=str(model_dir))
    assert published(make_trainer(model_dir, tmp_path / "next", start=tmp_path / "adapter")) == published(first)
    for other, says in ((LoraConfig(rank=2, alpha=8), "rank 4, model.lora.rank is 2"), (LoraConfig(rank=4), "alpha")):
        with pytest.raises(LoraError, match=says):
            make_trainer(model_dir, tmp_path / "other", other, start=tmp_path / "adapter")
    fewer = LoraConfig(rank=4, alpha=8, target_modules=("q_proj",))
    with pytest.raises(LoraError, match="no factor of an adapted layer"):
        make_trainer(model_dir, tmp_path / "fewer", fewer, start=tmp_path / "adapter")


def test_layers_that_are_not_named_stay_frozen(bf16_dir: Path, tmp_path: Path, groups: Groups) -> None:
    trainer = make_trainer(bf16_dir, tmp_path / "work", LoraConfig(rank=2, target_modules=("q_proj", "v_proj")))
    trainer.train_step(groups(1))
    assert len(trainer.wire_tensors()) == 2 * 2 * 2


def test_a_wrong_target_is_refused_before_anything_is_trained(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(LoraError, match="Nearest: q_proj"):
        make_trainer(model_dir, tmp_path, LoraConfig(rank=2, target_modules=("q_prj",)))


def test_padded_rows_give_the_same_update(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    packed, padded = make_trainer(model_dir, tmp_path / "a"), make_trainer(model_dir, tmp_path / "b")
    padded.policy.set_layout("padded")
    one, two = packed.train_step(groups(5)), padded.train_step(groups(5))
    assert two.loss == pytest.approx(one.loss, abs=1e-5)


def export(trainer: Trainer, model_dir: Path, output: Path, *, merge: bool = False) -> Path:
    path = trainer.save()
    trainer.close()
    facts = RunFacts(run_name="run", base_model=str(model_dir), version=1, adapter="" if merge else "rank 4")
    return export_policy(path, model_dir, output, facts, lora=LORA, merge=merge)


def test_an_export_is_a_peft_directory_that_names_its_base(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    trainer = make_trainer(model_dir, tmp_path / "work")
    trainer.train_step(groups(1))
    output = export(trainer, model_dir, tmp_path / "policy")
    written = load_file(output / "adapter_model.safetensors")
    assert {name: tensor.numpy().tobytes() for name, tensor in written.items()} == published(trainer)
    assert read_settings(output).rank == 4
    assert Path(base_of(output)) == model_dir
    assert base_digest_of(output) == base_digest(model_dir)
    assert "an adapter of" in (output / "README.md").read_text()
    check_start(output, LORA, model_dir)
    other = Path(shutil.copytree(model_dir, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoraError, match="An adapter means nothing on another base"):
        check_start(output, LORA, other)


def test_a_merged_export_is_the_whole_policy(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    trainer = make_trainer(model_dir, tmp_path / "work", learning_rate=3e-2)
    trainer.train_step(groups(1))
    output = export(trainer, model_dir, tmp_path / "policy", merge=True)
    ids = torch.arange(12)[None] % 32
    merged, base = build_model(output), build_model(model_dir)
    trainer.policy.set_layout("eager")
    with torch.no_grad():
        expected = trainer.policy.model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=0.1, rtol=0.05)
        assert float((base(input_ids=ids).logits - expected).abs().max()) > 0.2
    assert not list(output.glob("adapter*"))


def test_merging_needs_an_adapter(model_dir: Path, tmp_path: Path) -> None:
    facts = RunFacts(run_name="run", base_model="bundled", version=0)
    with pytest.raises(ExportError, match="no adapter to merge"):
        export_policy(model_dir, model_dir, tmp_path / "out", facts, merge=True)


def test_the_memory_plan_counts_the_base_once_and_moments_of_factors_only() -> None:
    config = TrainingConfig(device="cpu", kl_beta=0.01)
    full, adapted = model_shape("bundled"), model_shape("bundled", lora=LORA)
    assert full.adapter == 0
    whole, small = (plan_memory(shape, config, ranks=1, on_gpu=False).parts for shape in (full, adapted))
    assert small["frozen base"] == adapted.stored_bytes * full.parameters
    assert small["optimiser (2 × fp32)"] == 8 * adapted.adapter < whole["optimiser (2 × fp32)"]
    assert small["reference policy"] == 0 < whole["reference policy"]


def test_a_warm_start_trains_the_adapter_alone(model_dir: Path, tmp_path: Path) -> None:
    first = make_trainer(model_dir, tmp_path / "first")
    factors = {
        tensor.name: torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).view(tensor.shape).clone()
        for tensor in first.wire_tensors()
    }
    write_adapter(tmp_path / "adapter", factors, LORA, base=str(model_dir))
    start = WarmStart(FitSettings(batch=2), model_dir, work_dir=tmp_path / "work", start=tmp_path / "adapter")
    checkpoint = start.train([Example((1, 2, 3), (4, 5)), Example((2, 3), (6,))])
    output = write_policy(checkpoint, model_dir, tmp_path / "out", base_model=str(model_dir), loss_curve=[], lora=LORA)
    learnt = load_file(output / "adapter_model.safetensors")
    assert learnt.keys() == factors.keys()
    assert any(not torch.equal(learnt[name], factor) for name, factor in factors.items())
