"""Scores of the package reasoning-gym, for the problems that it generated (`data.reasoning_gym`).

The answer of a row holds all that the package needs to score a response: the family, its settings,
and the problem's own answer and metadata.
"""

from __future__ import annotations

import ast
import functools
import json
from importlib import metadata
from typing import Any

from gapo_megatron.errors import ConfigError

PACKAGE = "reasoning-gym"
_OPEN, _CLOSE = "<answer>", "</answer>"
_KEYS = ("answer", "family", "settings", "metadata", "version")


def installed_version() -> str:
    """Version of the package.

    Raises:
        ConfigError: it is not installed; says what to do.
    """
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "data.source or reward of the kind 'reasoning_gym' needs the package reasoning-gym, "
            "which is not installed: tools/setup_env.sh reasoning, or pip install "
            "'gapo-megatron[reasoning]'"
        ) from None


def verify(response: str, answer: str) -> float:
    """The package's score of a response, from 0 to 1.

    Scored is what the last `<answer>` tag holds, or all of a response without one.
    """
    task = _read(answer)
    dataset = _dataset(task["family"], json.dumps(task["settings"], sort_keys=True))
    entry = {"answer": task["answer"], "metadata": ast.literal_eval(task["metadata"])}
    return float(dataset.score_answer(find_answer(response), entry))


def check_answer(answer: str) -> None:
    """Refuse an answer that is not of this version of the package.

    Raises:
        ValueError: says what is wrong.
    """
    task = _read(answer)
    if task["version"] != (here := installed_version()):
        raise ValueError(
            f"it is of {PACKAGE} {task['version']}, here is {here}: scores may differ. Install "
            "that version, or make the problems anew"
        )


def reference_answer(answer: str) -> str | None:
    """The package's own answer to the problem of a row; None: it gives none, only a score."""
    found = _read(answer)["answer"]
    return None if found is None else str(found)


def make_answer(family: str, settings: dict[str, Any], entry: dict[str, Any]) -> str:
    """The answer of a row, as text.

    Args:
        family: name of the family.
        settings: those of the family; JSON values.
        entry: a problem of the family, `question`, `answer` and `metadata`.

    Raises:
        TypeError: the metadata holds objects that are no Python literals.
    """
    plain = _plain(entry["metadata"])
    text = repr(plain)
    try:
        is_same = ast.literal_eval(text) == plain
    except (ValueError, SyntaxError):
        is_same = False
    if not is_same:
        raise TypeError(f"its metadata cannot be written down: {text[:200]}")
    values = (_plain(entry["answer"]), family, settings, text, installed_version())
    return json.dumps(dict(zip(_KEYS, values, strict=True)))


def find_answer(response: str) -> str:
    """What the last `<answer>` tag of a response holds; without one, the response itself."""
    found, at = response, 0
    while (start := response.find(_OPEN, at)) >= 0:
        start += len(_OPEN)
        end = response.find(_CLOSE, start)
        if end < 0:
            break
        found, at = response[start:end], end + len(_CLOSE)
    return found.strip()


def _plain(value: Any) -> Any:
    """A value with Python's own texts and numbers in place of NumPy's."""
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_plain(one) for one in value)
    return value.item() if hasattr(value, "dtype") and not getattr(value, "ndim", 0) else value


def _read(answer: str) -> dict[str, Any]:
    task = json.loads(answer)
    if not isinstance(task, dict) or task.keys() != {*_KEYS}:
        raise ValueError("not an answer of a problem that reasoning-gym generated")
    return task


@functools.cache
def _dataset(family: str, settings: str) -> Any:
    """The family, which scores; `settings` as JSON."""
    import reasoning_gym

    from gapo_megatron.compat.reasoning_gym import read_answers_safely

    read_answers_safely()
    return reasoning_gym.create_dataset(family, **json.loads(settings), seed=0, size=500)
