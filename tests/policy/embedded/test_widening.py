"""A validator keeps weights as they are published and computes as if they were float32."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.files import CONFIG_FILE, WEIGHTS_FILE
from shoal.policy import ScoreRequest, TorchEngine, build_model
from shoal.policy.embedded.widening import Widener, compute_wide
from shoal.policy.engine import GenerationRequest
from shoal.policy.weights import unique_tensors
from support.tiny_models import EOS, RUNNABLE, VOCAB_SIZE

Directory = Callable[..., Path]


@pytest.fixture
def published(model_directory: Directory, tmp_path: Path) -> Callable[[str], Path]:
    """A version as it is on the wire, in bf16 under the model's own names, beside the model's config."""

    def make(name: str) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        tensors = unique_tensors(build_model(model_directory(name)))
        narrow = {key: value.detach().bfloat16().contiguous() for key, value in tensors.items()}
        save_file(narrow, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        files = directory / "files"
        files.mkdir()
        shutil.copyfile(model_directory(name) / CONFIG_FILE, files / CONFIG_FILE)
        return directory

    return make


def engine(directory: Path, stored: str = "") -> TorchEngine:
    made = TorchEngine(directory / "files", eos_token_ids=(EOS,), max_batch=16, prefill_tokens=64, stored=stored)
    made.load(directory)
    return made


def requests(count: int = 12) -> list[ScoreRequest]:
    rng = random.Random(1)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, most)))

    return [ScoreRequest(tokens(20), tokens(40), rng.getrandbits(64)) for _ in range(count)]


def matrices(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.dim() >= 2]


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_narrow_engine_scores_as_a_wide_one_to_the_last_bit(published: Callable[[str], Path], name: str) -> None:
    directory = published(name)
    wide, narrow = engine(directory), engine(directory, "bfloat16")
    for one, other in zip(
        wide.score(requests(), temperature=0.9), narrow.score(requests(), temperature=0.9), strict=True
    ):
        assert torch.equal(one.margins, other.margins)
        assert torch.equal(one.logprobs, other.logprobs)
        assert torch.equal(one.states, other.states)


@pytest.mark.parametrize("name", RUNNABLE)
def test_matrices_stay_in_bf16_before_and_after_a_pass(published: Callable[[str], Path], name: str) -> None:
    narrow = engine(published(name), "bfloat16")
    narrow.score(requests(2), temperature=1.0)
    assert {matrix.dtype for matrix in matrices(narrow._runner.model)} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_narrow_engine_generates_as_a_wide_one(published: Callable[[str], Path], name: str) -> None:
    directory = published(name)
    asked = [GenerationRequest((5, 6, 7), seed, 24) for seed in range(6)]
    wide, narrow = (engine(directory, stored).generate(asked, temperature=1.0) for stored in ("", "bfloat16"))
    assert wide == narrow
    assert len({tuple(one.tokens) for one in narrow}) > 1


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_new_weights_are_used_at_once(published: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    directory, other = published(name), tmp_path / "next"
    shutil.copytree(directory, other)
    tensors = load_file(other / WEIGHTS_FILE)
    changed = {key: value * 1.5 if value.is_floating_point() else value for key, value in tensors.items()}
    save_file(changed, other / WEIGHTS_FILE, metadata={"format": "pt"})
    narrow, wide = engine(directory, "bfloat16"), engine(other)
    narrow.load(other)
    assert torch.equal(
        narrow.score(requests(1), temperature=1.0)[0].logprobs, wide.score(requests(1), temperature=1.0)[0].logprobs
    )


def test_one_widened_matrix_exists_at_a_time() -> None:
    widener, large, small = Widener(), torch.randn(8, 16).bfloat16(), torch.randn(4, 4).bfloat16()
    first = widener.widened(large)
    assert torch.equal(first, large.float())
    second = widener.widened(small)
    assert torch.equal(second, small.float())
    assert second.data_ptr() == first.data_ptr(), "the memory of the larger one is used again"


def test_no_more_than_one_module_is_wide_during_a_pass() -> None:
    widths: list[int] = []

    class Watched(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            widths.append(sum(each.weight.dtype == torch.float32 for each in layers))
            return super().forward(inputs)

    layers = [Watched(8, 8, bias=False, dtype=torch.bfloat16) for _ in range(3)]
    model = nn.Sequential(*layers)
    compute_wide(model)
    assert model(torch.randn(2, 8)).dtype == torch.float32
    assert widths == [1, 1, 1]


def test_a_pass_that_fails_leaves_the_weights_narrow() -> None:
    class Failing(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    model: Any = nn.Sequential(Failing(4, 4, bias=False, dtype=torch.bfloat16))
    before = model[0].weight.data.clone()
    compute_wide(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(torch.randn(1, 4))
    assert model[0].weight.dtype == torch.bfloat16
    assert torch.equal(model[0].weight.data, before)


def test_a_dtype_that_cannot_be_widened_without_loss_is_not(published: Callable[[str], Path]) -> None:
    directory = published("llama")
    assert engine(directory, "float16")._runner.dtype == torch.float32
    assert {matrix.dtype for matrix in matrices(engine(directory, "float16")._runner.model)} == {torch.float32}
