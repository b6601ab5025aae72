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
for fd in [*range(3, 63), *range(64, 256)]:
    try: os.fstat(fd); print(WON, fd)
    except OSError: pass
""",
    "a session that listens no more": "import os; os.close(63)\nwhile True: pass",
    "the end of a call, forged": "import os; os.write(63, b'd' * 100)\nwhile True: pass",
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
    "a file that all may write, changed by its path": """
import os
path = {file!r}
ways = [lambda: os.truncate(path, 0), lambda: os.open(path, os.O_RDONLY | os.O_TRUNC), lambda: open(path, 'a').write('x')]
ways += [lambda: os.unlink(path), lambda: os.rename(path, 'l'), lambda: os.link(path, 'l'), lambda: os.rename('.', path)]
ways += [lambda: os.symlink('/', path + '2'), lambda: os.mkdir(path + '3'), lambda: os.mkfifo(path + '4')]
ways += [lambda: os.utime(path), lambda: os.chmod(path, 0), lambda: os.setxattr(path, 'user.a', b'x')]
for way in ways:
    try: way(); print(WON)
    except OSError: pass
""",
    "a file emptied as it is read, by bare calls": """
import ctypes, os, platform
if platform.machine() != 'x86_64': raise SystemExit
libc, path = ctypes.CDLL(None), {file!r}.encode()
how = (ctypes.c_uint64 * 3)(os.O_TRUNC, 0, 0)
for words in ((2, path, os.O_TRUNC, 0), (257, -100, path, os.O_TRUNC, 0), (437, -100, path, how, 24), (76, path, 0), (85, path, 0o600)):
    if libc.syscall(*words) >= 0: print(WON, words)
for bits in (1 << 32, 3, 3 | 1 << 32, os.O_NOFOLLOW | os.O_CLOEXEC):
    if libc.syscall(257, ctypes.c_long(-100), path, ctypes.c_ulong(os.O_TRUNC | bits), 0) >= 0: print(WON, bits)
if os.stat({file!r}).st_size != 8: print(WON)
""",
    "the interpreter's own files, emptied as they are read": """
import os, sys
for path in (os.__file__, sys.executable):
    try: os.open(path, os.O_RDONLY | os.O_TRUNC); print(WON)
    except OSError: pass
""",
    "calls of a 32-bit program": """
import ctypes, mmap, platform
if platform.machine() != 'x86_64': raise SystemExit
page = mmap.mmap(-1, 4096, prot=7)
page.write(b'\\xb8\\x02\\0\\0\\0\\xcd\\x80\\xc3')
if ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))() >= 0: print(WON)
""",
    "flags of a descriptor that others have too": """
import fcntl, os
for fd in (0, 1, 63):
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND: print(WON, fd)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK | os.O_ASYNC)
""",
    "a lock on what others read": "import fcntl, os, sys\nkept = [open(p, 'rb') for p in (os.__file__, sys.executable, '/dev/null')]\nfor f in kept: fcntl.flock(f, fcntl.LOCK_EX)",
    "hooks that stay": """
import atexit, builtins, faulthandler, gc, os, signal, sys, threading
sys.addaudithook(lambda *a: os._exit(3) if a[0] == 'exec' else None)
sys.settrace(lambda *a: 1 / 0); threading.settrace(lambda *a: 1 / 0); sys.setprofile(lambda *a: 1 / 0)
sys.excepthook = sys.unraisablehook = sys.displayhook = lambda *a: os._exit(4)
gc.callbacks.append(lambda *a: os._exit(5)); atexit.register(os._exit, 6)
builtins.__import__ = builtins.print = builtins.repr = lambda *a, **k: os._exit(7)
signal.signal(signal.SIGCONT, lambda *a: os._exit(8))
""",
    "generators and coroutines that refuse to end": """
import asyncio, sys
def g():
    while True:
        try: yield
        except BaseException: pass
kept = [g() for _ in range(1000)]
for x in kept: next(x)
async def f():
    while True:
        try: await asyncio.sleep(0)
        except BaseException: pass
