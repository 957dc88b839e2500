"""What a user environment returned, read once, as plain values."""

from __future__ import annotations

from typing import Any

import numpy as np

from gapo_megatron.types import TurnSettings

_MOST_TEXT = 1_000_000
"""Characters of an episode's final text: it is sent to all ranks of the replica and a verifier."""


def split_answer(answer: Any) -> tuple[Any, TurnSettings]:
    """An answer of `Environment.respond`, and the settings of the next turn that came with it."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], TurnSettings):
        return answer
    return answer, TurnSettings()


def check_answer(answer: Any, *, max_tokens: int, vocab_size: int) -> tuple[int, ...] | str | None:
    """An answer of `Environment.respond`, tokens as plain integers.

    Args:
        answer: what it returned.
        max_tokens: tokens that a response may have, `rollout.max_response_tokens`. Further ones are
            cut: there is no room for so many, and the response is truncated.
        vocab_size: tokens are 0 to `vocab_size` - 1.

    Raises:
        TypeError: it is neither None, nor a string, nor a list, tuple or array of integers.
        ValueError: it has no token, or one that the model has not; or a text that is too long, or
            cannot be encoded.
    """
    if answer is None:
        return None
    if isinstance(answer, str):
        if len(answer) > _MOST_TEXT:
            raise ValueError(f"respond returned {len(answer)} characters; at most {_MOST_TEXT}")
        answer.encode()  # raises for half a surrogate pair
        return answer
    if not isinstance(answer, list | tuple | np.ndarray):
        raise TypeError(
            f"respond returned {type(answer).__name__}, not a list of tokens, a text or None"
        )
    if not len(answer):
        raise ValueError("respond returned no token: None or a text ends the episode")
    tokens = []
    for one in answer[:max_tokens]:
        if not isinstance(one, int | np.integer) or isinstance(one, bool):
            raise TypeError(f"respond returned {type(one).__name__} among the tokens")
        token = int(one)
        if not 0 <= token < vocab_size:
            raise ValueError(f"respond returned the token {token}, which the model does not have")
        tokens.append(token)
    return tuple(tokens)
