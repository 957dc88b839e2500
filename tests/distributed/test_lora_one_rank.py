"""LoRA on one rank: what is bound, exported, kept, switched off and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gapo_megatron import checkpoint
from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.formats.manifest import read_manifest
from gapo_megatron.formats.torch_dist import MegatronFolder
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.update import update
from gapo_megatron.policy import ParallelGroups, Policy
from gapo_megatron.policy.exact import exact_arithmetic, exact_stages
from gapo_megatron.policy.optimizer import inner_optimizers
from tests.attempt_setup import make_attempt
from tests.distributed.checkpoint_setup import make_state, tensors_on_disk
from tests.distributed.lora_setup import ALPHA, RANK, factors, lora_config, lora_of, randomise
from tests.distributed.policy_setup import (
    WeightedLoss,
    copies,
    equal,
    load_policy,
    make_config,
    pack_all,
    read_weights,
)
from tests.distributed.training_setup import BATCH, save_models
from tests.messages import mentions

NAMES = ["qwen2", "qwen3_moe", "deepseek_v3"]
MICROBATCHES = pack_all(BATCH, ((0, 1, 2, 3, 4), (5, 6, 7)))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models")
    save_models(path, NAMES)
    return path


def load(root: Path, groups: ParallelGroups, model: str = "qwen2", /, **sections: Any) -> Policy:
    return load_policy(lora_config(root / model, model, **sections), groups)


class NewTensors(TorchDispatchMode):
    """Shapes of the tensors that operations make in memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.shapes.add(result.shape)
        return result


def train(policy: Policy) -> None:
    update(policy, MICROBATCHES, WeightedLoss(BATCH, MICROBATCHES))


def scores(policy: Policy) -> Tensor:
    return torch.cat(log_probs(policy, MICROBATCHES))


def save(run_dir: Path, policy: Policy, config: Any) -> Path:
    return checkpoint.save(
        run_dir, make_state(1), policy=policy, config=config, attempt=make_attempt(run_dir)
    )


@pytest.mark.parametrize("model", NAMES)
def test_a_run_starts_as_its_base_and_trains_only_factors(
    root: Path, groups: ParallelGroups, model: str
) -> None:
    folder = root / model
    policy = load(root, groups, model)
    base = dict(read_weights(folder))
    assert equal(base, copies(policy))
    plain = load_policy(make_config(folder), groups)
    assert torch.equal(scores(policy), scores(plain))
    before = {name: p.detach().clone() for name, p in policy.stages[0].named_parameters()}
    own = {name for name in before if name.startswith("adapter.")}
    masters = [
        p
        for adam in inner_optimizers(policy.optimizer)
        for group in adam.param_groups
        for p in group["params"]
    ]
    assert sum(p.numel() for p in masters) == sum(before[name].numel() for name in own)
    for _ in range(2):  # A has no gradient in the first: B is zero
        train(policy)
    after = dict(policy.stages[0].named_parameters())
    assert {name for name in before if not torch.equal(before[name], after[name])} == own


@pytest.mark.parametrize("model", NAMES)
def test_the_export_is_the_base_plus_the_factors(
    root: Path, groups: ParallelGroups, model: str
) -> None:
    policy = load(root, groups, model)
    randomise(policy)
    base, merged, found = dict(read_weights(root / model)), copies(policy), factors(policy)
    linear = {name for name in base if name.endswith(("_proj.weight", "_proj_with_mqa.weight"))}
    assert {f"{name}.weight" for name in found} == linear
    for name, weight in base.items():
        if name in linear:
            a, b = found[name.removesuffix(".weight")]
            assert a.shape == (RANK, weight.shape[1]) and b.shape == (weight.shape[0], RANK)
            # Products are computed in float32, in another order.
            weight = weight + ALPHA / RANK * b @ a
            torch.testing.assert_close(merged[name], weight, rtol=1e-6, atol=1e-6)
            assert not torch.equal(merged[name], base[name])
        else:
            assert torch.equal(merged[name], weight)
    # The base with the factors beside it computes what the merged weights compute.
    plain = load_policy(make_config(root / model), groups)
    plain.load_hf_weights(merged.items())
    torch.testing.assert_close(scores(policy), scores(plain), rtol=1e-5, atol=1e-5)


