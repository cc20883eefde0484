"""Runs model-written programs where they can do no harm: bubblewrap, system-call filters and limits, one fresh sandbox per job.

Inside there is no network, no process of the host, no file but Python's standard library (read-only) and a small private /tmp.
A job is one program and many inputs; what comes back is bytes, which the caller compares out here. Sandboxes are started before
they are needed and used once. Where bubblewrap cannot run, nothing is executed: there is no fallback.
"""

import importlib.util
import json
import os
import platform
import secrets
import selectors
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from shoal.errors import ShoalError
from shoal.tasks.sandbox.runner import PACKAGES
from shoal.tasks.sandbox.seccomp import program_filter, runner_filter

RUNNER = Path(__file__).with_name("runner.py")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
NOBODY = 65534
FIRST_UID = 1 << 30
START_DEADLINE_S = 20.0
HEADER_BYTES = 4096
OWN_COUNT_SINCE = (5, 14)
"""Linux counts the processes of each user namespace on their own since then; before, the limit would count the host's too."""


class SandboxError(ShoalError):
    """Model-written code cannot be run here."""

    code = "sandbox"
    permanent = True


@dataclass(frozen=True)
class SandboxLimits:
    """Per test, but for the last one."""

    cpu_s: int = 5
    wall_s: float = 15.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 4 << 20
    file_bytes: int = 16 << 20
    files: int = 64
    threads: int = 32
    job_wall_s: float = 30.0


LIMITS = SandboxLimits()
TMP_BYTES = 32 << 20


@dataclass(frozen=True)
class Job:
    program: str
    inputs: Sequence[Any]
    """Standard inputs as text, or argument lists."""
    function: str | None = None
    """Called with each argument list; None runs the program as a script."""
    packages: tuple[str, ...] = ()
    """Packages beside the standard library that the program may import; its sandbox has to be made with them."""
    limits: SandboxLimits = LIMITS


@dataclass(frozen=True)
class Ran:
    """What one input led to."""

    ending: str
    """Empty if the program ended by itself; else `cpu`, `wall`, `output` or `signal N`."""
    exit_code: int
    cpu_s: float
    produced: bytes
    """Standard output, or the JSON of the returned value, or what was raised."""

    @property
    def limited(self) -> bool:
        return self.ending in ("cpu", "wall") or self.exit_code == OUT_OF_MEMORY


RAISED, NOT_JSON, OUT_OF_MEMORY = 1, 2, 3
"""Exit codes of the runner's children."""


class Sandbox:
    """One bubblewrap with a runner inside, good for one job. Must be started by a thread that outlives it."""

    def __init__(self, packages: tuple[str, ...] = ()) -> None:
        filter_fd = _filter_fd()
        filtered = ["--seccomp", str(filter_fd)] if filter_fd is not None else []
        try:
            self._process = subprocess.Popen(
                [*_bwrap(), *_packages(packages), *filtered, "--", *_inside()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[filter_fd] if filter_fd is not None else [],
                bufsize=0,
                env={},
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"bubblewrap cannot be started: {error.strerror}.", hint=HINT) from None
        finally:
            if filter_fd is not None:
                os.close(filter_fd)

    def run(self, job: Job) -> Iterator[Ran]:
        """The tests one by one; a caller that needs no more closes the sandbox."""
        deadline = time.monotonic() + START_DEADLINE_S
        output = _Output(self._process.stdout, deadline)
        if output.line() != b"ready":
            raise SandboxError(f"The sandbox did not start: {self._complaint()}.", hint=HINT)
        output.deadline = time.monotonic() + job.limits.job_wall_s
        _feed(self._process.stdin, _job_bytes(job), output.deadline)
        for _ in job.inputs:
            header = json.loads(output.line() or b"null")
            if header is None:
                yield Ran("wall" if output.late else "signal 9", -9, 0.0, b"")
                return
            yield Ran(header["ending"], header["exit"], header["cpu_s"], output.exactly(header["bytes"]))

    def close(self) -> None:
        """Ends everything inside: the namespace dies with its first process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _complaint(self) -> str:
        self._process.kill()
        assert self._process.stderr is not None
        text = self._process.stderr.read(2000).decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "no reason was given"


HINT = "Install bubblewrap (`make system`, or your system's package) and allow user namespaces."


@cache
def sandbox_complaint() -> str:
    """Why no sandbox can be started here; empty if one can. Tries it once per process."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    try:
        with Sandbox() as sandbox:
            ran = list(sandbox.run(Job("print(input())", ["ready"])))
    except SandboxError as error:
        return error.message
    return "" if ran[0].produced == b"ready\n" else "a first program did not run"


def require_sandbox() -> None:
    complaint = sandbox_complaint()
    if complaint:
        raise SandboxError(f"Model-written code cannot be run here: {complaint.rstrip('.')}.", hint=HINT)


def _bwrap() -> list[str]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bubblewrap is not installed.", hint=HINT)
    if os.getuid() == 0:
        # Root needs no user namespace, and a runner that may change its user can be given limits that root would escape.
        user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        user = ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    return [bwrap, *user, *_fixed_arguments()]


@cache
def _fixed_arguments() -> tuple[str, ...]:
    unshared = [f"--unshare-{space}" for space in ("ipc", "pid", "net", "uts", "cgroup-try")]
    devices = [*_parents(Path(DEVICES[0])), *(part for path in DEVICES for part in ("--dev-bind", path, path))]
    return (
        *unshared,
        *("--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"),
        *("--setenv", "HOME", "/tmp", "--setenv", "PYTHONHASHSEED", "0"),
        *_libraries(),
        *devices,
        *("--ro-bind", str(RUNNER), "/runner.py"),
        *("--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp"),
    )


def _packages(names: tuple[str, ...]) -> list[str]:
    """Each package with the shared libraries that its wheel brought, and then nothing more can be mounted."""
    found = [place for name in names for place in _package_folders(name)]
    bound = [part for place in found for part in ("--ro-bind", str(place), f"{PACKAGES}/{place.name}")]
    # Threads of linear algebra would take their stacks out of the program's memory.
    single = ["--setenv", "OPENBLAS_NUM_THREADS", "1"] if bound else []
    return [*_parents(Path(PACKAGES) / "any"), *bound, *single, "--remount-ro", "/"]


def _package_folders(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SandboxError(f"The package {name} that a task needs is not installed.", hint=f"pip install {name}")
    folder = Path(spec.origin).parent
    libraries = folder.with_name(f"{name}.libs")
    return [folder, *([libraries] if libraries.is_dir() else [])]


def _libraries() -> list[str]:
    """Python's standard library, its executable and the shared libraries of the system; nothing of site-packages."""
    standard = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix}))
    bound = [_executable(), standard, *_system_libraries()]
    library = Path(sys.base_prefix) / "lib" / str(sysconfig.get_config_var("LDLIBRARY"))
    if library.suffix != ".a" and library.exists():
        bound += sorted(library.parent.glob(f"{library.name.split('.so')[0]}*.so*"))
    arguments = [part for path in dict.fromkeys(bound) for part in (*_parents(path), "--ro-bind", str(path), str(path))]
    for link in (Path("/lib"), Path("/lib64")):
        if link.is_symlink():
            arguments += ["--symlink", os.readlink(link), str(link)]
    site = standard / "site-packages"
    return [*arguments, "--tmpfs", str(site), "--remount-ro", str(site)] if site.is_dir() else arguments


