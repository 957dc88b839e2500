"""The policy: a Megatron-core model with its optimizer, its weights going in and out."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron import cpu
from gapo_megatron.batching import pack
from gapo_megatron.config import Config
from gapo_megatron.convert import Place, Rule, find_rule, to_hf, to_megatron
from gapo_megatron.convert.hf import finite_extremes, read_hf
from gapo_megatron.convert.rules import shard_size
from gapo_megatron.counts import layers_of_stages
from gapo_megatron.fp8 import fp8_multiple
from gapo_megatron.model_checks import check_shapes, num_experts
from gapo_megatron.policy.context import num_chunks, to_rank
from gapo_megatron.policy.load import check_digests, find_weights, load_weights
from gapo_megatron.policy.model import PolicyModel, build_model, read_hf_config
from gapo_megatron.policy.offload import Offload
from gapo_megatron.policy.optimizer import (
    CHECKPOINT_METADATA,
    build_optimizer,
    inner_optimizers,
    load_state,
    wrap_model,
)
from gapo_megatron.policy.parallel import ParallelGroups
from gapo_megatron.policy.precision import check_fp8, check_head, free_fp8_copies
from gapo_megatron.policy.reduction import GradientReduction
from gapo_megatron.types import Batch, Microbatch

_NO_SEQUENCES = Batch(
    prompt_ids=[],
    response_ids=[],
    rollout_log_probs=[],
    advantages=torch.zeros(0, dtype=torch.float64),
    num_correct=torch.zeros(0, dtype=torch.int64),
    group_size=torch.zeros(0, dtype=torch.int64),
    valid=torch.zeros(0, dtype=torch.bool),
)


class Policy:
    """One rank's part of the policy.

    Attributes:
        config: of the run.
        hf_config: the model's Hugging Face config.
        groups: this rank's place.
        device: where parameters live.
        model: the DDP-wrapped virtual stages.
        optimizer: AdamW; fp32 master weights when parameters are bf16.
        num_updates: optimizer steps taken since the initial weights were loaded.
        reduction: begins the reduction of gradients during the last backward pass; None: it waits.
    """

    def __init__(
        self,
        config: Config,
        hf_config: PretrainedConfig,
        groups: ParallelGroups,
        device: torch.device,
        model: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
    ) -> None:
        self.config = config
        self.hf_config = hf_config
        self.groups = groups
        self.device = device
        self.model = model
        self.optimizer = optimizer
        self.num_updates = 0
        self.reduction = GradientReduction(model) if config.parallel.overlap_grad_reduce else None
        self._rules = model[0].module.rules
        self._layers = layers_of_stages(config.parallel, hf_config.num_hidden_layers)
        self._parameters = dict(self._named_parameters())
        self._reference: dict[str, Tensor] | None = None
        self._offload = Offload(inner_optimizers(optimizer), self._parameters.values())

    @classmethod
    def build(cls, config: Config, groups: ParallelGroups, device: torch.device | str) -> Policy:
        """Allocate model, gradients and optimizer of this rank. Weights are undefined until loaded.

        Raises:
            ConfigError: a model folder, architecture, precision or layout that cannot run; raised
                before anything is allocated.
        """
        device = torch.device(device)
        hf_config = read_hf_config(config.model.hf_dir)
        check_shapes(hf_config, config.parallel, config.model)
        if config.model.precision == "fp8":
            check_fp8(config.model.fp8_recipe)
        check_head(config.model, device)
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
            overlap = config.parallel.overlap_grad_reduce
            model = [wrap_model(stage, groups, overlap_grad_reduce=overlap) for stage in stages]
            optimizer = build_optimizer(config.optimizer, model)
        return cls(config, hf_config, groups, device, model, optimizer)

    @property
    def stages(self) -> list[PolicyModel]:
        """This rank's virtual stages, without their wrappers; one without virtual stages."""
        return [wrapped.module for wrapped in self.model]

    @property
    def sequence_multiple(self) -> int:
        """Packed tokens must be a multiple of it.

        Under sequence and context parallelism ranks share them equally, and each has as many as
        an fp8 matrix product takes.
        """
        ranks = self.groups.tp_size if self.config.parallel.sequence_parallel else 1
        return ranks * fp8_multiple(self.config.model) * num_chunks(self.groups.cp_size)

    def pack(self, batch: Batch, indices: Sequence[int]) -> Microbatch:
        """Pack sequences of `batch` as this policy's layout takes them: `batching.pack`."""
        whole = pack(
            batch,
            indices,
            align=self.sequence_multiple,
            sequence_align=num_chunks(self.groups.cp_size),
            vocab_size=self.hf_config.vocab_size,
            device="cpu",
        )
        num_shards = self.groups.tp_size if self.config.parallel.sequence_parallel else 1
        return to_rank(whole, self.groups, num_shards=num_shards, device=self.device)

    def pack_nothing(self) -> Microbatch:
        """A micro-batch without a sequence; it takes part in every collective."""
        return self.pack(_NO_SEQUENCES, ())

    def load_initial_weights(
        self, *, on_bytes: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        """Set every weight as `model` says: from `megatron_dir` if given, else from `hf_dir`.

        Args:
            on_bytes: called with the bytes of a Megatron folder that have been compared with their
                digest, which takes long.

        Collectives: those of `load_megatron_weights`.

        Raises:
            ConfigError, ConversionError: see `load_megatron_weights`, `convert.hf.read_hf`.
        """
        if self.config.model.megatron_dir:
            self.load_megatron_weights(self.config.model.megatron_dir, on_bytes=on_bytes)
        else:
            self.load_hf_weights(read_hf(self.config.model.hf_dir))

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
        for name, full in to_megatron(self._rules, tensors):
            if name not in self._parameters:
                continue  # another pipeline stage's
            rule, _ = find_rule(self._rules, name)
            size = shard_size(rule, groups.tp_size)
            self._parameters[name].copy_(rule.shard(full, groups.tp_rank % size, size))
        self._start_from_weights()

    def load_megatron_weights(
        self, folder: str | Path, *, on_bytes: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        """Set every weight from a Megatron folder, and the optimizer's masters with them.

        Every rank reads its part, whatever layout wrote it. Cast to the policy's precision.

        Args:
            folder: see `find_weights`.
            on_bytes: see `check_digests`.

        Collectives: those of `check_digests` and of Megatron-core's load.

        Raises:
            ConfigError: there is no whole checkpoint of this format.
            ConversionError: it does not hold the model of `model.hf_dir`, a file is damaged, or a
                weight is not finite in the policy's precision.
        """
        weights = find_weights(folder, self.hf_config)
        check_digests(weights, on_bytes=on_bytes)
        for stage in self.stages:
            load_weights(stage, weights.root)
        self._start_from_weights()

    def _start_from_weights(self) -> None:
        for name, parameter in self._parameters.items():
            precision = self.config.model.precision  # to which it was cast
            finite_extremes(parameter.detach(), name=f"{name}, in model.precision {precision},")
        with cpu.device_scope():
            self.optimizer.reload_model_params()
        self.num_updates = 0
        if self.config.objective.kl_coef > 0:
            self._reference = self._snapshot()

    def iterate_hf_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor), one after another, on every rank.

        Tensors are on the policy's device and may share memory with its weights: use or copy them
        before the next update.

        Args:
            dtype: cast to; None keeps the policy's.

        Layers come one after another. At most `expert_model_parallel_size` experts' parameters are
        held besides the weights.

        Collectives: per parameter a broadcast over the pipeline group, then an all-gather over the
        tensor parallel group; of an expert's, over the expert parallel group instead, which brings
        one of every rank's experts. Every rank must consume the iterator to its end.
        """
        for name, tensor in to_hf(self._rules, self._whole_parameters()):
            yield name, tensor if dtype is None else tensor.to(dtype)

    def sharded_state_dict(self, *, is_loading: bool = False) -> dict[str, Any]:
        """Model, optimizer and update count for `megatron.core.dist_checkpointing`.

        Collectives: those of Megatron-core's optimizer when saving.
        """
        with cpu.device_scope():
            model = {
                f"stage_{i}": stage.sharded_state_dict(metadata=dict(CHECKPOINT_METADATA))
                for i, stage in enumerate(self.stages)
            }
            optimizer = self.optimizer.sharded_state_dict(
                model, is_loading=is_loading, metadata=dict(CHECKPOINT_METADATA)
            )
        return {"model": model, "optimizer": optimizer, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `dist_checkpointing.load` made of `sharded_state_dict(is_loading=True)`."""
        with cpu.device_scope():
            for i, stage in enumerate(self.stages):
                stage.load_state_dict(state["model"][f"stage_{i}"])
            load_state(self.optimizer, state["optimizer"], config=self.config.optimizer)
        self.num_updates = state["num_updates"]

    def make_room(self) -> None:
        """Give back the memory of what comes again when it is needed.

        Gradients and fp8 copies are made anew; with `optimizer.offload` the optimizer's state waits
        in host memory for the next update, and a checkpoint may be written meanwhile.
        """
        if self.config.optimizer.offload:
            self._offload.to_host()
        with cpu.device_scope():
            for wrapped in self.model:
                free_fp8_copies(wrapped)
                wrapped.offload_grad_buffers()  # and gives what is free back to the device

    def begin_update(self) -> None:
        """Take the room again that was made: all gradients zero, the optimizer's state back."""
        self._offload.to_device()
        for wrapped in self.model:
            wrapped.restore_grad_buffers()
            wrapped.zero_grad_buffer()
        if self.reduction is not None:
            self.reduction.reset()
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Hold the initial weights instead of the current ones, which come back bit for bit.

        For log-probs only. Needs `objective.kl_coef` > 0: otherwise no copy was kept.
        """
        if self._reference is None:
            raise RuntimeError("reference weights are kept only when objective.kl_coef > 0")
        current = self._snapshot()
        self._restore(self._reference)
        try:
            yield
        finally:
            self._restore(current)

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters under the rules' names: global numbers, our layer spec."""
        first_expert = self.groups.ep_rank * self._experts_per_rank
        for stage, layers in zip(self.stages, self._layers[self.groups.pp_rank], strict=True):
            for name, parameter in stage.named_parameters():
                rule, place = find_rule(self._rules, name)
                if place.layer is not None:
                    place = place._replace(layer=layers[place.layer])
                if place.expert is not None:
                    place = place._replace(expert=place.expert + first_expert)
                yield rule.megatron_name(place), parameter

    @property
    def _experts_per_rank(self) -> int:
        return (num_experts(self.hf_config) or 0) // self.groups.ep_size

    def _rank_of(self, rule: Rule, place: Place) -> int:
        """The pipeline rank that has a parameter."""
        if place.layer is not None:
            return next(
                rank
                for rank, stages in enumerate(self._layers)
                if any(place.layer in layers for layers in stages)
            )
        return 0 if rule.megatron.startswith("embedding.") else self.groups.pp_size - 1

    @torch.no_grad()
    def _whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name by the rules, whole parameter) on every rank; tied copies left out. Collective."""
        groups = self.groups
        for rule, place in self._in_model_order():
            if place.expert is None:
                shards = [self._shard(rule, place)]
                if rule.tp_dim is not None:
                    shards = _all_gather(shards[0], groups.tp_group)
                yield rule.megatron_name(place), rule.unshard(shards)
                continue
            # Ours is one of `ep_size` experts that are sent around together.
            experts = [
                place.expert + rank * self._experts_per_rank for rank in range(groups.ep_size)
            ]
            mine = self._shard(rule, place._replace(expert=experts[groups.ep_rank]))
            for expert, full in zip(experts, _all_gather(mine, groups.ep_group), strict=True):
                yield rule.megatron_name(place._replace(expert=expert)), full

    def _in_model_order(self) -> Iterator[tuple[Rule, Place]]:
        """Every parameter, layer after layer; of experts, the first rank's stand for all."""
        own = [rule for rule in self._rules if not rule.tied]
        for num_layers, rules in itertools.groupby(own, lambda rule: rule.num_layers):
            layers = [None] if num_layers is None else range(num_layers)
            for layer, rule in itertools.product(layers, list(rules)):
                if rule.num_experts is None:
                    yield rule, Place(layer)
                else:
                    for expert in range(self._experts_per_rank):
                        yield rule, Place(layer, expert)

    def _shard(self, rule: Rule, place: Place) -> Tensor:
        """This rank's part of a parameter of any pipeline stage. Collective."""
        groups, name = self.groups, rule.megatron_name(place)
        if name in self._parameters:
            shard = self._parameters[name].detach()
        else:
            shape = rule.shard_shape(shard_size(rule, groups.tp_size))
            shard = torch.empty(shape, dtype=self.stages[0].config.params_dtype, device=self.device)
        if groups.pp_size > 1:
            source = self._rank_of(rule, place)
            dist.broadcast(shard, group=groups.pp_group, group_src=source)
        return shard

    def _snapshot(self) -> dict[str, Tensor]:
        return {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def _restore(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])


def _all_gather(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [mine]
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    return gathered
