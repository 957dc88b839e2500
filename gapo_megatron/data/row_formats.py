"""Which keys of a row are its prompt, answer and id: the formats of this project and of others."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from gapo_megatron.config.data_section import RowKeys
from gapo_megatron.data.rows import Row, column_names, read_rows
from gapo_megatron.errors import DataError
from gapo_megatron.io.documents import is_unicode
from gapo_megatron.user_code import is_code

OWN = "gapo"
"""This project's format. A row with its key `answer` has it, whatever else the row has."""

FORMATS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    OWN: (("prompt", "messages"), ("answer",)),
    "verl": (("prompt",), ("reward_model.ground_truth",)),
    "slime": (("prompt", "messages"), ("label",)),
    "orz": (("0.value",), ("1.ground_truth.value",)),
    "trl": (("prompt",), ("solution", "ground_truth", "completion")),
    "openai": (("messages",), ("messages.-1.content",)),
}
"""Keys of the prompt, of which a row has one, and keys that the answer may have."""

_ABSENT = object()

SETTINGS = (
    "set data.prompt_key and data.answer_key, or data.format (prepare_data.py own: --prompt-key, "
    "--answer-key, --format)"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A row's prompt and answer as they are in the file."""

    prompt: str | list[Any]
    """A text, or messages that are not checked yet."""
    prompt_key: str
    answer: Any
    """As JSON has it; neither None nor a boolean."""


class EmptyError(DataError):
    """The row has the key, but no value."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the rows of a file are read: decided at its first row, the same for all others."""

    format: str
    """Name in `FORMATS`; empty: both keys were given."""
    prompt_keys: tuple[str, ...]
    """A row has one of them."""
    answer_key: str
    first: str = ""
    """File and row that it was recognised at; empty: nothing had to be recognised."""

    def __str__(self) -> str:
        name = f"{self.format} format" if self.format else "keys as set"
        return f"{name}: {' or '.join(self.prompt_keys)}, {self.answer_key}"

    def read(self, row: Row, *, path: Path, number: int) -> Problem:
        """The row's prompt and answer.

        Raises:
            DataError: one is missing, null, or of another type; names file, row and key.
        """
        where = f"{path}:{number}"
        given = {key: one for key in self.prompt_keys if (one := find(row, key)) is not None}
        if len(given) != 1:
            self._refuse_null(row, self.prompt_keys if not given else (), where=where)
            rule = "or ".join(f"the key {key!r} " for key in self.prompt_keys)
            rule = f"a row needs {'either ' if len(self.prompt_keys) > 1 else ''}{rule.rstrip()}"
            raise DataError(
                f"{where}: {rule}; it has {' and '.join(given) or column_names(path, row)}"
                f"{self._why(where)} ({SETTINGS})"
            )
        [(key, prompt)] = given.items()
        if is_messages := key.rpartition(".")[2] == "messages":
            prompt = _parsed(prompt, prompt)  # a cell of a table is a text
        if not isinstance(prompt, list if is_messages else str | list):
            rule = f"must be {'' if is_messages else 'a string or '}a list of messages"
            raise DataError(f"{where}: {key} ({reprlib.repr(prompt)}) {rule}")
        if self.format == "openai" and is_messages:
            if (role := find(row, f"{key}.-1.role")) != "assistant":
                raise DataError(
                    f"{where}: {key}.-1.role ({reprlib.repr(role)}) must be 'assistant': messages "
                    f"must end with the model's, which is the answer{self._why(where)}"
                )
            prompt = prompt[:-1]
        answer = find(row, self.answer_key)
        if answer is None:
            self._refuse_null(row, (self.answer_key,), where=where)
            raise DataError(
                f"{where}: key {self.answer_key!r} is missing; the row has "
                f"{column_names(path, row)}{self._why(where)} ({SETTINGS})"
            )
        if self.answer_key == "completion" and isinstance(answer, list) and len(answer) == 1:
            answer = find(answer[0], "content") or answer
        return Problem(prompt, key, answer)

    def _refuse_null(self, row: Row, keys: Sequence[str], *, where: str) -> None:
        for key in keys:
            if _walk(row, key, absent=_ABSENT) is None or row.get(key, _ABSENT) is None:
                raise EmptyError(f"{where}: {key} is null{self._why(where)}")

    def _why(self, where: str) -> str:
        is_known = self.first in ("", where)
        return "" if is_known else f"; {self.first} was recognised as {self}"


def recognise(row: Row, keys: RowKeys, *, path: Path, number: int) -> Reading:
    """How a file is read whose first row this is.

    Raises:
        DataError: no format fits the row, or several do; names file, row, keys and settings.
    """
    where, prompts, answers = f"{path}:{number}", keys.prompt_key, keys.answer_key
    if prompts and answers:
        return Reading("", (prompts,), answers)
    names = [*FORMATS] if keys.format == "auto" else [keys.format]
    found = []
    for name in names:
        of_prompt = (prompts,) if prompts else FORMATS[name][0]
        for answer in (answers,) if answers else FORMATS[name][1]:
            reading = Reading(name, of_prompt, answer, where)
            if reading not in found and _fits(reading, row):
                found.append(reading)
    if prompts or answers:  # the format is only where the other key comes from
        found = [*{(one.prompt_keys, one.answer_key): one for one in reversed(found)}.values()]
    own = [one for one in found if one.format == OWN]
    if len(own or found) == 1:
        return (own or found)[0]
    if found:
        listed = "; ".join(map(str, found))
        raise DataError(
            f"{where}: {len(found)} readings of the row fit: {listed}. To choose, {SETTINGS}"
        )
    # Nothing fits: what the row lacks is said by reading it.
    name = OWN if keys.format == "auto" else keys.format
    given = (prompts,) if prompts else FORMATS[name][0]
    for answer in (answers,) if answers else FORMATS[name][1]:
        Reading(name, given, answer, where).read(row, path=path, number=number)
    raise AssertionError(f"{where}: the row can be read, and yet no format fits")


def _fits(reading: Reading, row: Row) -> bool:
    if reading.format == "openai" and find(row, "messages.-1.role") != "assistant":
        return False
    is_there = [find(row, key) is not None for key in reading.prompt_keys]
    return any(is_there) and find(row, reading.answer_key) is not None


def first_row(path: Path, keys: RowKeys) -> tuple[Reading, Problem] | None:
    """How a file is read, and its first row; None if it has no rows.

    Raises:
        DataError: see `recognise` and `Reading.read`.
    """
    for number, row, _ in read_rows(path, optional=heads(keys)):
        reading = recognise(row, keys, path=path, number=number)
        return reading, reading.read(row, path=path, number=number)
    return None


def heads(keys: RowKeys) -> list[str]:
    """The columns of a Parquet file that hold a prompt, an answer or an id of any format."""
    dotted = [key for pair in FORMATS.values() for some in pair for key in some]
    dotted += [keys.prompt_key, keys.answer_key, keys.id_key, "id"]
    return [*dict.fromkeys(one for key in dotted for one in (key, key.partition(".")[0]) if key)]


def find(value: Any, key: str) -> Any:
    """The value at a key with dots; None if there is none.

    The whole key may be the name of a column, a number is a place in a list (-1 is the last), and
    a text on the way is parsed as JSON.

    Raises:
        DataError: the key is the name of a column, and also leads into another one.
    """
    within, whole = _walk(value, key), None
    if "." in key and isinstance(value, dict):
        whole = value.get(key)
    if whole is not None and within is not None and whole != within:
        raise DataError(f"the key {key!r} is a column, and also leads into {key.split('.')[0]!r}")
    return within if whole is None else whole


def _walk(value: Any, key: str, *, absent: Any = None) -> Any:
    for part in key.split("."):
        value = _parsed(value, value)
        if isinstance(value, dict):
            value = value.get(part, absent)
        elif isinstance(value, list) and re.fullmatch(r"-?[0-9]{1,9}", part):
            at = int(part)
            value = value[at] if -len(value) <= at < len(value) else absent
        else:
            return absent
    return value


def with_prompt(row: Row, problem: Problem) -> Row:
    """The row with its prompt as it was read: under `messages`, or else under `prompt`.

    Other `messages` are left out: they may go on to the answer.
    """
    key = problem.prompt_key if problem.prompt_key in ("prompt", "messages") else "prompt"
    prompt = problem.prompt
    if isinstance(prompt, list):  # Parquet has every key of every message
        prompt = [{name: one[name] for name in one if one[name] is not None} for one in prompt]
    return {name: one for name, one in row.items() if name != "messages"} | {key: prompt}


def without(row: Mapping[str, Any], key: str) -> Row:
    """A copy of a row without what `find` finds at a key; an empty key has nothing."""
    copied = {name: one for name, one in copy.deepcopy(dict(row)).items() if name != key}
    return _remove(copied, key.split(".")) if find(copied, key) is not None else copied


def _remove(value: Any, parts: Sequence[str]) -> Any:
    """The value without what is at the end of a path in it, which is there."""
    inner, first = _parsed(value, value), parts[0]
    at = int(first) if isinstance(inner, list) else first
    if parts[1:]:
        inner[at] = _remove(inner[at], parts[1:])
    else:
        del inner[at]
    return json.dumps(inner, ensure_ascii=False) if isinstance(value, str) else inner


def _parsed(text: Any, otherwise: Any) -> Any:
    """The list or object in a text; anything else gives `otherwise`."""
    if isinstance(text, str) and text.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    return otherwise


def check_text(value: Any, *, where: str) -> None:
    """Refuse a text that is empty or cannot be encoded.

    Raises:
        DataError: names place and rule.
    """
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where} is empty")
        if not is_unicode(value):
            raise DataError(f"{where} ({reprlib.repr(value)}) contains a lone surrogate")


