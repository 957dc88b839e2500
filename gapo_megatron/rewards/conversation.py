"""A response as chat messages: those of the prompt, then the turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Conversation(list[dict[str, Any]]):
    """Messages with `role` and `content`; the first `num_prompt` are the prompt's."""

    num_prompt: int = 0


def conversation(
    row: Mapping[str, Any], response: str, turns: Sequence[Mapping[str, Any]] | None
) -> Conversation:
    """The messages of a row, and what the model and its environment said.

    Args:
        row: see `prompt_messages`.
        response: text of `marked_text`.
        turns: the turns after the prompt (`turns.messages`); None: the response is the only one.
    """
    first = prompt_messages(row)
    if turns is None:
        turns = [{"role": "assistant", "content": response}]
    found = Conversation([*first, *map(dict, turns)])
    found.num_prompt = len(first)
    return found


def prompt_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row's prompt, as copies.

    Args:
        row: has `messages`, or `prompt`: a text, or messages too; all others count as no prompt.
    """
    prompt = row.get("messages") or row.get("prompt")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return [dict(one) for one in prompt] if isinstance(prompt, list) else []
