"""A contributor may trust a private authority too."""

import os
import ssl
from pathlib import Path

import certifi
import pytest

from coordinator.http.test_tls import make_certificates
from shoal.errors import ConfigError
from shoal.roles import authority


def test_a_private_authority_is_trusted_besides_the_public_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "trusted.pem"
    monkeypatch.setenv("SSL_CERT_FILE", "")
    authority.trust_authority(make_certificates(tmp_path), bundle)
    assert os.environ["SSL_CERT_FILE"] == str(bundle)
    public = len(ssl.create_default_context(cafile=certifi.where()).get_ca_certs())
    assert len(ssl.create_default_context().get_ca_certs()) == public + 1


@pytest.mark.parametrize(("content", "reason"), [(None, "no such file"), (b"hello", "no pem certificates")])
def test_a_file_without_certificates_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"ca\.pem cannot be trusted: {reason}.* PEM format"):
        authority.trust_authority(tmp_path / "ca.pem", tmp_path / "trusted.pem")
    assert not (tmp_path / "trusted.pem").exists()
