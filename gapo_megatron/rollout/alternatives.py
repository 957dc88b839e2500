"""Alternatives: the most likely tokens at the places of sampled ones, for turns that ask for them.

They stay with an episode while it is open: an agent that begins anew gets the same answers.
"""

from __future__ import annotations

import base64
import itertools
from typing import TYPE_CHECKING

import numpy as np

from gapo_megatron.errors import RolloutError
from gapo_megatron.types import Episode

if TYPE_CHECKING:  # it needs torch, and the number of alternatives is checked before that is there
    from gapo_megatron.rollout.engine import Completion

MOST_ALTERNATIVES = 20
"""Largest number of a turn: OpenAI's, and vLLM's without `max_logprobs`."""
ALTERNATIVE = np.dtype([("place", "<i4"), ("token", "<i4"), ("log_prob", "<f4")])
"""An alternative: the number of the response token in whose place it stands, and its own values."""


def joined_alternatives(episode: Episode, completion: Completion) -> np.ndarray | None:
    """[n] of `ALTERNATIVE`: those of an episode, and of the tokens that continue its turn.

    Raises:
        RolloutError: the engine has not returned as many as the turn asks for.
    """
    kept, num_alternatives = episode.alternatives, episode.turn.num_alternatives
    shape = len(completion.token_ids), num_alternatives
    if not all(shape):
        return kept
    ids, log_probs = completion.alternative_ids, completion.alternative_log_probs
    if ids is None or log_probs is None or not ids.shape == log_probs.shape == shape:
        found = ["none" if one is None else [*one.shape] for one in (ids, log_probs)]
        raise RolloutError(
            f"prompt {episode.prompt.id!r}, rollout {episode.sample}: the engine must return "
            f"alternatives {[*shape]} with num_alternatives ({num_alternatives}), which an "
            f"agent's top_logprobs asks for; their ids and log-probs are {found[0]} and {found[1]}"
        )
    new = np.empty(ids.size, ALTERNATIVE)
    new["place"] = len(episode.token_ids) + np.repeat(np.arange(shape[0]), num_alternatives)
    new["token"], new["log_prob"] = ids.ravel(), log_probs.ravel()
    return new if kept is None else np.concatenate([kept, new])


def alternatives_of(episode: Episode, places: range) -> list[list[tuple[int, float]]]:
    """Tokens and log-probs of the alternatives at each of some places, the most likely first."""
    kept = episode.alternatives
    if kept is None:
        return [[] for _ in places]
    edges = np.searchsorted(kept["place"], [*places, places.stop]).tolist()
    ids, log_probs = kept["token"], kept["log_prob"]
    return [
        [*zip(ids[start:end].tolist(), log_probs[start:end].tolist(), strict=True)]
        for start, end in itertools.pairwise(edges)
    ]


def to_text(alternatives: np.ndarray) -> str:
    """Alternatives as ASCII, with all bits of their log-probs."""
    return base64.b64encode(alternatives.tobytes()).decode()


def of_text(text: str) -> np.ndarray:
    """What `to_text` was given."""
    return np.frombuffer(base64.b64decode(text), ALTERNATIVE).copy()
