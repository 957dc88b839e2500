"""Decide which rows are kept, and why the others are dropped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gapo_megatron.data.rows import Row
from gapo_megatron.data.schema import LengthError, encode_prompt
from gapo_megatron.errors import ConfigError, DataError, said
from gapo_megatron.io.documents import is_unicode, keys_of
from gapo_tools.preparation.duplicates import Duplicates
from gapo_tools.preparation.held_out import HeldOut
from gapo_tools.preparation.sources import Candidate, Source, UnreadableError

Entry = dict[str, Any]
"""The finding for a row, as JSON: its source (`id`, `file`, `row`, `level`), the `rule` it broke
(empty: none) with `details`, and `problem`, `prompt` (or messages), `answer`, `kept` columns."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The limit on a prompt's length."""

    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy."""
    max_prompt_tokens: int
    """Largest number of tokens, including the template."""
    chat_template: bool
    """Prompts will be wrapped in the tokenizer's template."""


class Rules:
    """Applies the rules to the rows of the inputs, in order."""

    def __init__(self, source: Source, *, held_out: HeldOut | None, lengths: Lengths) -> None:
        self.duplicates = Duplicates(source.kind) if source.deduplicates else None
        """Texts of the rows so far; contradictory answers are known after the last row."""
        self._source = source
        self._held_out = held_out
        self._lengths = lengths
        self._places: dict[str, str] = {}
        """File and row of each kept id."""

    def look(self, path: Path, number: int, row: Row, *, index: int) -> tuple[Entry, str]:
        """Apply the rules to the next row.

        Args:
            path: file of the row.
            number: number of the row in its file, from 1.
            row: as read.
            index: index of the row over all inputs, from 0; used in generated ids.

        Returns:
            Its entry, and the tests of a program that is kept, which are too large for the entry.

        Raises:
            DataError: a key is missing or of another type, or the id was used before.
        """
        source, where = self._source, f"{path}:{number}"
        entry: Entry = {"id": f"{source.name}-{index}", "file": str(path), "row": number}
        entry |= {"level": "", "rule": "", "details": {}, "problem": "", "prompt": "", "answer": ""}
        # Read the row: a row without an answer is dropped, one with other keys ends the run.
        try:
            entry["level"] = _unicode("level", source.level_of(row, path))
            entry["id"] = _unicode("id", source.id_of(row)) or entry["id"]
            one = source.read(row, path, number)
            _unicode("problem", one.text)
            _unicode("prompt", one.prompt if isinstance(one.prompt, str) else "")
            _unicode("answer", one.answer)
        except UnreadableError as error:
            return entry | {"rule": "unreadable", "details": {"reason": str(error)}}, ""
        except KeyError as error:
            raise DataError(
                f"{where}: no key {error}, which {source.name} needs; the row has {keys_of(row)} "
                "(set other keys of your own files by --prompt-key and --answer-key)"
            ) from None
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{where}: not a row of {source.name}: {said(error)}; the row has {keys_of(row)}"
            ) from None
        # Apply the rules; only kept rows take up their id.
        is_code = source.kind == "code"
        entry |= {
            "problem": one.text,
            "prompt": one.prompt,
            "answer": "" if is_code else one.answer,
            "kept": one.kept,
        }
        if broken := self._broken(one, same_as=self._remember(entry), where=where):
            entry["rule"], entry["details"] = broken
            return entry, ""
        self._use_id(entry)
        return entry, one.answer if is_code else ""

    def look_again(self, entry: Entry) -> None:
        """Take over the finding for a row from before an interruption."""
        if entry["rule"] != "unreadable":
            self._remember(entry)
        if not entry["rule"]:
            self._use_id(entry)

    def _remember(self, entry: Entry) -> str | None:
        """Id of an earlier row with this text; None if there is none, or duplicates may stay."""
        if not self.duplicates:
            return None
        return self.duplicates.add(entry["id"], text=entry["problem"], answer=entry["answer"])

    def _use_id(self, entry: Entry) -> None:
        place = f"{entry['file']}:{entry['row']}"
        if other := self._places.get(entry["id"]):
            raise DataError(f"{place}: id {entry['id']!r} is already used at {other}")
        self._places[entry["id"]] = place

    def _broken(
        self, one: Candidate, *, same_as: str | None, where: str
    ) -> tuple[str, dict[str, Any]] | None:
        """The first rule that a problem breaks, with its details."""
        if same_as is not None:
            return "duplicate", {"same_as": same_as}
        if self._held_out and (hit := self._held_out.find(one.text)):
            shown = {"same_as": hit.id, "share": round(hit.share, 3), "benchmark_problem": hit.text}
            return "held_out", shown
        if not (isinstance(one.prompt, str) or self._lengths.chat_template):
            raise DataError(f"{where}: a list of messages needs --chat-template")
        try:
            encode_prompt(
                one.prompt,
                self._lengths.tokenizer,
                chat_template=self._lengths.chat_template,
                max_tokens=self._lengths.max_prompt_tokens,
            )
        except LengthError as error:
            rule = "too_long" if error.num_tokens else "no_tokens"
            return rule, {"tokens": error.num_tokens}
        except ConfigError as error:  # the template or the tokenizer refuses it
            raise ConfigError(f"{where}: {error}") from error
        return None


def _unicode(key: str, text: str) -> str:
    if not is_unicode(text):  # half of a surrogate pair, which no tokenizer takes
        raise UnreadableError(f"{key} is not valid Unicode")
    return text