sys.setrecursionlimit(10**6)
asyncio.run(f())
""",
    "an end that is written, and a second life": """
import os, time
os.write(63, b'd')
while True:
    try: print(WON if b'CANARY' in os.read(63, 65536) else '', flush=True)
    except OSError: time.sleep(0.01)
""",
    "descriptors of the answer put in each other's places": "import os\nos.dup2(1, 63); os.dup2(63, 1); os.dup2(0, 2)\nos.write(1, b'd' * 1000)\nwhile True: pass",
    "a text of a billion characters": "print('x' * 10**9)",
    "a value of a billion characters": "[0] * 10**8",
    "a number of many digits": "import sys; sys.set_int_max_str_digits(0); 10 ** 10**7",
    "a repr without end": "class E:\n    def __repr__(self): return repr([E()])\nE()",
    "a source of parentheses": "exec('(' * 10**6)",
    "a source of minus signs": "compile('-' * 10**6 + '1', 'x', 'eval')",
    "source that is no text": "x = '\\ud800'; print(x); print('\\x00\\x1b[2J')",
}

# What looks for the text of another request, which begins with CANARY- and goes on with 32 hexadecimal digits.
_SPY = """
import re
def look(data, where):
    data = data if isinstance(data, (bytes, bytearray)) else str(data).encode('utf-8', 'replace')
    if re.search(b'CANA' + b'RY-[0-9a-f]{32}', data): print(WON, where, flush=True)
"""
_SCAN = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
libc.sbrk.restype = ctypes.c_void_p
out, into = os.pipe()
def scan(begin, end, where):
    for at in range(begin & ~4095, end, 4096):
        if libc.write(into, at, 4096) == 4096: look(os.read(out, 4096), where)
"""
SPIES = {
    "frames": "import sys\nframe = sys._getframe()\nwhile frame: look([frame.f_locals, frame.f_globals], 'frame'); frame = frame.f_back",
    "frames of all threads": "import sys\nfor f in sys._current_frames().values():\n    while f: look(f.f_locals, 'frame'); f = f.f_back",
    "the stack as inspect has it": "import inspect\nfor i in inspect.stack(): look(i.frame.f_locals, 'inspect')",
    "all objects": "import gc\nfor o in gc.get_objects():\n    try: look(repr(o)[:100000], 'gc')\n    except Exception: pass",
    "strings that objects refer to": """
import gc
for o in gc.get_objects():
    for r in gc.get_referents(o):
        if isinstance(r, (str, bytes, bytearray)): look(r, 'referent')
""",
    "frozen objects": "import gc\ngc.unfreeze()\nfor o in gc.get_objects(): look([r for r in gc.get_referents(o) if isinstance(r, (str, bytes, bytearray))], 'frozen')",
    "modules": "import sys\nfor m in list(sys.modules.values()):\n    try: look(vars(m), m)\n    except Exception: pass",
    "the main module": "import sys; look(vars(sys.modules['__main__']), 'main')",
    "lines that are kept": "import linecache; look(linecache.cache, 'linecache')",
    "arguments and environment": "import os, sys; look([sys.argv, sys.orig_argv, dict(os.environ)], 'arguments')",
    "own memory as a file": """
maps = open('/proc/self/maps').read().splitlines()
with open('/proc/self/mem', 'rb') as mem:
    for line in maps:
        begin, end = (int(x, 16) for x in line.split()[0].split('-'))
        try: mem.seek(begin); look(mem.read(end - begin), line)
        except (OSError, ValueError, OverflowError): pass
""",
    "the heap": _SCAN + "top = libc.sbrk(0); scan(top - (32 << 20), top, 'heap')",
    "arenas": _SCAN
    + "for o in (object(), 'x' * 100, b'y' * 600, [1], {1: 2}): scan(id(o) - (2 << 20), id(o) + (2 << 20), 'arena')",
    "the C stack": _SCAN
    + "here = ctypes.addressof(ctypes.c_int()); libc.pthread_self.restype = ctypes.c_void_p; me = libc.pthread_self(); scan(me - (1 << 20), me + (1 << 20), 'stack')",
    "memory that is not cleared": "import ctypes\nfor n in range(4, 24): look(ctypes.string_at(ctypes.cast(ctypes.CDLL(None).malloc, ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t))(1 << n), 1 << n), 'malloc')",
    "descriptors": "import os, fcntl\nfor fd in range(2048):\n    try: os.set_blocking(fd, False); look(os.read(fd, 1 << 16), fd)\n    except OSError: pass",
    "the control socket": "import socket\ns = socket.socket(fileno=63); s.setblocking(False)\ntry: look(s.recv(1 << 16, socket.MSG_PEEK), 'control')\nexcept OSError: pass\ns.detach()",
    "the output pipe": "import os\nos.set_blocking(1, False)\nlook(os.read(1, 1 << 16), 'output')",
    "files everywhere": """
import os
for top in ('.', '..', '../..', '/session', '/folders', '/tmp', '/home', '/var/tmp', '/dev/shm', '/run', '/agentrl'):
    for path, folders, names in os.walk(top):
        look([path, folders, names], path)
        for name in names:
            try: look(open(os.path.join(path, name), 'rb').read(1 << 20), name)
            except OSError: pass
""",
    "other processes": """
import os
for pid in range(1, 400):
    for name in ('environ', 'cmdline', 'mem', 'maps', 'cwd', 'root', 'task', 'fd'):
        try: look(open(f'/proc/{pid}/{name}', 'rb').read(1 << 16), pid); print(WON, pid, name) if pid != os.getpid() else 0
        except OSError: pass
""",
    "memory of the processes around": """
import ctypes, os
libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer(4096)
class V(ctypes.Structure): _fields_ = [('a', ctypes.c_void_p), ('n', ctypes.c_size_t)]
for pid in {os.getppid(), *range(1, 64), *range(max(1, os.getpid() - 64), os.getpid() + 64)} - {os.getpid()}:
    mine, theirs = V(ctypes.addressof(buffer), 4096), V(id(len) & ~4095, 4096)
    if libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0: print(WON, pid)
""",
}

