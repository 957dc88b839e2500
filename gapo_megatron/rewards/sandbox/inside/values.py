"""Values of a program encoded as JSON, and back."""

from __future__ import annotations

from typing import Any

MAX_NODES = 100_000
MAX_ITEMS = 2**24
"""Most items of a collection: four times as many as a reply of 8 MiB can hold."""


class ListNode:
    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val, self.next = val, next


class TreeNode:
    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val, self.left, self.right = val, left, right


def encode(value: Any) -> Any:
    """Encode a plain Python value as JSON; types that JSON lacks become {KIND: CONTENT}.

    Raises:
        TypeError: any other type, or a collection with more than `MAX_ITEMS`.
        RecursionError: nested too deeply, or cyclic.
    """
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else {"int": hex(value)}
    if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > MAX_ITEMS:
        raise TypeError(f"a value of {len(value)} items is too large to be compared")
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, (tuple, set, frozenset)):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {kind: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if hasattr(value, "val") and hasattr(value, "next"):
        return {"list_node": [encode(item) for item in _list_values(value)]}
    if hasattr(value, "val") and hasattr(value, "left") and hasattr(value, "right"):
        return {"tree_node": [encode(item) for item in _tree_values(value)]}
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared")


def decode(value: Any) -> Any:
    """Decode what `encode` wrote.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: `encode` did not write it.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "int":
        return int(content, 16)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    items = [decode(item) for item in content]
    if kind in ("list_node", "tree_node"):
        return list_node(items) if kind == "list_node" else tree_node(items)
    return {"tuple": tuple, "set": set}[kind](items)


def list_node(values: list[Any]) -> ListNode | None:
    """Build a linked list of the values."""
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head


def tree_node(values: list[Any]) -> TreeNode | None:
    """Build a binary tree from its values level by level, with None for a missing child."""
    if not values or values[0] is None:
        return None
    rest = iter(values[1:])
    root = TreeNode(values[0])
    level = [root]
    for node in level:  # grows as children are added
        for side in ("left", "right"):
            value = next(rest, None)
            if value is not None:
                child = TreeNode(value)
                setattr(node, side, child)
                level.append(child)
    return root


def _list_values(node: Any) -> list[Any]:
    values = []
    while node is not None:
        values.append(node.val)
        node = node.next
        if len(values) > MAX_NODES:
            raise RecursionError("the linked list has no end")
    return values


def _tree_values(root: Any) -> list[Any]:
    values, level = [], [root]
    for node in level:
        values.append(None if node is None else node.val)
        if node is not None:
            level += [node.left, node.right]
        if len(level) > MAX_NODES:
            raise RecursionError("the tree has no end")
    while values and values[-1] is None:
        values.pop()
    return values
