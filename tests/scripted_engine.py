"""An engine for tests: every request is answered by a script, a token each decoding step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapo_megatron.errors import RolloutError
from gapo_megatron.rollout.engine import Completion, Request
from gapo_megatron.rollout.progress import Heartbeat, Tally
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollouts import Rollouts
from tests.waiting import HANG_S

Script = Callable[[Request], Sequence[int]]
"""What the model says next: tokens up to and with EOS. A request may have too few tokens left."""


class LoneHeartbeat(Heartbeat):
    """Nobody else generates."""

    def __init__(self) -> None:
        super().__init__(None)

    def beat(self, *, ended: bool) -> bool:
        self.all_ended = ended
        return ended

    def wait_for_all(
        self, *, on_beat: Callable[[], object], meanwhile: Callable[[], object]
    ) -> None:
        on_beat()
        meanwhile()


class QueueChannel:
    """A `exchange.Channel` of threads; alone it has nobody to send to."""

    def __init__(self, rank: int, queues: dict[Any, queue.Queue[bytes]], *, size: int) -> None:
        self.rank, self.size = rank, size
        self._queues = queues

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Any:
        self._queue(self.rank, to, tag).put(buffer.numpy().tobytes())
        return SimpleNamespace(wait=lambda: None)

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Any:
        found = self._queue(source, self.rank, tag)

        def wait() -> None:
            content = np.frombuffer(found.get(timeout=HANG_S), dtype=np.uint8)
            assert len(content) == len(buffer)
            buffer.numpy()[:] = content

        return SimpleNamespace(wait=wait)

    def _queue(self, *key: int) -> queue.Queue[bytes]:
        return self._queues.setdefault(key, queue.Queue())


class LoneReplicas(Replicas):
    """A rank without a process group; of several it is the one that is there."""

    def __init__(self, *, rank: int = 0, world_size: int = 1, size: int = 1) -> None:
        super().__init__(rank=rank, world_size=world_size, size=size)

    def gather(self, groups: Sequence[Any]) -> list[Any]:
        return list(groups)

    def gather_tables(self, table: np.ndarray) -> list[np.ndarray]:
        return self.gather([table])

    @property
    def channel(self) -> Any:
        return QueueChannel(self.rank, {}, size=self.world_size)

    def heartbeat(self) -> Heartbeat:
        return LoneHeartbeat()

    def tally(self, wanted: int) -> Tally:
        return GatheredTally(self, wanted)


class GatheredTally(Tally):
    """The reports of ranks without a process group."""

    def __init__(self, replicas: LoneReplicas, wanted: int) -> None:
        super().__init__(None, wanted=wanted)
        self._replicas = replicas

    def _begin(self, sums: torch.Tensor) -> None:
        self._everyone = self._replicas.gather([sums.tolist()])

    def _finish(self, meanwhile: Callable[[], object]) -> tuple[int, int]:
        sum_whole, num_aborts = map(sum, zip(*self._everyone, strict=True))
        return sum_whole, num_aborts


class ThreadReplicas(LoneReplicas):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, *, size: int, barrier: threading.Barrier, sent: list[Any]):
        super().__init__(rank=rank, world_size=barrier.parties, size=size)
        self.queues: dict[Any, queue.Queue[bytes]] = {}
        self._barrier = barrier
        self._sent = sent

    @classmethod
    def of(cls, world_size: int, *, size: int) -> list[ThreadReplicas]:
        """One for each rank."""
        barrier, sent = threading.Barrier(world_size), [None] * world_size
        ranks = [cls(rank, size=size, barrier=barrier, sent=sent) for rank in range(world_size)]
        for one in ranks:
            one.queues = ranks[0].queues
        return ranks

    @property
    def channel(self) -> Any:
        return QueueChannel(self.rank, self.queues, size=self.world_size)

    def gather(self, groups: Sequence[Any]) -> list[Any]:
        self._sent[self.rank] = list(groups)
        self._barrier.wait(HANG_S)
        received = [one for part in self._sent for one in part]
        self._barrier.wait(HANG_S)
        return received


def place_of(request: Request) -> tuple[str, int]:
    """The problem's id and the number of the response, which make up a request's name."""
    problem, _, sample = request.name.rpartition("/")
    return problem, int(sample)


def says(tokenizer: Any, responses: Mapping[str, Sequence[str]]) -> Script:
    """The text of each response, by problem, and EOS."""

    def script(request: Request) -> list[int]:
        problem, sample = place_of(request)
        return [*tokenizer.encode(responses[problem][sample]), tokenizer.eos_token_id]

    return script


def alternatives_to(tokens: np.ndarray, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Alternatives [n, count] and their log-probs, which differ among the tokens of a response.

    The first are the sampled tokens themselves; those after the third are excluded.
    """
    ids = (tokens[:, None] + np.arange(count, dtype=np.int32)).astype(np.int32)
    places = start + np.arange(len(tokens))[:, None]
    log_probs = (-1 - np.arange(count) / (3 + places)).astype(np.float32)
    log_probs[:, 3:] = -np.inf
    return ids, log_probs


