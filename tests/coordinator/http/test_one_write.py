import asyncio
from collections.abc import Callable

import pytest

from shoal.coordinator.http.listener import OneWrite


class Recorder:
    """A transport that remembers what was done to it."""

    def __init__(self) -> None:
        self.done: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("closed")

    def abort(self) -> None:
        self.done.append("aborted")

    def is_closing(self) -> bool:
        return "closed" in self.done


def written(act: Callable[[OneWrite], None], *, turns: int = 1) -> list[bytes | str]:
    """What leaves when `act` writes and the loop then runs so often."""

    async def run() -> list[bytes | str]:
        transport = Recorder()
        act(OneWrite(transport, asyncio.get_running_loop()))  # type: ignore[arg-type]  # has what is called
        for _ in range(turns):
            await asyncio.sleep(0)
        return transport.done

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("parts", "sent"),
    [
        ([b"head", b"body"], [b"headbody"]),
        ([b"head"], [b"head"]),
        ([b"head", b""], [b"head"]),
        ([b"", b"head"], [b"head"]),
        ([b"head", b"one", b"two"], [b"headone", b"two"]),
    ],
)
def test_a_head_leaves_with_its_body_and_nothing_stays_behind(parts: list[bytes], sent: list[bytes]) -> None:
    def act(transport: OneWrite) -> None:
        for part in parts:
            transport.write(part)

    assert written(act) == sent


def test_what_waits_leaves_before_the_connection_is_closed() -> None:
    def act(transport: OneWrite) -> None:
        transport.write(b"refusal")
        transport.close()
        assert callable(transport.is_closing)
        assert transport.is_closing(), "what it does not know is the transport's own"

    assert written(act) == [b"refusal", "closed"]


def test_what_waits_is_dropped_with_the_connection() -> None:
    def act(transport: OneWrite) -> None:
        transport.write(b"half")
        transport.abort()

    assert written(act) == ["aborted"]
