"""The nginx site of docs/design/broadcast.md, as it is printed there, in front of a published directory."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.ports import free_port, wait_for

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "broadcast.md"
SHARD = "ab" * 32
AROUND = """daemon off; user root; pid {work}/nginx.pid; error_log stderr crit; worker_processes 1;
events {{}}
http {{
  access_log off; client_body_temp_path {work}/body; proxy_temp_path {work}/proxy;
  fastcgi_temp_path {work}/fastcgi; uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
  {site}
}}
"""


def documented_site(root: Path, port: int) -> str:
    site = PAGE.read_text().split("nginx with\nrate limits:\n\n```\n")[1].split("```")[0]
    return site.replace("listen 80;", f"listen 127.0.0.1:{port};").replace("/srv/shoal/origin", str(root))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    if NGINX is None:
        pytest.skip("nginx is missing: run `make system`")
    root, port = tmp_path / "origin", free_port()
    for name, data in {f"shards/{SHARD}": b"weights", "head.json": b"{}", "keys/run.key": b"secret"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (tmp_path / "nginx.conf").write_text(AROUND.format(work=tmp_path, site=documented_site(root, port)))
    process = subprocess.Popen([NGINX, "-c", str(tmp_path / "nginx.conf")])
    try:
        wait_for("nginx", port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def test_the_documented_site_serves_what_is_published_and_nothing_else(site: str) -> None:
    shard, head = httpx.get(f"{site}/shards/{SHARD}"), httpx.get(f"{site}/head.json")
    assert (shard.content, shard.headers["cache-control"]) == (b"weights", "public, max-age=31536000, immutable")
    assert (head.content, head.headers["cache-control"]) == (b"{}", "no-store")
    assert httpx.get(f"{site}/keys/run.key").status_code == 404
    assert httpx.get(f"{site}/shards/").status_code == 404
