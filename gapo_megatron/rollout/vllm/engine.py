"""vLLM inside the trainer's processes: tokens in, tokens out.

Every `rollout.tensor_parallel_size` consecutive ranks form a replica: a vLLM engine whose ranks run
in lockstep without a coordinator (vLLM's external launcher).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig
from vllm import SamplingParams
from vllm.outputs import RequestOutput

from gapo_megatron.compat import vllm
from gapo_megatron.compat.vllm_routes import finish_steps, routes_on_every_rank
from gapo_megatron.config import Config
from gapo_megatron.errors import ConversionError, RolloutError, WeightSyncError
from gapo_megatron.formats.model_folder import end_tokens
from gapo_megatron.models.tables import geometry_of
from gapo_megatron.rollout.engine import Completion, Needs, Request
from gapo_megatron.rollout.factors import factor_shapes
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.vllm.adapter import load_factors, slots_for
from gapo_megatron.rollout.vllm.arguments import (
    check_engine,
    engine_args,
    returns_routes,
)
from gapo_megatron.rollout.vllm.guards import Guards, guarded, own_shared_memory
from gapo_megatron.rollout.vllm.requests import (
    TOKENS_ONLY,
    to_completion,
    to_params,
)
from gapo_megatron.rollout.vllm.schedule import Phase, Schedule
from gapo_megatron.rollout.vllm.weights import reload_weights, verify_bound
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Factors


class RolloutEngine:
    """This rank's part of the engine: vLLM as a `rollout.engine.Engine`.

    Attributes:
        config, hf_config: the run's settings, and its model's Hugging Face config.
        device: this rank's device.
        guards: what of the process is vLLM's within each call of this class.
        llm: vLLM's engine.
        schedule: whether the engine or the trainer has the memory.
        gloo_group: gloo group of all ranks, for Python objects; also `replicas.gloo_group`.
        slots: room for the policy's adapter; None without one, and if its weights come merged.
        routed: the model, if the engine returns routes; otherwise None.
        replicas, policy_version, max_sequence_tokens, vocab_size, verify_bound: see `Engine`.
    """

    def __init__(
        self,
        config: Config,
        hf_config: PretrainedConfig,
        *,
        device: torch.device | str,
        load_weights: bool = False,
        gloo_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Build the engine. The process group must be up.

        Args:
            config: the run's settings.
            hf_config: the model's Hugging Face config.
            device: this rank's device.
            load_weights: load the weights of `model.hf_dir`, to generate without a trainer.
                Otherwise the engine starts asleep, without weights and KV cache, and the first sync
                brings the weights.
            gloo_group: all ranks, used by nothing else while the engine generates; None: a new
                group.

        Collectives: vLLM's own at start-up; one new group over all ranks, unless `gloo_group` is
        given.

        Raises:
            ConfigError: see `check_engine`; raised before anything is built.
            RolloutError: vLLM cannot start, for instance for lack of memory.
        """
        self.device = device = torch.device(device)
        world_size = dist.get_world_size()
        check_engine(config, hf_config, device, world_size=world_size, load_weights=load_weights)
        self.config = config
        self.hf_config = hf_config
        self.policy_version = -1
        # An engine without a trainer gets no factors.
        self.slots = None if load_weights else slots_for(config, hf_config, device)
        self._adapter: vllm.LoRARequest | None = None
        self._has_base = False
        self._is_new_generation = True
        has_routes = returns_routes(config.objective, load_weights=load_weights)
        self.routed = geometry_of(hf_config) if has_routes else None
        self._requests: dict[str, Request] = {}
        """Those that the engine holds, by name."""
        self.max_sequence_tokens = config.max_sequence_tokens
        self.vocab_size: int = hf_config.vocab_size
        self.verify_bound = verify_bound(config.model, config.rollout, hf_config, device)
        in_files = end_tokens(Path(config.model.hf_dir), hf_config.vocab_size)
        self.eos_token_ids = sorted({one for found in in_files.values() for one in found})
        self.gloo_group = gloo_group or dist.new_group(
            backend="gloo", timeout=timedelta(seconds=config.parallel.timeout_s)
        )
        self.guards = Guards(device)
        with (
            vllm.launched_as_this_world(),
            self.guards.in_vllm(),
            own_shared_memory(self.gloo_group),
            routes_on_every_rank(),
        ):
            try:
                self.llm = vllm.create(
                    engine_args(
                        config, hf_config, device, load_weights=load_weights, slots=self.slots
                    ),
                    architectures=hf_config.architectures or [],
                )
            except ValueError as error:
                raise RolloutError(f"vLLM cannot start: {error}") from error
        self.schedule = Schedule(self.llm, device, keeps_weights=self.slots is not None)
        size = config.rollout.tensor_parallel_size
        self.replicas = Replicas.create(size, gloo_group=self.gloo_group)
        if not load_weights:
            self.sleep()

    @property
    def needs(self) -> Needs:
        """What a sync of a policy with an adapter must bring: `AdapterEngine.needs`."""
        if self.slots is None:
            return "merged"
        return "factors" if self._has_base else "base"

    @guarded
    def add(self, request: Request) -> None:
        """Queue a request: `Engine.add`."""
        self.schedule.require(Phase.GENERATING, "generate")
        if self._is_new_generation and not self.llm.has_unfinished_requests():
            # Earlier requests must not decide what is cached now: a resumed run starts from an
            # empty cache and must produce the same bits. Within a generation the engine may be
            # empty for a moment, while all episodes wait for their environment.
            finish_steps(self.llm)
            self.llm.reset_prefix_cache()
        self._is_new_generation = False
        tokens = [*request.prompt_ids, *request.response_ids.tolist()]
        params = to_params(request, list(request.stop_ids) or self.eos_token_ids)
        vllm.add_tokens(self.llm, request.name, tokens, params, self._adapter)
        self._requests[request.name] = request

    @guarded
    def poll(self) -> list[Completion]:
        """Take one decoding step: `Engine.poll`."""
        return [self._completion(one, aborted=False) for one in self.llm.step() if one.finished]

    @guarded
    def abort(self) -> list[Completion]:
        """Drop all requests: `Engine.abort`."""
        try:
            left = vllm.unfinished(self.llm).values()
            return [self._completion(one, aborted=True) for one in left]
        finally:
            self._drop_requests()

    @guarded
    def num_requests(self) -> tuple[int, int]:
        """Numbers of requests that run, and that wait: `Engine.num_requests`."""
        return vllm.queue_lengths(self.llm)

    @guarded
    def score(self, rollouts: Rollouts) -> list[np.ndarray]:
        """Log-probs of given tokens: `Engine.score`.

        Raises:
            RolloutError: the engine is asleep, or vLLM scored other tokens.
        """
        self.schedule.require(Phase.GENERATING, "score")
        tokens = [
            np.concatenate([rollouts.prompt_ids[i], rollouts.response_ids[i]]).tolist()
            for i in range(len(rollouts))
        ]
        outputs: dict[str, RequestOutput] = {}
        try:
            for i, ids in enumerate(tokens):
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=1,
                    prompt_logprobs=0,
                    routed_experts_prompt_start=len(ids),  # nobody reads them
                    **TOKENS_ONLY,
                )
                vllm.add_tokens(self.llm, str(i), ids, params, self._adapter)
            while self.llm.has_unfinished_requests():
                outputs |= {one.request_id: one for one in self.llm.step() if one.finished}
        finally:
            self._drop_requests()
        scored = []
        for i, ids in enumerate(tokens):
            # One entry per token, without alternatives; the first token has none.
            flat = outputs[str(i)].prompt_logprobs
            if flat is None or flat.token_ids != ids[1:]:
                raise RolloutError(f"vLLM's scored tokens differ from those of sequence {i}")
            scores = np.asarray(flat.logprobs, dtype=np.float32)
            scores = scores[len(rollouts.prompt_ids[i]) - 1 :]
            scored.append(scores[rollouts.is_sampled(i)])
        return scored

    @guarded
    def update_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        policy_version: int,
        on_received: Callable[[], None] = lambda: None,
    ) -> None:
        """Replace all weights in place, and generate with them: `Engine.update_weights`."""
        self.schedule.require_awake("update_weights")
        self.policy_version = -1
        self._has_base, self._adapter = False, None  # vLLM forgets adapters with the weights
        try:
            reload_weights(self.llm, self.hf_config, tensors, self.replicas)
        except (ConversionError, WeightSyncError) as error:
            raise WeightSyncError(f"weight sync, version {policy_version}: {error}") from error
        on_received()
        self._has_base = True
        # The policy's weights are these and the factors, which are still to come.
        self._begin(policy_version if self.slots is None else -1)

    @guarded
    def update_adapter(
        self, factors: Iterable[Factors], *, scale: float, policy_version: int
    ) -> None:
        """Replace the adapter in place, and generate with it: `AdapterEngine.update_adapter`.

        Raises:
            RolloutError: the engine is asleep or has no weights, or no room for factors.
            WeightSyncError: see `load_factors`.
        """
        self.schedule.require_awake("update_adapter")
        if self.slots is None or self.needs != "factors":
            raise RolloutError(f"update_adapter, but the engine needs {self.needs} weights")
        self.policy_version, self._adapter = -1, None
        try:
            self._adapter = load_factors(
                self.llm,
                factors,
                shapes=factor_shapes(self.config.adapter, self.hf_config),
                scale=scale,
                replicas=self.replicas,
            )
        except WeightSyncError as error:
            raise WeightSyncError(f"weight sync, version {policy_version}: {error}") from error
        self._begin(policy_version)

    def _begin(self, policy_version: int) -> None:
        """Be ready to generate at the new version, with no cache of the old."""
        self.schedule.wake_for_generation()
        finish_steps(self.llm)
        if not self.llm.reset_prefix_cache():
            raise WeightSyncError(
                "weight sync: requests are in flight, so cached prefixes stay stale"
            )
        self.policy_version = policy_version

    @guarded
    def sleep(self) -> None:
        """Release memory to the trainer: `Engine.sleep`."""
        finish_steps(self.llm)  # vLLM empties its cache
        self.schedule.sleep()

    @guarded
    def wake(self) -> None:
        """Allocate the memory of the weights: `Engine.wake`."""
        self.schedule.wake_for_sync()

    @guarded
    def close(self) -> None:
        """Free the engine's memory and destroy the default process group: vLLM does both at once.

        Only for a process that continues without either; not needed at the end of a process.
        """
        vllm.close(self.llm)

    def _completion(self, output: RequestOutput, *, aborted: bool) -> Completion:
        request = self._requests.pop(output.request_id)
        return to_completion(
            output,
            aborted=aborted,
            routed=self.routed,
            num_routed=request.num_routed,
            num_alternatives=request.num_alternatives,
        )

    def _drop_requests(self) -> None:
        self._is_new_generation = True
        self._requests.clear()
        if left := vllm.request_names(self.llm):
            self.llm.abort_request(left)
