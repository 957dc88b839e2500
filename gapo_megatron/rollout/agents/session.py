"""What an agent is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Session:
    """One sample of one problem: the argument of an agent.

    An agent is a function `solve(session, **settings)`, plain or `async`, that asks the model with
    the `openai` client:

        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        client.chat.completions.create(model=session.model, messages=[...])

    It returns the text that the verifier reads as the response, or None: the text of the model's
    last turn.
    """

    base_url: str
    """Address of the model, on this machine, for the client."""
    api_key: str = field(repr=False)
    """Secret of this session, for the client."""
    model: str
    """Name of the model, for the requests."""
    problem: Mapping[str, Any]
    """The problem: columns of its row, `id`, `prompt` and `level` included, without the answer."""
    sample: int
    """Number of this response among those to the problem."""
