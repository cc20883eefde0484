"""A real systemd of an ordinary user, in namespaces of its own: for what `systemd-analyze verify` cannot tell.

Needs root, which gives itself up inside: mounts, processes and the group of processes of the manager are private to one call, and
the user is nobody. `/tmp` and `/home` are empty ones, as on any machine; what the commands need of the real ones stays visible.
"""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.wheel import ROOT

SYSTEMD = Path("/lib/systemd/systemd")
USER = 65534
HOME = Path("/home/laptop")
DEADLINE_S = 600.0
needs_user_manager = pytest.mark.skipif(
    os.geteuid() != 0 or not SYSTEMD.exists() or shutil.which("unshare") is None,
    reason="needs root, systemd and namespaces",
)
PREPARE = """
set -e
group=$1; shift
mount -t tmpfs none /run
mkdir -p /run/systemd/system /run/systemd/unit-root /run/user/$USER_ID /run/before/tmp /run/before/home
for folder in tmp home; do
  mount --bind /$folder /run/before/$folder
  mount -t tmpfs -o mode=1777 none /$folder
done
for place in $KEPT; do
  case $place in /tmp/*|/home/*) mkdir -p "$place"; mount --bind "/run/before$place" "$place";; esac
done
umount /run/before/tmp /run/before/home
mkdir $HOME
mount -t cgroup2 none /sys/fs/cgroup
mkdir /sys/fs/cgroup/$group
chown -R $USER_ID /sys/fs/cgroup/$group /run/user/$USER_ID $HOME
echo $$ > /sys/fs/cgroup/$group/cgroup.procs
cd $HOME
setpriv --reuid=$USER_ID --regid=$USER_ID --clear-groups sh -c "$SCRIPT" || exit $?  # a changed user outlives its parent
"""
REMOVE = """
mount -t cgroup2 none /sys/fs/cgroup
find /sys/fs/cgroup/$0 -depth -type d -exec rmdir {} +
"""
BEGIN = f"""
{SYSTEMD} --user > $HOME/systemd.log 2>&1 &
until systemctl --user is-system-running 2> /dev/null | grep -qE "running|degraded"; do sleep 0.1; done
"""


def as_user(script: str) -> str:
    """What a shell script says that runs beside the user's manager; fails if it fails."""
    kept = sorted({str(ROOT), sys.prefix, sys.base_prefix})
    group = f"shoal-test-{uuid.uuid4().hex[:12]}"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(HOME),
        "XDG_RUNTIME_DIR": f"/run/user/{USER}",
        "USER_ID": str(USER),
        "KEPT": " ".join(kept),
        "SCRIPT": f"set -e\n{BEGIN}\n{script}",
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    words: Sequence[str] = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
    try:
        done = subprocess.run(
            [*words, PREPARE, "sh", group],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    finally:
        subprocess.run(["unshare", "--mount", "sh", "-c", REMOVE, group], check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
