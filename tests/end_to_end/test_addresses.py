"""A contributor on another machine: the join command that `shoal up` prints works there, over IPv4 and IPv6, relays included."""

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from end_to_end.commands import eventually, shoal, wait_for_text
from end_to_end.swarm import DEADLINE_S, small_config
from shoal.config import to_toml
from shoal.owner.addresses import with_public_host
from support.networks import OWNER_HOST, Cable, cable, needs_namespaces

pytestmark = [pytest.mark.slow, needs_namespaces]
ASK = "import sys, urllib.request; sys.stdout.buffer.write(urllib.request.urlopen(sys.argv[1], timeout=10).read())"


def fetch(ends: Cable, url: str) -> bytes:
    """What somebody on the other machine gets from an address."""
    command = [*ends.inside(ends.stranger), sys.executable, "-c", ASK, url]
    return subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S).stdout


def relays_announced(ends: Cable, url: str) -> list[str] | None:
    found = [relay["url"] for relay in json.loads(fetch(ends, f"{url}/v1/relays"))["relays"]]
    return found if len(found) == 2 else None


def test_listening_everywhere_without_an_address_is_refused_with_the_likely_one(tmp_path: Path) -> None:
    run_file = tmp_path / "mine.toml"
    everywhere = {"host": "0.0.0.0"}
    run_file.write_text(to_toml(small_config(tmp_path / "run", steps=2, coordinator=everywhere, broadcast=everywhere)))
    with cable() as ends:
        for command in ("init", "up"):
            log = tmp_path / f"{command}.log"
            with shoal(log, command, run_file, inside=ends.inside(ends.owner)) as refused:
                assert refused.wait(DEADLINE_S) == 78
            assert "says where to listen, not how others reach it" in log.read_text()
            assert f"--coordinator.public_url http://{OWNER_HOST[4]}:" in log.read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("family", "everywhere"), [(4, "0.0.0.0"), (6, "::")])
def test_the_printed_join_command_works_on_another_machine(tmp_path: Path, family: int, everywhere: str) -> None:
    servers = {"coordinator": {"host": everywhere}, "broadcast": {"host": everywhere}}
    config = with_public_host(small_config(tmp_path / "run", steps=2, **servers), OWNER_HOST[family])
    host = urlsplit(config.coordinator_url).netloc.rpartition(":")[0]
    run_file = tmp_path / "mine.toml"
    run_file.write_text(to_toml(config))
    up_log, log = tmp_path / "up.log", tmp_path / "stranger.log"
    with cable() as ends, shoal(up_log, "up", run_file, inside=ends.inside(ends.owner)) as up:
        wait_for_text(up_log, "contributors join with: shoal work")
        printed = re.search(r"contributors join with: shoal (work (\S+) --run-key \S+)", up_log.read_text())
        assert printed is not None
        assert host in printed[2]
        with shoal(log, *printed[1].split(), "--dir", "here", inside=ends.inside(ends.stranger)) as stranger:
            wait_for_text(log, "joined as")
            relays = eventually(lambda: relays_announced(ends, printed[2]), lambda: "two relays were never announced")
            assert all(host in url for url in relays)
            assert {len(fetch(ends, f"{url}/head.json")) > 0 for url in relays} == {True}
            assert up.wait(DEADLINE_S) == 0, up_log.read_text()[-2000:]
            stranger.wait(DEADLINE_S)
    assert "credit" in log.read_text()
    assert "is finished: 2 versions" in up_log.read_text()
