"""`shoal up`: which processes start, with which threads and addresses."""

from pathlib import Path
from typing import Any

import pytest

from shoal.config import build_config
from shoal.host.supervisor import Role
from shoal.host.swarm import Swarm
from shoal.host.threads import Threads
from shoal.rundir import RunDirectory


def swarm(root: Path, *, sections: dict[str, Any] | None = None, **options: Any) -> Swarm:
    config = build_config({"run": {"dir": root}} | (sections or {}))
    return Swarm(RunDirectory(root), config, **options)


def words_after(role: Role, flag: str) -> list[str]:
    words = role.command
    return [words[index + 1] for index, word in enumerate(words) if word == flag]


def by_name(roles: list[Role]) -> dict[str, Role]:
    return {role.name: role for role in roles}


def test_the_swarm_is_complete_and_each_role_has_its_own_log(tmp_path: Path) -> None:
    host = swarm(tmp_path, workers=["local-1"])
    roles = [*host.owner_roles(), *host.worker_roles(), host.worker_role("cheater", "stale")]
    names = ["coordinator", "trainer", "relay-1", "relay-2", "validator", "evaluator", "local-1", "cheater"]
    assert [role.name for role in roles] == names
    assert {role.log for role in roles} == {tmp_path / "logs" / f"{name}.log" for name in names}
    assert [role.name for role in roles if not role.essential] == ["relay-1", "relay-2", "local-1", "cheater"]


def test_each_role_gets_the_threads_that_the_machine_has_to_spare(tmp_path: Path) -> None:
    host = swarm(tmp_path, workers=["local-1", "local-2"], cores=64)
    roles = by_name([*host.owner_roles(), *host.worker_roles()])
    assert words_after(roles["trainer"], "--threads") == ["32"]
    for name in ("validator", "evaluator", "local-1", "local-2"):
        assert words_after(roles[name], "--threads") == ["8"]
    assert all("OMP_NUM_THREADS" not in role.env for role in roles.values())
    assert "--threads" not in (*roles["coordinator"].command, *roles["relay-1"].command)


def test_the_owner_may_say_otherwise(tmp_path: Path) -> None:
    host = swarm(tmp_path, workers=["local-1"], cores=64, threads=Threads(3, {"trainer": 24, "workers": 1}))
    roles = by_name([*host.owner_roles(), *host.worker_roles()])
    found = {
        name: words_after(roles[name], "--threads")[0] for name in ("trainer", "validator", "evaluator", "local-1")
    }
    assert found == {"trainer": "24", "validator": "3", "evaluator": "3", "local-1": "1"}


def test_each_relay_follows_the_origin_and_the_relays_before_it(tmp_path: Path) -> None:
    first, second = swarm(tmp_path, sections={"broadcast": {"port": 9000}}).relay_roles()
    assert words_after(first, "--upstream") == ["http://127.0.0.1:9000"]
    assert words_after(second, "--upstream") == ["http://127.0.0.1:9001", "http://127.0.0.1:9000"]
    assert words_after(second, "--port") == ["9002"]


@pytest.mark.parametrize("relays", [0, 1, 5])
def test_there_are_as_many_relays_as_the_owner_wants(tmp_path: Path, relays: int) -> None:
    assert len(list(swarm(tmp_path, relays=relays).relay_roles())) == relays


@pytest.mark.parametrize(
    ("host", "public_url", "here", "announced"),
    [
        ("127.0.0.1", "", "http://127.0.0.1:7301", "http://127.0.0.1:7302"),
        ("0.0.0.0", "http://203.0.113.5:7301", "http://127.0.0.1:7301", "http://203.0.113.5:7302"),
        ("::", "http://[2001:db8::5]:7301", "http://[::1]:7301", "http://[2001:db8::5]:7302"),
        ("10.0.0.4", "https://weights.example.org", "http://10.0.0.4:7301", "http://weights.example.org:7302"),
    ],
)
def test_relays_are_announced_under_the_public_host_and_follow_the_origin_of_this_one(
    tmp_path: Path, host: str, public_url: str, here: str, announced: str
) -> None:
    sections = {"broadcast": {"host": host, "public_url": public_url}}
    relay = next(iter(swarm(tmp_path, sections=sections).relay_roles()))
    assert words_after(relay, "--upstream") == [here]
    assert words_after(relay, "--public-url") == [announced]
    assert words_after(relay, "--host") == [host]


def test_workers_of_the_owner_may_import_the_owners_verifiers(tmp_path: Path) -> None:
    assert words_after(swarm(tmp_path).worker_role("local-1"), "--verifier") == ["all"]
