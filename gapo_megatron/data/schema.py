"""The problem file: one problem per row, checked whole before any model is built.

    {"id": "a-17", "prompt": "3+8+5=", "answer": "16", "level": "2 additions"}

`id` is unique within the file, the verifier compares responses with `answer`, and the optional
`level` names a stratum in reports. `messages` may stand for `prompt`, and `verifier` names the
row's verifier. Other keys are only kept for a verifier or a user environment. `row_formats` says
where the rows of other frameworks have prompt and answer.
Answers that are too large for the memory of every rank (tests of programs) are in another file, and
`answer` refers to it:

    "answer": {"file": "tests.jsonl", "offset": 0, "length": 5126}
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapo_megatron import rewards
from gapo_megatron.config import DataConfig, RewardConfig
from gapo_megatron.config.data_section import RowKeys
from gapo_megatron.config.schema import VerifierConfig
from gapo_megatron.data.answers import Answers
from gapo_megatron.data.messages import Message, read_messages, render, special_pattern
from gapo_megatron.data.row_formats import (
    OWN,
    Problem,
    Reading,
    check_text,
    find,
    heads,
    read_id,
    recognise,
    with_prompt,
)
from gapo_megatron.data.rows import Row, check_texts, read_lines, read_rows
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

KEYS = ("id", "prompt", "messages", "answer", "level", "verifier")
"""Keys of a row in this project's format that become part of its `Prompt`."""


def read_training_prompts(
    data: DataConfig, *, generated: Mapping[str, Iterable[Row]] = {}, **options: Any
) -> list[Prompt]:
    """Read the training problems: of `data.train_path`, or of every `[[data.source]]` in order.

    Args:
        data: section `data`.
        generated: rows of its generated sources, by name.
        options: see `read_prompts`, also for errors.
    """
    return [
        prompt
        for name, path in data.train_files.items()
        for prompt in read_prompts(
            path, data=data, source=name, generated=generated.get(name), **options
        )
    ]


def read_prompts(
    path: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    data: DataConfig,
    reward: RewardConfig,
    source: str = "",
    columns: Collection[str] | None = (),
    most: int | None = None,
    generated: Iterable[Row] | None = None,
) -> list[Prompt]:
    """Read, check and tokenise a problem file.

    Args:
        path: see `read_rows`; in UTF-8, blank lines are skipped.
        tokenizer: the policy's tokenizer; adds its special tokens (a BOS if it has one), and has
            been bound to `data` (`messages.bind_template`). None: prompts are not encoded.
        data: section `data`: how rows are read, the longest prompt, and the chat template.
        reward: section `reward`: the verifier of the answers.
        source: name of the data source, which is then part of the ids; empty: none.
        columns: columns to keep as `Prompt.row`, for user verifiers, if a row has
            them, `answer` and `verifier` excepted; None: all. The prompt is kept as it was read.
        most: number of rows to read, from the first; None: all.
        generated: the rows, where they are in no file; `path` then names them in messages.

    Returns:
        The problems in file order, the same on every rank.

    Raises:
        DataError: names the file, the line and the broken rule; for answers that the verifier
            cannot read, their number and the first lines. Or a row lacks a column that its verifier
            requires.
        ConfigError: the tokenizer or its chat template refuses a row.
    """
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    path, keys = Path(path), data.row_keys(source)
    if generated is not None:
        keys = RowKeys("gapo")
    oddities = _Oddities(tokenizer, chat_template=data.chat_template)
    with closing(Answers(path.parent)) as answers:
        rows = _read_problems(path, keys, columns, generated)
        for number, whole, reading, problem in itertools.islice(rows, most):
            where = f"{path}:{number}"
            id = read_id(whole, keys.id_key, where=where) or str(number)
            level = _level(whole, is_own=reading.format == OWN, where=where)
            verifier, judge = _verifier(whole, reward, where=where)
            answer = answers.read(problem.answer, judge, where=f"{where}: {reading.answer_key}")
            if id in line_of:
                raise DataError(f"{where}: id {id[:60]!r} was used in line {line_of[id]}")
            line_of[id] = number
            token_ids = _encode(problem, tokenizer, data, where=where, id=id)
            oddities.look_at(problem.prompt, token_ids, where=where)
            kept = kept_columns(with_prompt(whole, problem), columns, judge, where=where)
            has_answer = reading.answer_key.partition(".")[0] != problem.prompt_key
            has_answer = has_answer and find(kept, reading.answer_key) is not None
            prompts.append(
                Prompt(
                    f"{source}/{id}" if source else id,
                    token_ids,
                    answer,
                    level,
                    source=source,
                    verifier=verifier,
                    row=kept,
                    answer_key=reading.answer_key if has_answer else "",
                )
            )
    if not prompts:
        raise DataError(f"{path}: contains no problems")
    answers.check(path, num_problems=len(prompts))
    return prompts