def _parents(path: Path) -> list[str]:
    """bubblewrap makes missing folders for its own user alone; the runner becomes another one."""
    return [part for folder in reversed(path.parents[:-1]) for part in ("--perms", "0755", "--dir", str(folder))]


def _executable() -> Path:
    return Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))


def _system_libraries() -> list[Path]:
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    folders = [Path("/usr/lib") / multiarch, Path("/usr/lib64"), *map(Path, ("/lib", "/lib64"))]
    return [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]


def _inside() -> list[str]:
    uid = [str(FIRST_UID + secrets.randbelow(1 << 29))] if os.getuid() == 0 else []
    return [str(_executable()), "-I", "-S", "-B", "-X", "utf8", "/runner.py", *uid]


def _filter_fd() -> int | None:
    """An open file with the runner's filter, as bubblewrap takes it; None where the machine is unknown."""
    program = runner_filter()
    if not program:
        return None
    descriptor = os.memfd_create("filter")
    os.write(descriptor, program)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _job_bytes(job: Job) -> bytes:
    limits = asdict(job.limits)
    if os.getuid() != 0 and _kernel() < OWN_COUNT_SINCE:
        limits["threads"] = 0
    tree = {
        "program": job.program,
        "inputs": list(job.inputs),
        "name": job.function,
        "limits": limits,
        "filter": program_filter().hex(),
        "packages": list(job.packages),
    }
    data = json.dumps(tree).encode()
    return struct.pack("<Q", len(data)) + data


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


def _feed(stream: IO[bytes] | None, data: bytes, deadline: float) -> None:
    """Writes all of it, unless the other side dies or stops reading until the deadline."""
    assert stream is not None
    os.set_blocking(stream.fileno(), False)
    view = memoryview(data)
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_WRITE)
        while view and selector.select(max(0.0, deadline - time.monotonic())):
            try:
                view = view[os.write(stream.fileno(), view[: 1 << 16]) :]
            except BrokenPipeError:
                return


class _Output:
    """What a sandbox writes, read up to a deadline; empty answers once it is over."""

    def __init__(self, stream: IO[bytes] | None, deadline: float) -> None:
        assert stream is not None
        self._descriptor, self.deadline = stream.fileno(), deadline
        self._pending = b""
        self._ended = False
        self.late = False

    def line(self) -> bytes:
        while b"\n" not in self._pending and len(self._pending) < HEADER_BYTES and self._more():
            pass
        line, newline, rest = self._pending.partition(b"\n")
        if not newline:
            return b""
        self._pending = rest
        return line

    def exactly(self, size: int) -> bytes:
        while len(self._pending) < size and self._more():
            pass
        data, self._pending = self._pending[:size], self._pending[size:]
        return data

    def _more(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_READ)
            if not selector.select(max(0.0, self.deadline - time.monotonic())):
                self.late = True
                return False
        data = os.read(self._descriptor, 1 << 16)
        self._pending += data
        return bool(data)
