"""Pairs of texts, before and after a change: damaged files of the standard library, or the commits of a git repository.

Everything is seeded: the same corpus and seed give the same pairs. Files are split into training and held-out ones by a hash
of their path, so no held-out session edits a file that training saw. Files that frames cannot show (other characters, binary
content) are skipped and counted by reason.
"""

import hashlib
import itertools
import random
import re
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import ShoalError
from shoal.tasks.editor import TextError, lines_of

Split = Literal["train", "heldout"]
Lines = list[str]
HELDOUT_SHARE = 0.05
LONGEST_FILE_BYTES = 400_000
EXCERPT_LINES = 160
"""A session edits an excerpt: moving through a long file would be most of its actions."""
LEAST_LINES = 12
MOST_UNCHANGED = 1_000
"""Attempts in a row: files of blank lines, say, have nothing to damage."""
GIT_TIMEOUT_S = 120.0
FILE_MODES = ("100644", "100755")
"""The others are links and submodules."""


class CorpusError(ShoalError):
    """A corpus that has no sessions to give."""

    code = "frame_corpus"
    permanent = True


@dataclass(frozen=True)
class Change:
    name: str
    before: Lines
    after: Lines


def is_heldout(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64


def read_text(data: bytes, skipped: Counter[str]) -> Lines | None:
    """The lines of a file, or none with the reason counted."""
    reason = ""
    if len(data) > LONGEST_FILE_BYTES:
        reason = "too large"
    elif b"\0" in data:
        reason = "binary"
    else:
        try:
            return lines_of(data.decode("utf-8"))
        except UnicodeDecodeError:
            reason = "not UTF-8"
        except TextError:
            reason = "characters beyond ASCII"
    skipped[reason] += 1
    return None


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def library_files(root: Path, split: Split, skipped: Counter[str]) -> list[tuple[str, Lines]]:
    """The Python files below a directory that belong to the split, by name."""
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or path.is_dir() or is_heldout(name) != (split == "heldout"):
            continue
        lines = _read_file(path, skipped)
        if lines is not None and len(lines) >= LEAST_LINES:
            found.append((name, lines))
    if not found:
        raise CorpusError(f"{root} has no Python files for the {split} split.", hint=skipped_line(skipped))
    return found


def _read_file(path: Path, skipped: Counter[str]) -> Lines | None:
    try:
        data = path.read_bytes()
    except OSError:
        skipped["unreadable"] += 1
        return None
    return read_text(data, skipped)


def skipped_line(skipped: Counter[str]) -> str:
    return "Skipped: " + (", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "none") + "."


def damaged(files: list[tuple[str, Lines]], seed: int) -> Iterator[Change]:
    """Endless changes that repair seeded damage to excerpts of the files."""
    rng = random.Random(seed)
    unchanged = 0
    while True:
        if unchanged > MOST_UNCHANGED:
            raise CorpusError(f"{unchanged} damages in a row changed nothing in {len(files)} files.")
        name, lines = files[rng.randrange(len(files))]
        start = rng.randrange(max(1, len(lines) - EXCERPT_LINES))
        after = lines[start : start + EXCERPT_LINES]
        before = list(after)
        for damage in rng.choices(DAMAGES, k=rng.randint(4, 9)):
            before = damage(before, rng)
        if before == after:
            unchanged += 1
            continue
        unchanged = 0
        yield Change(f"{name}:{start + 1}", before, after)


def _delete_body(lines: Lines, rng: random.Random) -> Lines:
    """One block behind a line that ends in a colon is gone."""
    opens = [at for at, line in enumerate(lines) if line.rstrip().endswith(":") and at + 1 < len(lines)]
    if not opens:
        return lines
    at = rng.choice(opens)
    depth = len(lines[at]) - len(lines[at].lstrip())
    end = at + 1
    while end < len(lines) and end - at <= 8 and (not lines[end].strip() or _indent(lines[end]) > depth):
        end += 1
    return lines[: at + 1] + lines[end:]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _rename(lines: Lines, rng: random.Random) -> Lines:
    """One identifier has another name throughout: the second place tells what the third needs."""
    counts = Counter(word for line in lines for word in re.findall(r"\b[a-z_]{4,12}\b", line))
    often = sorted(word for word, count in counts.items() if 2 <= count <= 8)
    if not often:
        return lines
    word = rng.choice(often)
    other = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 6)))
    return [re.sub(rf"\b{word}\b", other, line) for line in lines]