def test_the_reference_is_the_adapter_switched_off(root: Path, groups: ParallelGroups) -> None:
    """Without a copy, and whatever `objective.kl_coef` is."""
    policy = load(root, groups)
    base = scores(policy)
    randomise(policy)
    now, merged = scores(policy), copies(policy)
    assert not torch.equal(base, now)
    with pytest.raises(ZeroDivisionError), policy.reference_weights():
        assert torch.equal(base, scores(policy))
        assert equal(copies(policy), dict(read_weights(root / "qwen2")))
        raise ZeroDivisionError
    assert torch.equal(now, scores(policy)) and equal(merged, copies(policy))
    assert policy._reference.copy is None


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_exact_policy_has_the_factors_unrounded(
    root: Path, groups: ParallelGroups, precision: str
) -> None:
    """A merge into bf16 weights would be off by their rounding: here 1e-2 and more."""
    model = {"hf_dir": str(root / "qwen2"), "precision": precision}
    policy = load(root, groups, model=model)
    randomise(policy)
    dtype = policy.stages[0].config.params_dtype
    weights = {name: weight.to(dtype).float() for name, weight in read_weights(root / "qwen2")}
    for name, (a, b) in factors(policy).items():
        weights[f"{name}.weight"] += ALPHA / RANK * b.float() @ a.float()
    plain = load_policy(make_config(root / "qwen2"), groups)
    plain.load_hf_weights(weights.items())
    with exact_arithmetic(policy):
        exact = scores(policy)
    torch.testing.assert_close(exact.float(), scores(plain), rtol=1e-5, atol=1e-5)


def test_the_reference_of_weights_in_host_memory_is_the_base(
    root: Path, groups: ParallelGroups
) -> None:
    """With a KL term and everything offloaded: nothing is copied, and the factors come back."""
    sections = {"optimizer": {"offload": "all"}, "objective": {"kl_coef": 0.1}}
    policy = load(root, groups, **sections)
    base = scores(policy)
    for _ in range(2):  # B is zero before the first update
        train(policy)
        now = scores(policy)
        assert not torch.equal(base, now)
        policy.make_room()
        policy.make_room_of_weights()
        with policy.reference_weights():
            assert torch.equal(base, scores(policy))
        assert torch.equal(now, scores(policy))
        kept = factors(policy)
        policy.make_room_of_weights()
        for name, pair in factors(policy).items():
            assert all(map(torch.equal, pair, kept[name]))
    assert policy._reference.copy is None


def test_a_checkpoint_holds_the_factors_and_the_bases_digest(
    root: Path, groups: ParallelGroups, tmp_path: Path
) -> None:
    config = lora_config(root / "qwen2", "qwen2")
    policy = load_policy(config, groups)
    train(policy)
    saved = save(tmp_path, policy, config)
    on_disk = tensors_on_disk(saved)
    weights = {name for name in on_disk if not name.startswith("optimizer.")}
    assert len(weights) == 2 * lora_of(policy).num_bound
    assert all(name.startswith("adapter.decoder.layers.") for name in weights)
    assert read_manifest(saved).base_sha256 == policy.base_sha256()
    with pytest.raises(ConversionError, match=mentions(saved, "adapter.decoder", "--adapter")):
        MegatronFolder(saved, policy.stages[0].rules)
    # Full weights have no base.
    plain_config = make_config(root / "qwen2")
    plain = load_policy(plain_config, groups)
    other = save(tmp_path / "plain", plain, plain_config)
    assert plain.base_sha256() is None
    assert read_manifest(other).base_sha256 is None


