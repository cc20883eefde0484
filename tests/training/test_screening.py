"""The statistic of a group, and training on what is left of a proposed batch."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from shoal.protocol import api
from shoal.training import Group, Sample, Trainer, World
from shoal.training.screening import LARGEST, Screening, statistic
from support.fake_coordinator import FakeCoordinator
from support.samples import keypair

from .test_trainer import Groups, make_trainer, weights

TEMPERATURE = 0.9
"""That of `make_trainer`."""


class Heard:
    """Keeps the statistics and answers with the given lists in turn."""

    def __init__(self, *answers: Sequence[Group] | None) -> None:
        self.answers, self.statistics = list(answers), list[list[float]]()

    def __call__(self, statistics: Sequence[float]) -> Sequence[Group] | None:
        self.statistics.append(list(statistics))
        return self.answers.pop(0) if self.answers else None


def sampled(model_dir: Path, count: int, *, size: int = 8, length: int = 12) -> list[Group]:
    """Groups that the policy itself samples at the run's temperature."""
    torch.manual_seed(5)
    model = LlamaForCausalLM.from_pretrained(model_dir).eval().requires_grad_(False)
    made = []
    for number in range(count):
        prompt = torch.randint(2, 32, (1, 5))
        rows = prompt.repeat(size, 1)
        for _ in range(length):
            logits = model(rows).logits[:, -1].float() / TEMPERATURE
            rows = torch.cat([rows, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        outputs = rows[:, 5:].tolist()
        made.append(
            Group(
                f"0/0/{number}",
                [Sample(prompt[0].tolist(), row, float(k % 2), float(k % 2)) for k, row in enumerate(outputs)],
            )
        )
    return made


def by_hand(model_dir: Path, group: Group) -> float:
    model = LlamaForCausalLM.from_pretrained(model_dir).eval().requires_grad_(False)
    deviation = variance = 0.0
    for sample in group.samples:
        ids = torch.tensor([[*sample.prompt_tokens, *sample.output_tokens]])
        table = torch.log_softmax(model(ids).logits[0].double() / TEMPERATURE, -1)[len(sample.prompt_tokens) - 1 : -1]
        entropies = -(table.exp() * table).sum(1)
        chosen = table.gather(1, torch.tensor(sample.output_tokens)[:, None])[:, 0]
        deviation += float((chosen + entropies).sum())
        variance += float((table.exp() * (table + entropies[:, None]).square()).sum())
    return deviation / math.sqrt(variance)


@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_every_group_has_its_statistic_however_the_batch_is_cut(
    model_dir: Path, tmp_path: Path, groups: Groups, minibatches: int
) -> None:
    heard, batch = Heard(), groups(3)
    make_trainer(model_dir, tmp_path, minibatches=minibatches, micro_batch_tokens=20).train_step(batch, heard)
    assert heard.statistics[0] == pytest.approx([by_hand(model_dir, group) for group in batch], abs=1e-3)


def test_sampled_groups_have_mean_nothing_and_spread_one_and_random_ones_stand_out(
    model_dir: Path, tmp_path: Path
) -> None:
    honest = sampled(model_dir, 24)
    draw = torch.Generator().manual_seed(1)
    forged = [
        Group(
            f"0/1/{number}",
            [
                Sample(sample.prompt_tokens, torch.randint(0, 32, (12,), generator=draw).tolist(), sample.reward, 0.0)
                for sample in group.samples
            ],
        )
        for number, group in enumerate(honest[:4])
    ]
    heard = Heard()
    make_trainer(model_dir, tmp_path).train_step([*honest, *forged], heard)
    values = torch.tensor(heard.statistics[0])
    assert abs(values[:24].mean()) < 0.8
    assert 0.6 < values[:24].std() < 1.5
    assert values[24:].max() < -8 < values[:24].min()


def test_asking_changes_no_bit(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    plain, asked = make_trainer(model_dir, tmp_path / "a"), make_trainer(model_dir, tmp_path / "b")
    for step in range(2):
        plain.train_step(groups(step))
        asked.train_step(groups(step), Heard())
    assert weights(plain) == weights(asked)


def test_what_was_held_back_leaves_no_trace_in_the_weights(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    """A resume trains on the record alone, so both ways must give the same bits."""
    batch = groups(1)
    screened, recorded = make_trainer(model_dir, tmp_path / "a"), make_trainer(model_dir, tmp_path / "b")
    heard = Heard(batch[1:], batch[2:])
    screened.train_step(batch, heard)
    assert [len(values) for values in heard.statistics] == [4, 3, 2]
    recorded.train_step(batch[2:])
    for trainer in (screened, recorded):
        trainer.train_step(groups(2))
    assert weights(screened) == weights(recorded)
    assert screened.updates == recorded.updates


def test_a_batch_that_loses_every_group_changes_nothing(model_dir: Path, tmp_path: Path, groups: Groups) -> None:
    trainer, other = make_trainer(model_dir, tmp_path / "a"), make_trainer(model_dir, tmp_path / "b")
    before = weights(trainer)
    assert trainer.train_step(groups(1), Heard([])).groups == 0
    assert (weights(trainer), trainer.step) == (before, 1)
    other.skip_step()
    assert weights_after(trainer, groups) == weights_after(other, groups), "no gradient is left over"


def weights_after(trainer: Trainer, groups: Groups) -> dict[str, bytes]:
    trainer.train_step(groups(2))
    return weights(trainer)


@pytest.mark.parametrize(
    ("deviation", "variance", "value"),
    [(-6.0, 4.0, -3.0), (0.0, 0.0, 0.0), (-1.0, 0.0, -LARGEST), (math.nan, 1.0, LARGEST), (1.0, math.inf, LARGEST)],
)
def test_a_statistic_is_always_a_number(deviation: float, variance: float, value: float) -> None:
    assert statistic(deviation, variance) == value


def record(*names: str, state: str = "recorded", attempt: int = 0) -> api.BatchRecord:
    groups = [
        api.BatchGroup(
            group_id=name,
            submission_id="file",
            digest="",
            group=0,
            policy_version=0,
            rewards=[],
            task_rewards=[],
            logprobs_verified=False,
        )
        for name in names
    ]
    return api.BatchRecord.model_validate(
        {"step": 3, "state": state, "attempt": attempt, "groups": groups, "dropped": {}, "generated_groups": 0}
    )


Answers = Callable[..., tuple[Screening, FakeCoordinator]]


@pytest.fixture
def screening() -> Answers:
    def make(proposed: api.BatchRecord, *answers: api.BatchRecord) -> tuple[Screening, FakeCoordinator]:
        coordinator = FakeCoordinator()
        coordinator.screenings = list(answers)
        client = coordinator.client(keypair("trainer"))
        return Screening(
            client, World(), proposed, lambda batch: [Group(one.group_id) for one in batch.groups]
        ), coordinator

    return make


def test_a_recorded_batch_is_not_screened_again(screening: Answers) -> None:
    settle, coordinator = screening(record("a", "b"))
    assert settle([99.0, 0.0]) is None
    assert coordinator.screened == []


def test_a_proposal_that_is_recorded_unchanged_is_trained_as_it_is(screening: Answers) -> None:
    settle, coordinator = screening(record("a", "b", state="proposed"), record("a", "b"))
    assert settle([0.5, -0.5]) is None
    (body,) = coordinator.screened
    assert (body.step, body.attempt, body.statistics) == (3, 0, {"a": 0.5, "b": -0.5})


def test_a_shorter_record_and_a_second_proposal_give_other_groups(screening: Answers) -> None:
    first, second = record("a", "b", state="proposed"), record("a", "c", state="proposed", attempt=1)
    settle, coordinator = screening(first, second, record("a"))
    assert [group.group_id for group in settle([0.0, -99.0]) or ()] == ["a", "c"]
    assert [group.group_id for group in settle([0.0, -99.0]) or ()] == ["a"]
    assert settle([0.0]) is None
    assert [body.attempt for body in coordinator.screened] == [0, 1]
    assert settle.batch == record("a")
