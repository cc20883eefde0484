"""Pages fit the width, and what they name exists: files, commands, settings, packages."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.config import all_keys
from tools.reference import commands
from tools.reference.text import WIDTH

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shoal"
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/smollm2/README.md")),
]
WRITTEN = [page for page in PAGES if page.parent.name != "reference" and page.name != "CHANGELOG.md"]
CODE = re.compile(r"`([^`\n]+)`")
REPOSITORY = ("src/", "tests/", "docs/", "benchmarks/", "examples/", "configs/", "tools/", ".ci/")
MADE = ("runs/", "build/", "docs/assets/")
"""Directories that commands make."""
GROUPS = {"run", "ledger", "reward-model", "service", "key", "env"}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
each_written_page = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))


def prose_and_blocks(page: Path) -> Iterator[str]:
    """Code spans of the prose, and the lines of code blocks."""
    text = page.read_text()
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        yield from block.replace("\\\n", " ").splitlines()
    yield from CODE.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@each_page
def test_lines_fit_the_width(page: Path) -> None:
    too_long = [
        f"{number}: {line}"
        for number, line in enumerate(page.read_text().splitlines(), start=1)
        if len(line) > WIDTH and not is_unbreakable(line)
    ]
    assert not too_long, "\n".join(too_long)


def is_unbreakable(line: str) -> bool:
    """One word that is too long by itself, such as an address."""
    return len(line.split()[-1]) > WIDTH - 20 and len(line.split()) <= 2


@each_written_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = {word for code in prose_and_blocks(page) for word in re.findall(r"[\w./*-]+", code)}
    paths = {word.rstrip("/.") for word in named if word.startswith(REPOSITORY) and not word.startswith(MADE)}
    missing = sorted(path for path in paths if not any(ROOT.glob(path)))
    assert not missing, missing


@each_written_page
def test_commands_that_a_page_shows_exist(page: Path) -> None:
    known = {name.removeprefix("shoal ") for name, _ in commands.commands()} | GROUPS
    shown = [
        match.groups()
        for code in prose_and_blocks(page)
        for match in re.finditer(r"\bshoal ([a-z-]+)(?: ([a-z-]+))?", code)
    ]
    unknown = sorted(
        {f"shoal {first} {second or ''}" for first, second in shown if not is_command(first, second, known)}
    )
    assert not unknown, unknown


def is_command(first: str, second: str | None, known: set[str]) -> bool:
    return f"{first} {second}" in known if first in GROUPS and second else first in known


@each_written_page
def test_options_that_a_page_shows_exist(page: Path) -> None:
    options = {
        name.removeprefix("shoal "): {spelled for one in command.params for spelled in (*one.opts, *one.secondary_opts)}
        for name, command in commands.commands()
    }
    options["service install"] |= options["work"]  # which it passes on
    unknown = [
        f"{name} {option}"
        for line in prose_and_blocks(page)
        for name, known in options.items()
        for match in re.finditer(rf"\bshoal {name}(?![\w-])([^|#`]*)", line)
        for option in re.findall(r"(?<!\S)(--[a-z][a-z0-9-]*)(?![\w.-])", match.group(1))
        if option not in known | {"--help"}
    ]
    assert not unknown, unknown


@each_written_page
def test_settings_that_a_page_names_exist(page: Path) -> None:
    keys = set(all_keys())
    sections = {key.split(".")[0] for key in keys}
    named = {
        f"{section}.{name}"
        for code in prose_and_blocks(page)
        for section, name in re.findall(r"(?<![\w./-])(?:--)?([a-z]+)\.([a-z_]+(?:\.[a-z_]+)?)(?![\w/(:])", code)
        if section in sections and name not in {"toml", "key", "json", "jsonl", "py", "tar", "md", "secret"}
    }
    known = keys | {key.rpartition(".")[0] for key in keys}
    assert named <= known, sorted(named - known)


@each_written_page
def test_run_files_that_a_page_shows_have_settings_that_exist(page: Path) -> None:
    keys, unknown = set(all_keys()), []
    for block in re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        section = ""
        for line in block.splitlines():
            if match := re.match(r"\[([\w.]+)\]", line):
                section = match.group(1)
            elif (match := re.match(r"(\w+) = ", line)) and f"{section}.{match.group(1)}" not in keys:
                unknown.append(f"{section}.{match.group(1)}")
    assert not unknown, unknown


def test_the_map_names_every_package_and_only_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("## I want to change …")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if re.match(r"\| (?!I want|---)", line)]
    files = [CODE.findall(row.split("|")[2]) for row in rows]
    assert len(rows) >= 18
    assert [row for row, named in zip(rows, files, strict=True) if not named] == []
    assert [name for named in files for name in named if not (SOURCE / name).is_file()] == []
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    mapped = set(re.findall(r"`([a-z]+)/`", page.split("## Packages")[1].split("\n## ")[0]))
    assert packages <= mapped, packages - mapped
