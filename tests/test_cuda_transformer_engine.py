"""The policy with Transformer Engine's layers, against the conversion rules: names, shapes, shards.

One rank of a layout at a time, in process groups that no one else is in, on the meta device: there
a model of 72B takes no memory. Patched: the emulated device (it is meta in place of the CPU), the
choice of layers, which are Transformer Engine's on a GPU alone, Transformer Engine's question
whether there is a GPU, and where it makes sinks. Its compiled part is the real one; nothing is
computed.
"""

from __future__ import annotations

import importlib
import itertools
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gapo_megatron.compat import cpu
from gapo_megatron.config import Config, ParallelConfig, load_config
from gapo_megatron.formats.config_check import read_config
from gapo_megatron.formats.disk_keys import extra_states, written_shape, written_slot
from gapo_megatron.models.rules import Place, Rule, find_rule, shard_size
from gapo_megatron.models.tables import ARCHITECTURES, architecture_of
from gapo_megatron.policy.export import Exported, exported_by
from tests.cuda_setup import CONFIGS, model_folder, needs_cuda_wheels
from tests.distributed import conversion_setup

pytestmark = needs_cuda_wheels()
META = torch.device("meta")


class Changed(types.ModuleType):
    """A module as it is, but for some of its names."""

    def __init__(self, module: types.ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built has Transformer Engine's layers, without a GPU."""
    from transformer_engine.pytorch.module import base

    from gapo_megatron.policy import model

    on_a_gpu = Changed(torch, cuda=Changed(torch.cuda, is_available=lambda: True))
    monkeypatch.setattr(base, "torch", on_a_gpu)
    package = "transformer_engine.pytorch.attention.dot_product_attention"
    attention = importlib.import_module(f"{package}.dot_product_attention")
    monkeypatch.setattr(attention, "torch", Changed(torch, zeros=cpu._TORCH.zeros))
    monkeypatch.setattr(model, "has_transformer_engine", lambda device, dtype: True)


@pytest.fixture
def meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from gapo_megatron.policy import model

    config_of = model.transformer_config

    def on_meta(*arguments: Any, **settings: Any) -> Any:
        config = config_of(*arguments, **settings)
        config.init_model_with_meta_device = True
        return config

    monkeypatch.setattr(cpu, "_CPU", META)
    monkeypatch.setattr(model, "transformer_config", on_meta)


@dataclass(frozen=True)
class Rank:
    """What one rank has."""

    parallel: ParallelConfig
    groups: Any
    stages: list[Any]
    exported: Exported
    is_fused: bool
    """Layers are Transformer Engine's, as they are of most architectures."""

    @property
    def rules(self) -> Sequence[Rule]:
        return self.exported.rules

    def weights(self) -> Iterator[tuple[str, torch.Tensor, Rule, Place]]:
        """Each with its rule and its place in the whole model."""
        layers = self.exported.layers[self.groups.pp_rank]
        for stage, mine in zip(self.stages, layers, strict=True):
            assert stage.uses_transformer_engine == self.is_fused
            for name, weight in stage.named_weights():
                rule, place = find_rule(self.rules, name, numbers=mine)
                own = rule.place_in(name)
                # Ranks count from 0. Transformer Engine has names of its own for some, not for all.
                assert own and name == own.fill((self.is_fused and rule.te_name) or rule.megatron)
                assert tuple(weight.shape) == self.shard(rule), name
                assert weight.dtype == self.exported.dtype_of(rule), name
                if place.expert is not None:
                    experts = (rule.num_experts or 0) // self.groups.ep_size
                    assert place.expert < experts
                    place = place._replace(expert=place.expert + self.groups.ep_rank * experts)
                yield name, weight, rule, place

    def shard(self, rule: Rule) -> tuple[int, ...]:
        return rule.shard_shape(shard_size(rule, self.groups.tp_size))


def build(config: Config, device: torch.device, *, rank: int, world_size: int) -> Iterator[Rank]:
    """One rank of a config, while its groups are there."""
    from gapo_megatron.policy.model import build_model
    from gapo_tools.planner.no_data import fake_groups

    hf_config = read_config(Path(config.model.hf_dir))
    parallel, model = config.parallel, config.model
    with fake_groups(parallel, rank=rank, world_size=world_size) as groups, cpu.device_scope():
        stages = build_model(
            hf_config,
            groups,
            device,
            precision=model.precision,
            fp8_recipe=model.fp8_recipe,
            recompute=model.recompute,
            parallel=parallel,
        )
        exported = exported_by(config, hf_config, num_ranks=world_size)
        is_fused = architecture_of(hf_config).megatron_layers
        yield Rank(parallel, groups, stages, exported, is_fused)


def layouts() -> list[Any]:
    """A config of every model, layout and precision that is used."""
    found: dict[str, Any] = {}
    for path in CONFIGS:
        config = load_config(path)
        parallel = config.parallel.model_dump(exclude={"timeout_s", "overlap_grad_reduce"})
        same = f"{config.model.hf_dir} {config.model.precision} {config.model.recompute} {parallel}"
        name = f"{path.parent.name}/{path.stem}"
        found.setdefault(same, pytest.param(path, id=name))
    return list(found.values())


def check_rules(config: Config) -> None:
    """Every rule has its parameters, and every parameter its rule, over the ranks of a layout."""
    parallel = config.parallel
    tp, pp, ep = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.expert_model_parallel_size,
    )
    per_stage = max(tp * parallel.context_parallel_size, ep)
    seen: Counter[tuple[str, Place]] = Counter()
    rules: Sequence[Rule] = ()
    # The first rank of every stage, and all that have experts of their own.
    for stage, neighbour in itertools.product(range(pp), range(ep)):
        rank = stage * per_stage + neighbour
        for one in build(config, META, rank=rank, world_size=per_stage * pp):
            rules = one.rules
            assert (one.groups.pp_rank, one.groups.ep_rank) == (stage, neighbour)
            for _, _, rule, place in one.weights():
                if place.expert is not None or neighbour == 0:
                    seen[rule.megatron, place] += 1
    # A tied head is the embedding, unless another rank has that.
    expected = Counter(
        (rule.megatron, place) for rule in rules if not rule.tied or pp > 1 for place in rule.places
    )
    assert seen == expected


