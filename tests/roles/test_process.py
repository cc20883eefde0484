"""What role processes of one host share, and what not."""

import subprocess
import sys
from pathlib import Path

from shoal.roles.process import own_directory


def test_several_validators_of_one_host_each_have_a_directory_of_their_own(tmp_path: Path) -> None:
    with own_directory(tmp_path, "validator") as first, own_directory(tmp_path, "validator") as second:
        assert (first.name, second.name) == ("validator", "validator-2")
    with own_directory(tmp_path, "validator") as again:
        assert again == first


def test_no_collection_looks_at_what_was_loaded_before_the_work() -> None:
    """In a process of its own: what is frozen stays so."""
    script = """
import gc
from shoal.roles.process import keep_what_is_loaded
circle = []
circle.append(circle)
before = len(gc.get_objects())
keep_what_is_loaded()
kept = gc.get_freeze_count()
assert kept > before / 2, (kept, before)
assert not any(known is circle for known in gc.get_objects())
later = []
assert any(known is later for known in gc.get_objects())
"""
    subprocess.run([sys.executable, "-c", script], check=True)
