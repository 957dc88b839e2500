"""The problem file: JSONL with one problem per line, checked whole before any model is built.

    {"id": "a-17", "prompt": "3+8+5=", "answer": "16", "level": "2 additions"}

`id` is unique within the file, the verifier compares responses with `answer`, and the optional
`level` names a stratum in reports. Other keys are ignored. Answers that are too large for the
memory of every rank (tests of programs) are in another file, and `answer` refers to it:

    "answer": {"file": "tests.jsonl", "offset": 0, "length": 5126}
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

from gapo_megatron import rewards
from gapo_megatron.compat.library_errors import as_config_error
from gapo_megatron.data.rows import read_lines
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.hf.model_folder import MAX_TEMPLATE_CHARACTERS
from gapo_megatron.io.documents import is_unicode, keys_of, open_file
from gapo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

EXCERPT_BYTES = 64
"""Bytes at each end of an answer in another file that are read at the start of a run."""

QUICK_CHARACTERS = 2**16
"""Characters that are tokenised quickly; a hundred times as many take a minute."""

NUM_SHOWN = 5
"""Most lines that an error lists; it counts all."""


def read_prompts(
    path: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    kind: str,
    settings: Mapping[str, Any] = MappingProxyType({}),
    chat_template: bool = False,
    keep_unreadable: bool = False,
) -> list[Prompt]:
    """Read, check and tokenise a problem file.

    Args:
        path: JSONL file in UTF-8; blank lines are skipped.
        tokenizer: the policy's tokenizer; adds its special tokens (a BOS if it has one).
        max_prompt_tokens: longest prompt in tokens, with the template.
        kind: verifier of the answers, `reward.kind`.
        settings: settings of a verifier of the user's own.
        chat_template: wrap `prompt` as a user message in the tokenizer's chat template.
        keep_unreadable: only warn about unreadable answers, for runs that started with them.

    Returns:
        The problems in file order, the same on every rank.

    Raises:
        DataError: names the file, the line and the broken rule; for answers that the verifier
            cannot read, their number and the first lines.
        ConfigError: `chat_template` is true and the tokenizer has none.
    """
    if chat_template and not tokenizer.chat_template:
        raise ConfigError(
            "data.chat_template (true) needs a tokenizer with a chat template; set it to false, or "
            "use the tokenizer of an instruction-tuned model"
        )
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    with closing(_Answers(Path(path).parent, kind, settings)) as answers:
        for number, row in read_jsonl(path, keys=("id", "prompt"), optional=("level",)):
            where = f"{path}:{number}"
            answer, shown = answers.read(row, where=where), f"{row['id'][:60]!r}"
            if row["id"] in line_of:
                raise DataError(f"{where}: id {shown} was used in line {line_of[row['id']]}")
            line_of[row["id"]] = number
            try:
                token_ids = encode_prompt(
                    row["prompt"],
                    tokenizer,
                    chat_template=chat_template,
                    max_tokens=max_prompt_tokens,
                )
            except LengthError as error:
                raise DataError(
                    f"{where}: the prompt of {shown} has {error}; "
                    f"data.max_prompt_tokens allows 1 to {max_prompt_tokens}"
                ) from None
            prompts.append(Prompt(row["id"], token_ids, answer, row.get("level", "")))
    if not prompts:
        raise DataError(f"{path}: contains no problems")
    if unreadable := answers.unreadable:
        count = f"{path}: the verifier cannot read {len(unreadable)} of {len(prompts)} answers"
        _report(count, unreadable, is_error=not keep_unreadable)
    return prompts


def _report(count: str, unreadable: Sequence[str], *, is_error: bool) -> None:
    """Raise a DataError with the first unreadable answers, or warn."""
    if is_error:
        more = ["..."] if len(unreadable) > NUM_SHOWN else []
        raise DataError("\n  ".join([f"{count}:", *unreadable[:NUM_SHOWN], *more]))
    logger.warning("%s; verdicts on their problems are unknown. First: %s", count, unreadable[0])


class _Answers:
    """Reads the answers of a file's rows; the verifier checks them."""

    def __init__(self, folder: Path, kind: str, settings: Mapping[str, Any]) -> None:
        self._folder, self._kind, self._settings = folder, kind, settings
        self.unreadable: list[str] = []
        """A message for each answer that the verifier cannot read."""
        self._path = Path()
        self._file: BinaryIO | None = None
        """The open file at `_path`, kept because many rows may name it."""

    def read(self, row: dict[str, Any], *, where: str) -> str:
        """The answer; if it is in another file, the reference with its full path, as JSON text."""
        answer = row.get("answer")
        if not isinstance(answer, dict):
            _check(row, ("answer",), (), where=where)
        try:
            text, *ends = self._find(answer) if isinstance(answer, dict) else [row["answer"]]
        except DataError as error:
            raise DataError(f"{where}: answer ({_shown(answer)}): {error}") from None
        try:
            if ends:
                rewards.check_excerpt(self._kind, *ends)
            else:
                rewards.check_answer(self._kind, text, settings=self._settings)
        except DataError as error:
            self.unreadable.append(f"{where}: answer ({_shown(answer)}): {error}")
        return text

    def _find(self, reference: dict[str, Any]) -> tuple[str, bytes, bytes]:
        """The reference to an answer in another file, and the first and last bytes of it."""
        file, offset, length = (reference.get(key) for key in ("file", "offset", "length"))
        if (
            not (isinstance(file, str) and type(offset) is int and type(length) is int)
            or not is_unicode(file)
            or max(abs(offset), abs(length)) >= 2**63
        ):
            raise DataError("must be a string, or an object with file, offset and length")
        path = self._folder / file
        shown = repr(str(path))
        try:
            number = self._open(path).fileno()
            size = os.fstat(number).st_size
            if not 0 <= offset < offset + length <= size:
                raise DataError(
                    f"bytes {offset} to {offset + length} are beyond {shown}, which has {size}"
                )
            short = min(length, EXCERPT_BYTES)
            head, tail = (os.pread(number, short, at) for at in (offset, offset + length - short))
        except OSError as error:
            raise DataError(f"{shown} cannot be read: {error.strerror}") from None
        return json.dumps({"file": str(path), "offset": offset, "length": length}), head, tail

    def _open(self, path: Path) -> BinaryIO:
        if self._file is None or path != self._path:
            self.close()
            self._path, self._file = path, open_file(path)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_jsonl(
    path: str | Path, *, keys: Sequence[str], optional: Sequence[str] = ()
) -> list[tuple[int, dict[str, Any]]]:
    """Read a JSONL file of objects with text values.

    Args:
        path: file in UTF-8; blank lines are skipped.
        keys: required keys, whose values are strings that are not empty.
        optional: keys whose values are strings if present.

    Returns:
        (line number from 1, object) for every line that is not blank.

    Raises:
        DataError: names the file, the line and the broken rule.
    """
    rows = []
    for number, row in read_lines(Path(path)):
        _check(row, keys, optional, where=f"{path}:{number}")
        rows.append((number, row))
    return rows