class ScriptedEngine:
    """A `rollout.engine.Engine` of `num_places` requests at a time.

    Attributes:
        asked: every request there ever was.
        num_tokens: sampled so far.
        num_steps: decoding steps so far.
        before_step: called before each of them.
        weights: names of the tensors that the last update brought.
    """

    def __init__(
        self,
        script: Script,
        *,
        replicas: Replicas | None = None,
        num_places: int = 1000,
        log_prob: float = -1.0,
        before_step: Callable[[], object] = lambda: None,
    ) -> None:
        self.replicas = replicas or LoneReplicas()
        self.policy_version = 0
        self.max_sequence_tokens = 10_000
        self.vocab_size = 100_000
        self.verify_bound = 0.01
        self.asked: list[Request] = []
        self.num_tokens = self.num_steps = 0
        self.before_step = before_step
        self.weights: list[str] = []
        self._script = script
        self._num_places = num_places
        self._log_prob = log_prob
        self._awake = True
        self._open: dict[str, tuple[Request, Sequence[int], int]] = {}
        """Request, answer and number of tokens so far, by name and in order."""

    def add(self, request: Request) -> None:
        self._require_awake("generate")
        assert request.name not in self._open and request.max_tokens > 0, request
        self.asked.append(request)
        self._open[request.name] = request, self._script(request), 0

    def poll(self) -> list[Completion]:
        assert self._open, "nothing to generate"
        self.before_step()
        self.num_steps += 1
        ended = []
        for name in list(self._open)[: self._num_places]:
            request, answer, count = self._open[name]
            self.num_tokens += 1
            count += 1
            self._open[name] = request, answer, count
            if count == min(len(answer), request.max_tokens):
                ended.append(self._end(name, "stop" if count == len(answer) else "length"))
        return ended

    def abort(self) -> list[Completion]:
        return [self._end(name, "abort") for name in list(self._open)]

    def num_requests(self) -> tuple[int, int]:
        num_running = min(len(self._open), self._num_places)
        return num_running, len(self._open) - num_running

    def score(self, rollouts: Rollouts) -> list[np.ndarray]:
        self._require_awake("score")
        counts = rollouts.num_sampled_tokens.tolist()
        return [np.full(count, self._log_prob, np.float32) for count in counts]

    def update_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        policy_version: int,
        on_received: Callable[[], None] = lambda: None,
    ) -> None:
        self._require_awake("update_weights")
        self.weights = [name for name, _ in tensors]
        on_received()
        self.policy_version = policy_version

    def sleep(self) -> None:
        self._awake = False

    def wake(self) -> None:
        self._awake = True

    def _end(self, name: str, reason: Any) -> Completion:
        request, answer, count = self._open.pop(name)
        log_probs = np.full(count, self._log_prob, np.float32)
        tokens = np.array(answer[:count], np.int32)
        start = len(request.response_ids)
        ids, theirs = alternatives_to(tokens, start, request.num_alternatives)
        return Completion(
            name,
            tokens,
            log_probs,
            reason,
            alternative_ids=ids,
            alternative_log_probs=theirs,
        )

    def _require_awake(self, action: str) -> None:
        if not self._awake:
            raise RolloutError(f"{action} needs an engine that is awake")
