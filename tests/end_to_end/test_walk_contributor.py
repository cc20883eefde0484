"""A contributor on another network joins with the printed command, makes mistakes, is banned, and returns after the unban."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from end_to_end.commands import answer, eventually, shoal, wait_for_text
from end_to_end.swarm import small_config
from shoal.config import to_toml
from shoal.owner.addresses import with_public_host
from support.networks import OWNER_HOST, Cable, cable, needs_namespaces

pytestmark = [pytest.mark.slow, needs_namespaces]


def everywhere(root: Path, family: int) -> Path:
    """A run of a server that listens on all its addresses and names one."""
    host = {"host": {4: "0.0.0.0", 6: "::"}[family]}
    config = with_public_host(
        small_config(root / "run", steps=1000, coordinator=host, broadcast=host), OWNER_HOST[family]
    )
    (root / "mine.toml").write_text(to_toml(config))
    return root / "mine.toml"


def join_command(said: str) -> tuple[str, str]:
    printed = re.search(r"contributors join with: shoal work (\S+) --run-key (\S+)", said)
    assert printed is not None, said
    return printed[1], printed[2]


def without_name_server(ends: Cable, root: Path) -> tuple[str, ...]:
    """Words before a command that make it run on the stranger's machine, where names come from /etc/hosts alone."""
    (root / "nsswitch.conf").write_text("hosts: files\n")
    script = 'mount --bind "$0" /etc/nsswitch.conf && exec "$@"'
    return *ends.inside(ends.stranger), "sh", "-c", script, str(root / "nsswitch.conf")


def check_refusals(stranger: Sequence[str], root: Path, url: str, key: str) -> None:
    """Mistakes of a contributor: each gets its sentence, and none of them waits for anybody."""
    other = key[:-1] + ("1" if key[-1] == "0" else "0")
    for code, words, sentence in (
        (2, (url, "--engine", "foo"), "'foo' is not one of 'torch', 'vllm'"),
        (78, (url, "--run-key", key[:-1]), "is no public key. It has 64 letters of 0-9 and a-f"),
        (78, (url.removeprefix("http://"), "--run-key", key), "is no address. It looks like http://HOST:7300"),
        (78, ("http://nowhere.example:7300", "--run-key", key), "There is no host nowhere.example."),
        (78, (url, "--run-key", other), f"has the key {key}, not the {other} of --run-key"),
    ):
        said = answer("work", *words, "--dir", root / "mistaken", inside=stranger, expect=code)
        assert sentence in said, said
    assert not (root / "mistaken" / "worker.key").exists()


def worked_again(log: Path) -> bool | None:
    return "submitted" in log.read_text().partition("the ban is lifted, joining again")[2] or None


@pytest.mark.parametrize("family", [4, 6])
def test_a_contributor_on_another_network(tmp_path: Path, family: int) -> None:
    run_file = everywhere(tmp_path, family)
    with cable() as ends:
        owner = ends.inside(ends.owner)
        url, key = join_command(answer("init", run_file, inside=owner))
        assert OWNER_HOST[family] in url
        with shoal(tmp_path / "up.log", "up", run_file, inside=owner):
            wait_for_text(tmp_path / "up.log", "contributors join with: shoal work")
            assert join_command((tmp_path / "up.log").read_text()) == (url, key)
            join = ("work", url, "--run-key", key, "--dir", "here", "--name", "ann")
            with shoal(tmp_path / "ann.log", *join, inside=ends.inside(ends.stranger)) as ann:
                wait_for_text(tmp_path / "ann.log", "submitted")
                check_refusals(without_name_server(ends, tmp_path), tmp_path, url, key)
                answer("run", "ban", "ann", run_file, "--reason", "a mistake", inside=owner)
                wait_for_text(tmp_path / "ann.log", "by the owner: a mistake")
                answer("run", "unban", "ann", run_file, "--reason", "sorry", inside=owner)
                wait_for_text(tmp_path / "ann.log", "the ban is lifted, joining again")
                eventually(lambda: worked_again(tmp_path / "ann.log"), lambda: "ann never submitted again")
                assert ann.poll() is None
    assert "Traceback" not in (tmp_path / "ann.log").read_text()
