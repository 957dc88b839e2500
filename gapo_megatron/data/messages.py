"""Prompts as messages, and the chat template that turns them into text."""

from __future__ import annotations

import datetime
import functools
import hashlib
import inspect
import json
import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapo_megatron.compat.library_errors import as_config_error
from gapo_megatron.config import DataConfig
from gapo_megatron.data.template_date import DATE, asks_date, freeze_date
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.formats.model_folder import MAX_TEMPLATE_CHARACTERS, tokenizer_sha256
from gapo_megatron.io.documents import is_unicode
from gapo_megatron.rewards.final_answer import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = dict[str, str]
"""`role` and `content`."""

ROLES = ("system", "user", "assistant")
_SAMPLE = "What is 1 + 2?"
_MOST_PASSES = 16
"""Passes over a text that remove special tokens one within another, before they are replaced."""


def read_messages(value: Any, *, where: str) -> list[Message]:
    """Check the messages of a row.

    Args:
        value: a list of objects with `role` and `content`. A system message may come first, and a
            user message must come last.
        where: file, row and key, for messages.

    Raises:
        DataError: names file, row, key, the message and the rule.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} ({reprlib.repr(value)}) must be a list of messages")
    messages = [_read_message(one, where=f"{where}[{i}]") for i, one in enumerate(value)]
    for i, one in enumerate(messages):
        if one["role"] == "system" and i:
            raise DataError(f"{where}[{i}]: a system message must be the first message")
    if (role := messages[-1]["role"]) != "user":
        raise DataError(f"{where}[{len(value) - 1}]: the last role must be 'user', not {role!r}")
    return messages


def _read_message(value: Any, *, where: str) -> Message:
    if not isinstance(value, dict):
        raise DataError(f"{where} ({reprlib.repr(value)}) must be an object with role and content")
    given = {key: one for key, one in value.items() if one is not None}  # Parquet has every key
    for key in given:
        if key not in ("role", "content"):
            raise DataError(f"{where}: unknown key {key!r}; only role and content are read")
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise DataError(f"{where}: role ({reprlib.repr(role)}) must be one of {', '.join(ROLES)}")
    if not isinstance(content, str) or not content.strip():
        raise DataError(f"{where}: content ({reprlib.repr(content)}) must be a string, not empty")
    if not is_unicode(content):
        raise DataError(f"{where}: content ({reprlib.repr(content)}) contains a lone surrogate")
    return {"role": role, "content": content}


def special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the text of each special token, which a tokenizer reads as the token."""
    texts = filter(None, special_tokens(tokenizer).values())
    longest_first = sorted({*texts}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def without_special(text: str, pattern: re.Pattern[str]) -> str:
    """A text that `special_pattern` does not match: not by what is around a removed token, either.

    Tokens that are nested deeper than anybody writes become a replacement character.
    """
    num_removed = 1
    for _ in range(_MOST_PASSES):
        text, num_removed = pattern.subn("", text)
        if not num_removed:
            return text
    return pattern.sub("\N{REPLACEMENT CHARACTER}", text)


def render(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, **variables: Any
) -> str:
    """Apply the tokenizer's chat template, up to the beginning of the assistant's next message.

    All prompts and all turns of an environment or an agent are rendered here.

    Args:
        messages: the conversation so far.
        tokenizer: must have a chat template; see `bind_template`.
        variables: variables of the template beside those that the tokenizer is bound to; with
            `add_generation_prompt=False` the assistant's next message does not begin.

    Raises:
        ConfigError: the template fails, or writes far more than the messages.
    """
    variables = {"add_generation_prompt": True, **variables}
    where = f"{tokenizer.name_or_path}: its chat template"
    with as_config_error(f"{where} fails"):
        text: str = tokenizer.apply_chat_template(
            [dict(one) for one in messages], tokenize=False, **variables
        )
    num_characters = sum(len(str(one)) for one in (*messages, variables))
    if len(text) > num_characters + MAX_TEMPLATE_CHARACTERS:
        raise ConfigError(
            f"{where} turns a prompt of {num_characters} characters into {len(text)}; it may add "
            f"at most {MAX_TEMPLATE_CHARACTERS}"
        )
    return text


def begin_template(
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    folder: str | Path,
    *,
    is_used: bool = True,
    inherited: str = "",
) -> str:
    """Bind the tokenizer's chat template for a run or an evaluation; see `bind_template`.

    Args:
        tokenizer: the policy's tokenizer.
        data: section `data`.
        folder: folder of the run or evaluation, which records the date.
        is_used: whether anything is rendered.
        inherited: see `freeze_date`.

    Returns:
        The date; empty if the template asks for none.

    Raises:
        ConfigError, MachineError: see `bind_template` and `freeze_date`.
    """
    date = ""
    if is_used and asks_date(tokenizer.chat_template):
        date = freeze_date(folder, pinned=data.template_date, inherited=inherited)
    bind_template(tokenizer, data, date=date)
    return date


def bind_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig, *, date: str = "") -> None:
    """Let every call of `tokenizer.apply_chat_template` render as `[data]` says.

    Environments, user code among them, render turns with it. Arguments of a call have precedence.

    Args:
        tokenizer: the policy's tokenizer; what it was bound to before is replaced.
        data: section `data`; its `chat_template_kwargs` become variables of the template.
        date: what the template gets for today (`strftime_now`, at midnight); empty: the clock.

    Raises:
        ConfigError: the template does not use a setting of `[data]` that is for it; names setting,
            value and rule.
    """
    bound: dict[str, Any] = dict(data.chat_template_kwargs)
    if date:
        bound["strftime_now"] = datetime.datetime.fromisoformat(date).strftime
    apply = type(tokenizer).apply_chat_template
    if data.chat_template:
        _check_variables(data, tokenizer)
    tokenizer.apply_chat_template = functools.partial(apply, tokenizer, **bound)
    if data.template_date and not asks_date(tokenizer.chat_template):
        raise ConfigError(
            f"data.template_date ({data.template_date!r}): the tokenizer's chat template does not "
            "ask for the date (strftime_now)"
        )
    if data.system_prompt:
        _check_system_prompt(data, tokenizer)
    if data.chat_template and (header := _missing_header(tokenizer)):
        logger.warning(
            "%s: its chat template ignores add_generation_prompt: before an answer it writes %r, "
            "which no prompt ends with, so the model has to begin its turn itself",
            tokenizer.name_or_path,
            header,
        )