def read_id(row: Row, key: str, *, where: str) -> str | None:
    """The row's id as text; None if there is none and `key` (`data.id_key`) is empty.

    Raises:
        DataError: it is no text and no integer, or is missing under `key`.
    """
    value = find(row, key or "id")
    if value is None:
        if key:
            raise DataError(f"{where}: data.id_key {key!r} is missing or null")
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(
            f"{where}: {key or 'id'} ({reprlib.repr(value)}) must be text or an integer"
        )
    check_text(value, where=f"{where}: {key or 'id'}")
    return str(value)


def answer_text(value: Any, kind: str, *, where: str) -> str:
    """An answer as its verifier gets it.

    Numbers are written as in JSON. A list or an object is JSON text for `code`, `instructions` and
    user verifiers. For `math` a list holds the answers that are accepted; for it and `exact` a list
    of one is the answer.

    Args:
        value: the answer as read.
        kind: verifier, as `reward.kind`.
        where: file, row and key, for messages.

    Raises:
        DataError: nothing that the verifier takes.
    """
    if isinstance(value, list | dict):
        if not value:
            raise DataError(f"{where} is empty")
        if kind in ("code", "instructions") or is_code(kind):
            try:
                text = json.dumps(value, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise DataError(f"{where} is nothing that JSON can hold: {error}") from None
            check_text(text, where=where)
            return text
        if isinstance(value, list):
            texts = [*_texts(value, where=where)]
            if len(texts) == 1:
                return texts[0]
            if kind == "math":
                return json.dumps(texts, ensure_ascii=False)
            raise DataError(
                f"{where} has {len(texts)} accepted answers; reward.kind {kind!r} takes one, "
                "'math' any of several"
            )
    if isinstance(value, Decimal):  # of a Parquet file
        return format(value, "f")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        return json.dumps(value)
    if not isinstance(value, str):
        raise DataError(
            f"{where} ({reprlib.repr(value)}) must be a string, a number or a list of them"
        )
    check_text(value, where=where)
    return value


def _texts(values: list[Any], *, where: str) -> Iterator[str]:
    for i, one in enumerate(values):
        if isinstance(one, list | dict):
            raise DataError(f"{where}[{i}] ({reprlib.repr(one)}) must be a string or a number")
        yield answer_text(one, "", where=f"{where}[{i}]")
