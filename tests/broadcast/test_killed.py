"""A client that is killed at any change of the disk leaves no version with a wrong byte, and the next one goes on."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.broadcast import Origin, OriginSettings, WeightClient
from shoal.errors import ShoalError

from .conftest import RUN_KEY, Mirror
from .test_client import weights_of
from .test_delta_versions import publish, version_bytes

MakeClient = Callable[..., WeightClient]
MakeMirror = Callable[..., Mirror]


class KilledError(Exception):
    pass


class Death:
    """Kills a client at its n-th change of the disk: it and every later one do not happen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.changes, self._after = 0, after
        for name in ("pwrite", "ftruncate", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._mortal(getattr(os, name), KilledError()))
        monkeypatch.setattr(shutil, "rmtree", self._mortal(shutil.rmtree, end=None))

    def _mortal(self, act: Callable[..., Any], end: Exception | None) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            self.changes += 1
            if self.changes <= self._after:
                return act(*arguments, **options)
            if end is not None:
                raise end
            return None  # called where nobody would see an error, too

        return change


@pytest.mark.parametrize("kind", ["delta", "full"])
def test_killed_at_any_change_of_the_disk_no_version_has_a_wrong_byte(
    kind: str, tmp_path: Path, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    """In the middle of writing over the spare and of making the next one; nothing is hashed before it is looked at here."""
    settings = OriginSettings(
        shard_bytes=8000,
        span_bytes=8000,
        keep_versions=4,
        keyframe_every=100,
        delta_from_bytes=0 if kind == "delta" else None,
    )
    origin = Origin(tmp_path / "origin", RUN_KEY, settings)
    url = make_mirror(root=origin.root).url
    digests = [publish(origin, version) for version in range(4)]
    client = make_client(url, name="before", keep_versions=1)
    for version in range(2):
        client.fetch_version(version, digests[version])
    client.close()
    after = 0
    while True:
        shutil.copytree(tmp_path / "before", tmp_path / f"{after}")
        mortal = make_client(url, name=f"{after}", keep_versions=1)
        with pytest.MonkeyPatch.context() as patch:
            death = Death(patch, after)
            with contextlib.suppress(KilledError, ShoalError):
                mortal.fetch_version(2, digests[2], deadline_s=10)
            mortal.close()
        for directory in (tmp_path / f"{after}").glob("*/versions/*"):
            assert weights_of(directory) == version_bytes(digests.index(directory.name)), after
        again = make_client(url, name=f"{after}", keep_versions=1)
        for version in (2, 3):
            assert weights_of(again.fetch_version(version, digests[version])) == version_bytes(version), after
        if death.changes <= after:
            break
        after += 1
    assert after > 10
