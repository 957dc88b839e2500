"""Which rows stay, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gapo_megatron.data.rows import Row
from gapo_megatron.data.schema import LengthError, encode_prompt
from gapo_megatron.errors import DataError
from gapo_megatron.io.documents import is_unicode, keys_of
from gapo_megatron.ops.prepare.duplicates import Duplicates
from gapo_megatron.ops.prepare.held_out import HeldOut
from gapo_megatron.ops.prepare.sources import Candidate, Source, UnreadableError

Entry = dict[str, Any]
"""What was found out about a row, JSON: where it comes from (`id`, `file`, `row`, `level`), the
`rule` it broke (empty: none) with `details` that show it, and `problem`, `prompt`, `answer`."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long a prompt may be."""

    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy."""
    max_prompt_tokens: int
    """Template included."""
    chat_template: bool
    """Prompts will be wrapped in the tokenizer's template."""

    def check(self, prompt: str) -> None:
        """Raise the `LengthError` of a prompt that has none, or too many."""
        encode_prompt(
            prompt,
            self.tokenizer,
            chat_template=self.chat_template,
            max_tokens=self.max_prompt_tokens,
        )


class Rules:
    """Looks at the rows of the inputs, one after the other."""

    def __init__(self, source: Source, *, held_out: HeldOut | None, lengths: Lengths) -> None:
        self.duplicates = Duplicates(source.kind) if source.deduplicates else None
        """Texts of the rows so far; which have several answers is known after the last row."""
        self._source = source
        self._held_out = held_out
        self._lengths = lengths
        self._places: dict[str, str] = {}
        """File and row of each id that stays."""

    def look(self, path: Path, number: int, row: Row, *, index: int) -> tuple[Entry, str]:
        """Find out about the next row.

        Args:
            path: file of the row.
            number: of the row in it, from 1.
            row: as read.
            index: of the row in all inputs, from 0; part of the ids that are made.

        Returns:
            Its entry, and the tests of a program that stays, which are too large for the entry.

        Raises:
            DataError: the row has another form, or its id was used.
        """
        source, where = self._source, f"{path}:{number}"
        entry: Entry = {"id": f"{source.name}-{index}", "file": str(path), "row": number}
        entry |= {"level": "", "rule": "", "details": {}, "problem": "", "prompt": "", "answer": ""}
        try:
            entry["level"] = _unicode("level", source.level_of(row, path))
            entry["id"] = _unicode("id", source.id_of(row)) or entry["id"]
            one = source.read(row)
            _unicode("problem", one.text)
            _unicode("prompt", one.prompt)
            _unicode("answer", one.answer)
        except UnreadableError as error:
            return entry | {"rule": "unreadable", "details": {"reason": str(error)}}, ""
        except KeyError as error:
            raise DataError(
                f"{where}: not a row of {source.name}: no key {error}; it has {keys_of(row)} "
                "(--prompt-key, --answer-key name those of own files)"
            ) from None
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{where}: not a row of {source.name}: {type(error).__name__}: {error}; "
                f"it has {keys_of(row)}"
            ) from None
        is_code = source.kind == "code"
        entry |= {
            "problem": one.text,
            "prompt": one.prompt,
            "answer": "" if is_code else one.answer,
        }
        if broken := self._broken(one, same_as=self._remember(entry)):
            entry["rule"], entry["details"] = broken
            return entry, ""
        self._use_id(entry)
        return entry, one.answer if is_code else ""

    def look_again(self, entry: Entry) -> None:
        """Remember a row that was looked at before an interruption."""
        if entry["rule"] != "unreadable":
            self._remember(entry)
        if not entry["rule"]:
            self._use_id(entry)

    def _remember(self, entry: Entry) -> str | None:
        """Id of the first row with this text; None if there is none before, or none matters."""
        if not self.duplicates:
            return None
        return self.duplicates.add(entry["id"], text=entry["problem"], answer=entry["answer"])

    def _use_id(self, entry: Entry) -> None:
        place = f"{entry['file']}:{entry['row']}"
        if other := self._places.get(entry["id"]):
            raise DataError(f"{place}: id {entry['id']!r} was used at {other}")
        self._places[entry["id"]] = place

    def _broken(self, one: Candidate, *, same_as: str | None) -> tuple[str, dict[str, Any]] | None:
        """The first rule that a problem breaks, and what shows it."""
        if same_as is not None:
            return "duplicate", {"same_as": same_as}
        if self._held_out and (hit := self._held_out.find(one.text)):
            shown = {"same_as": hit.id, "share": round(hit.share, 3), "benchmark_problem": hit.text}
            return "held_out", shown
        try:
            self._lengths.check(one.prompt)
        except LengthError as error:
            rule = "too_long" if error.num_tokens else "no_tokens"
            return rule, {"tokens": error.num_tokens}
        return None


def _unicode(key: str, text: str) -> str:
    if not is_unicode(text):  # half of a surrogate pair, which no tokenizer takes
        raise UnreadableError(f"{key} is not Unicode")
    return text
