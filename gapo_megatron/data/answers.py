"""Answers of a problem file, in its rows or in a file beside it; checked by their verifiers."""

from __future__ import annotations

import json
import os
import reprlib
from pathlib import Path
from typing import Any, BinaryIO

from gapo_megatron import rewards
from gapo_megatron.config.schema import VerifierConfig
from gapo_megatron.data.row_formats import answer_text
from gapo_megatron.errors import DataError
from gapo_megatron.io.documents import is_unicode, open_file

EXCERPT_BYTES = 64
"""Bytes at each end of an answer in another file that are read at the start of a run."""

_PLACE = frozenset(("file", "offset", "length"))
"""Keys of an answer that says where the answer is."""

NUM_SHOWN = 5
"""Most lines that an error lists; it counts all."""


class Answers:
    """Reads the answers of a file's rows; the verifier checks them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.unreadable: list[str] = []
        """A message for each answer that the verifier cannot read."""
        self._path = Path()
        self._file: BinaryIO | None = None
        """The open file at `_path`, kept because many rows may name it."""

    def read(self, answer: Any, judge: VerifierConfig, *, where: str) -> str:
        """The answer; if it is in another file, the reference with its full path, as JSON text.

        Args:
            answer: as read.
            judge: its verifier.
            where: file, row and key.

        Raises:
            DataError: it is nothing that the verifier takes, or the place in the other file is
                wrong.
        """
        ends: list[bytes] = []
        if isinstance(answer, dict) and answer and answer.keys() <= _PLACE:
            try:
                text, *ends = self._find(answer)
            except DataError as error:
                raise DataError(f"{where} ({reprlib.repr(answer)}): {error}") from None
        else:
            text = _text(answer, judge, where=where)
        try:
            for part in judge.parts:
                if ends:
                    rewards.check_excerpt(part.kind, *ends)
                else:
                    rewards.check_answer(part.kind, text, settings=part.settings)
        except DataError as error:
            self.unreadable.append(f"{where} ({reprlib.repr(answer)}): {error}{_of(judge)}")
        return text

    def check(self, path: Path, *, num_problems: int) -> None:
        """Raise a DataError with the first unreadable answers, if any."""
        if num_unreadable := len(self.unreadable):
            count = f"{path}: the verifier cannot read {num_unreadable} of {num_problems} answers:"
            more = ["..."] if num_unreadable > NUM_SHOWN else []
            raise DataError("\n  ".join([count, *self.unreadable[:NUM_SHOWN], *more]))

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


def _text(answer: Any, judge: VerifierConfig, *, where: str) -> str:
    """The answer as text, which is the same for every verifier that judges the response.

    Raises:
        DataError: one of them does not take it, or they need different texts.
    """
    try:
        texts = {part.kind: answer_text(answer, part.kind, where=where) for part in judge.parts}
    except DataError as error:
        raise DataError(f"{error}{_of(judge)}") from None
    if len({*texts.values()}) > 1:
        each = ", ".join(f"{kind} {reprlib.repr(text)}" for kind, text in texts.items())
        raise DataError(
            f"{where} ({reprlib.repr(answer)}) must be the same text for all of reward.components "
            f"({judge.label}), but is by kind: {each}"
        )
    return next(iter(texts.values()))


def _of(judge: VerifierConfig) -> str:
    """Says after a message that its verifier is one of several; empty for one alone."""
    return "" if judge in judge.parts else f" (one of reward.components: {judge.label})"
