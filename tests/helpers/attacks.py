"""Programs that would like to do harm. One that gets what it wants prints WON, which no traceback spells."""

from __future__ import annotations

PRELUDE = "WON = 'ESC' + 'APED'\n"

# What may take its time, and must be stopped.
ENDLESS = {
    "infinite loop": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "sleep with all exceptions caught": """
import time
while True:
    try: time.sleep(1000)
    except BaseException: pass
""",
    "ignored signals": """
import signal
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "one operation that holds the interpreter": "x = 10 ** (10 ** 9)",
    "a pattern that backtracks": "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "stdout without end": "while True: print('x' * 1000000)",
    "threads that spin": """
import threading
def spin():
    while True: pass
for _ in range(20):
    threading.Thread(target=spin).start()
spin()
""",
}

ATTACKS = {
    "10 GB": "x = bytearray(10 << 30); print(WON)",
    "10 GB, bit by bit": """
kept = []
for _ in range(10240): kept.append(bytearray(b'x' * (1 << 20)))
print(WON)
""",
    "10 GB mapped": "import mmap; mmap.mmap(-1, 10 << 30); print(WON)",
    "fork": "import os\nif os.fork() >= 0: print(WON)",
    "fork bomb": "import os\nwhile True: os.fork(); print(WON)",
    "fork by ctypes": "import ctypes\nif ctypes.CDLL(None).fork() >= 0: print(WON)",
    "vfork by its number": "import ctypes\nif ctypes.CDLL(None).syscall(58) >= 0: print(WON)",
    "clone by its number": "import ctypes\nif ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) >= 0: print(WON)",
    "clone3 by its number": """
import ctypes
arguments = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)
if ctypes.CDLL(None).syscall(435, arguments, 88) >= 0: print(WON)
""",
    "exec": "import os; os.execv('/bin/sh', ['sh', '-c', 'echo ' + WON])",
    "subprocess": "import subprocess; print(subprocess.run(['/bin/echo', WON], capture_output=True).stdout)",
    "multiprocessing": "import multiprocessing as m; p = m.Process(target=print); p.start(); print(WON)",
    "a thousand threads": """
import threading, time
for _ in range(1000): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
print(WON)
""",
    "write outside": """
for path in ('/tmp/x', '/home/x', '/etc/x', '/usr/x', '/var/tmp/x', '/dev/shm/x', '/x', '../x', '../../x', '/agentrl/x'):
    try: open(path, 'w'); print(WON, path)
    except OSError: pass
""",
    "write to a device": "open('/dev/sda', 'wb'); print(WON)",
    "read the users": "print(WON, open('/etc/passwd').read())",
    "read the shadows": "print(WON, open('/etc/shadow').read())",
    "read the host's sources": "print(WON, open({host!r}).read())",
    "list what there is": """
import os
for path in ('/', '/home', '/root', '/tmp', '..', '/proc', '/sys'):
    try: found = set(os.listdir(path))
    except OSError: continue
    if {{'boot', 'var'}} & found or (path == '/proc' and found) or (path == '..' and found): print(WON, path, found)
""",
    "a link to what is outside": "import os; os.symlink('/etc/passwd', 'l'); print(WON, open('l').read())",
    "tcp": "import socket; socket.create_connection(('127.0.0.1', {port}), 1); print(WON)",
    "udp": "import socket; s = socket.socket(2, 2); s.sendto(b'x', ('127.0.0.1', 9)); print(WON)",
    "listen": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print(WON)",
    "a unix socket": "import socket; s = socket.socket(socket.AF_UNIX); s.connect({unix!r}); print(WON)",
    "an abstract socket": "import socket; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + {abstract!r}); print(WON)",
    "a datagram by a socket pair": """
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
print(WON)
""",
    "a message with an address": "import socket; a, b = socket.socketpair(); a.sendto(b'x', {unix!r}); print(WON)",
    "a descriptor passed on": """
import array, socket
a, b = socket.socketpair()
a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))]); print(WON)
""",
    "a signal by a descriptor's owner": """
import fcntl, os, socket
a, b = socket.socketpair()
for command, value in ((8, os.getppid()), (10, 9)):
    try: fcntl.fcntl(a, command, value); print(WON)
    except OSError: pass
""",
    "capabilities": """
import ctypes
held = (ctypes.c_uint32 * 6)()
if ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), held) == 0 and any(held): print(WON, list(held))
""",
    "netlink": "import socket; socket.socket(16, 3, 0); print(WON)",
    "a raw packet": "import socket; socket.socket(17, 3, 3); print(WON)",
    "1 GB of stdout": "import os\nfor _ in range(1024): os.write(1, b'x' * (1 << 20))",
    "deep recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0); print(WON)",
    "deep recursion in C": "import sys; sys.setrecursionlimit(10**9); x = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    "segmentation fault": "import ctypes; ctypes.string_at(0); print(WON)",
    "abort": "import os; os.abort(); print(WON)",
    "kill the parent": "import os; os.kill(os.getppid(), 9); print(WON)",
    "kill the first": "import os; os.kill(1, 9); print(WON)",
    "kill all": "import os; os.kill(-1, 9); print(WON)",
    "kill the group": "import os; os.killpg(0, 9); print(WON)",
    "stop the parent by its number": "import ctypes, os\nif ctypes.CDLL(None).syscall(62, os.getppid(), 19) == 0: print(WON)",
    "signal by pidfd": """
import os, signal
signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9); print(WON)
""",
    "own environment": """
import os
if any('SECRET' in name for name in os.environ): print(WON)
print(WON if 'SECRET' in open('/proc/self/environ').read() else '')
""",
    "the parent's environment": "import os; print(WON, open(f'/proc/{{os.getppid()}}/environ').read())",
    "the parent's memory": "import os; open(f'/proc/{{os.getppid()}}/mem', 'r+b'); print(WON)",
    "read the parent's memory": """
