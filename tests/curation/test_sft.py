"""A warm start learns, packs without changing the loss, and survives a kill bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.config import TasksConfig
from shoal.curation import Demonstration, FitReport, FitSettings, WarmStart, encode, write_demonstration, write_policy
from shoal.curation.fitting import scheduled_rate, step_order
from shoal.curation.sft import Example
from shoal.errors import ConfigError
from shoal.evaluation import AnswerGenerator, SamplingSettings
from shoal.policy import build_model
from shoal.tasks import PromptStyle, TextCodec, load_tasks
from support.held_writer import HeldWriter
from support.tiny_run import save_policy

SETTINGS = FitSettings(epochs=3, batch=4, learning_rate=5e-3, warmup_steps=2, checkpoint_every=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_policy(tmp_path_factory.mktemp("sft") / "model", seed=0)


@pytest.fixture(scope="module")
def examples(model: Path) -> list[Example]:
    codec = TextCodec.from_directory(model)
    tasks = load_tasks(TasksConfig(count=12, heldout=1)).train
    made = [Demonstration(task, f"it is easy</think>{task.verification_info['answer']}") for task in tasks]
    return [encode(one, codec, PromptStyle()) for one in made]


def weights(checkpoint: Path, model: Path, out: Path) -> bytes:
    return (
        write_policy(checkpoint, model, out, base_model="m", loss_curve=[(1, 2.0)]) / "model.safetensors"
    ).read_bytes()


def test_the_loss_falls_and_the_policy_is_a_model_directory(
    model: Path, examples: list[Example], tmp_path: Path
) -> None:
    reports: list[FitReport] = []
    settings = FitSettings(epochs=15, batch=4, learning_rate=1e-2, warmup_steps=2)
    checkpoint = WarmStart(settings, model, work_dir=tmp_path / "work").train(examples, reports.append)
    assert reports[-1].step == reports[-1].steps == 45
    assert reports[-1].loss < 0.5 * reports[0].loss
    out = write_policy(checkpoint, model, tmp_path / "out", base_model="m", loss_curve=[(1, 2.0), (2, 1.0)])
    card = (out / "README.md").read_text()
    assert "by supervised learning of demonstrations" in card
    AnswerGenerator.load(str(out), "torch", SamplingSettings(samples=1, max_new_tokens=4))


def test_the_loss_is_that_of_plain_rows(model: Path, examples: list[Example], tmp_path: Path) -> None:
    reports: list[FitReport] = []
    WarmStart(FitSettings(batch=12), model, work_dir=tmp_path / "work").train(examples, reports.append)
    plain = build_model(model)
    total, tokens = 0.0, 0
    for example in examples:
        ids = torch.tensor([[*example.prompt, *example.completion]])
        logprobs = torch.log_softmax(plain(input_ids=ids).logits[0, :-1].float(), dim=-1)
        chosen = logprobs.gather(1, ids[0, 1:, None])[len(example.prompt) - 1 :, 0]
        total, tokens = total - float(chosen.sum()), tokens + len(example.completion)
    assert reports[0].loss == pytest.approx(total / tokens, rel=1e-4)


def test_a_killed_run_ends_with_the_same_weights(model: Path, examples: list[Example], tmp_path: Path) -> None:
    whole = WarmStart(SETTINGS, model, work_dir=tmp_path / "whole").train(examples)

    def die(report: FitReport) -> None:
        if report.step == 6:
            raise KeyboardInterrupt

    interrupted = WarmStart(SETTINGS, model, work_dir=tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        interrupted.train(examples, die)
    steps: list[int] = []
    again = WarmStart(SETTINGS, model, work_dir=tmp_path / "killed")
    resumed = again.train(examples, lambda report: steps.append(report.step))
    assert steps == [5, 6, 7, 8, 9]
    assert weights(resumed, model, tmp_path / "a") == weights(whole, model, tmp_path / "b")


def test_an_interrupted_run_leaves_no_writer_behind(
    model: Path, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = HeldWriter(monkeypatch)

    def die(report: FitReport) -> None:
        if report.step == 3:
            raise KeyboardInterrupt
        writer.hold()

    try:
        with pytest.raises(KeyboardInterrupt):
            WarmStart(SETTINGS, model, work_dir=tmp_path).train(examples, die)
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    finally:
        writer.release()


def test_a_directory_of_another_run_is_refused(model: Path, examples: list[Example], tmp_path: Path) -> None:
    WarmStart(FitSettings(batch=12), model, work_dir=tmp_path).train(examples)
    with pytest.raises(ConfigError, match="other data or settings"):
        WarmStart(FitSettings(batch=12), model, work_dir=tmp_path).train(examples[1:])


def test_nothing_to_learn_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no demonstration"):
        WarmStart(SETTINGS, model, work_dir=tmp_path).train([])


def test_every_epoch_sees_every_example_once_in_a_new_order() -> None:
    steps = list(step_order(10, FitSettings(epochs=2, batch=4)))
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    first, second = ([index for step in part for index in step] for part in (steps[:3], steps[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert next(step_order(10, FitSettings(batch=4, shuffle=False))) == [0, 1, 2, 3]


def test_the_rate_warms_up_and_falls_to_its_floor() -> None:
    settings = FitSettings(learning_rate=1.0, warmup_steps=10, final_share=0.05)
    rates = [scheduled_rate(step, 1000, settings) for step in range(1000)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[-1] == pytest.approx(0.05, abs=0.001)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(model: Path, tmp_path: Path) -> None:
    tasks = load_tasks(TasksConfig(count=12, heldout=1)).train
    path = tmp_path / "d.jsonl"
    made = [Demonstration(task, f"it is easy to see</think>{task.verification_info['answer']}") for task in tasks]
    path.write_text("".join(write_demonstration(one) + "\n" for one in made))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
        "OMP_NUM_THREADS": "1",
    }
    ends = []
    for ranks in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        words = f"-m shoal sft {path} {tmp_path}/warm{ranks} --model {model} --epochs 3 --batch 4 --learning-rate 5e-3"
        done = subprocess.run(
            [sys.executable, *launcher, *words.split()], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("step 9/9") == 1
        ends.append(load_file(tmp_path / f"warm{ranks}" / "model.safetensors"))
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor.float(), ends[1][name].float(), atol=0.02, rtol=0.02)