_RAW_THREADS = """
import ctypes, mmap, platform
if platform.machine() != 'x86_64': raise SystemExit
flags = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000
code = b'\\xb8\\x38\\0\\0\\0\\xbf' + flags.to_bytes(4, 'little') + b'\\x31\\xf6\\x31\\xd2\\x4d\\x31\\xd2\\x4d\\x31\\xc0\\x0f\\x05'
code += b'\\x85\\xc0\\x74\\x01\\xc3\\xb8\\x22\\0\\0\\0\\x0f\\x05\\xeb\\xf7'
page = mmap.mmap(-1, 4096, prot=7); page.write(code)
make = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
made = 0
for _ in range(12000):
    if make() <= 0: break
    made += 1
"""
FLOODS = {
    "files opened": "kept = []\ntry:\n    while True: kept.append(open('/dev/null'))\nexcept OSError: pass\nif len(kept) > 100: print(WON)",
    "pipes opened": "import os\nkept = []\ntry:\n    while True: kept.append(os.pipe())\nexcept OSError: pass\nif len(kept) > 100: print(WON)",
    "socket pairs, full": """
import socket
kept = []
try:
    while True:
        kept += socket.socketpair()
        kept[-1].setblocking(False)
        while True:
            try: kept[-1].send(b'x' * 65536)
            except BlockingIOError: break
except OSError: pass
if len(kept) > 100: print(WON)
""",
    "large pipes": "import fcntl, os\nfor _ in range(20):\n    if fcntl.fcntl(os.pipe()[1], 1031, 1 << 20): print(WON)",
    "copies of the control socket": "import os\nkept = []\ntry:\n    while True: kept.append(os.dup(63))\nexcept OSError: pass\nif len(kept) > 100: print(WON)",
    "descriptors closed and others put in their places": "import os\nfor fd in range(256):\n    try: os.close(fd)\n    except OSError: pass\nos.pipe(); os.pipe(); os.pipe()",
    "1,200 nested folders": "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')",
    "nested folders as many as fit": "import os\nfor _ in range(100000):\n    os.mkdir('d' * 200); os.chdir('d' * 200)\nprint(WON)",
    "folders as many as fit": "import os\nfor n in range(100000): os.mkdir(str(n))\nprint(WON)",
    "files as many as fit": "for n in range(100000): open(str(n), 'w').close()\nprint(WON)",
    "links as many as fit": "import os\nfor n in range(100000): os.symlink('/' * 1000, str(n))\nprint(WON)",
    "hard links as many as fit": "import os\nopen('f', 'w').close()\nfor n in range(100000): os.link('f', str(n))\nprint(WON)",
    "a folder that cannot be listed, filled": """
import os
os.mkdir('d', 0o300)
for n in range(600):
    with open(f'd/{n}', 'wb') as f: f.write(b'x' * (1 << 20))
print(WON)
""",
    "folders that cannot be entered": "import os\nfor n in range(50):\n    os.mkdir(str(n)); open(f'{n}/f', 'w').write('x' * 9999); os.mkdir(f'{n}/e', 0)\nos.umask(0o777); os.mkdir('z'); open('y', 'w').close()",
    "deep folders that cannot be entered": "import os\nfor _ in range(300): os.mkdir('d', 0o300); os.chdir('d')\nos.mkdir('e', 0)",
    "names that are no text": "import os\nfor n in range(1, 256):\n    try: os.mkdir(bytes([n, 10, 255]))\n    except OSError: pass",
    "the home, removed": "import os, shutil\nhome = os.getcwd()\nshutil.rmtree(home, ignore_errors=True)\nos.chdir('/agentrl')\nos.rmdir(home); print(WON)",
    "the home, moved": "import os\nhome = os.getcwd(); os.rename(home, home + '2'); print(WON)",
    "a sparse file": "f = open('f', 'wb'); f.truncate(10 << 30); print(WON)",
    "room reserved": "import os\nfor n in range(100): os.posix_fallocate(os.open(str(n), os.O_CREAT | os.O_RDWR), 0, 8 << 20)\nprint(WON)",
    "files that have no name": "import os\nkept = []\nfor n in range(50):\n    f = os.open(str(n), os.O_CREAT | os.O_RDWR); os.unlink(str(n)); os.write(f, b'x' * (8 << 20)); kept.append(f)\nif len(kept) > 40: print(WON)",
    "files beside the home": "import os\nfor path in ('/session/x', '/folders/x', '../x', '../../x'):\n    try: os.mkdir(path); print(WON, path)\n    except OSError: pass",
    "threads by their bare call": _RAW_THREADS + "if made > 100: print(WON, made)\nimport os; os._exit(0)",
    "threads by their bare call, and then work": _RAW_THREADS + "while True: pass",
    "threads of Python": """
import threading, time
made = 0
try:
    for _ in range(1000): threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); made += 1
except RuntimeError: pass
if made > 100: print(WON, made)
""",
    "threads that print": "import threading\ndef f():\n    while True: print('x' * 10000)\nfor _ in range(30): threading.Thread(target=f, daemon=True).start()\nf()",
    "timers": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)\nsignal.signal(signal.SIGALRM, lambda *a: None)\nwhile True: pass",
    "one file read for ever": "while True: open(__import__('os').__file__).read()",
}