import ctypes, os
buffer = ctypes.create_string_buffer(64)
class V(ctypes.Structure): _fields_ = [('a', ctypes.c_void_p), ('n', ctypes.c_size_t)]
mine, theirs = V(ctypes.addressof(buffer), 64), V(ctypes.addressof(buffer), 64)
if ctypes.CDLL(None).process_vm_readv(os.getppid(), ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0: print(WON)
""",
    "the core pattern": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh'); print(WON)",
    "mount a proc": """
import ctypes, os
os.mkdir('p')
if ctypes.CDLL(None).mount(b'proc', b'p', b'proc', 0, 0) == 0: print(WON)
""",
    "change the root": "import os; os.chroot('.'); print(WON)",
    "a daemon": "import os\nif os.fork() == 0:\n    os.setsid(); print(WON)",
    "raise a limit": """
import resource as r
for kind in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_NOFILE, r.RLIMIT_FSIZE):
    try: r.setrlimit(kind, (r.RLIM_INFINITY, r.RLIM_INFINITY)); print(WON)
    except (OSError, ValueError): pass
""",
    "lower the parent's limit": "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_AS, (1, 1)); print(WON)",
    "trace the parent": "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: print(WON)",
    "a new user namespace": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print(WON)",
    "enter another namespace": "import ctypes\nif ctypes.CDLL(None).setns(3, 0) == 0: print(WON)",
    "become root": "import os; os.setuid(0); print(WON)",
    "take capabilities": "import ctypes\nif ctypes.CDLL(None).prctl(8, 1, 0, 0, 0) == 0: print(WON)",
    "take the filter off": "import ctypes\nif ctypes.CDLL(None).prctl(22, 0, 0, 0, 0) == 0: print(WON)",
    "modes of files outside": """
import os, sys
for path in (sys.executable, os.__file__, '/', '..'):
    try: os.chmod(path, 0o777); print(WON, path)
    except OSError: pass
""",
    "times of files outside": "import os; os.utime(os.__file__); print(WON)",
    "owners": "import os; os.chown('.', 0, 0); print(WON)",
    "a device": "import os, stat; os.mknod('d', 0o600 | stat.S_IFBLK, os.makedev(8, 0)); print(WON)",
    "a set-user-id program": "import os; open('s', 'w'); os.chmod('s', 0o4755); print(WON)",
    "memory to run": "import os; os.memfd_create('x'); print(WON)",
    "shared memory": "from multiprocessing import shared_memory as s; s.SharedMemory(create=True, size=10); print(WON)",
    "io_uring": "import ctypes\nif ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120)) >= 0: print(WON)",
    "bpf": "import ctypes\nif ctypes.CDLL(None).syscall(321, 0, ctypes.create_string_buffer(120), 120) >= 0: print(WON)",
    "userfaultfd": "import ctypes\nif ctypes.CDLL(None).syscall(323, 1) >= 0: print(WON)",
    "perf": "import ctypes\nif ctypes.CDLL(None).syscall(298, ctypes.create_string_buffer(120), 0, -1, -1, 0) >= 0: print(WON)",
    "keys": "import ctypes\nif ctypes.CDLL(None).syscall(250, 0, -3, 0) >= 0: print(WON)",
    "a file by its handle": "import ctypes\nif ctypes.CDLL(None).syscall(304, -100, ctypes.create_string_buffer(136), 0) >= 0: print(WON)",
    "the clock": "import time; time.clock_settime(0, 1.0); print(WON)",
    "the host's name": "import socket; socket.sethostname('x'); print(WON)",
    "32-bit calls": "import ctypes\nif ctypes.CDLL(None).syscall(0x40000000 + 57) >= 0: print(WON)",
    "answers on other descriptors": """
import os
for fd in range(3, 256):
    try: os.write(fd, b'{{"id": 0, "status": "ok", "output": "' + WON.encode() + b'", "cut": 0}}\\n')
    except OSError: pass
""",
    "descriptors that were left open": """
import os
for fd in [*range(3, 200), *range(201, 256)]:
    try: os.fstat(fd); print(WON, fd)
    except OSError: pass
""",
    "a session that listens no more": "import os; os.close(200)\nwhile True: pass",
    "the end of a call, forged": "import os; os.write(200, b'd' * 100)\nwhile True: pass",
    "fill the disk": """
written = 0
for i in range(10000):
    try:
        with open(f'f{{i}}', 'wb') as f: f.write(b'x' * (8 << 20))
        written += 8
    except OSError: break
if written > 1024: print(WON, written)
""",
    "one large file": "f = open('f', 'wb')\nfor _ in range(64): f.write(b'x' * (1 << 20)); f.flush()\nprint(WON)",
    "other sessions' files": """
import os
if os.path.exists('../secret') or [n for n in os.listdir('..') if n]: print(WON)
""",
    "output after the end": """
import threading, time
def late():
    time.sleep(0.3); print(WON)
threading.Thread(target=late, daemon=True).start()
""",
    "streams that lie": """
import sys
class Bad:
    def write(self, *a): raise SystemExit(0)
    flush = write
sys.stdout = sys.stderr = Bad()
1 / 0
""",
    "exceptions that bite": """
class E(BaseException):
    def __str__(self): raise MemoryError
    __repr__ = __str__
raise E
""",
    "builtins replaced": """
import builtins, ast, traceback, os
ast.parse = builtins.compile = builtins.exec = traceback.format_exception = lambda *a, **k: print('x')
raise ValueError
""",
    "source that is no text": "x = '\\ud800'; print(x); print('\\x00\\x1b[2J')",
}
