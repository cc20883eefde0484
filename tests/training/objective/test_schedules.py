"""Step sizes: equal to those of Transformers' schedules from the end of the warm-up on."""

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from shoal.config import TrainingConfig
from shoal.training.objective.schedules import learning_rate

STEPS, MINIBATCHES, WARMUP = 6, 2, 3


def rates(schedule: str, updates: int = STEPS * MINIBATCHES, **settings: int) -> list[float]:
    config = TrainingConfig.model_validate(
        {"learning_rate": 2.0, "warmup_steps": WARMUP, "minibatches": MINIBATCHES, "schedule": schedule} | settings
    )
    return [learning_rate(config, update, STEPS) for update in range(updates)]


def test_the_rate_warms_up_linearly_and_stays() -> None:
    assert rates("constant", 6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("schedule", "theirs"), [("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)]
)
def test_decay_follows_the_schedule_of_transformers(schedule: str, theirs: object) -> None:
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    reference = theirs(optimiser, WARMUP, STEPS * MINIBATCHES)  # type: ignore[operator]
    expected = []
    for _ in range(STEPS * MINIBATCHES):
        expected.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        reference.step()
    assert rates(schedule)[WARMUP:] == pytest.approx(expected[WARMUP:])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_after_the_last_step_the_rate_is_zero_and_never_negative(schedule: str) -> None:
    assert rates(schedule, 2 * STEPS * MINIBATCHES)[STEPS * MINIBATCHES :] == [0.0] * (STEPS * MINIBATCHES)


def test_a_run_that_only_warms_up_never_divides_by_zero() -> None:
    assert rates("linear", STEPS * MINIBATCHES, warmup_steps=STEPS * MINIBATCHES)[-1] == 2.0
