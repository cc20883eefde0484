"""The system-call filter of the sandbox: a classic BPF program, made by hand so that no library is needed.

Three filters come from one table of system calls. The runner's lets it start, watch and end children; the program's, which a
child puts on before it runs model-written code, has no way to make processes, run other programs, open sockets, trace, mount, or
allocate memory outside its own address space; the reader's, for code that runs among the files and processes of its host, can
moreover change no file and signal no process. What is not listed does not exist: it fails with ENOSYS, for which libc has
fallbacks.
"""

import platform
import struct
from dataclasses import dataclass

PROGRAM_CALLS = """
    read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 open:2:- openat:257:56 close:3:57
    stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291 lseek:8:62 access:21:- faccessat:269:48
    faccessat2:439:439 readlink:89:- readlinkat:267:78 getcwd:79:17 chdir:80:49 fchdir:81:50 mkdir:83:-
    mkdirat:258:34 rmdir:84:- unlink:87:- unlinkat:263:35 rename:82:- renameat:264:38 renameat2:316:276 symlink:88:-
    symlinkat:266:36 link:86:- linkat:265:37 chmod:90:- fchmod:91:52 fchmodat:268:53 utimensat:280:88 umask:95:166
    truncate:76:45 ftruncate:77:46 fsync:74:82 fdatasync:75:83 flock:73:32 fcntl:72:25 dup:32:23 dup2:33:-
    dup3:292:24 pipe:22:- pipe2:293:59 getdents64:217:61 getdents:78:- statfs:137:43 fstatfs:138:44
    fadvise64:221:223 sendfile:40:71 copy_file_range:326:285 mmap:9:222 mprotect:10:226 munmap:11:215 mremap:25:216
    madvise:28:233 brk:12:214 mlock:149:228 munlock:150:229 mincore:27:232 membarrier:324:283 rt_sigaction:13:134
    rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigsuspend:130:133 rt_sigtimedwait:128:137
    sigaltstack:131:132 alarm:37:- setitimer:38:103 getitimer:36:102 pause:34:- tgkill:234:131 getpid:39:172
    gettid:186:178 getppid:110:173 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148
    getresgid:120:150 getgroups:115:158 getpgrp:111:- getpgid:121:155 getsid:124:156 getrusage:98:165
    getrlimit:97:163 times:100:153 uname:63:160 sysinfo:99:179 getcpu:309:168 getpriority:140:141 futex:202:98
    set_robust_list:273:99 get_robust_list:274:100 set_tid_address:218:96 rseq:334:293 restart_syscall:219:128
    arch_prctl:158:- sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120
    sched_get_priority_max:146:125 sched_get_priority_min:147:126 clock_gettime:228:113 clock_getres:229:114
    clock_nanosleep:230:115 nanosleep:35:101 gettimeofday:96:169 time:201:- timer_create:222:107
    timer_settime:223:110 timer_gettime:224:108 timer_delete:226:111 timer_getoverrun:225:109 timerfd_create:283:85
    timerfd_settime:286:86 timerfd_gettime:287:87 select:23:- pselect6:270:72 poll:7:- ppoll:271:73
    epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 eventfd:284:-
    eventfd2:290:19 socketpair:53:199 getrandom:318:278 exit:60:93 exit_group:231:94
"""
RUNNER_CALLS = """
    fork:57:- vfork:58:- execve:59:221 wait4:61:260 waitid:247:95 kill:62:129 prctl:157:167 seccomp:317:277
    setrlimit:160:164 setsid:112:157 setpgid:109:154 setuid:105:146 setgid:106:144 setgroups:116:159
    setresuid:117:147 setresgid:119:149 capget:125:90 capset:126:91
"""
CHANGING_CALLS = """
    mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 symlink symlinkat link linkat chmod fchmod fchmodat utimensat
    truncate ftruncate copy_file_range socketpair tgkill
"""
"""Calls of a program that a reader does not have: it runs in no process namespace, where a signal could reach its host."""
SPECIAL_CALLS = """
    ioctl:16:29 prlimit64:302:261 clone:56:220 clone3:435:435
"""
"""name:number on x86_64:number on aarch64"""
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the table, and the kernel's name for the calling convention."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32
_KILL, _ALLOW, _ENOSYS, _EROFS = 0x80000000, 0x7FFF0000, 0x00050000 | 38, 0x00050000 | 30
_X32_BIT = 0x40000000
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020080
"""Every CLONE_NEW flag."""
_OPEN_TO_CHANGE = 0x1 | 0x2 | 0x40 | 0x200
"""Write, read and write, create, truncate."""
_SIGNALLED = (8, 10, 15)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX of fcntl: whom the kernel signals about a file, and how."""
_TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""isatty, window size, bytes to read, non-blocking, close-on-exec: what Python asks of an open file."""