def _drop_lines(pattern: str) -> Callable[[Lines, random.Random], Lines]:
    def drop(lines: Lines, rng: random.Random) -> Lines:
        gone = [at for at, line in enumerate(lines) if re.match(pattern, line)]
        chosen = set(rng.sample(gone, min(len(gone), 3)))
        return [line for at, line in enumerate(lines) if at not in chosen]

    return drop


def _swap_quotes(lines: Lines, rng: random.Random) -> Lines:
    """Quotes of up to six lines are of the other kind."""
    quoted = [at for at, line in enumerate(lines) if re.search(r"'[^'\"]*'|\"[^'\"]*\"", line)]
    chosen = set(rng.sample(quoted, min(len(quoted), 6)))
    swap = str.maketrans("'\"", "\"'")
    return [line.translate(swap) if at in chosen else line for at, line in enumerate(lines)]


DAMAGES = (_delete_body, _rename, _drop_lines(r"\s*(import|from) "), _drop_lines(r"\s*#"), _swap_quotes)


def committed(repository: Path, split: Split, skipped: Counter[str]) -> Iterator[Change]:
    """Every changed file of every commit, first parent, oldest first; excerpts around the first difference."""
    commits = _commits(repository)
    if len(commits) < 2:
        raise CorpusError(f"{repository} has {len(commits)} commits; sessions need a history of at least two.")
    for parent, commit in itertools.pairwise(commits):
        for name, old, new in _modified(repository, parent, commit, skipped):
            if is_heldout(name) != (split == "heldout"):
                continue
            before, after = (read_text(_git(repository, "cat-file", "blob", blob), skipped) for blob in (old, new))
            if before is not None and after is not None and before != after:
                yield _excerpt(f"{commit[:12]}:{name}", before, after)


def _commits(repository: Path) -> list[str]:
    if not _git(repository, "rev-list", "-n", "1", "--all"):  # where nothing was committed HEAD names nothing
        return []
    return _git(repository, "rev-list", "--first-parent", "--reverse", "HEAD", "--").decode().split()


def _modified(repository: Path, parent: str, commit: str, skipped: Counter[str]) -> Iterator[tuple[str, str, str]]:
    """Name and both blobs of every file that the commit modifies; links and submodules are skipped and counted."""
    raw = ("diff-tree", "-r", "-z", "--no-abbrev", "--diff-filter=M", parent, commit)
    parts = _git(repository, *raw).decode("utf-8", "backslashreplace").split("\0")
    for row, name in zip(parts[:-1:2], parts[1::2], strict=True):
        old_mode, new_mode, old, new, _ = row.removeprefix(":").split(" ")
        if old_mode in FILE_MODES and new_mode in FILE_MODES:
            yield name, old, new
        else:
            skipped["not a file"] += 1


def _excerpt(name: str, before: Lines, after: Lines) -> Change:
    """The lines around the first difference; what differs behind them is left out on both sides."""
    first = next(
        (at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    start = max(0, first - EXCERPT_LINES // 4)
    return Change(name, before[start : start + EXCERPT_LINES] or [""], after[start : start + EXCERPT_LINES] or [""])


def _git(repository: Path, *words: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CorpusError(f"git {words[0]} could not be run in {repository}: {error}.") from None
    if done.returncode:
        reported = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise CorpusError(f"git {words[0]} failed in {repository}: {reported[-1] if reported else done.returncode}.")
    return done.stdout
