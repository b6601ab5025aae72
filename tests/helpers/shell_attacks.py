"""Commands that would like to do harm. One that gets what it wants prints $W, which its own text does not spell."""

from __future__ import annotations

from os.path import expanduser

_HOME = expanduser("~root")  # the host's
SOCKET = "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('socket')\" || ln -s /nowhere socket"
_CALL = "python3 -c \"import ctypes, os; c = ctypes.CDLL(None); print(os.environ['W'] if {0} else 'no')\""

QUICK_SHELL_ATTACKS = {
    "read the users": "grep -q root: /etc/passwd && echo $W; grep -q root /etc/shadow && echo $W",
    "list the host": f"ls {_HOME}/.ssh /var /boot /sys >/dev/null 2>&1 && echo $W",
    "climb out": f"cd /proc/1/root 2>/dev/null && echo $W; ls /home/../..{_HOME}/.bashrc 2>/dev/null && echo $W",
    "write to /": "touch /x 2>/dev/null && echo $W; mkdir /etc/x 2>/dev/null && echo $W; touch /home/x/../../y 2>/dev/null && echo $W",
    "write to /usr": "touch /usr/x 2>/dev/null && echo $W; touch /usr/bin/bash 2>/dev/null && echo $W",
    "write to the agent": "echo >> /agentrl/agent.py && echo $W",
    "a folder that is mounted": "touch /dev/x && echo $W; touch /proc/x && echo $W; rm -rf /dev /agentrl 2>/dev/null; test -e /dev/null || echo $W",
    "the core pattern": "echo x > /proc/sys/kernel/core_pattern && echo $W",
    "sysrq": "echo h > /proc/sysrq-trigger && echo $W",
    "oom scores": "echo -1000 > /proc/self/oom_score_adj && echo $W; echo 1000 > /proc/1/oom_score_adj && echo $W",
    "the agent's environment": "cat /proc/1/environ && echo $W; tr '\\0' '\\n' < /proc/1/environ | grep -q = && echo $W",
    "the agent's memory": "dd if=/proc/1/mem bs=1 count=1 skip=4194304 && echo $W; cat /proc/1/maps && echo $W",
    "the agent's descriptors": "ls /proc/1/fd && echo $W; echo '{\"exit_code\": 0, \"stdout\": \"\"}' > /proc/1/fd/1 && echo $W",
    "answers on descriptors of one's own": "for n in 3 4 5 6 7 8 9; do echo '{\"ready\": true}' >&$n && echo $W; done 2>/dev/null",
    "answers on standard output": "echo '{\"exit_code\": 0, \"stdout\": \"\", \"stderr\": \"\", \"cut\": 0}'",
    "stop the agent": "kill -STOP 1; kill -STOP -1; echo",
    "kill the agent": "kill -9 1; kill -KILL -1; echo",
    "every signal to all": "for n in $(seq 1 64); do kill -$n 1 2>/dev/null; done; echo",
    "kill its own group": "kill -9 0",
    "a stopped shell": "kill -STOP $$",
    "signals to numbers": "for n in $(seq 2 400); do kill -9 $n 2>/dev/null && test $n -ne $$ && kill -0 $n 2>/dev/null; done; echo",
    "trace the agent": _CALL.format("c.ptrace(16, 1, 0, 0) == 0 or c.ptrace(0x4206, 1, 0, 0) == 0"),
    "read another's memory": _CALL.format("c.process_vm_readv(1, 0, 0, 0, 0, 0) >= 0"),
    "the agent's limits": _CALL.format("c.syscall(302, 1, 7, ctypes.create_string_buffer(16), 0) == 0"),
    "one's own limits": "ulimit -Hn 100000 && echo $W; ulimit -u unlimited && echo $W; ulimit -v unlimited && echo $W",
    "a user namespace": "unshare -U true && echo $W; unshare -r true && echo $W; unshare -m true && echo $W; unshare -n true && echo $W",
    "a user namespace by clone": _CALL.format("c.syscall(56, 0x10000011, 0, 0, 0, 0) > 0"),
    "a user namespace by clone3": _CALL.format("c.syscall(435, (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17), 88) > 0"),
    "another's namespaces": "nsenter -t 1 -m true && echo $W; nsenter -t 1 -U true && echo $W",
    "mounts": "mount -t tmpfs x /home/agent && echo $W; mount -o remount,rw / && echo $W; mount --bind /usr /tmp && echo $W; umount /tmp && echo $W",
    "new mounts": _CALL.format("c.syscall(430, b'tmpfs', 0) >= 0 or c.syscall(428, -100, b'/', 1) >= 0 or c.syscall(442, -100, b'/', 0, 0, 0) == 0"),
    "another root": "chroot . true && echo $W; pivot_root . . && echo $W",
    "become root": "su -c true && echo $W; sudo true && echo $W; python3 -c 'import os; os.setuid(0)' 2>/dev/null && echo $W",
    "a set-user-id program": "cp /bin/true t; chmod 4755 t; ./t; find t -uid 0 | grep -q t && echo $W",
    "programs of root's": "find /usr -perm -4000 2>/dev/null | head -3 | while read f; do $f --help >/dev/null 2>&1; done; test $(id -u) = 0 && echo $W",
    "a device": "mknod d b 8 0 && echo $W; mknod c c 1 1 && cat c && echo $W",
    "tcp": "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 1)' 2>/dev/null && echo $W; (exec 3<>/dev/tcp/127.0.0.1/22) 2>/dev/null && echo $W",
    "sockets": "for k in '2, 1' '2, 2' '1, 1' '16, 3' '17, 3' '40, 1'; do python3 -c \"import socket; socket.socket($k)\" 2>/dev/null && echo $W; done; true",
    "shared memory": "ipcmk -M 100 && echo $W; ipcmk -S 1 && echo $W; ipcmk -Q && echo $W; touch /dev/shm/x && echo $W",
    "kernel": "dmesg 2>/dev/null | head -1 | grep -q . && echo $W; " + _CALL.format("c.syscall(321, 0, 0, 0) >= 0 or c.syscall(425, 1, 0) >= 0 or c.syscall(323, 0) >= 0 or c.syscall(298, 0, 0, -1, -1, 0) >= 0"),
    "keys": _CALL.format("c.syscall(250, 0, -3, 0) >= 0"),
    "calls of another number": _CALL.format("c.syscall(0x40000000 + 39) >= 0 or c.syscall(500) >= 0"),
    "the host's name and clock": "hostname x && echo $W; date -s 2001-01-01 >/dev/null && echo $W",
    "an endless reply": "head -c 30000000 /dev/zero | tr '\\0' x; head -c 3000000 /dev/zero | tr '\\0' y >&2",
    "bytes that are no text": "head -c 50000 /dev/urandom; printf '\\n\\0\\377{\"error\": 1}\\n'",
    "closed outputs": "exec 1>&- 2>&- 0<&-; sleep 0.1",
    "an output kept open": "(trap '' HUP; setsid sleep 1000) & echo",
    "a home that is gone": "rm -rf /home/agent /home/* /tmp/*; mkdir -p /home/agent 2>/dev/null; echo",
    "a home without rights": "chmod 0 /home/agent; sleep 0.1; chmod 755 /home/agent",
    "deep folders": "for i in $(seq 1 300); do mkdir d && cd d || break; done; echo",
    "a folder without rights": "mkdir -p a/b/c && chmod 0300 a/b && chmod 0 a; chmod -R 755 a",
}  # fmt: skip

