"""The process in which the asserts of a problem run."""

from __future__ import annotations

import ast
import builtins
import os
from typing import Any, NoReturn

from gapo_megatron.rewards.sandbox.inside.channel import Channel
from gapo_megatron.rewards.sandbox.inside.program import common_names, confine
from gapo_megatron.rewards.sandbox.inside.values import (
    ListNode,
    TreeNode,
    decode,
    encode,
    list_node,
    tree_node,
)

_NEW_SOLUTION = ast.dump(ast.parse("Solution()", mode="eval").body)


class _UnreadableError(BaseException):
    """The tests cannot be run; no fault of the program."""


def _equal_nodes(one: Any, other: Any) -> bool:
    return bool(encode(one) == encode(other))


class _Remote:
    """Stands for a name of the program in the asserts; a call is sent to the judge."""

    def __init__(self, names: list[str], session: _Session) -> None:
        self._names, self._session = names, session

    def __getattr__(self, name: str) -> _Remote:
        if self._names != ["Solution"]:
            self._session.give_up(f"use {'.'.join([*self._names, name])}, an attribute")
        return _Remote([*self._names, name], self._session)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._names == ["Solution"]:
            return self
        return self._session.call(self._names, args, kwargs)


class _Session(dict[str, Any]):
    """Globals of the asserts: usual imports, code of the problem, and names of the program."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(
            ListNode=ListNode,
            TreeNode=TreeNode,
            list_node=list_node,
            tree_node=tree_node,
            is_same_list=_equal_nodes,
            is_same_tree=_equal_nodes,
        )
        self.num_calls, self.fault = 0, ""
        self._channel = channel
        self._theirs: set[str] = set()

    def run(self, *, prelude: str, code: str, entry_point: str) -> None:
        """Run the tests, and raise what they raise."""
        usual = common_names()
        self.update(usual)
        exec(compile(prelude, "prelude.py", "exec"), self)
        own = {name for name, value in self.items() if value is not usual.get(name, self)}
        tree = ast.parse(code, "tests.py")
        free = _free_names(tree) - own - vars(builtins).keys()
        self._theirs = {entry_point} if entry_point else _choose(tree, free, usual)
        if undefined := free - self._theirs - usual.keys():
            self.give_up(f"use {min(undefined)}, which neither they nor the problem define")
        if line := _dropped_value(tree, self._theirs):
            self.give_up(f"ignore in line {line} the value that the program returns")
        for name in self._theirs:
            self.pop(name, None)
        exec(compile(tree, "tests.py", "exec"), self)
        if entry_point:
            self["check"](_Remote([entry_point], self))

    def __missing__(self, name: str) -> _Remote:
        if name in self._theirs:
            return _Remote([name], self)
        raise KeyError(name)

    def call(self, names: list[str], args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            request = {
                "function": names,
                "args": [encode(value) for value in args],
                "kwargs": {name: encode(value) for name, value in kwargs.items()},
            }
        except TypeError as error:
            self.give_up(f"call the program with an argument that cannot be sent: {error}")
        self.num_calls += 1
        self._channel.send(request)
        return decode(self._channel.receive()["value"])

    def give_up(self, fault: str) -> NoReturn:
        self.fault = self.fault or fault  # known even if the tests catch the exception
        raise _UnreadableError(fault)


def _free_names(tree: ast.AST) -> set[str]:
    """Names that the tests use and never define."""
    used, defined = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return used - defined


def _choose(tree: ast.AST, free: set[str], usual: dict[str, Any]) -> set[str]:
    """Choose the free names that the program must define.

    These are the names that the tests call or pass to a function of their own. A usual import, such
    as `gcd`, belongs to the program only if it is the only such name.
    """
    called = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
            if node.func.id not in free:
                called |= {arg.id for arg in node.args if isinstance(arg, ast.Name)}
    called &= free
    return called - usual.keys() or (called if len(called) == 1 else set())


def _dropped_value(tree: ast.AST, theirs: set[str]) -> int:
    """The line of a call of the program whose value is ignored; 0 if there is none."""
    names = theirs | {"candidate"}  # parameter of `check` in every data set
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.dump(node.value) == _NEW_SOLUTION:
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _root(node.value) in names:
            return node.lineno
    return 0


def _root(node: ast.AST) -> str:
    """The first name of a chain of calls and attributes."""
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def check(tests: dict[str, str], channel: Channel, limits: dict[str, int]) -> NoReturn:
    """Run the asserts of a problem against the program in the other sandbox."""
    confine(limits, cpu_s=limits["total_s"])
    session = _Session(channel)
    failure = None
    try:
        session.run(**tests)
    except BaseException as error:
        failure = _place(error)
    channel.send({"num_calls": session.num_calls, "fault": session.fault, "failure": failure})
    os._exit(0)


def _place(error: BaseException) -> str:
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "tests.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{type(error).__name__} in line {line} of the tests: {error}"[:500]
