"""Nodes without a shared disk: a checkpoint is whole on all of them or on none, and ranks never decide for themselves."""

import shutil
from pathlib import Path

import pytest
import torch

from shoal.rundir import checkpoint_path, checkpoint_steps, checkpoints_of
from shoal.training.disks import CheckpointError, choose_step

from .node import Outcome, train_on_nodes


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([{}, {}], None),
        ([{2: "", 3: ""}, {2: "", 3: ""}], 3),
        ([{2: "", 3: ""}, {2: ""}], 2),  # killed between two renames
        ([{3: ""}, {2: "", 3: ""}], 3),
    ],
)
def test_ranks_resume_at_the_newest_step_that_all_have(found: list[dict[int, str]], chosen: int | None) -> None:
    assert choose_step(found) == chosen


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([{3: ""}, {}], r"Ranks 1 have no checkpoint.*step 3.*copy its directory"),
        ([{3: ""}, {2: ""}], r"no checkpoint"),
        ([{2: "", 3: ""}, {2: "", 3: "lacks 1 of 2 parts"}], r"step 3 cannot be read.*rank 1: lacks 1.*--node-rank"),
    ],
)
def test_what_is_missing_is_refused_with_what_to_do(found: list[dict[int, str]], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        choose_step(found)


def steps_on(directory: Path) -> list[int]:
    return checkpoint_steps(checkpoints_of(directory))


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    assert ours.weights is not None
    assert theirs.weights is not None
    for name, tensor in ours.weights.items():
        assert torch.equal(tensor, theirs.weights[name]), name


@pytest.mark.slow
def test_nodes_resume_from_their_own_disks_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    straight, _ = train_on_nodes(model_dir, [tmp_path / "shared", tmp_path / "shared"], 4)
    nodes = [tmp_path / "a", tmp_path / "b"]
    train_on_nodes(model_dir, nodes, 2)
    assert [steps_on(node) for node in nodes] == [[2], [2]]
    parts = [{part.name for part in checkpoint_path(checkpoints_of(node), 2).glob("*.distcp")} for node in nodes]
    assert parts == [{"__0_0.distcp"}, {"__1_0.distcp"}]
    resumed = train_on_nodes(model_dir, nodes, 4)
    assert [one.resumed_at for one in resumed] == [2, 2]
    assert_same(resumed[0], straight)
    assert not [*tmp_path.glob("*/checkpoints/.tmp-*")]


@pytest.mark.slow
def test_a_node_that_lost_its_disk_stops_all_ranks_at_start_with_what_to_do(model_dir: Path, tmp_path: Path) -> None:
    """The job died inside a collective."""
    nodes = [tmp_path / "a", tmp_path / "b"]
    train_on_nodes(model_dir, nodes, 2)
    shutil.rmtree(checkpoints_of(nodes[1]))
    for outcome in train_on_nodes(model_dir, nodes, 4):
        assert "Ranks 1 have no checkpoint, others have that of step 2." in outcome.refusal
        assert "copy its directory" in outcome.refusal


@pytest.mark.slow
def test_nodes_in_another_order_are_refused_and_merged_directories_are_read_by_any(
    model_dir: Path, tmp_path: Path
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    train_on_nodes(model_dir, nodes, 2)
    for outcome in train_on_nodes(model_dir, nodes[::-1], 4):
        assert "lacks 1 of 2 parts" in outcome.refusal
        assert "--node-rank" in outcome.refusal
    for source, target in (nodes, nodes[::-1]):
        shutil.copytree(checkpoints_of(source), checkpoints_of(target), dirs_exist_ok=True)
    shutil.copytree(nodes[0], tmp_path / "c")
    swapped = train_on_nodes(model_dir, nodes[::-1], 3)
    assert [one.resumed_at for one in swapped] == [2, 2]
    (alone,) = train_on_nodes(model_dir, [tmp_path / "c"], 3)
    assert alone.resumed_at == 2


@pytest.mark.slow
def test_a_kill_between_two_renames_returns_all_ranks_to_the_step_before(model_dir: Path, tmp_path: Path) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    train_on_nodes(model_dir, nodes, 1)
    train_on_nodes(model_dir, nodes, 2)
    shutil.rmtree(checkpoint_path(checkpoints_of(nodes[1]), 2))
    resumed = train_on_nodes(model_dir, nodes, 3)
    assert [one.resumed_at for one in resumed] == [1, 1]
    assert [steps_on(node) for node in nodes] == [[1, 3], [1, 3]]


@pytest.mark.slow
def test_a_part_that_is_missing_on_one_node_keeps_the_checkpoint_from_all(model_dir: Path, tmp_path: Path) -> None:
    """Rank 0 renamed what it had, and half of a checkpoint looked whole."""
    nodes = [tmp_path / "a", tmp_path / "b"]
    for outcome in train_on_nodes(model_dir, nodes, 1, loses_a_part=True):
        assert "rank 1" in outcome.refusal
        assert "__1_0.distcp" in outcome.refusal
    assert [steps_on(node) for node in nodes] == [[], []]


@pytest.mark.slow
def test_bf16_gives_the_same_on_one_and_two_ranks(model_dir: Path, tmp_path: Path) -> None:
    """Stated tolerance: 0.01 of the loss, 0.2 % of the entropy, and weights within a tenth of what the steps moved them."""
    settings = {"compute_dtype": "bfloat16", "max_grad_norm": 1.0}
    (one,) = train_on_nodes(model_dir, [tmp_path / "one"], 3, **settings)
    two, _ = train_on_nodes(model_dir, [tmp_path / "two", tmp_path / "two"], 3, **settings)
    (start,) = train_on_nodes(model_dir, [tmp_path / "start"], 0, **settings)
    assert two.entropies == pytest.approx(one.entropies, rel=2e-3)
    assert two.losses == pytest.approx(one.losses, abs=1e-2)
    assert one.weights and two.weights and start.weights  # noqa: PT018
    moved = torch.cat([(one.weights[name] - start.weights[name]).flatten() for name in one.weights]).norm()
    apart = torch.cat([(one.weights[name] - two.weights[name]).flatten() for name in one.weights]).norm()
    assert apart < 0.1 * moved
