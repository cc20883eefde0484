"""The unit under a real systemd of an ordinary user: it starts, writes to its own directory only, and can still use a sandbox."""

import shlex
import sys

import pytest

from shoal.contributor.service import Service, unit_text
from support.user_manager import HOME, as_user, needs_user_manager

pytestmark = [pytest.mark.slow, needs_user_manager]
DIRECTORY = HOME / "worker"
PROBE = """
touch "$HOME/.config/x" 2> /dev/null && echo "writes to the home"
touch "$XDG_RUNTIME_DIR/x" 2> /dev/null && echo "writes to the session"
ls /tmp/seen 2> /dev/null && echo "sees the /tmp of others"
touch own && echo "writes to its directory"
bwrap --unshare-all --ro-bind / / --proc /proc --dev /dev true && echo "has a sandbox"
grep -E "CapBnd|NoNewPrivs" /proc/self/status | tr -d "\\t"
exit 0
"""
START = """
mkdir -p $HOME/.config/systemd/user {directory}
printf %s {unit} > $HOME/.config/systemd/user/shoal-worker.service
printf %s {probe} > {directory}/probe.sh
touch /tmp/seen
systemctl --user daemon-reload
systemctl --user start shoal-worker.service
while systemctl --user is-active --quiet shoal-worker.service; do sleep 0.1; done
systemctl --user show --property=Result --property=ExecMainStatus shoal-worker.service
cat {directory}/said.txt
"""


def probed(*, is_confined: bool) -> set[str]:
    command = ("/bin/sh", "-c", "sh probe.sh > said.txt 2>&1")
    unit = unit_text(Service("worker", command, (), DIRECTORY, is_confined=is_confined))
    words = {"directory": str(DIRECTORY), "unit": unit, "probe": PROBE}
    return set(as_user(START.format(**{name: shlex.quote(word) for name, word in words.items()})).splitlines())


def test_the_unit_starts_confined_to_its_directory_and_can_use_a_sandbox() -> None:
    said = probed(is_confined=True)
    assert {"Result=success", "ExecMainStatus=0"} <= said
    assert {"writes to its directory", "has a sandbox", "NoNewPrivs:1", "CapBnd:0000000000000000"} <= said
    assert {"writes to the home", "writes to the session", "sees the /tmp of others"} & said == set()


def test_without_user_namespaces_the_unit_starts_all_the_same() -> None:
    said = probed(is_confined=False)
    assert {"Result=success", "writes to its directory", "NoNewPrivs:1"} <= said


def test_a_service_is_installed_shown_asked_and_removed_by_the_commands() -> None:
    shoal = shlex.join([sys.executable, "-m", "shoal"])
    said = as_user(f"""
        {shoal} service install http://127.0.0.1:9 --run-key {"ab" * 32} --dir {DIRECTORY} --hours 0-23:59
        until {shoal} work status --dir {DIRECTORY} 2> /dev/null; do sleep 0.2; done
        {shoal} service status | grep Active:
        {shoal} service install http://127.0.0.1:9 --dir {DIRECTORY} 2>&1 || echo "refused with $?"
        {shoal} service remove
        systemctl --user is-active shoal-worker.service || true
        {shoal} work status --dir {DIRECTORY} 2>&1 || echo "ended with $?"
        ls $HOME/.config/systemd/user
    """)
    assert f"wrote {HOME}/.config/systemd/user/shoal-worker.service" in said
    assert "joining" in said
    assert "Active: active (running)" in said
    assert "is a service already, and another one" in said
    assert "refused with 78" in said
    assert "inactive" in said
    assert f"No worker runs in {DIRECTORY}" in said
    assert "ended with 78" in said
    assert "shoal-worker.service" not in said.splitlines()[-1]
