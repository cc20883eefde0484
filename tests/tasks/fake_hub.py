"""A hub on the loopback that speaks the few requests that the hub's client makes to look up and load a dataset."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    datasets: dict[str, dict[str, bytes]]
    """Files by dataset and path."""
    url: str = ""
    asked: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        self.asked.append(f"{method} {path}")
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[:2] == ["api", "datasets"] and "/".join(parts[2:4]) in self.datasets:
            return self._describe("/".join(parts[2:4]), parts[4:])
        if parts[0] == "datasets" and "/".join(parts[1:3]) in self.datasets and parts[3] == "resolve":
            return self._file("/".join(parts[1:3]), "/".join(parts[5:]))
        return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b"{}"

    def _describe(self, name: str, rest: list[str]) -> tuple[int, dict[str, str], bytes]:
        files = self.datasets[name]
        if rest[:1] in (["tree"], ["paths-info"]):
            return 200, {}, json.dumps(_tree(files, "/".join(rest[2:]))).encode()
        siblings = [{"rfilename": path} for path in files]
        body: dict[str, Any] = {"_id": "1", "id": name, "sha": COMMIT, "private": False, "gated": False}
        return 200, {}, json.dumps(body | {"siblings": siblings, "tags": [], "downloads": 0, "likes": 0}).encode()

    def _file(self, name: str, path: str) -> tuple[int, dict[str, str], bytes]:
        data = self.datasets[name].get(path)
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        return 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}, data


def _tree(files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
    """What lies directly in the folder."""
    folders = {parent.as_posix() for path in files for parent in PurePosixPath(path).parents if parent.name}
    here = PurePosixPath(folder)
    found = [{"type": "directory", "path": name, "oid": "0"} for name in folders if PurePosixPath(name).parent == here]
    return found + [_entry(path, data) for path, data in files.items() if PurePosixPath(path).parent == here]


def _entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def fake_hub(datasets: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    hub = FakeHub(datasets)

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, body = hub.answer(self.command, urlsplit(self.path).path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = _reply

        def log_message(self, format: str, *arguments: object) -> None:
            """Tests are quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
