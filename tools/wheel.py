"""Builds the wheel: `python -m tools.wheel DIRECTORY` prints the file that it wrote.

The sources are copied first, so that the wheel has what the tree has and nothing that an earlier build left behind, and so that
several builds do not meet. Needs setuptools in this environment; nothing is downloaded.
"""

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
UNWANTED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*")


def build_wheel(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in SOURCES:
            source, copy = ROOT / name, Path(scratch) / name
            if source.is_dir():
                shutil.copytree(source, copy, ignore=UNWANTED)
            else:
                shutil.copyfile(source, copy)
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--no-cache-dir",
            "--quiet",
        ]
        subprocess.run([*command, "--wheel-dir", str(directory.absolute()), scratch], check=True)
    (wheel,) = directory.glob("shoal-*.whl")
    return wheel


def install(environment: Path, requirement: str) -> Path:
    """A new environment with this and nothing else, in the tested versions; the directory of its commands."""
    venv.create(environment, with_pip=True)
    commands = environment / "bin"
    command = [str(commands / "python"), "-m", "pip", "install", "-qq", "--no-input", "--no-cache-dir"]
    subprocess.run([*command, "--constraint", str(ROOT / "constraints.txt"), requirement], check=True)
    return commands


if __name__ == "__main__":
    print(build_wheel(Path(sys.argv[1])))
