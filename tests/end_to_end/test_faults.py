"""The bad network itself: each fault does what it says, and nothing else."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from end_to_end.faults import FaultRates, FaultyProxy

SOUND = {"lost_request": 0.0, "lost_answer": 0.0, "doubled": 0.0, "delayed": 0.0, "cut_answer": 0.0}


class Server(BaseHTTPRequestHandler):
    seen: list[tuple[str, str, bytes, str]] = []  # noqa: RUF012  # one per test

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.seen.append((self.command, self.path, body, self.headers.get("x-signed", "")))
        answer = b"answer " * 1000
        self.send_response(201)
        self.send_header("content-length", str(len(answer)))
        self.send_header("x-time", "now")
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST  # the name that the base class looks for

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def target() -> Iterator[str]:
    Server.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ask(target: str, **rates: float) -> httpx.Response:
    with FaultyProxy(target, FaultRates(**SOUND | rates)) as proxy:
        return httpx.post(f"{proxy.url}/a%20b?c=d%2F", content=b"body", headers={"x-signed": "yes"}, timeout=10)


def test_without_a_fault_everything_passes_as_it_is(target: str) -> None:
    answer = ask(target)
    assert (answer.status_code, answer.content, answer.headers["x-time"]) == (201, b"answer " * 1000, "now")
    assert Server.seen == [("POST", "/a%20b?c=d%2F", b"body", "yes")]


def test_a_lost_request_never_reaches_the_server(target: str) -> None:
    with pytest.raises(httpx.TransportError):
        ask(target, lost_request=1.0)
    assert Server.seen == []


def test_a_lost_answer_reached_the_server(target: str) -> None:
    with pytest.raises(httpx.TransportError):
        ask(target, lost_answer=1.0)
    assert len(Server.seen) == 1


def test_a_cut_answer_is_noticed(target: str) -> None:
    with pytest.raises(httpx.TransportError):
        ask(target, cut_answer=1.0)
    assert len(Server.seen) == 1


def test_a_doubled_request_reaches_the_server_twice_and_is_answered_once(target: str) -> None:
    assert ask(target, doubled=1.0).status_code == 201
    assert len(Server.seen) == 2


def test_a_delayed_request_arrives(target: str) -> None:
    assert ask(target, delayed=1.0, longest_delay_s=0.01).status_code == 201
    assert len(Server.seen) == 1


def test_a_server_that_is_away_hangs_up() -> None:
    with pytest.raises(httpx.TransportError):
        ask("http://127.0.0.1:9")


def test_what_happens_follows_from_the_seed(target: str) -> None:
    def counts(seed: int) -> dict[str, int]:
        with FaultyProxy(target, FaultRates(delayed=0.0), seed=seed) as proxy:
            for _ in range(60):
                try:
                    httpx.get(proxy.url, timeout=10)
                except httpx.TransportError:
                    continue
            return dict(proxy.counts)

    assert counts(7) == counts(7)