REACHING = {
    "a datagram by a socket pair": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); print(WON)",
    "packets by a socket pair": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); print(WON)",
    "a raw socket pair": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW); print(WON)",
    "a pair of another family": "import socket; socket.socketpair(socket.AF_INET, socket.SOCK_STREAM); print(WON)",
    "a socket pair with more bits": """
import ctypes
pair = (ctypes.c_int * 2)()
for family, kind in ((1, 2 | 1 << 32), (1 | 1 << 32, 2), (1, 2 | 0o2000000), (1, 5 | 0o4000)):
    if ctypes.CDLL(None).syscall(53, ctypes.c_ulong(family), ctypes.c_ulong(kind), 0, pair) == 0: print(WON, family, kind)
""",
    "a socket made of a pair": "import socket\na, b = socket.socketpair()\nfor f in (lambda: a.bind('x'), lambda: a.connect('x'), lambda: a.listen(), lambda: b.bind(chr(0) + 'x')):\n    try: f(); print(WON)\n    except OSError: pass",
    "several messages at once": "import ctypes, socket\na, b = socket.socketpair()\nif ctypes.CDLL(None).syscall(307, a.fileno(), ctypes.create_string_buffer(64), 0, 0) >= 0: print(WON)",
    "a descriptor down the control socket": "import array, socket\ns = socket.socket(fileno=63)\ns.sendmsg([b'd'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1]))]); print(WON)",
    "credentials down the control socket": "import socket, struct\ns = socket.socket(fileno=63)\ns.sendmsg([b'd'], [(socket.SOL_SOCKET, 2, struct.pack('3i', 1, 0, 0))]); print(WON)",
}
for _name, _command in {"own": 8, "signal": 10, "owner": 15, "lease": 1024, "notice": 1026}.items():
    for _bits, _more in {"": 0, ", with more bits": 1 << 32}.items():
        REACHING[f"fcntl's {_name}{_bits}"] = f"""
import ctypes, os, platform, socket
a, b = socket.socketpair()
number = 72 if platform.machine() == 'x86_64' else 25
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(number, a.fileno(), ctypes.c_ulong({_command} | {_more}), ctypes.c_long(os.getppid())) >= 0 or ctypes.get_errno() != 1: print(WON)
"""
for _name, _request in {"FIOSETOWN": 0x8901, "SIOCSPGRP": 0x8902, "TIOCSTI": 0x5412, "TIOCSCTTY": 0x540E}.items():
    for _bits, _more in {"": 0, ", with more bits": 1 << 32}.items():
        REACHING[f"ioctl's {_name}{_bits}"] = f"""
import ctypes, os, platform, socket
a, b = socket.socketpair()
number = 16 if platform.machine() == 'x86_64' else 29
libc, pid = ctypes.CDLL(None, use_errno=True), ctypes.c_int(os.getppid())
if libc.syscall(number, a.fileno(), ctypes.c_ulong({_request} | {_more}), ctypes.byref(pid)) >= 0 or ctypes.get_errno() != 1: print(WON)
"""