@pytest.mark.parametrize("damage", ["a factor is missing", "a factor has another name"])
def test_a_resume_needs_every_factor(root: Path, groups: ParallelGroups, damage: str) -> None:
    """Frozen weights are not in a checkpoint, so a missing name is no error as such."""
    policy = load(root, groups)
    state = policy.sharded_state_dict()
    of_stage = dict(policy.stages[0].state_dict())
    frozen = {n for n, one in policy.stages[0].named_parameters() if not one.requires_grad}
    of_stage = {name: one for name, one in of_stage.items() if name not in frozen}
    name = "adapter.0.lora_b"
    if damage == "a factor is missing":
        del of_stage[name]
    else:
        of_stage["adapter.0.lora_x"] = of_stage[name]
    with pytest.raises(AssertionError, match=mentions("lora_")):
        policy.load_state_dict(state | {"model": {"stage_0": of_stage}})


def test_filling_other_stages_makes_no_copies_but_of_adapted_weights(
    root: Path, groups: ParallelGroups
) -> None:
    """Another copy of the embedding would be the largest tensor of all."""
    plain, adapted = load_policy(make_config(root / "qwen2"), groups), load(root, groups)
    for policy in (plain, adapted):
        (stage,) = exact_stages(policy)
        embedding = stage.embedding.word_embeddings.weight
        with NewTensors() as new:
            policy.fill([stage])
        assert embedding.shape not in new.shapes
        assert bool(new.shapes) == (policy is adapted)


def test_another_base_is_refused(root: Path, groups: ParallelGroups, tmp_path: Path) -> None:
    config = lora_config(root / "qwen2", "qwen2")
    policy = load_policy(config, groups)
    save(tmp_path, policy, config)
    tensors = load_file(root / "qwen2" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][0, 0] = torch.nextafter(tensors[name][0, 0], torch.tensor(9.0))
    policy.load_hf_weights(tensors.items())
    digests = [read_manifest(tmp_path / "checkpoints/step_00000001").base_sha256 or ""]
    digests.append(policy.base_sha256() or "")
    folder = str(root / "qwen2")
    with pytest.raises(ConfigError, match=mentions(folder, *(d[:12] for d in digests[::-1]))):
        checkpoint.load_latest(tmp_path, policy=policy, config=config)


@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        ({"kind": "none"}, "adapter.kind"),
        ({"kind": "lora", "rank": RANK + 1, "alpha": ALPHA}, "adapter.rank"),
        ({"kind": "lora", "rank": RANK, "alpha": ALPHA + 1}, "adapter.alpha"),
        ({"kind": "lora", "rank": RANK, "alpha": ALPHA, "targets": ["qkv"]}, "adapter.targets"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused_by_name(
    root: Path,
    groups: ParallelGroups,
    tmp_path: Path,
    adapter: dict[str, Any],
    name: str,
) -> None:
    config = lora_config(root / "qwen2", "qwen2")
    save(tmp_path, load_policy(config, groups), config)
    other = make_config(root / "qwen2", adapter=adapter)
    policy = load_policy(other, groups)
    with pytest.raises(ConfigError, match=mentions(name, "run.output_dir")):
        checkpoint.check_resume(tmp_path, policy.hf_config, other)
    with pytest.raises(ConfigError, match=mentions(name, "run.output_dir")):
        checkpoint.load_latest(tmp_path, policy=policy, config=other)


@pytest.mark.parametrize("target", ["qkv", "proj", "fc1", "fc2"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_layer_learns_whatever_else_is_bound(
    root: Path, groups: ParallelGroups, target: str, recompute: str
) -> None:
    """The first layer too: in front of it every weight is frozen."""
    adapter = {"kind": "lora", "rank": RANK, "targets": [target]}
    model = {"hf_dir": str(root / "qwen2"), "precision": "fp32", "recompute": recompute}
    policy = load(root, groups, adapter=adapter, model=model)
    before = factors(policy)
    train(policy)
    after = factors(policy)
    assert len({name.split(".")[2] for name in after}) == 4
    assert all(not torch.equal(before[name][1], after[name][1]) for name in before)
