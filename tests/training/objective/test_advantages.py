"""Each advantage against its formula, and at the edges."""

import pytest
import torch
from torch import Tensor

from shoal.training.objective.advantages import ADVANTAGES, batch_normalised, dr_grpo, grpo, rloo

REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0])


def test_grpo_divides_by_the_sample_deviation() -> None:
    deviations = REWARDS.double() - 0.375
    expected = deviations / ((deviations**2).sum() / 3).sqrt()
    torch.testing.assert_close(grpo([REWARDS])[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_dr_grpo_only_centres() -> None:
    torch.testing.assert_close(dr_grpo([REWARDS])[0], torch.tensor([0.625, -0.375, 0.125, -0.375]))


def test_rloo_compares_each_with_the_mean_of_the_others() -> None:
    expected = [1.0 - 0.5 / 3, 0.0 - 1.5 / 3, 0.5 - 1.0 / 3, 0.0 - 1.5 / 3]
    torch.testing.assert_close(rloo([REWARDS])[0], torch.tensor(expected))


def test_batch_normalised_uses_one_scale_for_all_groups() -> None:
    other = torch.tensor([0.0, 3.0])
    first, second = batch_normalised([REWARDS, other])
    assert torch.cat([first, second]).std(correction=1) == pytest.approx(1.0, abs=1e-4)
    assert float(second[1] / first[0]) == pytest.approx(1.5 / 0.625)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("rewards", [torch.full((7,), 0.1), torch.zeros(3), torch.tensor([0.7])])
def test_equal_rewards_give_exactly_no_advantage(name: str, rewards: Tensor) -> None:
    (advantages,) = ADVANTAGES[name]([rewards])
    assert advantages.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_a_group_sum_to_zero(name: str) -> None:
    for advantages in ADVANTAGES[name]([REWARDS, torch.tensor([0.0, 1.0])]):
        assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-5)
