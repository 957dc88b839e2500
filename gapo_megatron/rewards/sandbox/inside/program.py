"""The processes that run a program."""

from __future__ import annotations

import builtins
import ctypes
import functools
import importlib
import os
import resource
import signal
import sys
import types
from collections.abc import Callable
from io import FileIO
from typing import Any, NoReturn

from gapo_megatron.rewards.sandbox.inside.channel import Channel
from gapo_megatron.rewards.sandbox.inside.values import ListNode, TreeNode, decode, encode

MAX_OPEN_FILES = 64
MAX_SIGNALS = 64  # pending signals and timers
SIGNALS_LEFT_TO_JUDGE = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
RECURSION_LIMIT = 600_000  # LiveCodeBench's
STACK_BYTES = 64 * 2**20
PR_SET_DUMPABLE = 4  # prctl(2)

COMMON_MODULES = (
    *("typing", "array", "time", "decimal", "fractions"),
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
"""Modules that judges of programming contests star-import for every program; later ones win. From
`string` on it is the list of LeetCode and LiveCodeBench, in their order."""

MODULES = (*COMMON_MODULES, "hashlib")
"""Modules that they also import by name; HumanEval adds hashlib."""


class _ModuleAndMember(types.ModuleType):
    """A module that is also its member of the same name: `bisect.insort(a, x)`, `bisect(a, x)`."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        vars(self).update(vars(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[self.__name__](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # `datetime.now()`
        return getattr(vars(self)[self.__name__], name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any]:  # `class Time(datetime)`
        return (vars(self)[self.__name__],)

    def __instancecheck__(self, value: Any) -> bool:  # `isinstance(x, datetime)`
        return isinstance(value, vars(self)[self.__name__])


@functools.cache
def common_names() -> dict[str, Any]:
    """Names that every program finds besides the builtins, with their values."""
    names: dict[str, Any] = {}
    for name in COMMON_MODULES:
        exec(f"from {name} import *", names)
    for name in MODULES:
        module = importlib.import_module(name)
        names[name] = _ModuleAndMember(module) if callable(getattr(module, name, 0)) else module
    return {name: value for name, value in names.items() if not hasattr(builtins, name)}


def confine(limits: dict[str, int], *, cpu_s: int) -> None:
    """Set the limits of a process of the program, which it cannot raise."""
    output, memory = limits["output_mib"] * 2**20, limits["memory_mib"] * 2**20
    bounds = {
        resource.RLIMIT_CPU: cpu_s + 1,  # `serve` checks the sum over all processes first
        resource.RLIMIT_FSIZE: output,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_STACK: min(STACK_BYTES, memory),
    }
    if os.getppid() == 1:  # without a user namespace all processes of the user would count
        bounds[resource.RLIMIT_NPROC] = limits["num_processes"]
        bounds[resource.RLIMIT_SIGPENDING] = MAX_SIGNALS
    for number, bound in bounds.items():
        hard = resource.getrlimit(number)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(number, (bound, bound))
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.setsid()  # from here on `serve` must be able to inspect it
    # If the machine runs out of memory, the kernel kills this process and not the trainer.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    # Slurm sends these to every process of a job, in any namespace.
    signal.pthread_sigmask(signal.SIG_SETMASK, SIGNALS_LEFT_TO_JUDGE)


def load(program: dict[str, str], name: str) -> dict[str, Any]:
    """Run the program as a module."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv[:] = ["program.py"]  # in place: `argv` was star-imported
    sys.setrecursionlimit(RECURSION_LIMIT)
    if hasattr(sys, "set_int_max_str_digits"):  # from Python 3.10.7 on it refuses 4,301 digits
        sys.set_int_max_str_digits(0)
    # Into the builtins, not the module: tests may call only what the program itself defines.
    vars(builtins).update(common_names(), ListNode=ListNode, TreeNode=TreeNode)
    exec(program["prelude"], module.__dict__)
    exec(compile(program["program"], "program.py", "exec"), module.__dict__)
    return module.__dict__


def become_program(program: dict[str, str], files: list[FileIO], limits: dict[str, int]) -> None:
    """Run the program for one test in this process, with its standard input, output and error."""
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    os.closerange(3, 1024)
    confine(limits, cpu_s=limits["cpu_s"])
    load(program, "__main__")


def serve_calls(program: dict[str, str], channel: Channel, limits: dict[str, int]) -> NoReturn:
    """Run the program in this process and answer calls of its functions."""
    confine(limits, cpu_s=limits["total_s"])
    namespace = None
    while True:
        request = channel.receive()
        try:
            _limit_call(limits["cpu_s"])
            if namespace is None:
                namespace = load(program, "program")
            channel.send({"value": call(request, namespace)})
        except BaseException as error:  # such as SystemExit
            channel.send({"error": f"{type(error).__name__}: {error}"[:500]})


def call(request: dict[str, Any], namespace: dict[str, Any]) -> Any:
    """Call a function of the program; return its encoded value."""
    function = _find(request["function"], namespace)
    args = [decode(value) for value in request["args"]]
    kwargs = {name: decode(value) for name, value in request["kwargs"].items()}
    return encode(function(*args, **kwargs))


def _limit_call(cpu_s: int) -> None:
    """Kill this process after this many CPU seconds from now, or one more.

    The program can undo this; then `wall_s` is the limit.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]  # `confine` has set it
    usage = resource.getrusage(resource.RUSAGE_SELF)
    bound = int(usage.ru_utime + usage.ru_stime) + cpu_s + 1
    resource.setrlimit(resource.RLIMIT_CPU, (min(bound, hard), hard))


def _find(names: list[str], namespace: dict[str, Any]) -> Callable[..., Any]:
    """Find a function by name, or a method of a new object by the names of class and method."""
    solution = namespace.get("Solution")
    if len(names) == 1 and hasattr(solution, names[0]):
        names = ["Solution", *names]
    if names[0] not in namespace:
        raise NameError(f"the program does not define {names[0]}")
    found = namespace[names[0]]
    for name in names[1:]:
        found = getattr(found(), name)
    return found
