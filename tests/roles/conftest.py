"""Whatever answers at the address that a role joins."""

from collections.abc import Callable

import pytest

from shoal.protocol.descriptor import RunDescriptor
from shoal.roles import joining
from support.samples import keypair

Show = Callable[[RunDescriptor], None]
Fail = Callable[[Exception], None]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Puts a run behind the address."""

    def put(run: RunDescriptor) -> None:
        sealed = run.seal(keypair("run")).to_bytes()
        monkeypatch.setattr(joining, "fetch_descriptor", lambda url, key, **options: (sealed, run))

    return put


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    def put(error: Exception) -> None:
        def fetch(*arguments: object, **options: object) -> None:
            raise error

        monkeypatch.setattr(joining, "fetch_descriptor", fetch)

    return put
