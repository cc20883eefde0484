"""Each loss against its closed form; gradients against finite differences; no gradient where the clip says so."""

import pytest
import torch
from torch import Tensor

from shoal.config import TrainingConfig
from shoal.training.objective.losses import (
    LOSSES,
    TokenBatch,
    TokenLoss,
    cispo,
    dapo,
    gspo,
    k3_divergence,
    penalised,
    two_sided_grpo,
)

CONFIG = TrainingConfig(clip_epsilon=0.2, clip_epsilon_high=0.28, clip_delta=4.0)


def tokens(ratios: list[float], advantages: list[float], rows: list[int] | None = None) -> TokenBatch:
    logprobs = torch.tensor(ratios, dtype=torch.float64).log() - 1.0
    row_N = torch.tensor(rows or list(range(len(ratios))))
    return TokenBatch(
        logprobs.requires_grad_(),
        torch.full_like(logprobs, -1.0).detach(),
        torch.tensor(advantages, dtype=torch.float64),
        row_N,
        int(row_N[-1]) + 1,
    )


def gradient(batch: TokenBatch, loss: TokenLoss) -> Tensor:
    (values,) = torch.autograd.grad(loss.loss_N.sum(), batch.logprobs_N)
    return values


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),  # above 1+ε_high: no more push up
        (0.5, 2.0, -1.0, -1.0),
        (0.9, -2.0, 1.8, 1.8),
        (0.5, -2.0, 1.6, 0.0),  # below 1−ε: no more push down
        (3.0, -2.0, 6.0, 6.0),
        (9.0, -2.0, 8.0, 0.0),  # above δ: bounded, no gradient
    ],
)
def test_two_sided_clip(ratio: float, advantage: float, loss: float, slope: float) -> None:
    batch = tokens([ratio], [advantage])
    result = two_sided_grpo(batch, CONFIG)
    assert result.loss_N.item() == pytest.approx(loss)
    assert gradient(batch, result).item() == pytest.approx(slope)
    assert bool(result.clipped_N) == (slope == 0.0)


def test_one_sided_clip_leaves_the_ratio_of_bad_tokens_unbounded() -> None:
    batch = tokens([100.0], [-1.0])
    result = dapo(batch, CONFIG)
    assert result.loss_N.item() == pytest.approx(100.0)
    assert gradient(batch, result).item() == pytest.approx(100.0)
    assert not result.clipped_N.item()


def test_without_an_upper_epsilon_the_region_is_symmetric() -> None:
    batch = tokens([1.25], [1.0])
    assert dapo(batch, CONFIG.model_copy(update={"clip_epsilon_high": 0.0})).loss_N.item() == pytest.approx(-1.2)


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.5), (3.0, 3.0), (9.0, 4.0)])
def test_cispo_caps_the_weight_and_keeps_the_gradient(ratio: float, weight: float) -> None:
    batch = tokens([ratio], [-2.0])
    assert gradient(batch, cispo(batch, CONFIG)).item() == pytest.approx(weight * 2.0)


def test_gspo_weighs_a_whole_completion_by_its_mean_log_ratio() -> None:
    batch = tokens([1.2, 0.8, 1.1], [1.0, 1.0, -1.0], [0, 0, 1])
    ratio = (1.2 * 0.8) ** 0.5
    result = gspo(batch, CONFIG)
    torch.testing.assert_close(result.loss_N.detach(), torch.tensor([-ratio, -ratio, 1.1], dtype=torch.float64))
    torch.testing.assert_close(gradient(batch, result), torch.tensor([-ratio, -ratio, 1.1], dtype=torch.float64))


def test_gspo_clips_all_tokens_of_a_completion_together() -> None:
    batch = tokens([3.0, 1.0], [1.0, 1.0], [0, 0])
    result = gspo(batch, CONFIG)
    assert result.clipped_N.all()
    assert not gradient(batch, result).any()


@pytest.mark.parametrize("name", ["two_sided_grpo", "dapo", "gspo"])
def test_gradient_matches_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    batch = tokens([0.5, 0.85, 1.0, 1.1, 2.0, 6.0], [1.0, -1.0, 0.5, -0.2, -3.0, -1.0], [0, 0, 1, 1, 1, 2])

    def loss(logprobs_N: Tensor) -> Tensor:
        moved = TokenBatch(logprobs_N, batch.old_logprobs_N, batch.advantages_N, batch.row_N, batch.rows)
        return LOSSES[name](moved, CONFIG).loss_N

    assert torch.autograd.gradcheck(loss, (batch.logprobs_N,))


@pytest.mark.parametrize("name", LOSSES)
def test_no_advantage_no_gradient(name: str) -> None:
    batch = tokens([0.1, 1.0, 50.0], [0.0, 0.0, 0.0])
    assert not gradient(batch, LOSSES[name](batch, CONFIG)).any()


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_is_no_loss(name: str) -> None:
    none = torch.zeros(0)
    batch = TokenBatch(none.requires_grad_(), torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0)
    assert LOSSES[name](batch, CONFIG).loss_N.sum().item() == 0.0


@pytest.mark.parametrize(
    ("given", "region", "weighting"),
    [
        ({"loss": "two_sided_grpo"}, (0.2, 0.0), "token"),
        ({"loss": "dapo"}, (0.2, 0.28), "token"),
        ({"loss": "gspo"}, (3e-4, 4e-4), "sequence"),
        ({"loss": "gspo", "clip_epsilon": 0.1, "loss_weighting": "token"}, (0.1, 0.0), "token"),
        ({"loss": "dapo", "clip_epsilon_high": 0.4}, (0.2, 0.4), "token"),
    ],
)
def test_a_loss_comes_with_the_region_of_its_paper_unless_the_run_file_names_one(
    given: dict[str, object], region: tuple[float, float], weighting: str
) -> None:
    config = TrainingConfig.model_validate(given)
    assert ((config.clip_epsilon, config.clip_epsilon_high), config.loss_weighting) == (region, weighting)


def test_gspo_clips_at_the_scale_of_its_paper() -> None:
    config = TrainingConfig(loss="gspo")
    batch = tokens([1.0003, 1.0005], [1.0, 1.0], [0, 1])
    assert gspo(batch, config).clipped_N.tolist() == [False, True]


def test_a_penalty_in_the_advantage_has_the_gradient_of_the_exact_divergence() -> None:
    """Expected over the policy's own tokens: the gradient of ρ·log(π/π_ref) is that of KL(π‖π_ref)."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.4, -0.5], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    old = logprobs.detach()
    advantages = penalised(torch.zeros(3, dtype=torch.float64), old, reference, beta=1.0)
    batch = TokenBatch(logprobs, old, advantages, torch.arange(3), 3)
    loss_N = two_sided_grpo(batch, TrainingConfig()).loss_N
    (ours,) = torch.autograd.grad((old.exp() * loss_N).sum(), logits)
    torch.testing.assert_close(ours, exact)


def test_k3_is_zero_at_the_reference_positive_elsewhere_and_has_a_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    values = k3_divergence(logprobs, reference)
    assert values[0].item() == 0.0
    assert (values[1:] > 0).all()
    assert torch.autograd.gradcheck(lambda x: k3_divergence(x, reference), (logprobs,))


def test_k3_estimates_the_divergence_without_bias() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * k3_divergence(policy.log(), reference.log())).sum(), exact)