def _read_problems(
    path: Path,
    keys: RowKeys,
    columns: Collection[str] | None,
    generated: Iterable[Row] | None,
) -> Iterator[tuple[int, Row, Reading, Problem]]:
    """Number of each row, the row, how it is read, and what was read."""
    optional = None if columns is None else (*KEYS, *heads(keys), *columns)
    reading: Reading | None = None
    if generated is None:
        rows = ((n, row) for n, row, _ in read_rows(path, optional=optional))
    else:
        rows = ((n, row) for n, row in enumerate(generated, start=1))
    for number, row in rows:
        if reading is None:
            reading = recognise(row, keys, path=path, number=number)
            logger.info("%s: %s", path, reading)
        problem = reading.read(row, path=path, number=number)
        check_text(problem.prompt, where=f"{path}:{number}: {problem.prompt_key}")
        yield number, row, reading, problem


_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]""")
"""Begins a text that holds a list of messages, as JSON or as Python writes it."""


class _Oddities:
    """Warns of suspicious prompts, once per kind, naming the row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, chat_template: bool) -> None:
        self._bos = None if tokenizer is None else tokenizer.bos_token_id
        # Without a template it is the data that writes control tokens.
        self._special = special_pattern(tokenizer) if tokenizer and chat_template else None
        self._warned: set[str] = set()

    def look_at(self, given: str | list[Any], token_ids: Sequence[int], *, where: str) -> None:
        """Look at a row's prompt and its tokens."""
        if self._bos is not None and [*token_ids[:2]] == [self._bos] * 2:
            self._warn("begins with BOS twice: the text has it, and the tokenizer adds it", where)
        if isinstance(given, str) and _MESSAGES.match(given):
            self._warn("is a text that looks like a list of messages, and is read as text", where)
        texts = [given] if isinstance(given, str) else [one["content"] for one in given]
        for found in filter(None, map(self._special.search, texts) if self._special else ()):
            self._warn(
                "has %r in its text, which the tokenizer reads as a control token", where, found[0]
            )

    def _warn(self, what: str, where: str, *values: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(f"%s: the prompt {what} (later rows are not named)", where, *values)


def _level(row: Row, *, is_own: bool, where: str) -> str:
    """The row's level; in rows of others an integer becomes text."""
    level = row.get("level")
    if level is None:
        return ""
    if type(level) is int and not is_own:
        return str(level)
    check_texts(row, (), ("level",), where=where)
    return str(level)


def _verifier(row: Row, reward: RewardConfig, *, where: str) -> tuple[str, VerifierConfig]:
    """The row's verifier: its name in `RewardConfig.by_name`, and its settings."""
    name = row.get("verifier")
    if name is not None:
        check_texts(row, ("verifier",), (), where=where)
    name = "" if name is None else reward.name_for(name)
    if name not in reward.by_name:
        usual = "reward.kind" if reward.kind else f"absent for reward.components ({reward.label})"
        known = ", ".join(filter(None, [reward.kind, *reward.verifiers])) or "there is none"
        raise DataError(
            f"{where}: verifier ({name!r}) must be {usual} or a name in reward.verifiers: {known}"
        )
    return name, reward.by_name[name]


def _encode(
    problem: Problem,
    tokenizer: PreTrainedTokenizerBase | None,
    data: DataConfig,
    *,
    where: str,
    id: str,
) -> tuple[int, ...]:
    """The tokens of the row's prompt; none without a tokenizer."""
    prompt, key = problem.prompt, problem.prompt_key
    if not isinstance(prompt, str):
        if not data.chat_template:
            raise DataError(f"{where}: {key}: a list of messages needs data.chat_template = true")
        prompt = read_messages(prompt, where=f"{where}: {key}")
    if tokenizer is None:
        return ()
    return encode_problem(prompt, tokenizer, data, id=id, where=where)


def encode_problem(
    prompt: str | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    id: str,
    where: str,
    setting: str = "data.max_prompt_tokens",
) -> tuple[int, ...]:
    """Tokenise a problem's prompt as section `data` says.

    Args:
        prompt: see `encode_prompt`.
        tokenizer: the policy's tokenizer.
        data: the longest prompt, and the chat template.
        id: the problem's id, for messages.
        where: its file and row, for messages.
        setting: name that the user gives the longest prompt, for messages.

    Raises:
        DataError: the prompt has no token, or too many.
        ConfigError: see `encode_prompt`.
    """
    try:
        return encode_prompt(
            prompt,
            tokenizer,
            chat_template=data.chat_template,
            max_tokens=data.max_prompt_tokens,
            system_prompt=data.system_prompt,
        )
    except LengthError as error:
        raise DataError(
            f"{where}: the prompt of {id[:60]!r} has {error}; "
            f"{setting} allows 1 to {data.max_prompt_tokens}"
        ) from None
    except ConfigError as error:  # the template or the tokenizer refuses these messages
        raise ConfigError(f"{where}: {error}") from error


def kept_columns(
    whole: Row, columns: Collection[str] | None, judge: VerifierConfig, *, where: str
) -> Row:
    """A row's columns for `Prompt.row`.

    Args:
        whole: the row as read.
        columns: columns to keep, None: all. Never `answer` and `verifier`; of the other `KEYS`,
            those that are not null.
        judge: the row's verifier.
        where: file and row, for messages.

    Raises:
        DataError: a value is nothing that JSON can hold, or the verifier requires a column that the
            row has not.
    """
    kept = {
        key: value
        for key, value in whole.items()
        if key not in ("answer", "verifier") and not (key in KEYS and value is None)
        if columns is None or key in columns
    }
    for key, value in kept.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: {key} ({reprlib.repr(value)}) is nothing that JSON can hold, as "
                f"verifiers get it: {error}"
            ) from None
    try:
        for part in judge.parts:
            rewards.check_row(part.kind, kept, settings=part.settings)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    return kept


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
        check_texts(row, keys, optional, where=f"{path}:{number}")
        rows.append((number, row))
    return rows


