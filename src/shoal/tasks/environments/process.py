"""The process that runs an environment, one forked child per episode: `python -m shoal.tasks.environments.process NAME FD`.

The environment is imported once; each episode gets a child of its own, so episodes share no state and a child starts in
milliseconds. Before the first call a child loses the right to make processes and sockets, to run programs, to signal others and to
write or remove files; the kernel limits its memory and the processor time of each call. Messages are JSON behind their length.
"""

import ctypes
import functools
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from shoal.tasks.environments.contract import Answer, FailureError, read_answer, read_opening
from shoal.tasks.environments.loading import find_environment, make_environment
from shoal.tasks.environments.tools import call_accepted
from shoal.tasks.sandbox.runner import install_filter
from shoal.tasks.sandbox.seccomp import reader_filter

MEMORY_BYTES = 2 << 30
MOST_BYTES = 16 << 20
"""Of one message."""
RESERVE_BYTES = 8 << 20
"""Given back when the environment has eaten the rest: saying so takes memory too."""
PR_SET_PDEATHSIG = 1


def main() -> None:
    name, control = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    kind = find_environment(name)
    getattr(kind, "prepare", lambda: None)()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    control.sendall(b"r")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            serve(kind, descriptors[0])
        os.close(descriptors[0])


def serve(kind: type, descriptor: int) -> NoReturn:
    """Never returns: answers the calls of one episode until the other side closes."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        confine()
        send(descriptor, {"pid": os.getpid()})
        made = functools.cache(lambda: make_environment(kind))
        while (message := receive(descriptor)) is not None:
            send(descriptor, answer(made, message))
        code = 0
    finally:
        os._exit(code)


def confine() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    for limit, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (most, most))
    install_filter(reader_filter())


def answer(made: Callable[[], Any], message: dict[str, Any]) -> dict[str, Any]:
    """What one call led to: an answer, or how the environment failed; the first call also makes the environment."""
    limit_processor_time(message["step_s"])
    reserve = bytearray(RESERVE_BYTES)
    started = time.process_time()
    try:
        found = _call(made(), message)._asdict()
    except FailureError as failure:
        found = {"failed": failure.kind}
    except (MemoryError, RecursionError):
        del reserve
        found = {"failed": "ran out of memory", "limited": True}
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        # The name alone: a message may hold a path, an address or a time.
        found = {"failed": f"raised {type(error).__name__}"}
    return found | {"cost_s": time.process_time() - started}


def _call(made: Any, message: dict[str, Any]) -> Answer:
    if "seed" in message:
        return Answer(read_opening(call_accepted(made.reset, {"seed": message["seed"], **message["task"]})))
    return read_answer(made.step(as_action(made.step, message["action"])))


def as_action(step: Callable[..., Any], text: str) -> Any:
    """The text, or what it says in JSON where `step` is annotated with a model of pydantic, as OpenEnv's actions are."""
    kinds = [kind for name, kind in getattr(step, "__annotations__", {}).items() if name not in ("return", "timeout_s")]
    read = getattr(kinds[0], "model_validate_json", None) if kinds else None
    if read is None:
        return text
    begin, end = text.find("{"), text.rfind("}")
    try:
        return read(text[begin : end + 1])
    except ValueError:
        raise FailureError("cannot read the action") from None


def limit_processor_time(seconds: int) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + seconds, -1))


def send(descriptor: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    data = struct.pack("<I", len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int) -> dict[str, Any] | None:
    """None when the other side has closed."""
    header = _exactly(descriptor, 4)
    if header is None:
        return None
    (size,) = struct.unpack("<I", header)
    data = _exactly(descriptor, size) if size <= MOST_BYTES else None
    found: dict[str, Any] | None = json.loads(data) if data is not None else None
    return found


def _exactly(descriptor: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = os.read(descriptor, size - len(data))
        if not more:
            return None
        data += more
    return data


if __name__ == "__main__":
    main()
