"""The policy: a Megatron-core model with its optimizer, and how weights are loaded and exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.batching import NO_SEQUENCES, pack
from gapo_megatron.compat import cpu
from gapo_megatron.compat.megatron_checkpoint import without_frozen
from gapo_megatron.compat.optimizer_implementation import (
    fuse_weight_gradients_by_apex,
    implementation_of,
)
from gapo_megatron.compat.transformer_engine import free_fp8_copies
from gapo_megatron.config import Config
from gapo_megatron.formats.weights import finite_extremes, read_hf
from gapo_megatron.logprob import Resolved
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.fp8 import fp8_multiple
from gapo_megatron.models.rules import find_rule, shard_size, split_all, to_megatron
from gapo_megatron.policy.adapters import Adapter
from gapo_megatron.policy.allocator import ExpandableSegments
from gapo_megatron.policy.context import num_chunks, to_rank
from gapo_megatron.policy.digest import weights_sha256
from gapo_megatron.policy.export import exported_by, find_locations, whole_parameters
from gapo_megatron.policy.load import check_digests, find_weights, load_weights, resume_weights
from gapo_megatron.policy.lora import make_adapter
from gapo_megatron.policy.loss_scale import LossScale
from gapo_megatron.policy.model import PolicyModel, build_model, read_hf_config
from gapo_megatron.policy.offload import Offload, WeightOffload
from gapo_megatron.policy.optimizer import (
    CHECKPOINT_METADATA,
    build_optimizer,
    choose_implementation,
    gather_state,
    inner_optimizers,
    load_state,
    wrap_model,
)
from gapo_megatron.policy.parallel import ParallelGroups
from gapo_megatron.policy.precision import check_fp8, choose_head
from gapo_megatron.policy.reduction import GradientReduction
from gapo_megatron.policy.reference import Reference
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Microbatch


class Policy:
    """One rank's part of the policy.

    Attributes:
        precision: `model.precision`.
        parallel: section `parallel`.
        temperature: sampling temperature (`rollout.temperature`); part of its distribution.
        optimizer_settings: section `optimizer`.
        sequence_multiple: required divisor of the number of packed tokens. Sequence and context
            parallel ranks get equal shares, each a multiple of what fp8 matrix products need.
        hf_config: the model's Hugging Face config.
        groups: this rank's parallel groups.
        device: device of the parameters.
        model: the DDP-wrapped virtual stages.
        stages: this rank's virtual stages without their wrappers; one if there are none.
        adapter: decides which weights are trained.
        optimizer: AdamW, with fp32 master weights for 16-bit parameters.
        implementation: whose kernels it takes, the same on every rank.
        exported: what is exported, and which rank holds it.
        head: implementation of the output layer's log-probs, the same on every rank.
        num_updates: optimizer steps since the initial weights were loaded.
        loss_scale: factor of the loss in fp16; None in other precisions.
        reduction: overlaps the gradients' reduction with the last backward pass; None: no overlap.
    """

    def __init__(
        self,
        config: Config,
        groups: ParallelGroups,
        device: torch.device,
        model: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        head: Resolved,
        adapter: Adapter,
    ) -> None:
        self.precision = config.model.precision
        self.parallel = config.parallel
        self.temperature = config.rollout.temperature
        self.optimizer_settings = config.optimizer
        self.hf_config: PretrainedConfig = model[0].module.hf_config
        self.groups = groups
        self.device = device
        self.model: list[Any] = [*model]
        self.stages: list[PolicyModel] = [wrapped.module for wrapped in model]
        self.optimizer = optimizer
        self.implementation = implementation_of(optimizer)
        self.head = head
        self.num_updates = 0
        self.loss_scale = LossScale() if self.precision == "fp16" else None
        self.reduction = GradientReduction(model) if config.parallel.overlap_grad_reduce else None
        self._num_shards = groups.tp_size if config.parallel.sequence_parallel else 1
        self._sequence_align = num_chunks(groups.cp_size)
        align = fp8_multiple(config.model) * self._sequence_align
        self.sequence_multiple = self._num_shards * align
        self._model_settings = config.model
        self.exported = exported_by(config, self.hf_config, num_ranks=groups.world_size)
        self.exported.check(groups)
        self.adapter = adapter
        layers = self.exported.layers[groups.pp_rank]
        self._locations = find_locations(self.stages, layers, groups)
        self._parameters = {name: location.parameter for name, location in self._locations.items()}
        weights = [weight for stage in self.stages for weight in stage.parameters()]
        self._has_base = adapter.switched_off() is not None
        self._base_sha256: str | None = None
        optimizers = inner_optimizers(optimizer)
        self._segments = ExpandableSegments(device)
        self._offload = Offload(optimizers, weights)
        self._weight_offload = WeightOffload(weights, optimizers)
        self._reference = Reference(
            adapter,
            [weight for weight in weights if weight.requires_grad],
            self._weight_offload,
            keeps_copy=config.objective.kl_coef > 0,
        )

    @classmethod
    def build(
        cls,
        config: Config,
        groups: ParallelGroups,
        device: torch.device | str,
        *,
        adapter: Adapter | None = None,
    ) -> Policy:
        """Allocate model, gradients and optimizer of this rank. Weights are undefined until loaded.

        Args:
            config: the run's settings.
            groups: this rank's parallel groups.
            device: device of the parameters.
            adapter: decides which of the model's weights are trained; None: section `adapter`.

        Collectives: those of `choose_head` and `choose_implementation`.

        Raises:
            ConfigError: the model folder, architecture, precision or layout cannot run; raised
                before anything is allocated.
        """
        device = torch.device(device)
        hf_config = read_hf_config(config.model.hf_dir)
        check_shapes(hf_config, config.parallel, config.model)
        if config.model.precision == "fp8":
            check_fp8(config.model.fp8_recipe)
        adapter = adapter or make_adapter(config, hf_config, groups)
        head = choose_head(config.model, device)
        implementation = choose_implementation(config.optimizer, device)
        with cpu.device_scope():
            stages = build_model(
                hf_config,
                groups,
                device,
                precision=config.model.precision,
                fp8_recipe=config.model.fp8_recipe,
                recompute=config.model.recompute,
                parallel=config.parallel,
            )
            for stage in stages:
                adapter.attach(stage)
                if implementation == "apex":
                    fuse_weight_gradients_by_apex(stage)
            overlap = config.parallel.overlap_grad_reduce
            model = [wrap_model(stage, groups, overlap_grad_reduce=overlap) for stage in stages]
            optimizer = build_optimizer(config.optimizer, model, implementation)
        return cls(config, groups, device, model, optimizer, head, adapter)

    def pack(self, batch: Rollouts, indices: Sequence[int]) -> Microbatch:
        """Pack sequences of `batch` for this policy's layout: `batching.pack`."""
        whole = pack(
            batch,
            indices,
            align=self.sequence_multiple,
            sequence_align=self._sequence_align,
            vocab_size=self.hf_config.vocab_size,
            for_loss=self.groups.is_last_stage,
            device="cpu",
        )
        return to_rank(whole, self.groups, num_shards=self._num_shards, device=self.device)

    def pack_nothing(self) -> Microbatch:
        """A micro-batch without sequences, for ranks that must take part in collectives."""
        return self.pack(NO_SEQUENCES, ())

    def load_initial_weights(
        self, *, on_bytes: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        """Load every weight from `model.megatron_dir` if given, otherwise from `model.hf_dir`.

        Args:
            on_bytes: called with the number of bytes of a Megatron folder that were verified since
                the last call.

        Collectives: those of `load_megatron_weights`.

        Raises:
            ConfigError, ConversionError: see `load_megatron_weights`, `formats.weights.read_hf`.
        """
        if self._model_settings.megatron_dir:
            self.load_megatron_weights(self._model_settings.megatron_dir, on_bytes=on_bytes)
        else:
            self.load_hf_weights(read_hf(self._model_settings.hf_dir))

    @torch.no_grad()
    def load_hf_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Set every weight from whole Hugging Face tensors, and the optimizer's masters with them.

        Args:
            tensors: (Hugging Face name, whole CPU tensor) in any order; the same on every rank.
                Cast to the policy's precision.

        Raises:
            ConversionError: a tensor is missing, extra or misshapen, or not finite in the policy's
                precision.
        """
        groups = self.groups
        self._weight_offload.to_device()
        for name, full in to_megatron(self.exported.rules, tensors):
            if name not in self._parameters:
                continue  # it belongs to another pipeline stage
            rule, _ = find_rule(self.exported.rules, name)
            size = shard_size(rule, groups.tp_size)
            self._parameters[name].copy_(rule.shard(full, groups.tp_rank % size, size))
        self._start_from_weights()

    def load_megatron_weights(
        self, folder: str | Path, *, on_bytes: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        """Set every weight from a Megatron folder, and the optimizer's masters with them.

        Every rank reads its part, from a checkpoint of any layout, and casts it to the policy's
        precision.

        Args:
            folder: see `find_weights`.
            on_bytes: see `check_digests`.

        Collectives: those of `check_digests` and of Megatron-core's load.

        Raises:
            ConfigError: the folder has no complete checkpoint of the format torch_dist.
            ConversionError: it holds another model than `model.hf_dir`, a file is damaged, or a
                weight is not finite in the policy's precision.
        """
        weights = find_weights(folder, self.hf_config)
        check_digests(weights, on_bytes=on_bytes)
        self._weight_offload.to_device()
        for stage in self.stages:
            load_weights(stage, weights.root)
        self._start_from_weights()

    def _start_from_weights(self) -> None:
        where = f"in model.precision {self.precision},"
        for name, parameter in self._parameters.items():
            finite_extremes(parameter.detach(), name=f"{name}, {where}")
        with cpu.device_scope():
            self.optimizer.reload_model_params()
        self.num_updates = 0
        self._base_sha256 = None
        self._reference.loaded()

    def iterate_hf_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor), layer by layer, on every rank.

        Tensors are on the policy's device and may share memory with its weights: use or copy them
        before the next update. Needs memory for one bucket (`policy.export`).

        Args:
            dtype: cast to, except buffers; None keeps the policy's.

        Collectives: those of `export.whole_parameters`. Every rank must consume the iterator
        completely.
        """
        whole = whole_parameters(self.exported, self._parameters, self.groups, merge=self.shard)
        if dtype is not None:
            whole = (
                (rule, place, full if rule.is_buffer else full.to(dtype))
                for rule, place, full in whole
            )
        yield from split_all(self.exported.rules, whole)

    def shard(self, name: str) -> Tensor:
        """This rank's shard to export of a parameter, by the rules' name with global numbers.

        It may share memory with the policy. No collectives.
        """
        self._weight_offload.to_device()
        stage, own_name, parameter = self._locations[name]
        return self.adapter.merge(stage, own_name, parameter.detach())

    def base_sha256(self) -> str | None:
        """Digest of an adapter's frozen base, the same in every layout; None if there is none.

        Collectives, the first time after the weights are loaded: those of `iterate_hf_weights`,
        and a gather over all ranks.
        """
        if (base := self.adapter.switched_off()) is None:
            return None
        if self._base_sha256 is None:
            with base:
                self._base_sha256 = weights_sha256(self.iterate_hf_weights())
        return self._base_sha256

    def sharded_state_dict(self, *, is_loading: bool = False) -> dict[str, Any]:
        """Model, optimizer, update count and loss scale for `megatron.core.dist_checkpointing`.

        An adapter's frozen base is left out: every start loads it, `base_sha256` identifies it.
        Offloaded state is its copy in host memory. Tensors of the optimizer are always new ones in
        host memory, without content: a load fills them, and for a save `gather_optimizer_state`
        brings what is wanted.
        """
        with cpu.device_scope():
            model = {
                f"stage_{i}": stage.sharded_state_dict(metadata=dict(CHECKPOINT_METADATA))
                for i, stage in enumerate(self.stages)
            }
            if self._has_base:
                model = {name: without_frozen(state) for name, state in model.items()}
            optimizer = self.optimizer.sharded_state_dict(
                model, is_loading=is_loading, metadata=dict(CHECKPOINT_METADATA)
            )
        # Only now: the optimizer finds its parameters' names by object identity.
        self._weight_offload.make_readable(model)
        state = {"model": model, "optimizer": optimizer, "num_updates": self.num_updates}
        if self.loss_scale is not None:
            state["loss_scale"] = asdict(self.loss_scale)
        return state

    def gather_optimizer_state(self, wanted: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy master weights and moments, as they are now, to tensors in host memory.

        Args:
            wanted: tensors of the last `sharded_state_dict`, each with the contiguous float32
                tensor that gets its content. Ranks may want different ones.

        Collectives: all-gathers over the ranks that shard the optimizer's state.
        """
        gather_state(self.optimizer, wanted)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `dist_checkpointing.load` on `sharded_state_dict(is_loading=True)`."""
        self._weight_offload.to_device()
        with cpu.device_scope():
            for i, stage in enumerate(self.stages):
                resume_weights(stage, state["model"][f"stage_{i}"], lacks_frozen=self._has_base)
            load_state(self.optimizer, state["optimizer"], config=self.optimizer_settings)
        self.num_updates = state["num_updates"]
        if self.loss_scale is not None:
            self.loss_scale = LossScale(**state.get("loss_scale", {}))  # only fp16 saves it

    def make_room(self) -> None:
        """Free device memory that only an update needs.

        Gradients and fp8 copies are freed; with `optimizer.offload` the optimizer's state moves to
        host memory until the next update. A checkpoint may be written meanwhile.
        """
        self._segments.use(False)
        if self.optimizer_settings.offload != "none":
            self._offload.to_host()
        with cpu.device_scope():
            for wrapped in self.model:
                free_fp8_copies(wrapped)
                wrapped.offload_grad_buffers()  # also empties the allocator's cache

    def make_room_of_weights(self) -> None:
        """With `optimizer.offload = "all"`, move the weights to host memory until the next pass."""
        if self.optimizer_settings.offload == "all":
            self._weight_offload.to_host()

    def begin_pass(self) -> None:
        """Bring the weights back; the policy may use the device until `make_room`."""
        self._segments.use(True)
        self._weight_offload.to_device()

    def begin_update(self) -> None:
        """Reallocate and zero the gradient buffers; bring the optimizer state back."""
        self.begin_pass()
        self._offload.to_device()
        for wrapped in self.model:
            wrapped.restore_grad_buffers()
            wrapped.zero_grad_buffer()
        if self.reduction is not None:
            self.reduction.reset()
        self.optimizer.zero_grad()

    def unscale_gradients(self) -> None:
        """Divide the summed gradients by the loss scale, if any; exact."""
        if self.loss_scale is not None:
            for wrapped in self.model:
                wrapped.scale_gradients(1 / self.loss_scale.value)

    def reference_weights(self) -> AbstractContextManager[None]:
        """Use the initial weights within the block; the current weights are restored bitwise.

        For log-probs only. Needs `objective.kl_coef` > 0 or an adapter that can be switched off.
        """
        return self._reference.in_use()

    def fill(self, stages: Sequence[PolicyModel]) -> None:
        """Copy this rank's shards, adapters merged, to other stages of the layout, of any dtype."""
        self._weight_offload.to_device()
        layers = self.exported.layers[self.groups.pp_rank]
        for name, location in find_locations(stages, layers, self.groups).items():
            stage, own_name, parameter = self._locations[name]
            target = location.parameter.detach().copy_(parameter.detach())
            if (merged := self.adapter.merge(stage, own_name, target)) is not target:
                target.copy_(merged)
