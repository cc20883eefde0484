"""Preference pairs are fair, the reward model learns them, and its ranking means something."""

import math
import random
from pathlib import Path

import pytest
import torch

from shoal.curation import FitSettings, Pair, make_pairs, pair_accuracy, read_candidates, train_reward_model
from shoal.curation.preferences import Candidate, is_heldout
from shoal.curation.reward_training import REWARD_FIT
from shoal.errors import ConfigError
from shoal.evaluation import write_answers
from shoal.policy import ModelError, bundled_directory
from shoal.policy.reward_model import RewardModel, classify, win_chances
from support.answers import answer
from support.tiny_run import save_policy


def candidates(tasks: int) -> list[Candidate]:
    """A completion is right if it ends with the prompt's first token: something a tiny model can learn to see."""
    rng = random.Random(0)
    made = []
    for _ in range(tasks):
        key = rng.randrange(10, 30)
        prompt = (key, rng.randrange(100, 300), rng.randrange(100, 300))
        for right in (True, False, True, False):
            last = key if right else rng.choice([token for token in range(10, 30) if token != key])
            made.append(Candidate(prompt, (rng.randrange(100, 300), last), float(right)))
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_policy(tmp_path_factory.mktemp("rm") / "model", seed=0)


def test_pairs_prefer_the_higher_reward_and_no_task_is_on_both_sides() -> None:
    made = candidates(40)
    pairs, heldout = make_pairs(made, pairs_per_task=3)
    rewards = {one.prompt + one.completion: one.reward for one in made}
    assert all(rewards[pair.chosen] > rewards[pair.rejected] for pair in [*pairs, *heldout])
    sides = [{pair.chosen[:3] for pair in part} for part in (pairs, heldout)]
    assert all(sides)
    assert not sides[0] & sides[1]
    assert all(is_heldout(prompt) for prompt in sides[1])
    assert (pairs, heldout) == make_pairs(made, pairs_per_task=3)
    assert all(sum(pair.chosen[:3] == prompt for pair in pairs) <= 3 for prompt in sides[0])


def test_equal_rewards_and_equal_completions_give_no_pair() -> None:
    same = [Candidate((1,), (2,), 1.0), Candidate((1,), (3,), 1.0), Candidate((1,), (2,), 1.0)]
    assert make_pairs(same) == ([], [])


def test_chances_are_those_of_bradley_and_terry() -> None:
    assert win_chances([0.0, 0.0]) == [0.5, 0.5]
    assert win_chances([math.log(3), 0.0]) == pytest.approx([0.75, 0.25])
    assert win_chances([5.0]) == [0.5]
    chances = win_chances([2.0, 1.0, -1.0])
    assert chances == sorted(chances, reverse=True)
    assert sum(chances) == pytest.approx(1.5)


def test_the_score_is_read_at_the_last_token_whatever_stands_beside(base: Path, tmp_path: Path) -> None:
    from shoal.policy.reward_model import build_classifier

    model = build_classifier(base).eval()
    pad = model.config.pad_token_id
    rows = [(5, 6, 7), (5, 6, 7, 8, pad), (9,)]
    with torch.no_grad():
        together = classify(model, rows, torch.device("cpu"))
        alone = torch.cat([classify(model, [row], torch.device("cpu")) for row in rows])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.slow
def test_it_learns_what_the_verifier_prefers_and_says_so_on_unseen_tasks(base: Path, tmp_path: Path) -> None:
    pairs, heldout = make_pairs(candidates(600), pairs_per_task=4)
    settings = FitSettings(epochs=12, batch=32, learning_rate=3e-3, warmup_steps=10)
    accuracy = train_reward_model(base, pairs, heldout, tmp_path / "rm", work_dir=tmp_path / "work", settings=settings)
    assert accuracy.low > 0.8
    model = RewardModel(str(tmp_path / "rm"))
    assert pair_accuracy(model, heldout).mean == accuracy.mean
    ranks = model.rank(heldout[0].chosen[:3], [heldout[0].chosen[3:], heldout[0].rejected[3:]])
    assert ranks[0] > ranks[1]


def test_a_killed_training_ends_with_the_same_model(base: Path, tmp_path: Path) -> None:
    pairs, heldout = make_pairs(candidates(30))
    settings = FitSettings(epochs=2, batch=8, checkpoint_every=1)

    def die(report: object) -> None:
        if getattr(report, "step", 0) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_reward_model(
            base, pairs, heldout, tmp_path / "a", work_dir=tmp_path / "w", settings=settings, on_step=die
        )
    train_reward_model(base, pairs, heldout, tmp_path / "a", work_dir=tmp_path / "w", settings=settings)
    train_reward_model(base, pairs, heldout, tmp_path / "b", work_dir=tmp_path / "v", settings=settings)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_too_few_pairs_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too few"):
        train_reward_model(base, [Pair((1,), (2,))], [], tmp_path / "rm", work_dir=tmp_path / "w", settings=REWARD_FIT)


def test_a_policy_is_no_reward_model() -> None:
    with pytest.raises(ModelError, match="no reward model"):
        RewardModel(str(bundled_directory()))


def test_candidates_come_from_answer_files_and_anything_else_is_named(tmp_path: Path) -> None:
    write_answers(tmp_path / "some" / "answers.parquet", [answer("a", 0, 1.0), answer("a", 1, 0.0)])
    found = list(read_candidates([tmp_path]))
    assert [one.reward for one in found] == [1.0, 0.0]
    assert found[0].prompt == (1, 2, 3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither answers nor a run"):
        list(read_candidates([tmp_path / "empty"]))
