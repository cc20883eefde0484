import platform
import struct

import pytest

from shoal.tasks.sandbox import seccomp


def run(program: bytes, number: int, first: int = 0, second: int = 0, architecture: int = 0xC000003E) -> int:
    """What the kernel's interpreter would return for one system call."""
    data = struct.pack("<IIQQQ", number, architecture, 0, first, second)
    index = value = 0
    while True:
        code, then, otherwise, operand = struct.unpack_from("<HBBI", program, 8 * index)
        index += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:
            return int(operand)
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            index += then if holds else otherwise


ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050026, 0x80000000
CLONE, FORK, EXECVE, SOCKET, PTRACE, IOCTL, PRLIMIT, READ = 56, 57, 59, 41, 101, 16, 302, 0
OPEN, UNLINK, KILL_PROCESS, KILL_THREAD, FCNTL, READ_ONLY = 2, 87, 62, 234, 72, 0x0005001E
THREAD, NEW_USER = 0x00010000, 0x10000000


@pytest.mark.parametrize(
    ("call", "program", "runner"),
    [
        ((READ,), ALLOW, ALLOW),
        ((FORK,), REFUSE, ALLOW),
        ((EXECVE,), REFUSE, ALLOW),
        ((CLONE, 17), REFUSE, ALLOW),
        ((CLONE, THREAD), ALLOW, ALLOW),
        ((CLONE, THREAD | NEW_USER), REFUSE, REFUSE),
        ((SOCKET,), REFUSE, REFUSE),
        ((PTRACE,), REFUSE, REFUSE),
        ((IOCTL, 0, 0x5401), ALLOW, ALLOW),
        ((IOCTL, 0, 0x5412), REFUSE, REFUSE),
        ((PRLIMIT, 0), ALLOW, ALLOW),
        ((PRLIMIT, 77), REFUSE, REFUSE),
        ((0x40000000,), KILL, KILL),
        ((9999,), REFUSE, REFUSE),
    ],
)
def test_each_filter_decides_as_the_table_says(call: tuple[int, ...], program: int, runner: int) -> None:
    assert run(seccomp.program_filter("x86_64"), *call) == program
    assert run(seccomp.runner_filter("x86_64"), *call) == runner


@pytest.mark.parametrize(
    ("call", "decided"),
    [
        ((READ,), ALLOW),
        ((OPEN, 0, 0), ALLOW),
        ((OPEN, 0, 0x241), READ_ONLY),
        ((UNLINK,), REFUSE),
        ((KILL_PROCESS,), REFUSE),
        ((KILL_THREAD,), REFUSE),
        ((FCNTL, 3, 3), ALLOW),
        ((FCNTL, 3, 8), REFUSE),
        ((FCNTL, 3, 10), REFUSE),
        ((FCNTL, 3, 15), REFUSE),
    ],
)
def test_a_reader_changes_no_file_and_signals_no_process(call: tuple[int, ...], decided: int) -> None:
    assert run(seccomp.reader_filter("x86_64"), *call) == decided


def test_calls_of_another_convention_are_fatal() -> None:
    assert run(seccomp.program_filter("x86_64"), READ, architecture=0x40000003) == KILL
    assert run(seccomp.program_filter("aarch64"), 63, architecture=0xC00000B7) == ALLOW
    assert run(seccomp.program_filter("aarch64"), 220, 17, architecture=0xC00000B7) == REFUSE


def test_an_unknown_machine_has_no_filter() -> None:
    assert seccomp.program_filter("m68k") == b""
    assert bool(seccomp.program_filter()) == (platform.machine() in seccomp.ARCHITECTURES)
