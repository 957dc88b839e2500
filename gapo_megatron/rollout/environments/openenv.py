"""Environments of OpenEnv: a session over a WebSocket, `reset` and then a `step` for each turn.

    {"type": "reset", "data": {...}}             the row's column `reset`
    {"type": "step", "data": {"message": "..."}} the model's turn, under the key `action`
    {"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}

docs/environments.md says what a row needs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from websockets.sync.client import ClientConnection, connect

from gapo_megatron.errors import ConfigError, shown
from gapo_megatron.io.documents import sendable
from gapo_megatron.rewards.conversation import prompt_messages
from gapo_megatron.rollout.agents.conversation import first_token
from gapo_megatron.rollout.chat import ChatTemplate, ChatTurns
from gapo_megatron.rollout.environments.served import MOST_BYTES, Served, read_object, read_reward
from gapo_megatron.types import Episode, Prompt, TurnSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLOSE_S = 2.0
"""Time for a server to say goodbye."""


class OpenEnv(Served["_Session"]):
    """The prompt and the environment's first observation, then its answer to each turn.

    The reward is the sum over the steps, of which the last must have one.
    """

    moves_first = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        url: str,
        action: str = "message",
        observation: str = "",
        max_turns: int = 10,
        unscored: float | None = None,
        timeout_s: float = 60,
        max_call_tokens: int = 0,
    ) -> None:
        """Check the settings and the chat template.

        Args:
            tokenizer: the policy's, with its chat template.
            url: address of the server.
            action: key of the action that holds the text of the model's turn.
            observation: key of the observation that holds the text for the model; empty: all of it,
                as JSON.
            max_turns: turns of the model; the last ends the episode.
            unscored: see `Served`.
            timeout_s: see `Served`.
            max_call_tokens: see `Served`.

        Raises:
            ConfigError: names the setting, its value and the rule.
        """
        super().__init__(
            tokenizer,
            url=url,
            schemes=("ws", "wss"),
            unscored=unscored,
            timeout_s=timeout_s,
            max_call_tokens=max_call_tokens,
        )
        if type(max_turns) is not int or max_turns < 1:
            raise ConfigError(f"max_turns ({max_turns!r}) must be a whole number from 1")
        for name, value in {"action": action, "observation": observation}.items():
            if not isinstance(value, str) or (name == "action" and not value):
                raise ConfigError(f"{name} ({value!r}) must be the name of a key")
        self._action, self._observation, self._max_turns = action, observation, max_turns
        self._template = ChatTemplate(tokenizer)
        self._chat = ChatTurns(tokenizer, role="user")
        self._first = first_token(tokenizer)

    def begin(self, prompt: Prompt) -> Sequence[int]:
        """The first token of the chat template: the first observation brings the others."""
        return [self._first]

    def respond(self, episode: Episode) -> tuple[Sequence[int], TurnSettings] | str:
        """The conversation up to the model's first turn, later the next observation, or the end."""
        is_first = not len(episode.token_ids)
        session = self._session(episode, is_first=is_first, begin=self._connect)
        if is_first:
            seen = session.ask("reset", episode.prompt.row.get("reset") or {})
            messages = prompt_messages(episode.prompt.row)
            if not messages:
                raise LookupError("the row needs the column prompt or messages")
            [text], turn = self._read([self._text(seen)])
            asked = messages[-1]["content"]
            messages[-1]["content"] = "\n\n".join(filter(None, [asked, text]))
            return self._template.opening(messages)[1:], turn
        seen = session.ask("step", {self._action: self._said(episode)})
        session.num_turns += 1
        is_over = seen.get("done")
        if not isinstance(is_over, bool):
            raise ValueError(f"step: done ({shown(is_over)}) must be true or false")
        is_over = is_over or session.num_turns >= self._max_turns
        if seen.get("reward") is not None or is_over:
            session.reward = read_reward(session.reward + read_reward(seen.get("reward")))
        if is_over:
            return json.dumps(session.reward)
        texts, turn = self._read([self._text(seen)])
        return self._chat.tokens(episode, texts), turn

    def _connect(self) -> _Session:
        connection = connect(
            f"{self._url}/ws",
            open_timeout=self._timeout_s,
            close_timeout=_CLOSE_S,
            ping_timeout=None,  # a busy server answers none, and each call has its own limit
            max_size=MOST_BYTES,
            proxy=None,
        )
        with contextlib.ExitStack() as stack:
            entered = stack.enter_context(connection)
            return _Session(entered, end=stack.pop_all().close, timeout_s=self._timeout_s)

    def _text(self, seen: dict[str, Any]) -> str:
        """The text of an observation."""
        found = seen.get("observation")
        if not isinstance(found, dict):
            raise ValueError(f"observation ({shown(found)}) must be an object")
        text = found.get(self._observation)
        if not self._observation:
            text = json.dumps(found, ensure_ascii=False)  # the model reads characters
        if not isinstance(text, str):
            raise ValueError(f"observation: {self._observation!r} ({shown(text)}) must be a text")
        return text


class _Session:
    """A connection, which has an environment of its own at the server."""

    def __init__(
        self, connection: ClientConnection, *, end: Callable[[], None], timeout_s: float
    ) -> None:
        self._connection, self._timeout_s = connection, timeout_s
        self.close = end
        """Closes the connection."""
        self.num_turns = 0
        self.reward = 0.0

    def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message, and return the data of the observation that answers it.

        Raises:
            RuntimeError: the server answers with an error.
            ValueError: or with what is no observation.
            OSError, websockets.WebSocketException: no answer, or none in time.
        """
        self._connection.send(json.dumps(sendable({"type": kind, "data": data})))
        answer = read_object(self._connection.recv(timeout=self._timeout_s), where=kind)
        found = answer.get("data")
        if answer.get("type") == "error":
            raise RuntimeError(f"{kind}: the server refused: {shown(found)}")
        if answer.get("type") != "observation" or not isinstance(found, dict):
            raise ValueError(f"{kind}: the answer is no observation: {shown(answer)}")
        return found
