"""Sessions and their data: keys lead to the goal, actions are the keys again, the same seed gives the same bytes."""

import itertools
import os
import random
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.frames import (
    ActionTable,
    Change,
    CorpusError,
    Editor,
    TextError,
    build_dataset,
    build_table,
    committed,
    damaged,
    library_files,
    record,
    session_keys,
)
from shoal.frames.corpus import is_heldout
from shoal.tasks.editor import DOWN, SAVE

TABLE = build_table(["def word other word\n"], size=220)
LINES = st.lists(st.text("ab (", max_size=5), min_size=1, max_size=7)


@given(LINES, LINES, st.integers(0, 50))
@settings(max_examples=300)
def test_the_keys_of_a_session_turn_one_text_into_the_other(before: list[str], after: list[str], seed: int) -> None:
    keys = session_keys(before, after, 3, 6, seed)
    editor = Editor(3, 6, list(before))
    for key in keys:
        editor.press(key)
    assert editor.lines == after
    assert keys.endswith(SAVE)
    assert keys.count(SAVE) == 1


@given(st.text([chr(code) for code in range(128)], max_size=40))
def test_actions_decode_to_the_keys_they_were_made_of(keys: str) -> None:
    assert TABLE.decode(TABLE.encode(keys)) == keys


def test_the_longest_entry_is_taken_first() -> None:
    assert [TABLE.entries[action] for action in TABLE.encode("word" + DOWN * 17 + "wor")] == [
        "word", DOWN * 15, DOWN * 2, "w", "o", "r",
    ]  # fmt: skip


def test_a_table_has_the_size_it_was_asked_for_and_the_words_that_save_most() -> None:
    table = build_table(["lengthy " * 3 + "ab " * 5 + "rare"], size=200)
    assert len(table) == 200
    assert table.entries[-2:] == ("lengthy", "ab")


def test_tables_that_cannot_name_every_key_are_refused() -> None:
    with pytest.raises(TextError):
        ActionTable(("a", "b"))
    with pytest.raises(TextError, match="too small"):
        build_table([], size=100)
    with pytest.raises(TextError, match="not ASCII"):
        TABLE.encode("aé")


def test_the_frame_of_an_action_is_the_one_before_its_first_key() -> None:
    recording = record(["ab"], "word" + SAVE, TABLE, 2, 8, limit=9)
    assert [TABLE.entries[action] for action in recording.actions_L] == ["word", SAVE]
    rows = [bytes(frame[0]).decode() for frame in recording.frames_LRC]
    assert rows == ["\x05b      ", "word\x05b  "]


def tree(root: Path, files: int = 40) -> Path:
    for number in range(files):
        body = "".join(f"def name_{number}_{k}(value):\n    # note {k}\n    return value + {k}\n\n" for k in range(12))
        (root / f"file_{number}.py").write_text("import os\n" + body)
    return root


def test_the_same_seed_gives_the_same_data_and_another_seed_does_not(tmp_path: Path) -> None:
    files = library_files(tree(tmp_path), "train", Counter())

    def make(seed: int) -> bytes:
        data = build_dataset(damaged(files, seed), TABLE, 4, 12, actions=500, least=8, most=64, seed=seed)
        return data.frames_NRC.tobytes() + data.actions_N.tobytes()

    assert make(3) == make(3)
    assert make(3) != make(4)


def test_no_heldout_file_is_in_training(tmp_path: Path) -> None:
    tree(tmp_path, 200)
    train, held = (
        {name for name, _ in library_files(tmp_path, "train", Counter())},
        {name for name, _ in library_files(tmp_path, "heldout", Counter())},
    )
    assert not train & held
    assert 0.01 < len(held) / (len(held) + len(train)) < 0.12
    assert all(is_heldout(name) for name in held)


def test_files_that_frames_cannot_show_are_skipped_with_a_count(tmp_path: Path) -> None:
    tree(tmp_path)
    lines = b"x = 1\n" * 20
    (tmp_path / "accents_a.py").write_bytes(lines + "é = 1\n".encode())
    (tmp_path / "latin.py").write_bytes(lines + b"\xe9\xff")
    (tmp_path / "binary.py").write_bytes(lines + b"\0")
    (tmp_path / "huge.py").write_bytes(b"y = 2\n" * 80_000)
    skipped: Counter[str] = Counter()
    for split in ("train", "heldout"):
        library_files(tmp_path, split, skipped)
    assert skipped == {"characters beyond ASCII": 1, "not UTF-8": 1, "binary": 1, "too large": 1}


def test_paths_that_cannot_be_read_are_skipped_with_a_count(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nothing")
    skipped: Counter[str] = Counter()
    names = [name for split in ("train", "heldout") for name, _ in library_files(tmp_path, split, skipped)]
    assert len(names) == 40
    assert skipped == {"unreadable": 1}


def test_files_with_nothing_to_damage_are_refused_instead_of_searched_for_ever() -> None:
    with pytest.raises(CorpusError, match="changed nothing"):
        next(damaged([("blank.py", [""] * 20)], seed=0))


@pytest.mark.parametrize(("least", "most"), [(65, 64), (0, 64)])
def test_limits_that_no_session_meets_are_refused_instead_of_searched_for_ever(least: int, most: int) -> None:
    endless = itertools.repeat(Change("x", ["a"], ["b"]))
    with pytest.raises(CorpusError, match=f"at least {least} and at most {most}"):
        build_dataset(endless, TABLE, 4, 12, actions=10, least=least, most=most, seed=0)


def test_a_directory_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no Python files"):
        library_files(tmp_path, "train", Counter())


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


def commit(root: Path, name: str, content: bytes) -> None:
    (root / name).write_bytes(content)
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "change")


