"""The run behind an address: its signed descriptor, with a key that is pinned at first use.

Apart from `shoal.joined`, which imports torch: a relay joins too, and starts in well under a second.
"""

import re
from pathlib import Path
from urllib.parse import urlsplit

from shoal.errors import ConfigError, ShoalError
from shoal.files import write_atomic
from shoal.metrics import Report
from shoal.protocol.client import fetch_descriptor
from shoal.protocol.descriptor import RunDescriptor

JOIN_DEADLINE_S = 3600.0
"""As long as a role that has joined waits for its coordinator."""
PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")
SHOWN_LETTERS = 12


class PinnedKeyError(ShoalError):
    """The run's key is not the one that is pinned for this address."""

    code = "pinned_key"
    permanent = True


def joined_descriptor(url: str, run_key: str | None, root: Path, report: Report) -> RunDescriptor:
    """The run behind this address. Its key is pinned at first use: a different run under the same address is refused."""
    check_address(url)
    if run_key is not None:
        check_public_key(run_key)
    report(f"asking {url} for its run, for up to {JOIN_DEADLINE_S / 60:.0f} minutes")
    pin = root / "pinned" / "".join(letter if letter.isalnum() else "-" for letter in url.rstrip("/"))
    pinned = pin.read_text().strip() if run_key is None and pin.exists() else None
    try:
        data, descriptor = fetch_descriptor(url, None, deadline_s=JOIN_DEADLINE_S, on_wait=report)
    except ShoalError as error:
        if error.code in ("http", "integrity"):
            raise ConfigError(
                f"{url} is not a Shoal coordinator.", hint="Ask the run's owner for the address."
            ) from None
        raise
    _check_run_key(url, descriptor.run_key, run_key, pinned, pin)
    write_atomic(pin, descriptor.run_key.encode())
    write_atomic(root / "descriptor.json", data)
    return descriptor


def check_address(url: str) -> None:
    """Refuses what is no address before anybody is asked."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # a UnicodeError is one
        usable = False
    if not usable:
        raise ConfigError(
            f"{url} is no address.", hint="It looks like http://HOST:7300 and begins with http:// or https://."
        )


def check_public_key(key: str) -> None:
    if not PUBLIC_KEY.fullmatch(key):
        raise ConfigError(
            f"{key[:80]} is no public key.",
            hint="It has 64 letters of 0-9 and a-f; copy it from the run's join command.",
        )


def _check_run_key(url: str, shown: str, given: str | None, pinned: str | None, pin: Path) -> None:
    expected = given or pinned
    if expected is None or expected == shown:
        return
    theirs, ours = _distinct(shown, expected)
    if given is not None:
        raise PinnedKeyError(
            f"The run at {url} has the key {theirs}, not the {ours} of --run-key.",
            hint="Ask the run's owner for the key and the address; somebody else may answer there.",
        )
    raise PinnedKeyError(
        f"{url} now shows a run with key {theirs}, not the expected {ours}.",
        hint=f"If the owner really started a new run, remove {pin} or pass the new --run-key.",
    )


def _distinct(one: str, other: str) -> tuple[str, str]:
    """Both keys, cut where they differ for sure."""
    same = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    shown = max(SHOWN_LETTERS, same + 4)
    return tuple(key if len(key) <= shown else f"{key[:shown]}…" for key in (one, other))  # type: ignore[return-value]