@dataclass(frozen=True)
class _Step:
    """One instruction; `then` and `otherwise` are labels, empty for the next instruction."""

    code: int
    value: int
    then: str = ""
    otherwise: str = ""


def runner_filter(machine: str | None = None) -> bytes:
    """For the process that starts and ends children; empty where the machine is unknown."""
    return _filter(PROGRAM_CALLS + RUNNER_CALLS, machine or platform.machine(), processes=True)


def program_filter(machine: str | None = None) -> bytes:
    """For model-written code; empty where the machine is unknown."""
    return _filter(PROGRAM_CALLS, machine or platform.machine(), processes=False)


def reader_filter(machine: str | None = None) -> bytes:
    """For code that has to find its own files on the host; empty where the machine is unknown."""
    kept = [entry for entry in PROGRAM_CALLS.split() if entry.partition(":")[0] not in CHANGING_CALLS.split()]
    looked_at = [entry for entry in kept if entry.partition(":")[0] in _READING]
    others = [entry for entry in kept if entry not in looked_at]
    return _filter(" ".join(others), machine or platform.machine(), processes=False, reading=" ".join(looked_at))


def _filter(calls: str, machine: str, *, processes: bool, reading: str = "") -> bytes:
    if machine not in ARCHITECTURES:
        return b""
    column, architecture = ARCHITECTURES[machine]
    special = _numbers(SPECIAL_CALLS, column)
    steps = [
        _Step(_LOAD, _ARCHITECTURE),
        _Step(_EQUAL, architecture, otherwise="kill"),
        _Step(_LOAD, _NUMBER),
        _Step(_AT_LEAST, _X32_BIT, then="kill"),
        *(_Step(_EQUAL, special[name], then=name) for name in ("ioctl", "prlimit64", "clone")),
        *(_Step(_EQUAL, number, then=name) for name, number in _numbers(reading, column).items()),
        *(_Step(_EQUAL, number, then="allow") for number in _numbers(calls, column).values()),
    ]
    blocks = [*_arguments(processes), *(_READING.items() if reading else [])]
    return _assemble([("", steps), ("refuse", [_Step(_RETURN, _ENOSYS)]), *blocks, *_ENDS])


_ENDS = [("allow", [_Step(_RETURN, _ALLOW)]), ("kill", [_Step(_RETURN, _KILL)])]


_READING = {
    "open": [_Step(_LOAD, _SECOND_ARGUMENT), _Step(_ANY_BIT, _OPEN_TO_CHANGE, then="no_write", otherwise="reading")],
    "openat": [_Step(_LOAD, _THIRD_ARGUMENT), _Step(_ANY_BIT, _OPEN_TO_CHANGE, then="no_write", otherwise="reading")],
    "fcntl": [_Step(_LOAD, _SECOND_ARGUMENT), *(_Step(_EQUAL, command, then="no_signal") for command in _SIGNALLED)],
    "reading": [_Step(_RETURN, _ALLOW)],
    "no_write": [_Step(_RETURN, _EROFS)],
    "no_signal": [_Step(_RETURN, _ENOSYS)],
}
"""By name of a call what a reader's arguments are looked at for, and behind them the ends: jumps lead forward only."""


def _arguments(processes: bool) -> list[tuple[str, list[_Step]]]:
    """Calls that are allowed with some arguments only."""
    questions = [_Step(_EQUAL, question, then="allow") for question in _TERMINAL_QUESTIONS]
    threads = [] if processes else [_Step(_ANY_BIT, _CLONE_THREAD, otherwise="no")]
    return [
        ("ioctl", [_Step(_LOAD, _SECOND_ARGUMENT), *questions, _Step(_RETURN, _ENOSYS)]),
        ("prlimit64", [_Step(_LOAD, _FIRST_ARGUMENT), _Step(_EQUAL, 0, then="allow", otherwise="no")]),
        ("clone", [_Step(_LOAD, _FIRST_ARGUMENT), _Step(_ANY_BIT, _CLONE_NAMESPACES, then="no"), *threads]),
        ("granted", [_Step(_RETURN, _ALLOW)]),
        ("no", [_Step(_RETURN, _ENOSYS)]),
    ]


def _numbers(table: str, column: int) -> dict[str, int]:
    entries = (entry.split(":") for entry in table.split())
    return {name: int(numbers[column]) for name, *numbers in entries if numbers[column] != "-"}


def _assemble(blocks: list[tuple[str, list[_Step]]]) -> bytes:
    places: dict[str, int] = {}
    position = 0
    for label, steps in blocks:
        places[label] = position
        position += len(steps)
    program = [step for _, steps in blocks for step in steps]
    return b"".join(_encode(step, index, places) for index, step in enumerate(program))


def _encode(step: _Step, index: int, places: dict[str, int]) -> bytes:
    jumps = [places[label] - index - 1 if label else 0 for label in (step.then, step.otherwise)]
    return struct.pack("<HBBI", step.code, *jumps, step.value)
