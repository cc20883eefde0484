"""One rank asks the coordinator; every rank takes its decision, its refusals included."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import RefusedError, UnavailableError
from shoal.protocol import api
from shoal.training import World
from shoal.training.asking import FETCHED, REFUSED, act_as_one, ask_as_one, fetch_for_node

MODULE = "training.screen_under_torchrun"
TOLERANCE = 1e-6


class Rank(World):
    """One of two ranks; `heard` is what the main one says."""

    heard: list[str]

    def share(self, text: str) -> str:
        if self.is_main:
            self.heard.append(text)
        return self.heard[-1]


def pair() -> tuple[Rank, Rank]:
    main, other = Rank(0, 2), Rank(1, 2)
    heard: list[str] = []
    for rank in (main, other):
        object.__setattr__(rank, "heard", heard)
    return main, other


def never() -> str:
    raise AssertionError("this rank must not ask")


def test_the_answer_of_the_main_rank_holds_for_all() -> None:
    main, other = pair()
    answer = api.BatchAnswer(waiting_for="3 of 8 groups", run_state="running")
    assert ask_as_one(main, api.BatchAnswer, lambda: answer) == answer
    assert ask_as_one(other, api.BatchAnswer, never) == answer  # type: ignore[arg-type]


def test_a_refusal_is_raised_on_every_rank() -> None:
    main, other = pair()
    refusal = RefusedError("rewound", "The run was rewound.", hint="Start again.", permanent=False)

    def refuse() -> str:
        raise refusal

    with pytest.raises(RefusedError) as first:
        act_as_one(main, refuse)
    assert first.value is refusal
    with pytest.raises(RefusedError) as second:
        act_as_one(other, never)
    assert (second.value.code, second.value.message, second.value.hint) == (
        "rewound",
        "The run was rewound.",
        "Start again.",
    )


def test_other_errors_end_every_rank_too() -> None:
    main, other = pair()

    def fail() -> str:
        raise UnavailableError("The coordinator is away.")

    with pytest.raises(UnavailableError):
        act_as_one(main, fail)
    with pytest.raises(RefusedError, match="The coordinator is away"):
        act_as_one(other, never)


def test_one_process_asks_without_sharing() -> None:
    assert act_as_one(World(), lambda: json.dumps("x")) == '"x"'


def screened(ranks: int, model_dir: Path, root: Path) -> list[dict[str, Any]]:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    result = root.with_suffix(".out")
    arguments = [*launcher, "-m", MODULE, str(model_dir), str(root), str(result)]
    tests = Path(__file__).parents[1]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False, cwd=tests)
    assert done.returncode == 0, done.stderr[-3000:]
    return [pickle.loads(result.with_suffix(f".{rank}").read_bytes()) for rank in range(ranks)]


@pytest.mark.slow
def test_two_ranks_screen_recall_and_hear_of_a_rewind_as_one_does(model_dir: Path, tmp_path: Path) -> None:
    (alone,) = screened(1, model_dir, tmp_path / "one")
    main, other = screened(2, model_dir, tmp_path / "two")
    assert alone["screened"] == main["screened"] == 2
    assert other["screened"] == other["recalls"] == 0, "only the main rank asks"
    assert main["recalls"] == alone["recalls"] == 1
    assert alone["trained"] == main["trained"] == other["trained"] == [[1], [1], [2]]
    assert alone["heard"] == main["heard"] == other["heard"] == "rewound"
    for name, tensor in alone["weights"].items():
        for rank in (main, other):
            torch.testing.assert_close(rank["weights"][name], tensor, atol=TOLERANCE, rtol=0)


def test_a_rank_that_does_not_lead_its_node_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [FETCHED + b"rollouts", REFUSED + b'{"code": "gone", "message": "Away.", "hint": "", "permanent": false}']
    monkeypatch.setattr(World, "leads_node", property(lambda world: False))
    monkeypatch.setattr(World, "share_on_node", lambda world, data: said.pop(0))
    follower = World(1, 2, node=object())  # type: ignore[arg-type]

    def fetch() -> bytes:
        raise AssertionError("fetched twice on one node")

    assert fetch_for_node(follower, fetch) == b"rollouts"
    with pytest.raises(RefusedError, match="Away"):
        fetch_for_node(follower, fetch)


def test_the_first_rank_of_a_node_fetches_for_the_others_and_passes_errors_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bytes] = []
    monkeypatch.setattr(World, "leads_node", property(lambda world: True))
    monkeypatch.setattr(World, "share_on_node", lambda world, data: said.append(data) or data)  # type: ignore[func-returns-value]
    leader = World(0, 2, node=object())  # type: ignore[arg-type]
    assert fetch_for_node(leader, lambda: b"rollouts") == b"rollouts"

    def refuse() -> bytes:
        raise RefusedError("gone", "Away.")

    with pytest.raises(RefusedError):
        fetch_for_node(leader, refuse)
    assert said[0] == FETCHED + b"rollouts"
    assert said[1].startswith(REFUSED)
