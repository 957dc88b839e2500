"""The processes in which a program runs."""

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
MAX_SIGNALS = 64  # that wait to be delivered, and timers that send them
SIGNALS_LEFT_TO_JUDGE = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
RECURSION_LIMIT = 600_000  # LiveCodeBench's
STACK_BYTES = 64 * 2**20
PR_SET_DUMPABLE = 4  # prctl(2)

COMMON_MODULES = (
    *("typing", "array", "time", "decimal", "fractions"),
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
"""What judges of programming contests import for every program, with all that is in them; where two
have a name, the later has it. From `string` on it is the list of LeetCode and LiveCodeBench, in
their order."""

MODULES = (*COMMON_MODULES, "hashlib")
"""What they import by its name, with the one more that those of HumanEval do."""


class _ModuleAndMember(types.ModuleType):
    """A module, and what it has by its own name: `bisect.insort(a, x)` and `bisect(a, x)`."""

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
    """The names that every program finds beside the built-in ones, and what they are."""
    names: dict[str, Any] = {}
    for name in COMMON_MODULES:
        exec(f"from {name} import *", names)
    for name in MODULES:
        module = importlib.import_module(name)
        names[name] = _ModuleAndMember(module) if callable(getattr(module, name, 0)) else module
    return {name: value for name, value in names.items() if not hasattr(builtins, name)}


def confine(limits: dict[str, int], *, cpu_s: int) -> None:
    """Set the limits of one process of the program; it cannot raise them."""
    output, memory = limits["output_mib"] * 2**20, limits["memory_mib"] * 2**20
    bounds = {
        resource.RLIMIT_CPU: cpu_s + 1,  # the sum over all processes comes first
        resource.RLIMIT_FSIZE: output,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_STACK: min(STACK_BYTES, memory),
    }
    if os.getppid() == 1:  # outside a user namespace all that the user has would count
        bounds[resource.RLIMIT_NPROC] = limits["num_processes"]
        bounds[resource.RLIMIT_SIGPENDING] = MAX_SIGNALS
    for number, bound in bounds.items():
        hard = resource.getrlimit(number)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(number, (bound, bound))
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.setsid()  # from here on `serve` must be able to look into it
    # Where the machine runs out of memory the kernel ends this process, and not the trainer.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    # A scheduler sends them to every process of a job, whatever namespace that is in.
    signal.pthread_sigmask(signal.SIG_SETMASK, SIGNALS_LEFT_TO_JUDGE)


def _load(program: dict[str, str], name: str) -> dict[str, Any]:
    """Run the program as a module."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv[:] = ["program.py"]  # which `argv` alone is too
    sys.setrecursionlimit(RECURSION_LIMIT)
    # Beside the built-in names, which they do not replace: only what the program defines itself
    # can be called as its own.
    vars(builtins).update(common_names(), ListNode=ListNode, TreeNode=TreeNode)
    exec(program["prelude"], module.__dict__)
    exec(compile(program["program"], "program.py", "exec"), module.__dict__)
    return module.__dict__


def become_program(program: dict[str, str], files: list[FileIO], limits: dict[str, int]) -> None:
    """Be the program for one test, with its standard input, output and error."""
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    os.closerange(3, 1024)
    confine(limits, cpu_s=limits["cpu_s"])
    _load(program, "__main__")


def serve_calls(program: dict[str, str], channel: Channel, limits: dict[str, int]) -> NoReturn:
    """Be the program for all tests of its functions."""
    confine(limits, cpu_s=limits["total_s"])
    namespace = None
    while True:
        request = channel.receive()
        try:
            _limit_call(limits["cpu_s"])
            if namespace is None:
                namespace = _load(program, "program")
            function = _find(request["function"], namespace)
            args = [decode(value) for value in request["args"]]
            kwargs = {name: decode(value) for name, value in request["kwargs"].items()}
            channel.send({"value": encode(function(*args, **kwargs))})
        except BaseException as error:  # the program may raise SystemExit too
            channel.send({"error": f"{type(error).__name__}: {error}"[:500]})


def _limit_call(cpu_s: int) -> None:
    """End this process once it has used so many CPU seconds from now on, or one more.

    The program can undo this, and then has until `wall_s`.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]  # `confine` has set it
    usage = resource.getrusage(resource.RUSAGE_SELF)
    bound = int(usage.ru_utime + usage.ru_stime) + cpu_s + 1
    resource.setrlimit(resource.RLIMIT_CPU, (min(bound, hard), hard))


def _find(names: list[str], namespace: dict[str, Any]) -> Callable[..., Any]:
    """A function by its name, or a method of a new object by the names of class and method."""
    solution = namespace.get("Solution")
    if len(names) == 1 and hasattr(solution, names[0]):
        names = ["Solution", *names]
    if names[0] not in namespace:
        raise NameError(f"the program does not define {names[0]}")
    found = namespace[names[0]]
    for name in names[1:]:
        found = getattr(found(), name)
    return found
