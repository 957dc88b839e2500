"""What broken or hostile code of a user's own may do, as text: a function's body, by name.

`VALUES` are returned, `RAISED` are raised, and the rest runs; each in a namespace of `PRELUDE`. The
tests put them where a user's code is called, each beside healthy neighbours.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

_MODULES = {
    *("asyncio", "atexit", "builtins", "ctypes", "decimal", "fractions", "functools", "gc", "json"),
    *("locale", "mmap", "os", "pickle", "random", "re", "resource", "select", "signal", "socket"),
    *("subprocess", "sys", "tempfile", "threading", "time", "types", "warnings"),
}
"""Imported where a behaviour names them: a new worker must start fast."""

PRELUDE = """
from gapo_megatron.types import Outcome, Verdict

async def wait(): return True
async def several(): yield True
class Claims:
    def __init__(self, of): self.__dict__["of"] = of
    __class__ = property(lambda self: self.of)
    def __bool__(self): return True
    def __getattr__(self, name): return lambda *_: self
class Floats(float):
    def __float__(self): return "1"
class Leaves(float):
    def __float__(self): sys.exit(0)
class Item:
    def __init__(self, one): self.item = lambda: one
class Refuses:
    def __getattribute__(self, name): raise SystemExit(0)
class Text(str):
    def __str__(self): raise ValueError
    __repr__ = __eq__ = __str__
    __hash__ = str.__hash__
class Mute(Exception):
    def __str__(self): raise ValueError
class Exits(Exception):
    def __str__(self): sys.exit(0)
class Number(Exception):
    def __str__(self): return 5
class Meta(type):
    __name__ = property(lambda cls: 1 / 0)
class Nameless(Exception, metaclass=Meta): pass
class Loud(Exception):
    def __str__(self): return "x" * 10**7
def cyclic():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one
def deep(n=50_000):
    one = []
    for _ in range(n): one = [one]
    return one
def own_list():
    one = []
    one.append(one)
    return one
"""
"""Stands before every behaviour."""

_OBJECTS = """
    'correct' | b'1' | '' | '1' | [] | [True] | (True,) | {} | {'correct': True} | {1} | frozenset()
    object() | int | type | len | lambda: True | ... | NotImplemented | 1j | range(3) | slice(1)
    memoryview(b'1') | bytearray(b'1') | iter([1]) | (one for one in [1]) | wait() | several()
    Exception() | ValueError | sys | open(os.devnull) | threading.Lock() | re.match('a', 'a')
    types.SimpleNamespace(outcome=Outcome.CORRECT) | Outcome | Outcome.CORRECT | Verdict | deep()
    own_list() | Claims(str) | Claims(dict) | Refuses() | Text('correct') | Item('correct')
    Item(None) | np.array([1, 1]) | np.array([]) | np.str_('1') | np.datetime64('2020-01-01')
    np.void(b'1') | np.array('1') | np.array([None]) | np.complex64(1) | decimal.Decimal('0.9')
"""
OBJECTS = [one.strip() for line in _OBJECTS.strip().splitlines() for one in line.split(" | ")]
"""Neither a verdict, nor a number, nor a list of tokens."""

_NUMBERS = """
    float('nan') | float('inf') | -float('inf') | 10**400 | -10**400 | 1e7 | -1e7
    np.float32('nan') | np.float64('inf') | fractions.Fraction(10**400) | Floats(1) | Leaves(1)
    np.int64(10**7) | Claims(bool) | Claims(float) | Verdict('correct') | Verdict(True)
    Verdict(None) | Verdict(Outcome.CORRECT, grade='1')
    Verdict(Outcome.CORRECT, grade=float('nan'))
    Verdict(Outcome.CORRECT, grade=1e9) | Verdict(Outcome.CORRECT, grade=[])
    Verdict(Outcome.CORRECT, grade=Leaves(1)) | Verdict(Outcome.CORRECT, Text('because'))
    Verdict(Outcome.WRONG, 'x' * 10**7) | Claims(Verdict)