def _check(row: Any, keys: Sequence[str], optional: Sequence[str], *, where: str) -> None:
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be a JSON object, not {_shown(row)}")
    for key in keys:
        if key not in row:
            raise DataError(f"{where}: key {key!r} is missing; the row has {keys_of(row)}")
    for key in (*keys, *(key for key in optional if key in row)):
        if not isinstance(row[key], str):
            raise DataError(f"{where}: {key} ({_shown(row[key])}) must be a string")
        if not is_unicode(row[key]):
            raise DataError(f"{where}: {key} ({_shown(row[key])}) contains a lone surrogate")
        if key in keys and not row[key].strip():
            raise DataError(f"{where}: {key} is empty")


def _shown(value: Any) -> str:
    """A short form of a value, even if it is nested too deeply for `repr`."""
    return reprlib.repr(value)


class LengthError(DataError):
    """A prompt without tokens or with too many: at least `num_tokens`."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


def encode_prompt(
    text: str, tokenizer: PreTrainedTokenizerBase, *, chat_template: bool, max_tokens: int
) -> tuple[int, ...]:
    """Tokenise a prompt as the model sees it, with special tokens and template.

    Raises:
        LengthError: no token, or more than `max_tokens`.
    """
    check_length(text, tokenizer, max_tokens=max_tokens)
    if chat_template:
        # The template adds all special tokens itself.
        with as_config_error(f"{tokenizer.name_or_path}: its chat template fails"):
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        if len(rendered) > len(text) + MAX_TEMPLATE_CHARACTERS:
            raise ConfigError(
                f"{tokenizer.name_or_path}: its chat template turns a prompt of {len(text)} "
                f"characters into {len(rendered)}; it may add at most {MAX_TEMPLATE_CHARACTERS}"
            )
        text = rendered
    token_ids = tuple(tokenizer(text, add_special_tokens=not chat_template)["input_ids"])
    if not 0 < len(token_ids) <= max_tokens:
        raise LengthError(len(token_ids))
    return token_ids


def check_length(text: str, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> None:
    """Refuse a text that certainly has too many tokens, without tokenising it.

    A lower bound: it assumes that every token is as long as the longest in the vocabulary, and that
    the tokenizer drops no characters. A text that passes may still have too many tokens.

    Raises:
        LengthError: the bound is above `max_tokens`.
    """
    if len(text) > QUICK_CHARACTERS:
        least = math.ceil(len(text) / _longest_token(tokenizer))
        if least > max_tokens:
            raise LengthError(least)


@functools.lru_cache(maxsize=1)  # get_vocab builds a new dict at every call
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(map(len, tokenizer.get_vocab()))
