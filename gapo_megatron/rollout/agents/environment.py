"""Agents as an environment: a response is one or more conversations that the agent leads."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gapo_megatron.data.row_formats import without
from gapo_megatron.rollout.agents.conversation import first_token
from gapo_megatron.rollout.agents.conversations import Conversations
from gapo_megatron.rollout.agents.live import LiveAgent
from gapo_megatron.rollout.agents.requests import MODEL
from gapo_megatron.rollout.agents.server import Server
from gapo_megatron.rollout.agents.session import Session
from gapo_megatron.rollout.turns import last_text
from gapo_megatron.types import Episode, Prompt, TurnSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gapo_megatron.config import EnvironmentConfig

logger = logging.getLogger(__name__)


class Agents:
    """Runs an agent for each episode. Its messages are appended tokens, the model's turns sampled.

    The prompt is the first token of the chat template; the agent's first request begins the
    response. An episode that was interrupted, or that has changed its process, begins the agent
    anew, and its requests are answered from the turns that there are.
    """

    moves_first = True
    may_repeat = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        agent: functools.partial[Any],
        config: EnvironmentConfig,
    ) -> None:
        """Check the chat template; no agent and no server starts.

        From here on, clients of this process and its children reach 127.0.0.1 without a proxy: what
        a rollout changes in the environment variables is undone at its end.

        Args:
            tokenizer: the policy's, with its chat template.
            agent: called with a Session.
            config: section `environment`.

        Raises:
            ConfigError: there is no template, or none that begins with a special token.
        """
        self._tokenizer = tokenizer
        self._agent = agent
        self._config = config
        self._first = first_token(tokenizer)
        self._live: dict[tuple[str, int], LiveAgent] = {}
        self._lock = threading.Lock()
        self._said: set[str] = set()
        """What is said once."""
        _reach_without_proxy()

    def begin(self, prompt: Prompt) -> Sequence[int]:
        """The first token of the chat template: the agent's request brings the others."""
        return [self._first]

    def respond(self, episode: Episode) -> tuple[list[int], TurnSettings] | str | None:
        """The agent's next request: tokens, and what ends the turn. Or what the agent returned."""
        place = _place(episode)
        with self._lock:
            agent = self._live.get(place)
            if agent is None or not agent.fits(episode):
                self._drop(place)
                agent = self._live[place] = self._new_agent(episode)
                agent.start()
        return agent.follow(episode)

    def judge(self, episode: Episode) -> tuple[str, str]:
        """The text that the agent returned, or of the model's last turn."""
        text = episode.final_text
        if text is None:
            text = last_text(self._tokenizer, episode)
        return text, episode.prompt.answer

    def close(self, episode: Episode) -> None:
        """End the session: the agent's requests get an error from now on."""
        with self._lock:
            self._drop(_place(episode))

    def _drop(self, place: tuple[str, int]) -> None:
        agent = self._live.pop(place, None)
        if agent is not None:
            self._server.remove(agent)
            agent.close()

    def _new_agent(self, episode: Episode) -> LiveAgent:
        """The agent of an episode, with its session; not started yet."""
        prompt = episode.prompt
        session = Session(
            base_url=self._server.base_url,
            api_key=self._server.new_secret(),
            model=MODEL,
            problem={
                "id": prompt.id,
                "level": prompt.level,
                **without(prompt.row, prompt.answer_key),
            },
            sample=episode.sample,
        )
        conversations = Conversations(
            self._tokenizer,
            first=self._first,
            overrule=self._overrule,
            opens=self._say_opened,
            config=self._config,
        )
        agent = LiveAgent(self._agent, session, conversations)
        self._server.add(agent)
        return agent

    @functools.cached_property
    def _server(self) -> Server:
        """The address, from the first episode on."""
        return Server()

    def _overrule(self, name: str, value: Any) -> None:
        """Say once of each field that the run's own sampling settings hold."""
        if name not in self._said:
            self._said.add(name)
            logger.warning(
                "environment.kind: an agent asks for %s = %r; the settings of [rollout] hold "
                "instead, in this and all later requests",
                name,
                value,
            )

    def _say_opened(self, why: str) -> None:
        """Say once why a request begins a conversation beside those that there are."""
        if "opened" not in self._said:
            self._said.add("opened")
            logger.warning(
                "environment.kind: an agent's request continues no conversation of its episode and "
                "begins another, which is trained, too: %s (said once)",
                why,
            )


def _reach_without_proxy() -> None:
    """Let clients of this process reach the address where a proxy is set for all others.

    Clients differ in which of two spellings they prefer, and an asterisk stands for all hosts only
    by itself.
    """
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if hosts.strip() == "*":
        return
    if "127.0.0.1" not in [one.strip() for one in hosts.split(",")]:
        hosts = f"{hosts},127.0.0.1".strip(",")
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = hosts


def _place(episode: Episode) -> tuple[str, int]:
    return episode.prompt.id, episode.sample
