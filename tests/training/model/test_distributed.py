"""Two gloo processes train as one does, and read each other's checkpoints. Tolerance: 1e-6 in every fp32 weight."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

MODULE = "training.train_under_torchrun"
TOLERANCE = 1e-6


def train(ranks: int, model_dir: Path, work_dir: Path, result: Path, steps: int, rank: int = 0) -> Any:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    arguments = [*launcher, "-m", MODULE, str(model_dir), str(work_dir), str(result), str(steps), str(rank)]
    tests = Path(__file__).parents[2]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False, cwd=tests)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(result.read_bytes())


@pytest.fixture
def bf16_model_dir(model_dir: Path, tmp_path: Path) -> Path:
    """In bf16, so that its master weights have intervals to be dithered over."""
    copy = tmp_path / "bf16"
    shutil.copytree(model_dir, copy)
    for file in copy.glob("*.safetensors"):
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return copy


@pytest.mark.slow
def test_world_of_two_equals_world_of_one_and_resumes_at_either_size(bf16_model_dir: Path, tmp_path: Path) -> None:
    model_dir = bf16_model_dir
    _, reports_one, weights_one, wire_one = train(1, model_dir, tmp_path / "one", tmp_path / "one.pkl", 3)
    _, reports_two, weights_two, wire_two = train(2, model_dir, tmp_path / "two", tmp_path / "two.pkl", 3)
    for one, two in zip(reports_one, reports_two, strict=True):
        for name in ("loss", "entropy", "kl_reference", "ratio_mean", "ratio_max", "grad_norm_mean"):
            assert two[name] == pytest.approx(one[name], abs=TOLERANCE, rel=1e-5), name
        for name in ("trained_tokens", "samples", "age_histogram", "optimiser_steps"):
            assert two[name] == one[name]
    _assert_close(weights_two, weights_one)
    assert list(wire_two) == list(wire_one)

    resumed_at, _, larger, _ = train(2, model_dir, tmp_path / "one", tmp_path / "grown.pkl", 5)
    assert resumed_at == 3
    resumed_at, _, smaller, _ = train(1, model_dir, tmp_path / "two", tmp_path / "shrunk.pkl", 5)
    assert resumed_at == 3
    _assert_close(larger, smaller)


def _assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_an_adapter_trains_alike_on_two_ranks_and_resumes_at_either_size(bf16_model_dir: Path, tmp_path: Path) -> None:
    """The base is frozen in bf16 shards, the factors are fp32 shards."""
    _, _, _, wire_one = train(1, bf16_model_dir, tmp_path / "one", tmp_path / "one.pkl", 3, rank=3)
    _, _, weights, wire_two = train(2, bf16_model_dir, tmp_path / "two", tmp_path / "two.pkl", 3, rank=3)
    assert wire_one.keys() == wire_two.keys()
    assert all(name.startswith("base_model.model.") for name in wire_one)
    for name, data in wire_one.items():
        one, two = (torch.frombuffer(bytearray(part), dtype=torch.float32) for part in (data, wire_two[name]))
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)
    frozen = {name: tensor for name, tensor in weights.items() if tensor.dim() > 1 and ".lora_" not in name}
    assert {tensor.dtype for tensor in frozen.values()} == {torch.bfloat16}
    resumed_at, _, _, _ = train(1, bf16_model_dir, tmp_path / "two", tmp_path / "again.pkl", 4, rank=3)
    assert resumed_at == 3
