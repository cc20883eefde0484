"""Whom the TLS connections of this process trust, besides the usual authorities."""

import os
import ssl
from pathlib import Path

import certifi

from shoal.errors import ConfigError
from shoal.files import write_atomic

ROOTS_VARIABLE = "SSL_CERT_FILE"
"""Read by every TLS connection that is opened later in this process."""


def trust_authority(authority: Path, bundle: Path) -> None:
    """From here on TLS also trusts the certificates of this file, besides those it trusted before."""
    try:
        ssl.create_default_context(cafile=authority)
        added = authority.read_bytes()
    except OSError as error:  # an SSLError is one
        reason = error.strerror if not isinstance(error, ssl.SSLError) and error.strerror else "no PEM certificates"
        raise ConfigError(
            f"{authority} cannot be trusted: {reason.lower()}.", hint="It holds certificates in PEM format."
        ) from None
    before = Path(os.environ.get(ROOTS_VARIABLE) or certifi.where()).read_bytes()
    write_atomic(bundle, before + b"\n" + added)
    os.environ[ROOTS_VARIABLE] = str(bundle)