# By number, for x86_64: a call that is let through fails by its arguments, not with EPERM or ENOSYS.
_NUMBERS = {
    "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "socket": 41, "connect": 42, "sendmsg": 46, "bind": 49, "listen": 50,
    "ptrace": 101, "syslog": 103, "setuid": 105, "setpgid": 109, "setsid": 112, "setgroups": 116, "capset": 126,
    "rt_sigqueueinfo": 129, "mknod": 133, "personality": 135, "setpriority": 141, "sched_setparam": 142,
    "sched_setscheduler": 144, "modify_ldt": 154, "pivot_root": 155, "prctl": 157, "adjtimex": 159, "setrlimit": 160,
    "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "reboot": 169,
    "init_module": 175, "quotactl": 179, "setxattr": 188, "tkill": 200, "io_setup": 206, "timer_create": 222,
    "tgkill": 234, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "ioprio_set": 251, "inotify_init": 253, "inotify_add_watch": 254, "migrate_pages": 256, "unshare": 272,
    "move_pages": 279, "fanotify_init": 300, "open_by_handle_at": 304, "clock_adjtime": 305, "syncfs": 306, "setns": 308,
    "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "sched_setattr": 314, "seccomp": 317, "memfd_create": 319,
    "bpf": 321, "execveat": 322, "userfaultfd": 323, "pidfd_send_signal": 424, "io_uring_setup": 425, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsmount": 432, "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "landlock_restrict_self": 446, "memfd_secret": 447,
    "process_mrelease": 448, "cachestat": 451, "fchmodat2": 452, "statmount": 457, "listmount": 458,
    "setxattrat": 463, "open_tree_attr": 467, "file_setattr": 469, "a call of tomorrow": 470, "a call of next year": 600,
}  # fmt: skip
CALLS = {
    f"the call {name}": f"""
import ctypes, platform
if platform.machine() != 'x86_64': raise SystemExit
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall({number}, -1, -1, -1, -1, -1, -1) >= 0 or ctypes.get_errno() not in (1, 38): print(WON, ctypes.get_errno())
"""
    for name, number in _NUMBERS.items()
}
_CLONES = {"time": 0x80, "mounts": 0x20000, "cgroups": 0x2000000, "names": 0x4000000, "messages": 0x8000000}
_CLONES |= {"users": 0x10000000, "processes": 0x20000000, "networks": 0x40000000}
NAMESPACES = {
    f"a namespace of {name}": f"""
import ctypes, platform
libc = ctypes.CDLL(None)
number, unshare = (56, 272) if platform.machine() == 'x86_64' else (220, 97)
if libc.syscall(unshare, {flag}) == 0: print(WON, 'unshare')
for more in (17, 0x10D00, 0x10D00 & ~0x200):
    if libc.syscall(number, {flag} | more, 0, 0, 0, 0) >= 0: print(WON, more)
"""
    for name, flag in _CLONES.items()
}
NAMESPACES |= {
    "the home, unmounted": "import ctypes, os\nlibc = ctypes.CDLL(None)\nif libc.umount2(b'.', 2) == 0 or libc.umount2(os.getcwd().encode(), 2) == 0: print(WON)",
    "something mounted over the home": "import ctypes\nif ctypes.CDLL(None).mount(b'/usr', b'.', None, 4096, None) == 0: print(WON)",
    "the root, mounted again": "import ctypes\nif ctypes.CDLL(None).mount(None, b'/', None, 32, None) == 0: print(WON)",
}

