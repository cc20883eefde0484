"""Server-sent events: bounded queues, pages that never read, and what an event may show."""

import asyncio
import json

import pytest
from starlette.types import Message

from shoal.coordinator.page.stream import (
    MAX_STREAMS_PER_ADDRESS,
    PUBLIC_EVENTS,
    QUEUED,
    EventHub,
    EventStream,
    encode,
)


def test_a_page_that_never_reads_loses_its_stream_and_nobody_waits() -> None:
    async def play() -> tuple[int, int, bytes | None]:
        hub = EventHub()
        hub.start()
        slow, quick = hub.open("1.2.3.4"), hub.open("1.2.3.4")
        assert slow is not None
        assert quick is not None
        for number in range(QUEUED + 1):
            hub.send(b"%d" % number)
            await quick.get()
        return len(hub), slow.qsize(), slow.get_nowait()

    streams, queued, last = asyncio.run(play())
    assert (streams, queued, last) == (1, 1, None)


def test_streams_of_one_address_are_bounded() -> None:
    async def play() -> list[bool]:
        hub = EventHub()
        opened = [hub.open("1.2.3.4") is not None for _ in range(MAX_STREAMS_PER_ADDRESS + 1)]
        return [*opened, hub.open("5.6.7.8") is not None]

    *mine, theirs = asyncio.run(play())
    assert (sum(mine), mine[-1], theirs) == (MAX_STREAMS_PER_ADDRESS, False, True)


def test_an_event_shows_only_what_is_listed() -> None:
    async def play() -> bytes | None:
        hub = EventHub()
        hub.start()
        stream = hub.open("")
        assert stream is not None
        hub.hear(
            {"at": 1.0, "event": "verdict", "worker": "k", "slot": 3, "audited": True, "margin_max": 0.5, "step": 2}
        )
        hub.hear({"at": 1.0, "event": "trace_lost", "reason": "disk"})
        await asyncio.sleep(0)
        assert stream.qsize() == 1
        return stream.get_nowait()

    message = asyncio.run(play())
    assert message is not None
    name, data, *_ = message.decode().split("\n")
    assert name == "event: verdict"
    assert json.loads(data.removeprefix("data: ")) == {"at": 1.0, "worker": "k", "step": 2}


def test_no_listed_field_is_a_measurement_or_a_slot() -> None:
    shown = {field for fields in PUBLIC_EVENTS.values() for field in fields}
    assert not shown & {"slot", "audited", "drift", "margin", "seconds", "audit_rate", "text"}


def test_text_with_line_breaks_cannot_end_a_message() -> None:
    message = encode("alert", {"seen": "a\n\nevent: forged\ndata: {}\r\u2028"}).decode()
    assert message.count("\n") == 3
    assert message.endswith("\n\n")


@pytest.mark.parametrize("leaves", [True, False])
def test_a_stream_ends_when_its_page_leaves_or_the_coordinator_stops(leaves: bool) -> None:
    async def play() -> tuple[list[bytes], int]:
        hub, sent, gone = EventHub(), list[bytes](), asyncio.Event()
        hub.start()
        stream = hub.open("")
        assert stream is not None

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))
            if leaves and sent[-1] == b"second":
                gone.set()

        answer = EventStream(hub, stream, lambda: b"first")
        task = asyncio.create_task(answer({"type": "http"}, receive, send))
        await asyncio.sleep(0)
        hub.send(b"second")
        if not leaves:
            hub.close_all()
        await task
        return sent, len(hub)

    sent, open_streams = asyncio.run(play())
    assert b"first" in sent[1]
    assert (b"second" in sent) == leaves
    assert open_streams == 0
