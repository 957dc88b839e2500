"""Prompts as messages, and the chat template that turns them into text."""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gapo_megatron.compat.library_errors import as_config_error
from gapo_megatron.config import DataConfig
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.hf.model_folder import MAX_TEMPLATE_CHARACTERS
from gapo_megatron.io.documents import is_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""`role` and `content`."""

ROLES = ("system", "user", "assistant")
_SAMPLE = "What is 1 + 2?"


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


def render(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, **variables: Any
) -> str:
    """Apply the tokenizer's chat template, up to the beginning of the assistant's next message.

    Args:
        messages: the conversation so far.
        tokenizer: must have a chat template.
        variables: `data.chat_template_kwargs`.

    Raises:
        ConfigError: the template fails, or writes far more than the messages.
    """
    where = f"{tokenizer.name_or_path}: its chat template"
    with as_config_error(f"{where} fails"):
        text: str = tokenizer.apply_chat_template(
            [*messages], tokenize=False, add_generation_prompt=True, **variables
        )
    num_characters = sum(len(one["content"]) for one in messages)
    if len(text) > num_characters + MAX_TEMPLATE_CHARACTERS:
        raise ConfigError(
            f"{where} turns a prompt of {num_characters} characters into {len(text)}; it may add "
            f"at most {MAX_TEMPLATE_CHARACTERS}"
        )
    return text


def check_template(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the tokenizer's chat template uses the settings of `[data]` that are for it.

    Raises:
        ConfigError: names setting, value and rule.
    """
    if not data.chat_template:
        return
    if not tokenizer.chat_template:
        raise ConfigError(
            "data.chat_template (true) needs a tokenizer with a chat template; set it to false, or "
            "use the tokenizer of an instruction-tuned model"
        )
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    for name, value in data.chat_template_kwargs.items():
        setting = f"data.chat_template_kwargs.{name} ({value!r})"
        if name in (*taken, "messages"):
            raise ConfigError(f"{setting}: this name is an argument of apply_chat_template itself")
        if not re.search(rf"\b{name}\b", str(tokenizer.chat_template)):
            raise ConfigError(f"{setting}: the tokenizer's chat template has no such variable")
    if data.system_prompt:
        messages = [
            {"role": "system", "content": data.system_prompt},
            {"role": "user", "content": _SAMPLE},
        ]
        if data.system_prompt.strip() not in render(
            messages, tokenizer, **data.chat_template_kwargs
        ):
            raise ConfigError(
                f"data.system_prompt ({reprlib.repr(data.system_prompt)}): the tokenizer's chat "
                "template drops system messages; put the text into the prompts"
            )