class LengthError(DataError):
    """A prompt without tokens, or with too many."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


def encode_prompt(
    prompt: str | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: bool,
    max_tokens: int,
    system_prompt: str = "",
    response: str = "",
) -> tuple[int, ...]:
    """Tokenise a prompt as the model sees it, with special tokens and template.

    An EOS that the tokenizer appends is left out: a text that has ended is not to be continued.

    Args:
        prompt: a text; or messages, with `chat_template`.
        tokenizer: the policy's tokenizer.
        chat_template: apply its chat template; a text is a user message.
        max_tokens: longest result, with template and `response`.
        system_prompt: `data.system_prompt`.
        response: text that follows the prompt, and is tokenised with it.

    Raises:
        LengthError: no token, or more than `max_tokens`.
        ConfigError: see `messages.render`; or a token that the model does not have
            (`open_tokenizer`).
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    text = messages[-1]["content"]
    if chat_template:
        # The template adds all special tokens itself.
        if system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        text = render(messages, tokenizer)
    token_ids = tuple(tokenizer.encode(text + response, add_special_tokens=not chat_template))
    if not chat_template and _appends_end(tokenizer):
        token_ids = token_ids[:-1]
    if not 0 < len(token_ids) <= max_tokens:
        raise LengthError(len(token_ids))
    return token_ids


@functools.lru_cache(maxsize=8)
def _appends_end(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself puts its EOS behind every text."""
    plain, whole = (tokenizer.encode("1", add_special_tokens=adds)[-1:] for adds in (False, True))
    return whole == [tokenizer.eos_token_id] != plain