"""
NUMBERS = [one.strip() for line in _NUMBERS.strip().splitlines() for one in line.split(" | ")]
"""Numbers and verdicts that are none."""

_RAISED = """
    Exception | ValueError('x') | KeyError(5) | BaseException('x') | KeyboardInterrupt
    SystemExit | SystemExit(0) | SystemExit('x') | GeneratorExit | MemoryError | RecursionError
    StopIteration(True) | StopAsyncIteration | AssertionError | OSError(5, 'x') | Warning
    UnicodeDecodeError('a', b'', 0, 1, 'x') | asyncio.CancelledError | EOFError | BrokenPipeError
    ExceptionGroup('x', [ValueError()]) | BaseExceptionGroup('x', [SystemExit()]) | TimeoutError
    Mute | Exits | Number | Nameless | Loud | cyclic() | ValueError('\\ud800')
    ValueError('\\0' * 9) | None
"""
RAISED = [one.strip() for line in _RAISED.strip().splitlines() for one in line.split(" | ")]

PATCHES = {
    "json": "json.dumps = json.loads = None",
    "json that lies": 'json.dumps = lambda *_, **__: \'[0, "correct", "", null]\'',
    "pickle": "pickle.dumps = pickle.loads = None",
    "time": "time.time = time.monotonic = time.sleep = None",
    "os.write": "os.write = None",
    "os.getpid": "os.getpid = lambda: 5",
    "the garbage collector": "gc.disable(); gc.freeze(); gc.set_threshold(1)",
    "the modules": "sys.modules.clear()",
    "the path": "sys.path.clear(); sys.meta_path.clear()",
    "imports": "sys.meta_path.insert(0, Refuses())",
    "tracing": "sys.settrace(lambda *_: 1 / 0)",
    "profiling": "sys.setprofile(lambda *_: 1 / 0)",
    "hooks": "sys.excepthook = threading.excepthook = sys.unraisablehook = None",
}
"""Code of others that it replaces for the whole process."""

STATE = {
    "the folder": "os.chdir('/')",
    "a folder that is gone": "os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())",
    "the umask": "os.umask(0o777)",
    "the environment": "os.environ.clear()",
    "much environment": "os.environ['GAPO'] = 'x' * 2**20",
    "the recursion limit": "sys.setrecursionlimit(max(60, len(__import__('inspect').stack()) + 9))",
    "the streams": "sys.stdout = sys.stderr = sys.stdin = None",
    "warnings": "warnings.simplefilter('error')",
    "seeds": "random.seed(1); np.random.seed(1)",
    "the locale": "locale.setlocale(locale.LC_ALL, 'C')",
    "the end": "atexit.register(lambda: 1 / 0)",
    "the priority": "os.nice(1)",
    "a thread": "threading.Thread(target=lambda: time.sleep(3600), daemon=True).start()",
    "a thread that raises": "threading.Thread(target=lambda: sys.exit(3), daemon=True).start()",
    "the switch interval": "sys.setswitchinterval(10)",
}
"""State of the whole process that it changes."""


def source(body: str) -> str:
    """A module with the body as a function `behaves` of any arguments."""
    code = f"{PRELUDE}\ndef behaves(*given, **row):\n{textwrap.indent(body, '    ')}\n"
    used = {*re.findall(r"\b(\w+)\.", code)}
    imports = [f"import {one}" for one in sorted(_MODULES & used)]
    imports += ["import numpy as np"] if "np" in used else []
    return "\n".join([*imports, code])


def function(body: str) -> Callable[..., Any]:
    """The body as a function, in a namespace of its own."""
    space: dict[str, Any] = {}
    exec(compile(source(body), "behaviour", "exec"), space)
    return space["behaves"]


def verifier_file(cases: Mapping[str, str]) -> str:
    """A verifier that behaves as the response says, or well."""
    return f"""
import json
from tests.hostile.behaviours import function

CASES = json.loads({json.dumps(cases)!r})

def verify(response, answer, **row):
    if response == "fine":
        return answer == "1" and row["levels"] == [1]
    return function(CASES[response])(response, answer, **row)
"""