@pytest.mark.parametrize("path", layouts())
def test_every_rule_has_its_parameters_and_every_parameter_its_rule(
    path: Path, tmp_path: Path, meta_device: None
) -> None:
    check_rules(model_folder(path, tmp_path))


SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "one": (ParallelConfig(), 1),
    "tp2 pp3": (ParallelConfig(**SPLIT, pipeline_model_parallel_size=3), 6),
    "tp2 ep2": (ParallelConfig(**SPLIT, expert_model_parallel_size=2), 4),
}
MODELS = (*ARCHITECTURES, "moonlight")
OUR_LAYERS = {name for name, one in ARCHITECTURES.items() if not one.megatron_layers}
EXPERTS = ("qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3", "moonlight")
SMALL = [
    (name, layout)
    for name, layout in itertools.product(MODELS, LAYOUTS)
    if name in EXPERTS or LAYOUTS[layout][0].expert_model_parallel_size == 1
]


def small(name: str, layout: str, folder: Path, *, precision: str = "bf16") -> Config:
    """A model of an architecture that tensor parallel ranks of Transformer Engine can share."""
    model_type = "deepseek_v3" if name == "moonlight" else name
    changes = conversion_setup.MOONLIGHT if name == "moonlight" else {}
    names = {"architectures": [ARCHITECTURES[model_type].hf_class]}
    hf_config = conversion_setup.hf_config(model_type, num_hidden_layers=3, **changes, **names)
    hf_config.save_pretrained(folder)
    config = load_config(CONFIGS[0], [f"model.hf_dir={folder}", f"model.precision={precision}"])
    return config.model_copy(update={"parallel": LAYOUTS[layout][0]})


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (name, precision)
        for name, precision in itertools.product(MODELS, ("bf16", "fp16", "fp8"))
        if precision != "fp8" or name not in OUR_LAYERS
    ],
)
def test_every_weight_has_the_dtype_in_which_it_is_sent(
    name: str, precision: str, tmp_path: Path, meta_device: None
) -> None:
    """`policy/test_precision.py` has the same of our layers."""
    check_rules(small(name, "one", tmp_path, precision=precision))


@pytest.mark.parametrize(("name", "layout"), SMALL)
def test_shards_are_marked_as_the_gradient_norm_needs(
    name: str, layout: str, tmp_path: Path
) -> None:
    """On the CPU: Transformer Engine marks nothing on the meta device.

    A shard that is not marked would count once for all ranks that have a part of it.
    """
    config, world_size = small(name, layout, tmp_path), LAYOUTS[layout][1]
    kinds = set()
    for rank in range(world_size):
        for one in build(config, torch.device("cpu"), rank=rank, world_size=world_size):
            for key, weight, rule, place in one.weights():
                kinds.add(rule.megatron)
                if place.expert is None:
                    cut = rule.tp_dim is not None
                    assert getattr(weight, "tensor_model_parallel", False) == cut, key
                    assert not cut or weight.partition_dim == rule.tp_dim, key
                # Gradients of an expert, which is never cut, are summed over other ranks.
                split = one.groups.ep_size > 1 or one.groups.tp_size > 1
                alike = place.expert is None or not split
                assert getattr(weight, "allreduce", True) == alike, key
    # A tied head is the embedding, unless another rank has that.
    has_copy = one.parallel.pipeline_model_parallel_size > 1
    assert kinds == {rule.megatron for rule in one.rules if has_copy or not rule.tied}


@pytest.mark.parametrize(("name", "layout"), SMALL)
def test_a_checkpoint_has_the_keys_that_conversion_writes(
    name: str, layout: str, tmp_path: Path, meta_device: None
) -> None:
    """And what is beside the weights is known as such, by its name in the model and on disk."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

    from gapo_megatron.policy.load import _is_extra_state

    config, world_size = small(name, layout, tmp_path), LAYOUTS[layout][1]
    written: dict[str, tuple[int, ...]] = {}
    for rank in range(world_size):
        for one in build(config, META, rank=rank, world_size=world_size):
            for stage in one.stages:
                for key, part in stage.sharded_state_dict().items():
                    if isinstance(part, ShardedObject):
                        assert _is_extra_state(key), key
                        assert part.unique_key in extra_states(one.rules)
                        continue
                    assert not _is_extra_state(key), key
                    pieces = part.build() if isinstance(part, ShardedTensorFactory) else [part]
                    for piece in pieces:
                        assert written.setdefault(piece.key, piece.global_shape) == (
                            piece.global_shape
                        )
    padded = {
        written_slot(rule, Place()).key: (
            rule.shard_shape(one.groups.tp_size)[0] * one.groups.tp_size,
        )
        for rule in one.rules
        if rule.vocab_padded and not rule.tied
    }
    expected = {
        written_slot(rule, place).key: written_shape(rule)
        for rule in one.rules
        for place in rule.places
        if not rule.tied
    }
    for key, (num_rows,) in padded.items():
        expected[key] = (num_rows, *expected[key][1:])
    assert written == expected
