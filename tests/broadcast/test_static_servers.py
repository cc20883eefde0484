"""Any static web server can replace a relay."""

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.broadcast import Origin, WeightClient

from .test_client import expected_weights, publish, weights_of

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")
NGINX_SITE = """
daemon off;
pid {work}/nginx.pid;
error_log stderr;
worker_processes 1;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {work}/body; proxy_temp_path {work}/proxy; fastcgi_temp_path {work}/fastcgi;
  uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
  server {{ listen unix:{work}/probe.sock; listen 127.0.0.1:{port}; root {root}; }}
}}
"""


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=20)


def fetch_from(url: str, make_client: Callable[..., WeightClient], digest: str) -> bytes:
    client = make_client(url)
    assert client.head(deadline_s=30).versions
    return weights_of(client.fetch_version(0, digest, deadline_s=60))


def test_python_http_server(origin: Origin, make_client: Callable[..., WeightClient]) -> None:
    digest = publish(origin)
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(origin.root)]
    with running(command) as process:
        assert process.stdout is not None
        port = re.search(r"port (\d+)", process.stdout.readline())
        assert port is not None
        assert fetch_from(f"http://127.0.0.1:{port[1]}", make_client, digest) == expected_weights()


@pytest.mark.skipif(NGINX is None, reason="nginx is missing: run `make system`")
def test_nginx(origin: Origin, make_client: Callable[..., WeightClient], tmp_path: Path) -> None:
    digest = publish(origin)
    # nginx may run its worker under another account, which must be able to reach the files.
    for directory in (origin.root, *origin.root.parents):
        if directory.owner() == tmp_path.owner() and directory.is_relative_to("/tmp"):
            directory.chmod(0o755)
    port = free_port()
    config = tmp_path / "nginx.conf"
    config.write_text(NGINX_SITE.format(work=tmp_path, port=port, root=origin.root))
    with running([str(NGINX), "-c", str(config)]):
        assert fetch_from(f"http://127.0.0.1:{port}", make_client, digest) == expected_weights()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
