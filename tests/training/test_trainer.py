"""The engine: deterministic, resumable, and a gradient that does not depend on how the batch was cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import TrainingConfig
from shoal.errors import ConfigError
from shoal.training import BatchError, DivergedError, Group, Sample, Trainer
from shoal.training.objective.advantages import ADVANTAGES
from shoal.training.packing.batch import choose_members

Groups = Callable[..., list[Group]]


def make_trainer(model_dir: Path, work_dir: Path, **settings: Any) -> Trainer:
    config = TrainingConfig(**{"learning_rate": 1e-3, "warmup_steps": 2, "kl_beta": 0.0, "device": "cpu", **settings})
    return Trainer(config, model_dir, work_dir=work_dir, temperature=0.9, seed=3, max_new_tokens=9)


def weights(trainer: Trainer) -> dict[str, bytes]:
    return {name: parameter.detach().numpy().tobytes() for name, parameter in trainer.policy.named_parameters()}


def test_killed_and_resumed_run_has_the_same_bits(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    straight = make_trainer(model_dir, tmp_path / "straight", kl_beta=0.01)
    for step in range(4):
        straight.train_step(groups(step))
    first = make_trainer(model_dir, tmp_path / "killed", kl_beta=0.01)
    for step in range(2):
        first.train_step(groups(step))
        first.save()
    first.train_step(groups(2))  # never saved: this work is lost and done again
    first.close()  # the checkpoint of step 2 is on disk when the process dies
    second = make_trainer(model_dir, tmp_path / "killed", kl_beta=0.01)
    assert second.resume()
    assert second.step == 2
    for step in range(2, 4):
        second.train_step(groups(step))
    assert weights(second) == weights(straight)
    assert second.updates == straight.updates


def test_resume_without_a_checkpoint_says_so(model_dir: Path, tmp_path: Path) -> None:
    assert not make_trainer(model_dir, tmp_path).resume()


@pytest.mark.parametrize(
    "settings", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 20}, {"micro_batch_tokens": 10_000}]
)
def test_update_is_the_same_for_any_micro_batching(
    model_dir: Path, tmp_path: Path, groups: Groups, settings: dict[str, int]
) -> None:
    reference = make_trainer(model_dir, tmp_path / "a", kl_beta=0.01, entropy_eta=0.01)
    other = make_trainer(model_dir, tmp_path / "b", kl_beta=0.01, entropy_eta=0.01, **settings)
    expected, got = reference.train_step(groups(1)), other.train_step(groups(1))
    assert got.loss == pytest.approx(expected.loss, abs=1e-5)
    assert got.grad_norm_max == pytest.approx(expected.grad_norm_max, rel=1e-4)
    for one, two in zip(reference.policy.parameters(), other.policy.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-4)


def test_padded_rows_give_the_same_update_as_packed_bins(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    packed, padded = make_trainer(model_dir, tmp_path / "a"), make_trainer(model_dir, tmp_path / "b")
    assert packed.policy.packed
    padded.policy.set_layout("padded")
    one, two = packed.train_step(groups(5)), padded.train_step(groups(5))
    assert two.loss == pytest.approx(one.loss, abs=1e-5)
    for left, right in zip(packed.policy.parameters(), padded.policy.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=1e-4)


def test_first_minibatch_starts_at_ratio_one(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    report = make_trainer(model_dir, tmp_path, minibatches=1).train_step(groups(1))
    assert report.ratio_max == 1.0
    assert report.kl_update == 0.0
    assert report.clip_fraction_positive == report.clip_fraction_negative == 0.0


def test_later_minibatches_compare_with_the_policy_before_the_first_update(
    model_dir: Path, tmp_path: Path, groups: Groups
) -> None:
    report = make_trainer(model_dir, tmp_path, minibatches=2, learning_rate=1e-2, max_grad_norm=10.0).train_step(
        groups(1)
    )
    assert report.ratio_max != 1.0
    assert report.kl_update > 0
    assert report.optimiser_steps == 2


def test_rewarded_completion_becomes_more_likely(model_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_dir, tmp_path, learning_rate=5e-3, max_grad_norm=1.0)
    good, bad = [3, 4, 5], [6, 7, 8]
    batch = [Group("0/0/0", [Sample([1, 2], good, 1.0, 1.0), Sample([1, 2], bad, 0.0, 0.0)])]
    before = _logprob(trainer, good) - _logprob(trainer, bad)
    for _ in range(5):
        trainer.train_step(batch)
    assert _logprob(trainer, good) - _logprob(trainer, bad) > before + 0.5


def _logprob(trainer: Trainer, output: list[int]) -> float:
    tokens = torch.tensor([[1, 2, *output]])
    trainer.policy.set_layout("padded")
    with torch.no_grad():
        logits = trainer.policy.model(tokens).logits[0]
    trainer.policy.set_layout("packed")
    logprobs = torch.log_softmax(logits / 0.9, -1)
    return float(sum(logprobs[1 + place, token] for place, token in enumerate(output)))


def test_step_reports_what_happened(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    trainer = make_trainer(model_dir, tmp_path, kl_beta=0.1, kl_limit=100.0)
    trainer.train_step(groups(0))
    batch = [*groups(1, policy_version=0), *groups(2, policy_version=1, behaviour=True)]
    batch[0].samples[0].truncated = True
    report = trainer.train_step(batch)
    assert (report.step, report.policy_version, report.groups, report.samples) == (1, 2, 8, 32)
    assert report.age_histogram == {0: 16, 1: 16}
    assert report.truncation_rate == 1 / 32
    assert report.reward_mean == 0.5
    assert report.trained_tokens == sum(len(sample.output_tokens) for group in batch for sample in group.samples)
    assert 0 < report.behaviour_fraction < 1
    assert report.kl_behaviour is not None
    assert report.kl_behaviour > 0
    assert report.kl_reference > 0
    assert report.as_dict()["entropy"] > 0


def test_masked_completions_are_not_trained(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    trainer = make_trainer(model_dir, tmp_path, overlong="mask", entropy_eta=0.0)
    batch = groups(1)
    for group in batch:
        for sample in group.samples:
            sample.truncated = True
    before = weights(trainer)
    report = trainer.train_step(batch)
    assert (report.trained_tokens, report.optimiser_steps) == (0, 0)
    assert weights(trainer) == before
    assert trainer.step == 1


def test_overlong_completions_lose_reward(model_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_dir, tmp_path, overlong="penalise")
    samples = [Sample([1], [2] * length, 1.0, 1.0) for length in (3, 9)]
    assert trainer.train_step([Group("0/0/0", samples)]).zero_signal_fraction == 0.0


def test_non_finite_gradient_stops_before_the_weights_change(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    trainer = make_trainer(model_dir, tmp_path, minibatches=1)
    batch = groups(1)
    batch[0].samples[0].reward = float("inf")
    before = weights(trainer)
    with pytest.raises(DivergedError, match="not finite"):
        trainer.train_step(batch)
    assert weights(trainer) == before


def test_policy_that_moves_too_far_stops_the_run(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    trainer = make_trainer(model_dir, tmp_path, learning_rate=1.0, warmup_steps=0, kl_limit=0.01)
    with pytest.raises(DivergedError, match="above the limit"):
        trainer.train_step(groups(1))


def test_wire_tensors_are_bf16_and_name_tied_weights_once(model_dir: Path, tmp_path: Path) -> None:
    tensors = list(make_trainer(model_dir, tmp_path).wire_tensors())
    names = [tensor.name for tensor in tensors]
    assert "lm_head.weight" not in names
    assert len(set(names)) == len(names)
    assert all(tensor.dtype == "bfloat16" for tensor in tensors)
    assert all(len(tensor.data) == 2 * torch.Size(tensor.shape).numel() for tensor in tensors)


def test_the_reference_model_is_loaded_only_for_the_kl_term(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    assert make_trainer(model_dir, tmp_path)._reference.copy is None
    trainer = make_trainer(model_dir, tmp_path, kl_beta=0.1)
    copy = trainer._reference.copy
    assert copy is not None
    before = [parameter.clone() for parameter in copy.parameters()]
    trainer.train_step(groups(0))
    assert all(torch.equal(one, two) for one, two in zip(before, copy.parameters(), strict=True))


def test_a_skipped_step_changes_the_number_and_nothing_else(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    trainer.train_step(groups(0))
    before, updates = weights(trainer), trainer.updates
    report = trainer.skip_step()
    assert (report.step, report.policy_version, report.trained_tokens, trainer.step) == (1, 2, 0, 2)
    assert (weights(trainer), trainer.updates) == (before, updates)
    straight = make_trainer(model_dir, tmp_path / "straight")
    straight.train_step(groups(0))
    straight.skip_step()
    straight.save()
    straight.close()
    resumed = make_trainer(model_dir, tmp_path / "straight")
    assert resumed.resume()
    resumed.train_step(groups(2))
    trainer.train_step(groups(2))
    assert weights(resumed) == weights(trainer)


def test_unusable_batches_are_refused(model_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_dir, tmp_path)
    with pytest.raises(BatchError, match="no groups"):
        trainer.train_step([])
    with pytest.raises(BatchError, match="empty"):
        trainer.train_step([Group("0/0/0", [Sample([1], [], 1.0, 1.0)])])
    with pytest.raises(BatchError, match="log-probabilities"):
        trainer.train_step([Group("0/0/0", [Sample([1], [2, 3], 1.0, 1.0, [0.0])])])


def test_penalty_without_a_limit_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="limit"):
        Trainer(TrainingConfig(overlong="penalise"), model_dir, work_dir=tmp_path, temperature=1.0, seed=0)


def test_a_schedule_lowers_the_rate_that_the_optimiser_uses(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    config = TrainingConfig(learning_rate=1e-3, warmup_steps=0, schedule="linear", kl_beta=0.0, device="cpu")
    trainer = Trainer(config, model_dir, work_dir=tmp_path, temperature=0.9, seed=3, steps=2)
    rates = [trainer.train_step(groups(step)).learning_rate for step in range(2)]
    assert rates == pytest.approx([7.5e-4, 2.5e-4])
    assert trainer._optimiser.param_groups[0]["lr"] == pytest.approx(2.5e-4)


def test_a_schedule_without_an_end_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="number of training steps"):
        make_trainer(model_dir, tmp_path, schedule="cosine")


def test_both_forms_of_the_divergence_pull_to_the_reference(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    """With equal rewards only the KL term has a gradient; the policy was moved away from the reference first."""
    apart = {}
    for form in ("loss", "reward"):
        settings = {"kl_form": form, "kl_beta": 0.5, "learning_rate": 2e-2, "warmup_steps": 0, "entropy_eta": 0.0}
        trainer = make_trainer(model_dir, tmp_path, kl_limit=99.0, max_grad_norm=1.0, **settings)
        with torch.no_grad():
            for number, parameter in enumerate(trainer.policy.parameters()):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        level = groups(1)
        for group in level:
            for sample in group.samples:
                sample.reward = sample.task_reward = 0.0
        apart[form] = [trainer.train_step(level).kl_reference for _ in range(6)]
        assert apart[form][-1] < 0.5 * apart[form][0]
    assert apart["loss"][1] != apart["reward"][1]


def test_activation_checkpointing_changes_no_bit(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    plain = make_trainer(model_dir, tmp_path / "a")
    saving = make_trainer(model_dir, tmp_path / "b", activation_checkpointing=True)
    plain.train_step(groups(1))
    saving.train_step(groups(1))
    assert weights(plain) == weights(saving)


def test_bfloat16_compute_keeps_fp32_masters_and_stays_close(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    exact = make_trainer(model_dir, tmp_path / "a", kl_beta=0.01)
    rounded = make_trainer(model_dir, tmp_path / "b", kl_beta=0.01, compute_dtype="bfloat16")
    one, two = exact.train_step(groups(1)), rounded.train_step(groups(1))
    assert {parameter.dtype for parameter in rounded.policy.parameters()} == {torch.float32}
    assert two.entropy == pytest.approx(one.entropy, rel=0.02)
    assert two.entropy != one.entropy


@pytest.mark.parametrize("loss", ["dapo", "cispo", "gspo"])
@pytest.mark.parametrize("correction", ["truncated_token", "truncated_sequence", "masked", "decoupled"])
def test_every_recipe_trains(model_dir: Path, tmp_path: Path, groups: Groups, loss: str, correction: str) -> None:
    trainer = make_trainer(
        model_dir, tmp_path, loss=loss, correction=correction, loss_weighting="sequence", kl_limit=99.0
    )
    report = trainer.train_step(groups(1, behaviour=True))
    assert report.grad_norm_mean > 0
    assert report.correction_mean != 1.0


def test_sequence_weighting_counts_every_completion_the_same(model_dir: Path, tmp_path: Path) -> None:
    losses = {}
    for weighting in ("token", "sequence"):
        trainer = make_trainer(model_dir, tmp_path, loss_weighting=weighting, minibatches=1)
        samples = [Sample([1, 2], [3] * 6, 1.0, 1.0), Sample([1, 2], [4], 0.0, 0.0)]
        members = choose_members([Group("0/0/0", samples)], ADVANTAGES["grpo"], trainer.config, 9)[0]
        (part,) = (minibatch := trainer._build(members)).micro_batches
        losses[weighting] = float((part.weights_N * (part.advantages_N > 0)).sum() / minibatch.total_weight)
    assert losses == pytest.approx({"token": 6 / 7, "sequence": 1 / 2})


def test_completions_without_validated_logprobs_have_weight_one(
    model_dir: Path, tmp_path: Path, groups: Groups
) -> None:
    report = make_trainer(model_dir, tmp_path, correction="truncated_token").train_step(groups(1))
    assert report.behaviour_fraction == 0.0
    assert report.correction_mean == 1.0
