"""Through a real server: a sender of a large body learns why it was refused, however it treats its connection."""

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from shoal.coordinator.http.listener import server_config
from support.ports import free_port, wait_for
from support.swarm import Swarm, small_config

LARGE = b"x" * (8 << 20)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    swarm, port = Swarm(tmp_path, small_config(coordinator={"max_upload_bytes": 2 * len(LARGE)})), free_port()
    server = uvicorn.Server(server_config(swarm.app, port=port))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for("the coordinator", port)
    yield port
    server.should_exit = True
    thread.join()
    swarm.store.close()


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("address", ["PUT /v1/submissions/lease", "POST /v1/verdicts", "POST /v1/nothing"])
def test_a_sender_of_a_large_body_learns_why_it_was_refused(port: int, address: str, connection: str) -> None:
    method, path = address.split()
    sender = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for _ in range(2):
        sender.request(method, path, body=LARGE, headers={"connection": connection})
        answer = sender.getresponse()
        assert answer.status == (404 if "nothing" in path else 401)
        assert b'"code"' in answer.read()
    sender.close()
