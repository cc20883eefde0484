"""Tasks that a frame policy is trained on, and how they are solved."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import ShoalError
from shoal.frames import CorpusError
from shoal.frames.repairs import Window, as_task, demonstration_keys, repair_tasks, usable_lines
from shoal.frames.screens import GO, GOAL, Renderer
from shoal.tasks import THINK_CLOSE, row_to_task, score
from shoal.tasks.editor import DELETE, DOWN, RIGHT

LINES = ["def main():", "self.x = 1", "import os", "return None", "yield 3", "a = b  # c"]
WINDOW = Window(rows=2, columns=16)


def test_demonstrations_solve_their_tasks() -> None:
    for task in repair_tasks(LINES, WINDOW, 200, most=3, seed=5):
        assert score(task, THINK_CLOSE + demonstration_keys(task, WINDOW)).reward == 1.0
        assert score(task, THINK_CLOSE).reward == 0.0, "a task must not be solved already"


def test_tasks_follow_from_the_seed() -> None:
    first, again, other = (list(repair_tasks(LINES, WINDOW, 20, most=2, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_lines_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    body = "\n".join([*LINES, *LINES, "x" * 40, "y"])
    (tmp_path / "good.py").write_text(body)
    (tmp_path / "binary.py").write_bytes(b"\0" + body.encode())
    (tmp_path / "umlaut.py").write_text(body + "\n# ü")
    skipped: Counter[str] = Counter()
    assert usable_lines(tmp_path, "train", WINDOW, skipped) == LINES
    assert skipped == {"lines too long or too short": 2, "binary": 1, "characters beyond ASCII": 1}


def test_a_corpus_without_usable_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("\n".join(["z" * 50] * 20))
    with pytest.raises(CorpusError, match="0 lines"):
        usable_lines(tmp_path, "train", WINDOW, Counter())


@pytest.mark.parametrize(
    ("keys", "reward", "why"),
    [
        (f"{RIGHT * 2}l", 1.0, "as wanted"),
        (f"{RIGHT * 2}l\x04", 1.0, "as wanted"),
        (f"{RIGHT * 2}k", 0.0, "1 lines differ"),
        (f"{DOWN * 9}\n\n", 0.0, "3 lines differ"),
        ("ü\x00\x1b", 0.0, "differ"),
        (f"{GO}", 0.0, "differ"),
    ],
)
def test_the_verdict_is_about_the_buffer(keys: str, reward: float, why: str) -> None:
    task = as_task("1", ["helo"], ["hello"], WINDOW)
    found = score(task, THINK_CLOSE + keys)
    assert (found.reward, found.exact) == (reward, True)
    assert why in found.why


@pytest.mark.parametrize("wrong", [{"before": "ü", "after": "u"}, {"before": "a"}, {"before": "a", "after": "\x07"}])
def test_buffers_that_no_frame_shows_are_refused_with_the_task(wrong: dict[str, str]) -> None:
    row = {"problem_id": "1", "source": "s", "task_type": "editing", "prompt": "p", "verification_info": wrong}
    with pytest.raises(ShoalError, match="verification_info"):
        row_to_task(row, 1, "here")


def test_a_screen_shows_both_buffers_and_cursor_and_differences_in_reverse() -> None:
    entries = (*map(chr, range(128)), GOAL, GO)
    renderer = Renderer(entries, rows=4, columns=8)
    prompt = [*map(ord, "ab\ncd"), 128, *map(ord, "ab\ncx"), 129]
    first, frames = renderer.read([*prompt, *map(ord, (RIGHT, DOWN, DELETE, "x"))])
    assert first == len(prompt) - 1
    shown = [["".join(chr(cell & 127) for cell in row).rstrip() for row in frame] for frame in frames]
    assert shown == [["ab", "cd", "ab", "cx"]] * 3 + [["ab", "c", "ab", "cx"], ["ab", "cx", "ab", "cx"]]
    in_reverse = [[tuple(map(int, at)) for at in np.argwhere(frame > 127)] for frame in frames]
    assert in_reverse == [[(0, 0), (3, 1)], [(0, 1), (3, 1)], [(1, 1), (3, 1)], [(1, 1), (3, 1)], [(1, 2)]]
