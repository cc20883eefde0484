"""A validator changes between the versions of its window by pointers."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.files import CONFIG_FILE, WEIGHTS_FILE
from shoal.policy import ArchitectureError, ScoreRequest, TorchEngine, build_model
from shoal.policy.embedded import resident
from shoal.policy.weights import unique_tensors
from support.tiny_models import EOS

Directory = Callable[..., Path]
ASKED = [ScoreRequest((5, 6, 7), (8, 9, 10, 11), 3)]


@pytest.fixture(params=["llama", "mistral"])
def versions(model_directory: Directory, tmp_path: Path, request: pytest.FixtureRequest) -> list[Path]:
    """A config, and four versions of its model."""
    source = model_directory(request.param)
    tensors = {name: value.detach().bfloat16() for name, value in unique_tensors(build_model(source)).items()}
    made = []
    for number in range(4):
        directory = tmp_path / f"v{number}"
        directory.mkdir()
        moved = {name: (value * (1 + number / 4)).contiguous() for name, value in tensors.items()}
        save_file(moved, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        made.append(directory)
    (tmp_path / "files").mkdir()
    shutil.copyfile(source / CONFIG_FILE, tmp_path / "files" / CONFIG_FILE)
    return made


def engine(versions: list[Path], stored: str = "bfloat16") -> TorchEngine:
    return TorchEngine(versions[0].parent / "files", eos_token_ids=(EOS,), stored=stored)


def logprobs(scorer: TorchEngine, version: Path) -> torch.Tensor:
    scorer.load(version)
    return scorer.score(ASKED, temperature=1.0)[0].logprobs


def held(scorer: TorchEngine) -> resident.ResidentWeights:
    assert scorer._resident is not None
    return scorer._resident


def test_each_version_scores_as_itself_in_any_order(versions: list[Path]) -> None:
    scorer, wide = engine(versions), engine(versions, "")
    expected = [logprobs(wide, version) for version in versions]
    assert len({tuple(values.tolist()) for values in expected}) == len(versions)
    for number in (0, 1, 2, 1, 3, 0, 2, 2, 1):
        assert torch.equal(logprobs(scorer, versions[number]), expected[number])


def test_a_version_that_is_held_is_not_read_again(versions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = engine(versions)
    for version in versions[:3]:
        scorer.load(version)
    reads: list[Path] = []
    monkeypatch.setattr("shoal.policy.embedded.engine.load_weights", lambda model, directory: reads.append(directory))
    for number in (1, 2, 1):
        scorer.load(versions[number])
    assert reads == []
    scorer.load(versions[3])
    assert reads == [versions[3]]


def test_a_version_that_was_rewritten_is_read_again(versions: list[Path]) -> None:
    scorer, wide = engine(versions), engine(versions, "")
    before = logprobs(scorer, versions[1])
    scorer.load(versions[2])
    shutil.copyfile(versions[3] / WEIGHTS_FILE, versions[1] / "new.tmp")
    (versions[1] / "new.tmp").replace(versions[1] / WEIGHTS_FILE)
    after = logprobs(scorer, versions[1])
    assert not torch.equal(before, after)
    assert torch.equal(after, logprobs(wide, versions[3]))


def test_without_memory_for_another_the_oldest_is_overwritten(
    versions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer, wide = engine(versions), engine(versions, "")
    free = [10.0, 10.0]
    monkeypatch.setattr(
        resident, "available_bytes", lambda device: free.pop() * held(scorer).version_bytes if free else 0
    )
    expected = [logprobs(wide, version) for version in versions]
    for number in (0, 1, 2, 3, 0, 1, 2, 3):
        assert torch.equal(logprobs(scorer, versions[number]), expected[number])
    assert 1 <= len(held(scorer)) <= 3


def test_with_memory_for_one_it_still_works(versions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, wide = engine(versions), engine(versions, "")
    monkeypatch.setattr(resident, "available_bytes", lambda device: 0)
    for number in (0, 1, 0, 2):
        assert torch.equal(logprobs(scorer, versions[number]), logprobs(wide, versions[number]))
    assert len(held(scorer)) == 1


@pytest.mark.parametrize("plentiful", [True, False])
def test_a_refused_version_leaves_the_one_in_use(
    versions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plentiful: bool
) -> None:
    scorer = engine(versions)
    if not plentiful:
        monkeypatch.setattr(resident, "available_bytes", lambda device: 0)
    scorer.load(versions[0])
    before = logprobs(scorer, versions[1])
    broken = tmp_path / "broken"
    broken.mkdir()
    tensors = load_file(versions[2] / WEIGHTS_FILE)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, broken / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(ArchitectureError):
        scorer.load(broken)
    assert torch.equal(scorer.score(ASKED, temperature=1.0)[0].logprobs, before)
    assert torch.equal(logprobs(scorer, versions[1]), before)
