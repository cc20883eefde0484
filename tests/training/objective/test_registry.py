"""Functions by name, built in or the user's own."""

from pathlib import Path

import pytest
import torch

from shoal.config import TrainingConfig
from shoal.errors import ConfigError
from shoal.training.objective.advantages import ADVANTAGES, grpo
from shoal.training.objective.losses import LOSSES, TokenBatch
from shoal.training.objective.registry import find_function


def test_built_in_name() -> None:
    assert find_function("advantage", "grpo", ADVANTAGES) is grpo


def test_users_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def reinforce(batch, config):\n    from shoal.training import TokenLoss\n"
    code += "    return TokenLoss(-batch.advantages_N * batch.logprobs_N, batch.logprobs_N > 0)\n"
    (tmp_path / "my_recipe.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    loss = find_function("loss", "my_recipe:reinforce", LOSSES)
    one = torch.ones(1)
    assert loss(TokenBatch(-one, one, one, one.long(), 1), TrainingConfig()).loss_N.item() == 1.0


def test_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="dr_grpo"):
        find_function("advantage", "drgrpo", ADVANTAGES)


@pytest.mark.parametrize("name", ["no_such_module:loss", "math:no_such_function", "math:pi"])
def test_unusable_function_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        find_function("loss", name, LOSSES)