FORGERIES = {
    "an answer of the server's, everywhere": """
import os
for fd in range(256):
    for line in (b'{"id": 0, "status": "ok", "output": "' + WON.encode() + b'", "cut": 0}\\n', b'P\\0\\0\\0\\0', b'X' * 9):
        if fd in (1, 2): continue
        try: os.write(fd, line)
        except OSError: pass
""",
    "a start, forged": "import os; os.write(63, b's')\nwhile True: pass",
    "trouble, forged": "import os; os.write(63, b'no process can be made')\nwhile True: pass",
    "a flood of ends": "import os\nos.set_blocking(63, False)\nwhile True:\n    try: os.write(63, b'd' * 65536)\n    except BlockingIOError: pass",
    "an end in mid-word": "import os\nfor n in range(256): os.write(63, bytes([n]))",
    "a control socket shut down": "import socket; socket.socket(fileno=63).shutdown(2)\nwhile True: pass",
    "a control socket shut down one way": "import socket; socket.socket(fileno=63).shutdown(0)",
    "output closed": "import os\nfor fd in (0, 1, 2): os.close(fd)\nwhile True: pass",
    "an exit at once": "import os; os._exit(77)",
    "an exit by a thread": "import os, threading; threading.Thread(target=os._exit, args=(1,)).start()\nwhile True: pass",
    "an end, and an exit": "import os; os.write(63, b'd'); os._exit(1)",
    "the loop, called again": "import sys; sys.modules['session'].serve(63)",
    "the session's own functions, replaced": "import sys\nfor m in ('session', 'walls', 'zygote', 'confinement'):\n    for n in list(vars(sys.modules.get(m, sys))): \n        if not n.startswith('__') and m in sys.modules: setattr(sys.modules[m], n, None)",
    "the zygote, called": "import sys\nz = sys.modules['zygote']\nprint(z.Zygote)\nz._try(None); print(WON)",
    "the dispatcher, called": "import sys\nm = sys.modules['dispatcher']\nm.Dispatcher.run(m.Dispatcher)",
}


def build_programs(targets: dict[str, object]) -> dict[str, str]:
    """Return every program by its name, with what is outside written in, ready to run."""
    programs = {**ENDLESS, **{name: code.format(**targets) for name, code in ATTACKS.items()}}
    for name, code in SPIES.items():
        programs[f"spy: {name}"] = _SPY + code
    for kind in (FLOODS, REACHING, CALLS, NAMESPACES, FORGERIES):
        programs.update(kind)
    return {name: PRELUDE + code for name, code in programs.items()}
