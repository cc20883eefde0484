"""The self-test tells a machine that repeats steps from one that does not, and changes nothing."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.config import TrainingConfig
from shoal.training import Trainer
from shoal.training.model.determinism import fingerprint, use_deterministic_kernels
from shoal.training.packing.bins import build_packed
from shoal.training.packing.packing import group_by_prompt
from shoal.training.repetition import made_up_groups, steps_repeat

from .batches import make_groups


@pytest.fixture
def trainer(model_dir: Path, tmp_path: Path) -> Trainer:
    config = TrainingConfig(learning_rate=1e-3, kl_beta=0.0, device="cpu")
    return Trainer(config, model_dir, work_dir=tmp_path, temperature=1.0, seed=0)


def test_a_machine_that_repeats_is_found_and_nothing_is_changed(
    trainer: Trainer, model_dir: Path, tmp_path: Path
) -> None:
    assert steps_repeat(trainer)
    untouched = Trainer(trainer.config, model_dir, work_dir=tmp_path / "other", temperature=1.0, seed=0)
    for one in (trainer, untouched):
        one.train_step(make_groups(0))
    pairs = zip(trainer.policy.parameters(), untouched.policy.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_gradient_that_differs_in_its_last_bit_is_found(trainer: Trainer) -> None:
    weight = next(trainer.policy.parameters())
    passes = 0

    def disturb(gradient: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        disturbed = gradient.clone()
        if passes > 1:
            disturbed.view(torch.int32).view(-1)[5] ^= 1
        return disturbed

    weight.register_hook(disturb)  # type: ignore[no-untyped-call]
    assert not steps_repeat(trainer)


def test_gradients_with_two_values_exchanged_differ() -> None:
    one = torch.randn(1000)
    other = one.clone()
    other[[3, 700]] = one[[700, 3]]
    assert fingerprint([one]) == fingerprint([one.clone()])
    assert fingerprint([one]) != fingerprint([other])
    assert fingerprint([torch.tensor([0.0])]) != fingerprint([torch.tensor([-0.0])])


def test_the_made_up_batch_keeps_to_the_longest_row(trainer: Trainer) -> None:
    trainer.longest_row = 12
    samples = [sample for group in made_up_groups(trainer) for sample in group.samples]
    assert max(len(sample.prompt_tokens) + len(sample.output_tokens) for sample in samples) <= 12


@pytest.mark.parametrize("longest_row", [0, 12])
def test_the_made_up_batch_has_positions_and_predictions_that_rows_share(trainer: Trainer, longest_row: int) -> None:
    """Their gradients are sums of several, in an order that a GPU may not repeat."""
    trainer.longest_row = longest_row
    samples = [sample for group in made_up_groups(trainer) for sample in group.samples]
    prompts, outputs = [one.prompt_tokens for one in samples], [one.output_tokens for one in samples]
    bin = build_packed(group_by_prompt(prompts, outputs, 1 << 20), prompts, outputs)
    assert len(bin.source_U) < 0.8 * len(bin.source_N)
    assert all(len({tuple(one.output_tokens) for one in group.samples}) == 3 for group in made_up_groups(trainer))


def test_a_gpu_gets_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(before)
