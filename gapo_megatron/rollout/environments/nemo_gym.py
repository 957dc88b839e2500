"""Resources servers of NeMo Gym: tools and rewards over HTTP.

    POST /seed_session   the row           begins a session, whose cookie comes with every call
    POST /NAME           the arguments     a tool; the answer is text for the model
    POST /verify         row and response  the same with `reward`

The row has `responses_create_params`, as in NeMo Gym's data sets; docs/environments.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httpx

from gapo_megatron.errors import ConfigError, DataError, shown
from gapo_megatron.io.documents import sendable
from gapo_megatron.rollout.chat import ChatTurns
from gapo_megatron.rollout.environments.served import MOST_BYTES, Served, read_object, read_reward
from gapo_megatron.rollout.environments.tools import find_calls, read_call
from gapo_megatron.types import Episode, TurnSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUEST = "responses_create_params"
_FAILURE = "_ng_failure_class"
"""Key of an answer whose reward of 0 stands for a judge that failed."""
_NOT_OF_GYM = ("id", "prompt", "messages", "level")


class NemoGym(Served["_Session"]):
    """Runs the calls of each turn on the server; a turn without a call is verified by it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        url: str,
        max_calls: int = 10,
        role: str = "tool",
        unscored: float | None = None,
        timeout_s: float = 60,
        max_call_tokens: int = 0,
    ) -> None:
        """Check the settings and the chat template.

        Args:
            tokenizer: the policy's, with its chat template.
            url: address of the resources server.
            max_calls: calls of an episode; a turn beyond them is verified as it is.
            role: author of the results in the chat template.
            unscored: see `Served`.
            timeout_s: see `Served`.
            max_call_tokens: see `Served`.

        Raises:
            ConfigError: names the setting, its value and the rule.
        """
        super().__init__(
            tokenizer,
            url=url,
            schemes=("http", "https"),
            unscored=unscored,
            timeout_s=timeout_s,
            max_call_tokens=max_call_tokens,
        )
        if type(max_calls) is not int or max_calls < 0:
            raise ConfigError(f"max_calls ({max_calls!r}) must be a whole number from 0")
        self._max_calls = max_calls
        self._chat = ChatTurns(tokenizer, role=role)
        self._ssl = httpx.create_ssl_context()

    def respond(self, episode: Episode) -> tuple[Sequence[int], TurnSettings] | str:
        """The results of the turn's calls, in order; without a call the reward, as text."""
        session = self._session(
            episode, is_first=episode.response_mask is None, begin=lambda: self._begin(episode)
        )
        said = self._said(episode)
        calls = find_calls(said)
        if not calls or session.num_calls + len(calls) > self._max_calls:
            return json.dumps(session.verify(said))
        results, turn = self._read(session.call_tools(said, calls))
        return self._chat.tokens(episode, results), turn

    def _begin(self, episode: Episode) -> _Session:
        row = {key: one for key, one in episode.prompt.row.items() if key not in _NOT_OF_GYM}
        if not isinstance(row.get(REQUEST), dict):
            raise LookupError(f"the row needs the column {REQUEST}, an object, as NeMo Gym's have")
        # Never a connection that the server may have closed while the model wrote its turn.
        limits = httpx.Limits(max_keepalive_connections=0)
        transport = httpx.HTTPTransport(verify=self._ssl, limits=limits)
        session = _Session(
            httpx.Client(base_url=self._url, transport=transport, timeout=self._timeout_s), row
        )
        try:
            session.post("/seed_session", row)
        except BaseException:
            session.close()
            raise
        return session


class _Session:
    """The calls of an episode, whose cookies its client keeps, and what was said in it."""

    def __init__(self, client: httpx.Client, row: Mapping[str, Any]) -> None:
        self._client, self._row = client, row
        self._output: list[dict[str, Any]] = []
        """Items of the response, as OpenAI's Responses API has them."""
        self._tools = {
            one["name"]: one
            for one in row[REQUEST].get("tools") or ()
            if isinstance(one, dict) and isinstance(one.get("name"), str)
        }
        self.num_calls = 0

    def call_tools(self, said: str, calls: Sequence[str]) -> list[str]:
        """Results of the calls in a turn, in order."""
        self._add_message(said.partition("<tool_call>")[0].strip())
        return [self._call(call) for call in calls]

    def verify(self, said: str) -> float:
        """The server's reward, with `said` as the last message."""
        self._add_message(said)
        request = self._row[REQUEST]
        response = {
            "id": "resp_0",
            "created_at": 0,
            "model": str(request.get("model") or "policy"),
            "object": "response",
            "output": self._output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": list(self._tools.values()),
        }
        answer = self.post("/verify", {**self._row, "response": response})
        found = read_object(answer, where="/verify")
        if found.get(_FAILURE):
            raise RuntimeError(f"/verify: the server's own judge failed: {shown(found[_FAILURE])}")
        if "reward" not in found:
            raise ValueError("/verify: the answer has no reward")
        return read_reward(found["reward"])

    def post(self, path: str, body: Any, *, is_tool: bool = False) -> str:
        """The text of an answer.

        Raises:
            RuntimeError: the status says that the server failed; of a tool, that of a refusal (4xx)
                is an answer to the model.
            httpx.HTTPError: no connection, no whole answer, or none in time.
        """
        with self._client.stream("POST", path, json=sendable(body)) as response:
            parts, size = [], 0
            for part in response.iter_bytes():
                parts.append(part)
                if (size := size + len(part)) > MOST_BYTES:
                    raise ValueError(f"{path}: an answer of more than {MOST_BYTES} bytes")
        text = b"".join(parts).decode(errors="replace")
        if not (response.is_success or (is_tool and response.is_client_error)):
            raise RuntimeError(f"{path}: status {response.status_code}: {shown(text[:100])}")
        return text

    def close(self) -> None:
        self._client.close()

    def _call(self, call: str) -> str:
        """The result of a call: `name` with `arguments`."""
        self.num_calls += 1
        try:
            name, arguments = read_call(call)
        except DataError as error:
            return f"error: {error}"
        # Other addresses of the server are none of the model's business, `/verify` least of all.
        if name not in self._tools or not isinstance(arguments, dict):
            return f"error: there is no tool {name!r} with such arguments"
        number = f"call_{self.num_calls}"
        item = {"type": "function_call", "call_id": number, "name": name}
        self._output.append({**item, "arguments": json.dumps(arguments)})
        result = self.post(f"/{name}", arguments, is_tool=True)
        self._output.append({"type": "function_call_output", "call_id": number, "output": result})
        return result

    def _add_message(self, text: str) -> None:
        if text:
            content = [{"type": "output_text", "text": text, "annotations": []}]
            number = f"msg_{len(self._output)}"
            message = {"type": "message", "id": number, "role": "assistant", "content": content}
            self._output.append({**message, "status": "completed"})
