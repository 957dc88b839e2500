"""What environments behind an address share: sessions, calls over HTTP, and rewards.

An episode has a session with its server from its first call to its end. A server that fails, in
whatever way, is an exception here, and so an unknown verdict with its reason: never a reward of 0.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import httpx

from gapo_megatron.data.messages import special_pattern, without_special
from gapo_megatron.errors import ConfigError, shown
from gapo_megatron.rewards.final_answer import final_answer
from gapo_megatron.rewards.results import MOST_GRADE
from gapo_megatron.rollout.chat import cut_middle
from gapo_megatron.rollout.environments.one_turn import OneTurn
from gapo_megatron.rollout.turns import last_text
from gapo_megatron.types import Episode, Outcome, TurnSettings, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_BYTES = 4 * 2**20
"""Largest answer of a server."""
_PAUSES_S = (0.1, 1.0)
"""Waits before further attempts to connect: a server that is asked much may refuse some."""


class _Closable(Protocol):
    def close(self) -> None: ...


S = TypeVar("S", bound=_Closable)


class Served(OneTurn, Generic[S]):
    """The sessions of an environment's episodes, and the verdict from the server's reward."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        url: str,
        schemes: tuple[str, ...],
        unscored: float | None,
        timeout_s: float,
        max_call_tokens: int,
    ) -> None:
        """Check the settings; nothing connects.

        Args:
            tokenizer: the policy's.
            url: address of the server.
            schemes: what the address may begin with.
            unscored: reward of a response that reached the token limit, which no server has seen
                to its end; None: its verdict is unknown.
            timeout_s: `environment.call_timeout_s`.
            max_call_tokens: `environment.max_call_tokens`.

        Raises:
            ConfigError: names the setting, its value and the rule.
        """
        super().__init__(tokenizer)
        if not isinstance(url, str) or not url.startswith(tuple(f"{one}://" for one in schemes)):
            raise ConfigError(f"url ({url!r}) must begin with {' or '.join(schemes)}://")
        if unscored is not None:
            try:
                unscored = read_reward(unscored)
            except ValueError as error:
                raise ConfigError(f"unscored ({unscored!r}): {error}") from None
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._unscored, self._max_call_tokens = unscored, max_call_tokens
        self._special = special_pattern(tokenizer)
        self._sessions: dict[tuple[str, int], S] = {}
        self._lock = threading.Lock()

    def judge(self, episode: Episode) -> Any:
        """The server's reward: the text with which `respond` ended the episode."""
        if episode.final_text is not None:
            return read_reward(json.loads(episode.final_text))
        if self._unscored is not None:
            return self._unscored
        return Verdict(Outcome.UNKNOWN, "the server has not scored it: it reached the token limit")

    def close(self, episode: Episode) -> None:
        """End the session, in a thread: saying goodbye may take a while."""
        with self._lock:
            session = self._sessions.pop(_place(episode), None)
        if session is not None:
            threading.Thread(target=session.close, daemon=True).start()

    def _session(self, episode: Episode, *, is_first: bool, begin: Callable[[], S]) -> S:
        """The session of an episode; `begin` makes one at its first call.

        Raises:
            RuntimeError: the process that had the session is gone.
        """
        if is_first:
            self.close(episode)  # of an earlier generation
            session = _connected(begin)
            with self._lock:
                self._sessions[_place(episode)] = session
            return session
        with self._lock:
            found = self._sessions.get(_place(episode))
        if found is None:
            raise RuntimeError("its session with the server was lost with an earlier process")
        return found

    def _read(self, texts: Sequence[str]) -> tuple[list[str], TurnSettings]:
        """What the model reads of a server's texts, and settings that say how much was cut."""
        cut = [
            cut_middle(
                # JSON may hold halves of characters.
                without_special(text.encode(errors="replace").decode(), self._special),
                self._tokenizer,
                max_tokens=self._max_call_tokens,
            )
            for text in texts
        ]
        return [text for text, _ in cut], TurnSettings(num_cut=sum(num for _, num in cut))

    def _said(self, episode: Episode) -> str:
        """The model's last turn without its thinking."""
        return final_answer(last_text(self._tokenizer, episode)) or ""


def read_object(text: str | bytes, *, where: str) -> dict[str, Any]:
    """The JSON object that a server answered.

    Raises:
        ValueError: it is something else, or too large.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"{where}: an answer of more than {MOST_BYTES} bytes")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: the answer is no JSON: {shown(text[:100])}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: the answer is no JSON object: {shown(text[:100])}")
    return found


def read_reward(value: Any) -> float:
    """A server's reward.

    Raises:
        ValueError: it is no finite number, or a huge one.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or abs(value) > MOST_GRADE:
        raise ValueError(f"the reward {shown(value)} is no number within {MOST_GRADE:,.0f}")
    return float(value)


def _connected(begin: Callable[[], S]) -> S:
    """What `begin` returns; called again where nobody has accepted the connection.

    Nothing else is done twice: what was sent may have had effects.
    """
    for pause_s in _PAUSES_S:
        try:
            return begin()
        except (ConnectionRefusedError, httpx.ConnectError):
            time.sleep(pause_s)
    return begin()


def _place(episode: Episode) -> tuple[str, int]:
    return episode.prompt.id, episode.sample
