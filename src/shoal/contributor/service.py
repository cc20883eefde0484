"""A worker as a systemd service of its user: the text of the unit, and the few calls that install, show and remove it.

`unit_text` is pure. The unit starts again after a failure, but not where starting again cannot help; it may write to the worker's
directory and nowhere else, gains no privileges, and keeps the namespaces that the sandbox for model-written code needs. What is
mounted over /proc by other hardening would break that sandbox and is left out. A user's systemd can confine a service only inside a
user namespace: without `PrivateUsers` it ignores some of these lines and fails at others, so they come all together or not at all.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError, ShoalError
from shoal.files import write_atomic

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
CANNOT_HELP = 78
"""Exit code after which the same command would end the same way."""
CALL_DEADLINE_S = 120.0
CACHES = {"XDG_CACHE_HOME": ".cache", "HF_HOME": ".cache/huggingface", "NUMBA_CACHE_DIR": ".cache/numba"}
"""Variable → place in the worker's directory, because the rest of the home is read-only for the service."""
HARDENING = (
    "NoNewPrivileges=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
    "SystemCallArchitectures=native",
    "UMask=0077",
)
CONFINEMENT = (
    "PrivateUsers=yes",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "PrivateTmp=yes",
    "ProtectControlGroups=yes",
    "ProtectKernelModules=yes",
    "ProtectClock=yes",
    "ProtectHostname=yes",
    "CapabilityBoundingSet=",
)
"""What needs a user namespace."""
NAMESPACE_PROBE = ("unshare", "--user", "--map-root-user", "--mount", "true")


class ServiceError(ShoalError):
    """A service that cannot be installed, found or removed."""

    code = "service"
    permanent = True


@dataclass(frozen=True)
class Service:
    """What runs: `COMMAND work ARGUMENTS --dir DIRECTORY`."""

    name: str
    command: Sequence[str]
    arguments: Sequence[str]
    directory: Path
    cpus: int = 0
    memory_bytes: int = 0
    variables: Sequence[tuple[str, str]] = ()
    is_confined: bool = True

    @property
    def unit(self) -> str:
        return f"shoal-{self.name}.service"


def unit_text(service: Service) -> str:
    """The unit file. systemd accounts for whole process trees, so its limits bind the sandbox's children too."""
    words = [*service.command, "work", *service.arguments, "--dir", str(service.directory)]
    lines = [
        "[Unit]",
        "Description=Shoal worker, started by its contributor",
        "StartLimitIntervalSec=1h",
        "StartLimitBurst=20",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(map(quoted, words))}",
        f"WorkingDirectory={_path(service.directory)}",
        "Environment=PYTHONUNBUFFERED=1",
        *(_variable(name, str(service.directory / place)) for name, place in CACHES.items()),
        *(_variable(name, value) for name, value in service.variables),
        "Restart=on-failure",
        "RestartSec=30",
        f"RestartPreventExitStatus={CANNOT_HELP}",
        "SuccessExitStatus=130 143",
        "KillMode=mixed",
        "TimeoutStopSec=90",
        "Nice=10",
        "OOMPolicy=stop",
        *([f"CPUQuota={100 * service.cpus}%"] if service.cpus else []),
        *([f"MemoryMax={service.memory_bytes}"] if service.memory_bytes else []),
        "",
        *HARDENING,
        *((*CONFINEMENT, f'ReadWritePaths="{_path(service.directory)}"') if service.is_confined else ()),
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def quoted(word: str) -> str:
    """One word of a command line, whatever it holds: systemd would expand `$` and `%`, and split at blanks."""
    return _escaped(word).replace("$", "$$")


def _variable(name: str, value: str) -> str:
    """In an assignment `$` stands for itself."""
    return f"Environment={_escaped(f'{name}={value}')}"


def _escaped(word: str) -> str:
    if any(not character.isprintable() for character in word):
        raise ConfigError("A word of the command has a control character.", hint="Give it without line breaks.")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if not re.fullmatch(r"[\w./:=@,+-]+", word) else escaped


def _path(path: Path) -> str:
    """A path of a directive that is not a command line: only `%` is special there, once quotes and backslashes are refused."""
    text = str(path)
    if any(not character.isprintable() or character in "\"'\\" for character in text):
        raise ConfigError(f"The directory {text!r} cannot be named in a service.", hint="Give a plainer --dir.")
    return text.replace("%", "%%")


def can_confine() -> bool:
    """Whether this user may have a user namespace with mounts of its own."""
    try:
        probe = subprocess.run(NAMESPACE_PROBE, capture_output=True, timeout=CALL_DEADLINE_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return probe.returncode == 0


def check_lasting(prefix: Path, *caches: Path) -> None:
    """Refuses an environment that was made for one command: its files go when the cache is cleaned."""
    if any(prefix.resolve().is_relative_to(cache.resolve()) for cache in caches):
        raise ServiceError(
            f"This Shoal was installed for one command only, in {prefix}.",
            hint="Install it with `pipx install` first; a service needs files that stay.",
        )


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a service.", hint="Small letters, digits and hyphens, up to 40.")
    return name


@dataclass(frozen=True)
class Manager:
    """The user's systemd; `folder` is where its units lie."""

    folder: Path

    @classmethod
    def of_user(cls) -> "Manager":
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return cls(home / "systemd" / "user")

    def path(self, unit: str) -> Path:
        return self.folder / unit

    def find(self, unit: str) -> Path:
        """The file of a service that is installed."""
        path = self.path(unit)
        if not path.exists():
            raise ServiceError(f"There is no service {path}.", hint=f"Known: {', '.join(self.units()) or 'none'}.")
        return path

    def install(self, service: Service, *, start: bool) -> None:
        """Never over a service of other contents: that is removed first, by its owner."""
        text, path = unit_text(service), self.path(service.unit)
        if start:
            _find_systemctl()
        if path.exists() and path.read_text() != text:
            raise ServiceError(
                f"{path} is a service already, and another one.",
                hint=f"Remove it with `shoal service remove --name {service.name}`, or give another --name.",
            )
        service.directory.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
        if start:
            self.call("daemon-reload")
            self.call("enable", "--now", service.unit)

    def remove(self, unit: str) -> None:
        path = self.find(unit)
        if not has_systemctl():  # then nothing ever started it
            path.unlink()
            return
        self.call("disable", "--now", unit)
        path.unlink()
        self.call("daemon-reload")

    def units(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("shoal-*.service"))

    def call(self, *words: str) -> None:
        """`systemctl --user`, whose complaint becomes one sentence."""
        _find_systemctl()
        done = subprocess.run(
            ["systemctl", "--user", *words], capture_output=True, text=True, timeout=CALL_DEADLINE_S, check=False
        )
        if done.returncode:
            why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise ServiceError(
                f"systemctl --user {' '.join(words)} failed: {why.rstrip('.')}.",
                hint="Log in as the user that shall work; the file of the service stays where it is.",
            )


def has_systemctl() -> bool:
    return shutil.which("systemctl") is not None


def _find_systemctl() -> None:
    if not has_systemctl():
        raise ServiceError(
            "This machine has no systemd, so nothing was installed.",
            hint="Let cron or your own init start `shoal work`; `nohup shoal work … &` runs until the next boot.",
        )
