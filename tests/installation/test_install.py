"""The wheel in empty environments outside the repository: what the README types, and each role from an empty directory."""

import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from end_to_end.commands import eventually
from end_to_end.swarm import DEADLINE_S, free_ports, small_config
from shoal.cli.extras import MODULES, WHEEL
from shoal.config import to_toml
from shoal.owner.create import initialise
from shoal.protocol.client import CoordinatorClient
from tools.wheel import ROOT, build_wheel, install

pytestmark = pytest.mark.slow


def clean_environment(**more: str) -> dict[str, str]:
    """Without anything that would let the repository or this environment be found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"} | more


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commands of the package alone."""
    return install(tmp_path_factory.mktemp("light") / "env", str(wheel))


@pytest.fixture(scope="module")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("full") / "env", f"{wheel}[train]")


def said_by(commands: Path, *arguments: object, here: Path, expect: int = 0) -> str:
    result = subprocess.run(
        [commands / "shoal", *map(str, arguments)],
        cwd=here,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    said = result.stdout + result.stderr
    assert result.returncode == expect, said
    assert "Traceback" not in said
    return said


@contextmanager
def running(commands: Path, log: Path, *arguments: object, here: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            [commands / "shoal", *map(str, arguments)],
            cwd=here,
            env=clean_environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def empty(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_light_install_serves_a_run_and_says_what_a_worker_needs(light: Path, tmp_path: Path) -> None:
    (site,) = (light.parent / "lib").glob("python*/site-packages")
    heavy = {name for modules in MODULES.values() for name in modules}
    assert not heavy & {place.name for place in site.iterdir()}
    config = small_config(tmp_path / "run", steps=3)
    initialise(config)  # by the owner, elsewhere
    (tmp_path / "run.toml").write_text(to_toml(config))
    here = empty(tmp_path / "here")
    with running(light, tmp_path / "coordinator.log", "coordinator", tmp_path / "run" / "run.toml", here=here):
        url = config.coordinator.url_here
        with CoordinatorClient(url, None, deadline_s=DEADLINE_S) as client:
            assert client.status().run_state == "running"
        port = free_ports(1)
        words = ("relay", "--upstream", config.broadcast.url_here, "--coordinator", url, "--port", port)
        with running(light, tmp_path / "relay.log", *words, here=here):
            eventually(
                lambda: "relay at" in (tmp_path / "relay.log").read_text() or None,
                lambda: (tmp_path / "relay.log").read_text(),
            )
        said = said_by(light, "work", url, here=here, expect=78)
        assert f"pip install './{WHEEL}[worker]'" in said
        assert "entries" in said_by(light, "ledger", "verify", url, here=here)
    said_by(light, "doctor", here=here)


def test_a_full_install_runs_the_demo_and_reproduces_it_from_an_empty_directory(full: Path, tmp_path: Path) -> None:
    here, port = empty(tmp_path / "here"), free_ports(4)
    ports = ("--coordinator.port", port, "--broadcast.port", port + 1)
    said = said_by(full, "demo", "--steps", 4, *ports, here=here)
    assert "4 versions" in said or "version 4" in said, said
    assert (here / "runs" / "demo" / "report.html").exists()
    located = subprocess.run(
        [full / "python", "-c", "import shoal; print(shoal.__file__)"],
        cwd=here,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(full.parent) in located.stdout


def readme_lines(program: str) -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(program) and WHEEL in line]


@pytest.fixture(scope="module")
def downloads(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the README's lines would fetch, in the tested versions."""
    folder = tmp_path_factory.mktemp("downloads")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    subprocess.run([*command, "-c", ROOT / "constraints.txt", f"{wheel}[worker]", "pip"], check=True)
    return folder


@pytest.fixture(scope="module")
def installers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    environment = tmp_path_factory.mktemp("installers") / "env"
    venv.create(environment, with_pip=True)
    subprocess.run([environment / "bin" / "python", "-m", "pip", "install", "--quiet", "pipx", "uv"], check=True)
    return environment / "bin"


def typed(line: str, here: Path, installers: Path, variables: Mapping[str, str]) -> str:
    path = f"{installers}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        shlex.split(line),
        cwd=here,
        env=clean_environment(PATH=path, **variables),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


def test_the_lines_of_the_readme_install_the_file_and_nothing_by_name(
    wheel: Path, downloads: Path, installers: Path, tmp_path: Path
) -> None:
    (tmp_path / WHEEL).write_bytes(wheel.read_bytes())
    (tmp_path / "uv.toml").write_text(f'no-index = true\nfind-links = ["{downloads}"]\n')
    variables = {
        "PIPX_HOME": str(tmp_path / "pipx"),
        "PIPX_BIN_DIR": str(tmp_path / "bin"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(downloads),
        "UV_CONFIG_FILE": str(tmp_path / "uv.toml"),
        "UV_CACHE_DIR": str(tmp_path / "uv"),
    }
    plain, worker = readme_lines("pipx")
    typed(plain, tmp_path, installers, variables)
    typed("bin/shoal relay --help", tmp_path, installers, variables)
    assert "needs torch" in typed("bin/shoal doctor", tmp_path, installers, variables)
    typed(worker, tmp_path, installers, variables)
    assert "generates, validates and evaluates: torch" in typed("bin/shoal doctor", tmp_path, installers, variables)
    for line in readme_lines("uvx"):
        assert "ok    Python" in typed(line, tmp_path, installers, variables)