def _missing_header(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template writes before an answer, if prompts should end with it and do not."""
    asked, answer = {"role": "user", "content": _SAMPLE}, "It is 3."
    try:
        prompt = render([asked], tokenizer)
        if prompt != render([asked], tokenizer, add_generation_prompt=False):
            return ""
        whole = render([asked, {"role": "assistant", "content": answer}], tokenizer)
    except ConfigError:
        return ""  # it wants other messages
    header, _, _ = whole.removeprefix(prompt).partition(answer)
    return header.strip() if whole.startswith(prompt) else ""


def prompts_made_of(
    tokenizer: PreTrainedTokenizerBase, data: DataConfig, *, date: str
) -> dict[str, str]:
    """What prompts depend on besides the rows, by name; the same text if it is the same.

    A checkpoint records it, so that an error can name what has changed (`PromptSource`).
    """
    settings = {"system_prompt": data.system_prompt, **data.chat_template_kwargs}
    template = tokenizer.chat_template if data.chat_template else None
    return {
        "chat template": _sha256(template),
        "settings of the chat template": _sha256(settings),
        "tokenizer": tokenizer_sha256(Path(tokenizer.name_or_path)),
        DATE: date,
    }


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check_variables(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise ConfigError(
            "data.chat_template (true) needs a tokenizer with a chat template; set it to false, or "
            "use the tokenizer of an instruction-tuned model"
        )
    taken = inspect.signature(type(tokenizer).apply_chat_template).parameters
    for name, value in data.chat_template_kwargs.items():
        setting = f"data.chat_template_kwargs.{name} ({value!r})"
        if name in (*taken, "messages"):
            raise ConfigError(f"{setting}: this name is an argument of apply_chat_template itself")
        if not re.search(rf"\b{name}\b", str(tokenizer.chat_template)):
            raise ConfigError(f"{setting}: the tokenizer's chat template has no such variable")


def _check_system_prompt(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": data.system_prompt},
        {"role": "user", "content": _SAMPLE},
    ]
    if data.system_prompt.strip() not in render(messages, tokenizer):
        raise ConfigError(
            f"data.system_prompt ({reprlib.repr(data.system_prompt)}): the tokenizer's chat "
            "template drops system messages; put the text into the prompts"
        )