def test_commits_become_changes_oldest_first_and_binary_files_are_skipped(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    commit(tmp_path, "a.py", b"one\n")
    commit(tmp_path, "picture", b"\0\1")
    commit(tmp_path, "a.py", b"one\ntwo\n")
    commit(tmp_path, "picture", b"\0\2")
    commit(tmp_path, "a.py", b"two\n")
    skipped: Counter[str] = Counter()
    changes = list(committed(tmp_path, "train", skipped))
    assert [(change.before, change.after) for change in changes] == [
        (["one", ""], ["one", "two", ""]),
        (["one", "two", ""], ["two", ""]),
    ]
    assert skipped["binary"] == 2


def test_a_history_of_binary_files_is_refused_with_their_count(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for number in range(3):
        commit(tmp_path, "picture", b"\0" + bytes([number]))
    skipped: Counter[str] = Counter()
    with pytest.raises(CorpusError, match=r"session of 1 actions. Skipped: 4 binary"):
        build_dataset(
            committed(tmp_path, "train", skipped), TABLE, 4, 12, actions=9, least=1, most=9, seed=0, skipped=skipped
        )


def test_links_submodules_and_odd_names_in_a_history_stop_nothing(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    odd = os.fsdecode(b"caf\xe9 \n.py")
    for number in range(2):
        (tmp_path / "link.py").unlink(missing_ok=True)
        (tmp_path / "link.py").symlink_to(f"target-{number}")
        (tmp_path / "HEAD").write_text(f"{number}\n")
        git(tmp_path, "update-index", "--add", "--cacheinfo", f"160000,{str(number + 1) * 40},module.py")
        git(tmp_path, "add", "link.py", "HEAD")
        (tmp_path / odd).write_text(f"odd {number}\n")
        git(tmp_path, "add", odd)
        git(tmp_path, "commit", "-q", "-m", "change")
    skipped: Counter[str] = Counter()
    changes = [change for split in ("train", "heldout") for change in committed(tmp_path, split, skipped)]
    assert sorted(change.after[0] for change in changes) == ["1", "odd 1"]
    assert skipped["not a file"] == 2 * 2, "both splits read the history"


def test_a_machine_without_git_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CorpusError, match="git rev-list could not be run"):
        next(committed(tmp_path, "train", Counter()))


def test_a_shallow_clone_of_one_commit_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    git(source, "init", "-q")
    for number in range(3):
        commit(source, "a.py", b"x\n" * number)
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{source}", "copy")
    with pytest.raises(CorpusError, match="has 1 commits"):
        next(committed(tmp_path / "copy", "train", Counter()))


@pytest.mark.parametrize("commits", [0, 1])
def test_a_repository_without_history_is_refused(tmp_path: Path, commits: int) -> None:
    git(tmp_path, "init", "-q")
    for _ in range(commits):
        commit(tmp_path, "a.py", b"one\n")
    with pytest.raises(CorpusError, match=f"has {commits} commits"):
        next(committed(tmp_path, "train", Counter()))


def test_a_path_that_is_no_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="git rev-list failed"):
        next(committed(tmp_path / "nowhere", "train", Counter()))


def test_windows_stay_inside_one_session() -> None:
    before = [["a" * 3], ["b" * 3]]
    changes = [Change("x", lines, [lines[0] + lines[0][0] * 30]) for lines in before]
    data = build_dataset(changes, TABLE, 2, 40, actions=10_000, least=4, most=64, seed=0)
    for frames, actions in itertools.islice(data.windows(16, 8, seed=1), 40):
        assert frames.shape == (16, 8, 2, 40)
        assert actions.shape == (16, 8)
        texts = frames.permute(1, 0, 2, 3).flatten(1)
        assert all(not ({97, 98} <= set(text.tolist())) for text in texts)
    assert data.sessions == 2
    with pytest.raises(CorpusError, match="No session has 100"):
        next(data.windows(100, 1, seed=0))
    for length, batch in ((0, 1), (1, 0)):
        with pytest.raises(CorpusError, match="hold nothing"):
            next(data.windows(length, batch, seed=0))
        with pytest.raises(CorpusError, match="hold nothing"):
            data.streams(length, batch)


def test_streams_begin_where_their_sessions_begin() -> None:
    changes = [Change("x", ["ab"], ["ab" + "c" * 20]) for _ in range(3)]
    data = build_dataset(changes, TABLE, 2, 40, actions=10_000, least=4, most=64, seed=random.Random(0).randrange(9))
    frames, actions = data.streams(8, most=2)
    assert frames.shape[:2] == (8, 2)
    assert np.array_equal(actions[:, 0].numpy(), data.actions_N[:8])
