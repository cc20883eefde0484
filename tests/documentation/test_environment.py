"""What `make setup` shows while pip works, and how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import environment
from tools.environment import Line, Stage

SCRIPT = Path(environment.__file__)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    (tmp_path / "site").mkdir()
    (tmp_path / "scratch").mkdir()
    return Stage(tmp_path / "site", tmp_path / "scratch")


def test_a_download_is_shown_with_its_size_and_what_has_arrived(stage: Stage) -> None:
    stage.read("Collecting torch==2.13.0\n")
    stage.read("  Downloading https://index/torch-2.13.0-cp311-manylinux.whl (188.2 MB)\n")
    (stage.scratch / "numpy-2.4.6.whl").write_bytes(bytes(5_000_000))
    (stage.scratch / "torch-2.13.0-cp311-manylinux.whl").write_bytes(bytes(3_000_000))
    assert str(stage) == "downloading torch 2.13.0 (3 MB of 188.2 MB), 1 packages so far"


def test_small_files_are_named_without_a_size(stage: Stage) -> None:
    stage.read("  Downloading idna-3.20-py3-none-any.whl.metadata (7.2 kB)\n")
    assert str(stage) == "downloading idna 3.20, 0 packages so far"


def test_installing_counts_packages(stage: Stage) -> None:
    stage.read("Installing collected packages: idna, h11, httpx\n")
    assert str(stage) == "installing, 0 of 3 packages"
    (stage.site / "idna-3.20.dist-info").mkdir()
    assert str(stage) == "installing, 1 of 3 packages"


def test_replaced_packages_never_count_below_zero_or_above_the_total(stage: Stage) -> None:
    stage.installed_before = 5
    stage.read("Installing collected packages: idna\n")
    assert str(stage) == "installing, 0 of 1 packages"
    stage.installed_before = -5
    assert str(stage) == "compiling, all 1 packages"


@pytest.mark.parametrize("line", ["", "WARNING: something\n", "Collecting\n", "  Downloading\n", "\x00\n"])
def test_other_output_is_ignored(stage: Stage, line: str) -> None:
    stage.read(line)
    assert str(stage) == "starting, 0 packages so far"


def test_a_file_that_vanishes_while_it_is_measured_does_not_matter(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.read("  Downloading torch.whl (188.2 MB)\n")
    monkeypatch.setattr(Path, "rglob", lambda path, pattern: [path / "gone.whl"])
    assert "0 MB of 188.2 MB" in str(stage)


def test_without_a_terminal_lines_are_few_and_plain(capsys: pytest.CaptureFixture[str]) -> None:
    line = Line("[2/3] torch")
    for _ in range(100):
        line.show("resolving")
    line.show("done", is_last=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["[2/3] torch: resolving · 0:00", "[2/3] torch: done · 0:00"]


def test_a_failing_install_ends_with_pips_own_words_and_its_code(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.touch()
    stage = "nothing: --no-index no-such-package-anywhere"
    command = [sys.executable, str(SCRIPT), str(tmp_path / "env"), str(constraints), stage]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode != 0
    assert "pip failed" in result.stdout
    assert "no-such-package-anywhere" in result.stdout
    assert "no-such-package-anywhere" in (tmp_path / "env" / "setup.log").read_text()


def test_an_old_python_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "NEEDED", (99, 0))
    assert environment.main(["env", "constraints.txt"]) == 1
    assert "needs Python 99.0 or newer" in capsys.readouterr().out
