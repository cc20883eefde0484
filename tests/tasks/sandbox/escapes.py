# ruff: noqa: E501  # programs on one line each
"""Programs that try to break out of the sandbox. Each prints ESCAPED if it got anywhere."""

SYSCALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def syscall(*arguments):
    return libc.syscall(*map(ctypes.c_long, arguments))
"""

QUIET_ATTEMPTS = {
    "tcp connection": "import socket; socket.create_connection(('127.0.0.1', PORT), 2); print('ESCAPED')",
    "udp packet": "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', PORT)); print('ESCAPED')",
    "name lookup": "import socket; socket.getaddrinfo('example.org', 80); print('ESCAPED')",
    "unix socket of the host": "import socket; s = socket.socket(socket.AF_UNIX); s.connect('SECRET'); print('ESCAPED')",
    "password file": "open('/etc/passwd').read(); print('ESCAPED')",
    "file of the host by path": "open('SECRET').read(); print('ESCAPED')",
    "file of the host by symlink": "import os; os.symlink('SECRET', 'link'); open('link').read(); print('ESCAPED')",
    "file of the host by hard link": "import os; os.link('SECRET', 'link'); print('ESCAPED')",
    "climbing out of the working directory": "open('../' * 20 + 'etc/passwd').read(); print('ESCAPED')",
    "home directories": "import os; print('ESCAPED' if os.listdir('/home') else '')",
    "process table": "import os; os.listdir('/proc/1'); print('ESCAPED')",
    "root of the first process": "import os; os.listdir('/proc/1/root/etc'); print('ESCAPED')",
    "environment of the runner": "open('/proc/self/environ').read(); print('ESCAPED')",
    "kernel settings": "import os; os.listdir('/sys'); print('ESCAPED')",
    "writing to the root": "open('/escaped', 'w').write('x'); print('ESCAPED')",
    "writing to the standard library": "import os; open(os.path.dirname(os.__file__) + '/escaped.py', 'w'); print('ESCAPED')",
    "replacing the runner": "open('/runner.py', 'w').write('x'); print('ESCAPED')",
    "writing beside the runner's devices": "open('/dev/escaped', 'w').write('x' * 100); print('ESCAPED')",
    "making a device": "import os, stat; os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0)); print('ESCAPED')",
    "fork": "import os; os.fork(); print('ESCAPED')",
    "fork bomb": "import os\nwhile True:\n    os.fork()\n    print('ESCAPED', flush=True)",
    "another program": "import subprocess, sys; subprocess.run([sys.executable, '-c', '']); print('ESCAPED')",
    "a shell": "import os; print('ESCAPED' if os.system('true') == 0 else '')",
    "exec": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(\"ESCAPED\")'])",
    "multiprocessing": "import multiprocessing as m; p = m.Process(target=print); p.start(); p.join(); print('ESCAPED')",
    "signal to everybody": "import os; os.kill(-1, 9); print('ESCAPED')",
    "signal to the first process": "import os; os.kill(1, 9); print('ESCAPED')",
    "becoming root": "import os; os.setuid(0); print('ESCAPED')",
    "raising a limit": "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); print('ESCAPED')",
    "limits of the runner": "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1)); print('ESCAPED')",
    "four gigabytes": "x = bytearray(4 << 30); print('ESCAPED')",
    "four gigabytes bit by bit": "x = []\nwhile len(x) < 1 << 12:\n    x.append(bytearray(1 << 20))\nprint('ESCAPED')",
    "mapped memory": "import mmap; x = [mmap.mmap(-1, 64 << 20) for _ in range(64)]; print('ESCAPED')",
    "memory in files": "for i in range(64):\n    open(f'{i}', 'wb').write(b'x' * (4 << 20))\nprint('ESCAPED')",
    "one huge file": "f = open('f', 'wb')\nfor _ in range(64):\n    f.write(b'x' * (1 << 20))\n    f.flush()\nprint('ESCAPED')",
    "a sparse giant": "f = open('f', 'wb'); f.truncate(1 << 40); print('ESCAPED')",
    "memory behind a descriptor": "import os; os.memfd_create('x'); print('ESCAPED')",
    "shared memory": "from multiprocessing import shared_memory as s; s.SharedMemory(create=True, size=1 << 30); print('ESCAPED')",
    "thousands of open files": "x = [open('/dev/null') for _ in range(5000)]; print('ESCAPED')",
    "thousands of threads": (
        "import threading, time\nthreading.stack_size(32768)\n"
        "for _ in range(3000):\n    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\nprint('ESCAPED')"
    ),
    "descriptors of the runner": (
        "import os\nfor fd in range(4, 256):\n    try:\n        os.fstat(fd)\n        print('ESCAPED')\n    except OSError:\n        pass"
    ),
    "environment variables": "import os; print('ESCAPED' if set(os.environ) - {'HOME', 'PYTHONHASHSEED', 'PWD', 'LC_CTYPE'} else '')",
    "packages of the host": "import sys; sys.path += [p + '/site-packages' for p in sys.path]; import pip; print('ESCAPED')",
    "ptrace": SYSCALL + "print('ESCAPED' if syscall(101, 0, 0, 0, 0) == 0 else '')",
    "memory of another process": SYSCALL
    + "import os\nprint('ESCAPED' if syscall(310, os.getppid(), 0, 0, 0, 0, 0) >= 0 else '')",
    "a new user namespace": SYSCALL + "print('ESCAPED' if syscall(272, 0x10000000) == 0 else '')",
    "clone with a namespace": SYSCALL + "print('ESCAPED' if syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0 else '')",
    "clone3": SYSCALL
    + "b = ctypes.create_string_buffer(88)\nprint('ESCAPED' if syscall(435, ctypes.addressof(b), 88) >= 0 else '')",
    "vfork": SYSCALL + "print('ESCAPED' if syscall(58) >= 0 else '')",
    "mount": SYSCALL + "print('ESCAPED' if libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0 else '')",
    "chroot": "import os; os.chroot('/tmp'); print('ESCAPED')",
    "bpf, io_uring, userfaultfd, keyctl, perf": (
        SYSCALL + "print('ESCAPED' if any(syscall(n, 0, 0, 0, 0, 0) >= 0 for n in (321, 425, 323, 250, 298)) else '')"
    ),
    "32-bit system calls": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(bytes.fromhex('b802000000cd80c3'))\n"  # mov eax, 2 (fork); int 0x80; ret
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
        "print('ESCAPED' if f() >= 0 else '')"
    ),
    "typing into the terminal": "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); print('ESCAPED')",
    "a new filter": SYSCALL + "print('ESCAPED' if libc.prctl(22, 2, 0, 0, 0) == 0 else '')",
    "the clock": "import time; time.clock_settime(0, 0); print('ESCAPED')",
    "the host's name": "import socket; print('ESCAPED' if socket.gethostname() != 'sandbox' else '')",
    "a value that recurses": "x = []\nx.append(x)\nprint('' if len(repr(x)) else 'ESCAPED')",
    "a source that nests": "eval('(' * 100000 + ')' * 100000); print('ESCAPED')",
}
