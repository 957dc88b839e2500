"""Generation with vLLM inside the trainer's processes: tokens in, tokens out.

Every `rollout.tensor_parallel_size` neighbouring ranks form a replica: one vLLM engine whose ranks
run in lockstep without talking about what to do (vLLM's external launcher). Replicas share nothing;
each generates for its slice of the prompts. What follows, every rank does for its own part of them,
and `gather` brings the groups together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig
from vllm import SamplingParams
from vllm.outputs import RequestOutput

from gapo_megatron.compat import vllm
from gapo_megatron.config import Config
from gapo_megatron.errors import DataError, RolloutError
from gapo_megatron.rollout.progress import End, GenerationProgress, Heartbeat, Occupancy
from gapo_megatron.rollout.vllm.arguments import check_engine, engine_args, eos_token_ids
from gapo_megatron.rollout.vllm.guards import (
    own_shared_memory,
    trainer_num_threads,
    trainer_random_state,
)
from gapo_megatron.rollout.vllm.requests import (
    TOKENS_ONLY,
    Request,
    Responses,
    num_tokens,
)
from gapo_megatron.rollout.vllm.schedule import Phase, Schedule
from gapo_megatron.types import Ended, Prompt, Rollout

T = TypeVar("T")


class RolloutEngine:
    """This rank's part of the rollout engine.

    Attributes:
        config, hf_config: of the run, and of its model.
        device: of this rank.
        policy_version: of the weights it generates with; -1 until the first sync.
        llm: vLLM's engine.
        schedule: whether the engine or the trainer has the memory.
        gloo_group: all ranks, for Python objects.
    """

    def __init__(
        self,
        config: Config,
        hf_config: PretrainedConfig,
        *,
        device: torch.device | str,
        load_weights: bool = False,
    ) -> None:
        """Build the engine. The process group must be up.

        Args:
            config: of the run.
            hf_config: the model's Hugging Face config.
            device: of this rank.
            load_weights: read those of `model.hf_dir`, to generate with no trainer beside. Else it
                starts asleep, without weights: the first sync brings them, from the ranks that have
                read them, and finds the memory of weights and KV cache free.

        Collectives: vLLM's own at start-up; one new group over all ranks.

        Raises:
            ConfigError: see `check_engine`; raised before anything is built.
            RolloutError: vLLM refuses, for want of memory for instance.
        """
        self.device = device = torch.device(device)
        check_engine(config, hf_config, device, world_size=dist.get_world_size())
        self.config = config
        self.hf_config = hf_config
        self.policy_version = -1
        self.eos_token_ids = eos_token_ids(config.model.hf_dir, hf_config.vocab_size)
        self._tp_size = config.rollout.tensor_parallel_size
        self.gloo_group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=config.parallel.timeout_s)
        )
        with trainer_random_state(), trainer_num_threads(), own_shared_memory(self.gloo_group):
            try:
                self.llm = vllm.create(
                    engine_args(config, hf_config, device, load_weights=load_weights)
                )
            except ValueError as error:
                raise RolloutError(f"vLLM cannot start: {error}") from error
        self.schedule = Schedule(self.llm, device)
        self._replica_group = self._create_replica_groups()
        if not load_weights:
            self.schedule.sleep()

    @property
    def num_replicas(self) -> int:
        """Engines of the run, each generating for its own prompts."""
        return dist.get_world_size() // self._tp_size

    @property
    def replica(self) -> int:
        """Index of this rank's engine."""
        return dist.get_rank() // self._tp_size

    def share(self, prompts: Sequence[T]) -> list[T]:
        """This replica's contiguous slice; those of all replicas make up `prompts` in order."""
        return _slice(prompts, self.replica, self.num_replicas)

    def part(self, groups: Sequence[T]) -> list[T]:
        """This rank's contiguous slice of its replica's; those of its ranks make up `groups`."""
        return _slice(groups, dist.get_rank() % self._tp_size, self._tp_size)

    def gather(self, groups: Sequence[T]) -> list[T]:
        """What every rank made of its part, in prompt order, on every rank.

        Args:
            groups: this rank's. Anything that pickles.

        Collectives: one gather of objects over all ranks (gloo).
        """
        received: list[list[T]] = [[]] * dist.get_world_size()
        dist.all_gather_object(received, list(groups), group=self.gloo_group)
        return [group for part in received for group in part]

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        seed: int,
        step: int,
        max_response_tokens: int,
        num_groups: int | None = None,
        begun: Mapping[str, tuple[Rollout, ...]] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        progress: bool = False,
        occupancy: Occupancy | None = None,
        on_ended: Callable[[Sequence[Ended]], object] | None = None,
        should_abandon: Callable[[float], bool] | None = None,
    ) -> list[tuple[Rollout, ...]] | None:
        """Sample responses for this replica's prompts.

        Every request has its own seed (`request_seed`), so a response depends neither on its
        company nor on the number of replicas, up to the rounding of a batched forward pass.

        Args:
            prompts: this replica's share; the same on all of its ranks.
            num_samples: responses per prompt.
            seed: of the run.
            step: of the run; another step draws other samples.
            max_response_tokens: a response that reaches it without EOS is `truncated`.
            num_groups: prompts of this replica after whose last response it ends; by default all.
                Which ones depends on the lengths of the responses and on their company: on the
                number of replicas, and on what fits into their KV caches.
            begun: by id of the prompts that earlier calls have begun: their rollouts so far. The
                others are continued, from prompt + tokens so far, and seeded anew.
            temperature: > 0. Log-probs are those of the distribution sampled from: at this
                temperature, renormalised over the nucleus when `top_p` < 1.
            top_p: nucleus of sampling, in (0, 1].
            progress: show a bar with tokens/s (rank 0 only).
            occupancy: adds how full the replicas were; needs `should_abandon`.
            on_ended: called with the responses that have ended since its last call, often none,
                each once: first with what `begun` holds, then after every decoding step and, with
                `should_abandon`, now and then while other replicas still generate. What it raises
                breaks off.
            should_abandon: asked now and then on every rank, with the seconds since the call:
                whether to break off. The first rank of each replica decides for it. Asked, to no
                effect, also while other replicas still generate.

        Returns:
            One tuple of `num_samples` rollouts per prompt, in order. With `num_groups` those that
            it ended without are as far as they have come, not `finished`. None on every rank if any
            replica broke off.

        Collectives: vLLM's own within the replica; with `should_abandon` also a broadcast now and
        then within the replica, a sum of one integer a second over all ranks (`Heartbeat`), and one
        gather over all ranks.

        Raises:
            DataError: a prompt is empty, too long or has unknown tokens; names it. Raised before
                anything is generated.
            RolloutError: the engine is asleep, or did not return what was asked for.
        """
        self.schedule.require(Phase.GENERATING, "generate")
        self._check_prompts(prompts, max_response_tokens)
        # What was generated or scored before must not decide what is cached now: a resumed run
        # starts from an empty cache, and its bits must be the same.
        self.llm.reset_prefix_cache()
        responses = Responses(prompts, begun or {}, num_samples=num_samples)
        requests = responses.requests(
            seed=seed,
            step=step,
            max_response_tokens=max_response_tokens,
            temperature=temperature,
            top_p=top_p,
            stop_token_ids=list(self.eos_token_ids),
        )
        wanted = len(prompts) if num_groups is None else num_groups
        occupancy = occupancy or Occupancy()
        hand_over = on_ended or (lambda ended: None)

        def is_enough(finished: Sequence[RequestOutput]) -> bool:
            hand_over([responses.take(output) for output in finished])
            return responses.num_whole >= wanted

        hand_over(responses.ended)
        start = time.monotonic()
        heart = Heartbeat(self.gloo_group)

        def asked_and_beats(seconds: float) -> bool:
            heart.beat(ended=False)
            return should_abandon is not None and should_abandon(seconds)

        ask = asked_and_beats if should_abandon is not None else None
        with GenerationProgress(len(requests), shown=progress and dist.get_rank() == 0) as bar:
            _, unfinished, end = self._run(requests, bar, ask, is_enough, occupancy)
        if should_abandon is not None:
            heart.wait_for_all(
                on_beat=lambda: should_abandon(time.monotonic() - start),
                meanwhile=lambda: hand_over(()),
            )
            ends = [end] * dist.get_world_size()
            dist.all_gather_object(ends, end, group=self.gloo_group)
            occupancy.taken_s += sum(one.taken_s for one in ends)
            occupancy.there_s += len(ends) * max(one.seconds for one in ends)
            if any(one.broken_off for one in ends):
                return None
        for output in unfinished:
            responses.take(output, may_be_open=num_groups is not None)
        return [tuple(group) for group in responses.rollouts]

    def log_probs(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Log-probs the engine gives to tokens it is shown, at temperature 1: it has no other.

        Args:
            prompt_ids: B arrays of int tokens, none empty.
            response_ids: B arrays of int tokens; with the prompt at most `max_sequence_tokens`.

        Returns:
            B arrays of float32, aligned with `response_ids`.

        Collectives: vLLM's own within the replica.

        Raises:
            RolloutError: the engine is asleep, or did not return what was asked for.
        """
        self.schedule.require(Phase.GENERATING, "log_probs")
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, **TOKENS_ONLY)
        tokens = [
            np.concatenate(pair).tolist() for pair in zip(prompt_ids, response_ids, strict=True)
        ]
        requests = {str(i): (ids, params) for i, ids in enumerate(tokens)}
        outputs, _, _ = self._run(requests, None)
        scored = []
        for i, ids in enumerate(tokens):
            # One entry per token, without alternatives; the very first token has none.
            flat = outputs[str(i)].prompt_logprobs
            if flat is None or flat.token_ids != ids[1:]:
                raise RolloutError(f"vLLM scored other tokens than those of sequence {i}")
            scores = np.asarray(flat.logprobs, dtype=np.float32)
            scored.append(scores[len(prompt_ids[i]) - 1 :])
        return scored

    def sleep(self) -> None:
        """Leave the memory to the trainer. The next weight sync wakes the engine."""
        self.schedule.sleep()

    def close(self) -> None:
        """Free what the engine holds and destroy the default process group: vLLM does both at once.

        Only for a process that goes on without either; at the end of a process there is no need.
        """
        vllm.close(self.llm)

    def _create_replica_groups(self) -> dist.ProcessGroup | None:
        """This replica's ranks, for Python objects; None if it is one rank. Collective."""
        if self._tp_size == 1:
            return None
        groups = [
            dist.new_group(range(first, first + self._tp_size), backend="gloo")
            for first in range(0, dist.get_world_size(), self._tp_size)
        ]
        return groups[self.replica]

    def _replica_agrees(self, answer: bool) -> bool:
        """The answer of the replica's first rank: its ranks must take every step together."""
        if self._replica_group is None:
            return answer
        answers = [answer]
        dist.broadcast_object_list(
            answers, src=self.replica * self._tp_size, group=self._replica_group
        )
        return answers[0]

    def _check_prompts(self, prompts: Sequence[Prompt], max_response_tokens: int) -> None:
        limit = self.config.max_sequence_tokens - max_response_tokens
        for prompt in prompts:
            if not 0 < len(prompt.token_ids) <= limit:
                raise DataError(
                    f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens; it must have 1 to "
                    f"{limit} to leave room for {max_response_tokens} response tokens"
                )
            for token in (min(prompt.token_ids), max(prompt.token_ids)):
                if not 0 <= token < self.hf_config.vocab_size:
                    raise DataError(
                        f"prompt {prompt.id!r} has a token ({token}) outside the model's "
                        f"vocabulary (0 to {self.hf_config.vocab_size - 1})"
                    )

    def _run(
        self,
        requests: Mapping[str, Request],
        bar: GenerationProgress | None,
        should_abandon: Callable[[float], bool] | None = None,
        is_enough: Callable[[Sequence[RequestOutput]], bool] = lambda finished: False,
        occupancy: Occupancy | None = None,
    ) -> tuple[dict[str, RequestOutput], list[RequestOutput], End]:
        """Run requests until all are finished, or it is enough, or it is told to break off.

        Leaves no request in the engine. `is_enough` is told what every decoding step finishes.

        Returns:
            The finished requests by name; what there is of the others; and how it ended.
        """
        outputs: dict[str, RequestOutput] = {}
        occupancy = occupancy or Occupancy()
        taken_s, broken_off = 0.0, False
        start = last = time.monotonic()
        # vLLM's sampler draws from torch's generator also where every request has a seed.
        with trainer_random_state():
            try:
                for name, (tokens, params) in requests.items():
                    vllm.add_tokens(self.llm, name, tokens, params)
                num_steps = 0
                enough = is_enough(())
                while not enough and self.llm.has_unfinished_requests():
                    if should_abandon is not None and num_steps % _STEPS_PER_QUESTION == 0:
                        answer = should_abandon(time.monotonic() - start)
                        if broken_off := self._replica_agrees(answer):
                            break
                    num_steps += 1
                    finished = [output for output in self.llm.step() if output.finished]
                    outputs |= {output.request_id: output for output in finished}
                    enough = is_enough(finished)
                    num_running, num_waiting = vllm.queue_lengths(self.llm)
                    share = occupancy.share_taken(num_running + len(finished), num_waiting)
                    now = time.monotonic()
                    taken_s, last = taken_s + share * (now - last), now
                    if bar is not None and finished:
                        bar.advance(len(finished), sum(map(num_tokens, finished)))
                unfinished = vllm.unfinished(self.llm)
            finally:
                if left := [name for name in requests if name not in outputs]:
                    self.llm.abort_request(left)
        return outputs, list(unfinished.values()), End(broken_off, taken_s, last - start)


# Decoding steps between two questions whether to go on: a broadcast within the replica.
_STEPS_PER_QUESTION = 8


def _slice(items: Sequence[T], index: int, count: int) -> list[T]:
    return list(items[index * len(items) // count : (index + 1) * len(items) // count])
