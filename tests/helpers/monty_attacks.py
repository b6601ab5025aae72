"""Programs against monty. One that gets what it wants prints WON, which no error spells."""

from __future__ import annotations

PRELUDE = "WON = 'ESC' + 'APED'\n"

MONTY_ATTACKS = {
    'no end': 'while True: pass',
    'a huge power': 'x = 10 ** (10 ** 9)',
    'an integer that grows': 'x=2\nwhile True: x = x*x',
    'a huge string': 'x="a"*(10**11)',
    'a string that grows': 'x="a"\nwhile True: x+=x',
    'a huge list': 'x=[0]*(10**11)',
    'a list that grows': 'x=[]\nwhile True: x.append("a"*1000+str(len(x)))',
    'deep recursion': 'def f(): return f()\nf()',
    'deep recursion of lambdas': 'f=lambda: f()\nf()',
    'deep parentheses': "(" * 9000 + "1" + ")" * 9000,
    'a long sum': "+".join(["1"] * 9900),
    'deep lambdas': "lambda: " * 2000 + "1",
    'deep f-strings': "f'{" * 500 + "1" + "}'" * 500,
    'a deep list': 'x=[]\nfor i in range(1000000): x=[x]\nx',
    'deep lists that are compared': 'x=[]\ny=[]\nfor i in range(100000):\n    x=[x]\n    y=[y]\nx==y',
    'a deep tuple that is hashed': 'x=()\nfor i in range(100000): x=(x,)\nhash(x)',
    'a list in itself': 'x=[]\nx.append(x)\nx',
    'output without end': 'while True: print("x"*1000000)',
    'a value of 100 MB': '"x"*100_000_000',
    'a value of many strings': '["x"*1000]*100000',
    'a value that is small there and endless here': 'x=[1]\nfor i in range(40): x=[x,x]\nx',
    'an integer of a million digits': 'print(10**1000000)',
    'a huge shift': '1<<100_000_000',
    'an error of 100 MB': 'raise ValueError("x"*100_000_000)',
    'an error whose text raises': (
        'class E(Exception):\n'
        '    def __repr__(self): raise E\n'
        '    def __str__(self): raise E\n'
        'raise E("a")'
    ),
    'a value whose text raises': 'class A:\n    def __repr__(self): raise ValueError\nA()',
    'a pattern that backtracks': 'import re\nre.match(r"(a+)+$","a"*64+"b")',
    'a pattern that grows': 'import re\nre.compile("(a{1000}){1000}")',
    'a deep pattern': 'import re\nre.compile("("*9000+")"*9000)',
    'a wide field': '"{:1000000000}".format(1)',
    'a wide field of percent': '"%1000000000d" % 1',
    'attributes by a format': 'print("{0.__class__.__mro__}".format(1), WON)',
    'sleep': 'import time\ntime.sleep(1000)',
    'read the users': 'print(WON, open("/etc/passwd").read())',
    'the environment': 'import os\nprint(WON, os.environ)',
    'list the host': 'import os\nprint(WON, os.listdir("/"))',
    'import by name': 'print(WON, __import__("os").system("id"))',
    'subclasses of all': 'print(WON, ().__class__.__bases__[0].__subclasses__())',
    'a comparison without end': 'class A:\n    def __lt__(s,o):\n        while True: pass\nsorted([A(),A()])',
    'a sum without end': 'sum(i for i in range(10**12))',
    'a huge range': 'list(range(10**12))',
    'a huge join': '",".join(["x"*1000]*10**7)',
    'a huge replacement': '("a"*10**6).replace("a","b"*10**6)',
    'a long numeral': 'int("9"*10_000_000)',
    'no end, and all is caught': 'while True:\n    try:\n        while True: pass\n    except BaseException: pass',
    'memory, and all is caught': (
        'x=[]\n'
        'while True:\n'
        '    try:\n'
        '        while True: x.append("a"*1000000+str(len(x)))\n'
        '    except BaseException: pass'
    ),
    'a function of the host': 'print(undefined_function([1]), WON)',
    'a NUL': 'print("\\0")',
    'input': 'print(input(), WON)',
    'exit': 'exit()',
    'raise SystemExit': 'raise SystemExit(1)',
    'raise KeyboardInterrupt': 'raise KeyboardInterrupt',
    'a time limit that is none': 'raise TimeoutError("time limit")',
    'deep JSON': 'import json\njson.loads("["*100000)',
    'deep JSON, written': 'import json\nx=[]\nfor i in range(100000): x=[x]\njson.dumps(x)',
    'a deep dictionary': 'x={}\nfor i in range(100000): x={1:x}\nstr(x)',
    'deep closures': 'f=lambda: 0\nfor i in range(1000000):\n    g=f\n    f=lambda g=g: g()\nf()',
    'deep sets': 'x=frozenset()\nfor i in range(100000): x=frozenset([x])\nx',
    'return at the top': 'x = [1]\nfor i in range(40): x = [x, x]\nreturn x',
    'functions of its own under the names of ours': (
        'def print(*a): return a\n'
        'def repr(x): return x\n'
        'def str(x): return x\n'
        'def exec(x): return [x]\n'
        'class LookupError: pass\n'
        '1'
    ),
    'names of ours': '_code = _shown = _parses = _most = _value = None\n_value',
    'code that closes ours': '1)\nprint("a"',
    'an exit from what is around it': '")\nNone\n"',
    'modules of the host': (
        'for n in ("ctypes", "socket", "subprocess", "builtins", "importlib", "gc", "inspect", "threading"):\n'
        '    try:\n'
        '        exec("import " + n)\n'
        '        print(WON, n)\n'
        '    except ImportError: pass'
    ),
    'write': (
        'for p in ("/tmp/x", "x", "/dev/shm/x"):\n'
        '    try:\n'
        '        open(p, "w").write("x")\n'
        '        print(WON)\n'
        '    except OSError: pass'
    ),
    'the frame': 'import sys\nprint(sys._getframe(), WON)',
    'a network by asyncio': 'import asyncio\nprint(asyncio.open_connection("127.0.0.1", 80), WON)',
    'the pool by a value': 'print, open, len, print.__self__, WON',
    'an exec in an exec': 'c = "exec(c)"\nexec(c)',
    'coroutines without end': (
        'import asyncio\n'
        'async def f():\n'
        '    while True: await asyncio.sleep(0)\n'
        'asyncio.run(f())'
    ),
}  # fmt: skip