HEAVY_SHELL_ATTACKS = {
    "no end": "while true; do :; done",
    "no end, unheard": "trap '' TERM INT HUP QUIT TSTP CONT; while true; do sleep 1; done",
    "output without end": "yes",
    "a fork bomb": "f() { f | f & }; f; sleep 5",
    "a fork bomb in sessions": "f() { setsid bash -c \"$(declare -f f); f\" & f & }; f; sleep 5",
    "a fork bomb of stopped ones": "f() { (kill -STOP $BASHPID) & f; }; f",
    "a fork bomb that ends others": "f() { kill -9 -1; f | f & }; f; sleep 3",
    "threads": "python3 -c 'import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()'",
    "threads by clone": "python3 - <<'P'\nimport ctypes\nc = ctypes.CDLL(None)\ns = ctypes.create_string_buffer(1 << 20)\nn = 0\n"
                        "while c.clone(c.pause, ctypes.byref(s, 1 << 19), 0x10d0f00, 0) > 0 and n < 5000: n += 1\n"
                        "import os\nif n > 1000: print(os.environ['W'])\nP",
    "a full disk": "n=0; while head -c 10000000 /dev/zero > f$n && test $n -lt 20; do n=$((n + 1)); done; test $n -gt 10 && echo $W",
    "a full disk of temporary files": "n=0; while head -c 10000000 /dev/zero > /tmp/f$n && test $n -lt 20; do n=$((n + 1)); done; "
                                      "head -c 10000000 /dev/zero > g; head -c 10000000 /dev/zero > h; test $(du -sm /tmp /home | awk '{n += $1} END {print n}') -gt 33 && echo $W",
    "no files left": "python3 -c 'import os\nn = 0\ntry:\n    while n < 100000: open(f\"f{n}\", \"w\"); n += 1\nexcept OSError: pass\nif n > 20000: print(os.environ[\"W\"])'",
    "deleted files that are open": "python3 -c 'import os, time\nk = []\nfor i in range(90):\n    k.append(open(\"x\", \"wb\")); os.unlink(\"x\"); k[-1].write(b\"x\" * (1 << 20)); k[-1].flush()\nprint(os.environ[\"W\"])'",
    "memory": "python3 -c \"import os; x = b'x' * (300 << 20); print(os.environ['W'])\"",
    "memory of many": "for i in $(seq 20); do python3 -c \"x = b'x' * (150 << 20); import time; time.sleep(60)\" & done; sleep 3; "
                      "test $(ps -eo rss | awk '{n += $1} END {print int(n / 1024)}') -gt 2000 && echo $W",
    "shared memory of many": "python3 -c \"import mmap, os, time\nfor _ in range(6): os.fork()\nm = mmap.mmap(-1, 100 << 20); m.write(b'x' * (100 << 20)); time.sleep(60)\"",
    "a stopped agent of work": "(while true; do kill -STOP -1; done) & sleep 1",
    "what ends whoever comes": "setsid bash -c 'while true; do kill -9 -1; done' & sleep 0.5",
    "a thousand left behind": "for i in $(seq 1000); do setsid sleep 1000 & done; sleep 1",
}  # fmt: skip
