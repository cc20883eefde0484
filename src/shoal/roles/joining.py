"""The run behind an address: its signed descriptor, with a key that is pinned at first use.

Apart from `shoal.joined`, which imports torch: a relay joins too, and starts in well under a second.
"""

from pathlib import Path

from shoal.errors import ConfigError, ShoalError
from shoal.files import write_atomic
from shoal.metrics import Report
from shoal.protocol.client import fetch_descriptor
from shoal.protocol.descriptor import RunDescriptor

JOIN_DEADLINE_S = 120.0


class PinnedKeyError(ShoalError):
    code = "pinned_key"
    permanent = True


def joined_descriptor(url: str, run_key: str | None, root: Path, report: Report) -> RunDescriptor:
    """The run behind this address. Its key is pinned at first use: a different run under the same address is refused."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url} is no address.", hint="It begins with http:// or https://.")
    report(f"asking {url} for its run, for up to {JOIN_DEADLINE_S:.0f} s")
    pin = root / "pinned" / "".join(letter if letter.isalnum() else "-" for letter in url.rstrip("/"))
    pinned = run_key or (pin.read_text().strip() if pin.exists() else None)
    try:
        data, descriptor = fetch_descriptor(url, None, deadline_s=JOIN_DEADLINE_S, on_wait=report)
    except ShoalError as error:
        if error.code in ("http", "integrity"):
            raise ConfigError(
                f"{url} is not a Shoal coordinator.", hint="Ask the run's owner for the address."
            ) from None
        raise
    if pinned is not None and descriptor.run_key != pinned:
        raise PinnedKeyError(
            f"{url} now shows a run with key {descriptor.run_key[:12]}…, not the expected {pinned[:12]}….",
            hint=f"If the owner really started a new run, remove {pin} or pass the new --run-key.",
        )
    write_atomic(pin, descriptor.run_key.encode())
    write_atomic(root / "descriptor.json", data)
    return descriptor
