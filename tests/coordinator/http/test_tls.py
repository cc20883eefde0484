"""Behind a real proxy that ends TLS: signed requests, long polls and uploads pass unchanged."""

import os
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from shoal.errors import ConfigError
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from support.ports import free_port, wait_for
from support.samples import keypair
from support.swarm import Swarm, registration, small_config

PATIENCE_S = 120
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")
SITE = """
daemon off; user root; pid {work}/nginx.pid; error_log stderr crit; worker_processes 1;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {work}/body; proxy_temp_path {work}/proxy; fastcgi_temp_path {work}/fastcgi;
  uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
  server {{
    listen 127.0.0.1:{port} ssl; ssl_certificate {work}/server.crt; ssl_certificate_key {work}/server.key;
    client_max_body_size 64m;
    location / {{
      proxy_pass http://127.0.0.1:{inner}; proxy_http_version 1.1; proxy_request_buffering off; proxy_read_timeout 60s;
      proxy_set_header X-Forwarded-For $remote_addr;
    }}
  }}
}}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None or shutil.which("openssl") is None, reason="run `make system`"),
]


def make_certificates(work: Path) -> Path:
    """An authority of our own and a certificate for 127.0.0.1; returns the authority's."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=work, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=our authority", "-days", "2")
    openssl("req", *new, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (work / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
    openssl("x509", "-req", "-in", "server.csr", "-out", "server.crt", *signing)
    return work / "ca.crt"


@contextmanager
def served(swarm: Swarm, port: int) -> Iterator[None]:
    server = uvicorn.Server(uvicorn.Config(swarm.app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def proxied(work: Path, port: int, inner: int) -> Iterator[None]:
    (work / "nginx.conf").write_text(SITE.format(work=work, port=port, inner=inner))
    process = subprocess.Popen([str(NGINX), "-c", str(work / "nginx.conf")])
    try:
        wait_for("nginx", port, process)
        wait_for("the coordinator", inner)
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_everything_works_behind_a_proxy_that_ends_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, port, inner = make_certificates(tmp_path), free_port(), free_port()
    settings = small_config(coordinator={"max_upload_bytes": 8 << 20}, rollouts={"max_new_tokens": 40_000})
    swarm = Swarm(tmp_path / "run", settings)
    with served(swarm, inner), proxied(tmp_path, port, inner):
        url = f"https://127.0.0.1:{port}"

        def client(name: str, deadline_s: float = 60.0) -> CoordinatorClient:
            descriptor = swarm.run.descriptor
            return CoordinatorClient.for_run(descriptor, keypair(name), url, deadline_s=deadline_s, clock=swarm.clock)

        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(ConfigError, match=r"certificate of 127.* is not trusted here: .* --ca or SSL_CERT_FILE"):
            client("ann").register(registration("ann"))
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        assert httpx.get(f"{url}/openapi.json", verify=ssl.create_default_context(cafile=authority)).is_success
        digest = "0" * 64
        client("trainer").publish(
            api.VersionBody(version=0, manifest_digest=digest, weights_digest=digest, bytes_total=1)
        )
        ann = client("ann")
        ann.register(registration("ann", tokens_per_s=10_000.0))
        lease = swarm.lease(ann)
        data = bytes(range(256)) * 16_000
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client("validator").claim, api.ClaimBody(request_id="request-1", wait_s=30))
            ann.submit(lease.lease_id, data)
            claim = waiting.result(60).claim
        assert claim is not None
        assert client("validator").submission_file(claim.submission_id, claim.digest) == data
    swarm.store.close()


def test_a_contributor_joins_behind_a_private_authority_that_was_named(tmp_path: Path) -> None:
    authority, port, inner = make_certificates(tmp_path), free_port(), free_port()
    swarm = Swarm(tmp_path / "run", small_config())
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    command = [sys.executable, "-m", "shoal", "work", f"https://127.0.0.1:{port}", "--dir", str(tmp_path / "here")]
    with served(swarm, inner), proxied(tmp_path, port, inner):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == os.EX_CONFIG
        assert "is not trusted here" in done.stderr
        command += ["--ca", str(authority)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as joining:
            assert joining.stdout is not None
            introduction = f"run {swarm.run.descriptor.run_id}, key "
            has_joined = any(line.startswith(introduction) for line in joining.stdout)
            joining.kill()
    swarm.store.close()
    assert has_joined
