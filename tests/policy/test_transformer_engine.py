"""What the policy asks of Transformer Engine, and does without it: stand-ins, no GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from gapo_megatron.compat import cpu
from gapo_megatron.compat.megatron import HiddenStatesModel
from gapo_megatron.compat.megatron_version import version
from gapo_megatron.compat.transformer_engine import fuse_weight_gradients
from gapo_megatron.config import ModelConfig, ParallelConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.update import update
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.fp8 import RECIPES
from gapo_megatron.policy import destroy, initialize, model
from gapo_megatron.policy.export import Exported
from gapo_megatron.policy.load import _is_extra_state
from gapo_megatron.policy.lora import Lora
from gapo_megatron.policy.parallel import ParallelGroups
from gapo_megatron.policy.precision import precision_settings
from tests.configs import config_of
from tests.dist import single_rank
from tests.distributed import conversion_setup
from tests.distributed.policy_setup import (
    WeightedLoss,
    load_policy,
    make_batch,
    make_config,
    pack_all,
    save_model,
)
from tests.messages import mentions

CPU = torch.device("cpu")
ONE_RANK: Any = SimpleNamespace(tp_size=1, pp_size=1, vpp_size=1, cp_size=1, ep_size=1)
LINEARS = (ColumnParallelLinear, RowParallelLinear)
FUSED_PERMUTATIONS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    with single_rank():
        yield initialize(ParallelConfig())
        destroy()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine as far as a config asks for it."""
    monkeypatch.setattr(model, "has_transformer_engine", lambda device, dtype: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", object())
    for name in FUSED_PERMUTATIONS:
        monkeypatch.setattr(moe_utils, name, object(), raising=False)


def fused_config(
    folder: Path, name: str, recompute: str = "none", recipe: str = ""
) -> TransformerConfig:
    conversion_setup.save_model(folder, name)
    precision = "fp8" if recipe else "bf16"
    return model.transformer_config(
        AutoConfig.from_pretrained(folder),
        ONE_RANK,
        CPU,
        number_format=precision_settings(precision, fp8_recipe=recipe),
        recompute=recompute,
        parallel=ParallelConfig(),
    )


@pytest.mark.usefixtures("fused")
def test_experts_are_added_up_by_transformer_engine(tmp_path: Path) -> None:
    config = fused_config(tmp_path, "qwen3_moe")
    assert config.moe_permute_fusion and config.moe_grouped_gemm


@pytest.mark.usefixtures("fused")
def test_yarn_scales_the_scores_where_no_cosines_are_given(tmp_path: Path) -> None:
    """Its factor is one of queries and of keys; our layers have it in their cosines and sines."""
    config = fused_config(tmp_path, "gpt_oss")
    magnitude = 0.1 * math.log(8.0) + 1
    assert config.softmax_scale == pytest.approx(16**-0.5 * magnitude**2)
    assert config.softmax_type == "learnable" and config.add_bias_linear
    # Megatron-core knows its fused kernel of the clamped gate by this function.
    assert config.activation_func is quick_gelu and config.bias_activation_fusion
    assert (config.glu_linear_offset, config.activation_func_clamp_value) == (1.0, 7.0)
    assert fused_config(tmp_path, "qwen2").softmax_scale is None


class Scatters(TorchDispatchMode):
    """Sums of hidden states at places that an index gives: by which kernel, and whether in order.

    On a GPU both add by atomics where torch is not asked for deterministic ones; asked, the first
    has none.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.found: set[tuple[str, bool]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scatters = func.overloadpacket in (torch.ops.aten.scatter_add_, torch.ops.aten.index_add_)
        if scatters and args[0].shape[-1] == self.hidden_size:
            by = func.overloadpacket.__name__
            self.found.add((by, torch.are_deterministic_algorithms_enabled()))
            assert not torch.utils.deterministic.fill_uninitialized_memory  # a pass over it
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_without_it_experts_are_added_up_in_order(
    recompute: str, tmp_path: Path, groups: ParallelGroups
) -> None:
    """In both passes, and where a layer is recomputed."""
    conversion_setup.save_model(tmp_path, "qwen3_moe")
    policy = load_policy(make_config(tmp_path, model={"recompute": recompute}), groups)
    batch = make_batch(4, vocab_size=policy.hf_config.vocab_size)
    microbatches = pack_all(batch, ((0, 1), (2, 3)))
    hidden_size = policy.hf_config.hidden_size
    with Scatters(hidden_size) as scatters:
        log_probs(policy, microbatches)
    assert scatters.found == {("index_add_", True)}
    assert not torch.are_deterministic_algorithms_enabled()
    with Scatters(hidden_size) as scatters:
        update(policy, microbatches, WeightedLoss(batch, microbatches))
    assert scatters.found == {("index_add_", True)}


@pytest.mark.parametrize(
    ("name", "modules"), [("qwen2", ["mlp"]), ("qwen3_moe", ["layernorm", "moe_act"])]
)
def test_selective_recomputes_what_fused_attention_leaves(
    tmp_path: Path, name: str, modules: list[str], request: pytest.FixtureRequest
) -> None:
    assert fused_config(tmp_path, name, "selective").recompute_modules == ["core_attn"]
    request.getfixturevalue("fused")
    config = fused_config(tmp_path, name, "selective")
    assert (config.recompute_granularity, config.recompute_modules) == ("selective", modules)
    assert fused_config(tmp_path, name).recompute_granularity is None


@pytest.mark.parametrize(
    ("name", "device", "cp_size", "module"),
    [
        ("gemma3_text", "cuda", 1, "mlp"),
        ("olmo2", "cuda", 1, "mlp"),
        ("olmo2", "cuda", 2, "core_attn"),
        ("olmo2", "cpu", 1, "core_attn"),
    ],
)
def test_our_layers_recompute_what_their_attention_leaves(
    tmp_path: Path, name: str, device: str, cp_size: int, module: str
) -> None:
    config = model.transformer_config(
        conversion_setup.hf_config(name),
        SimpleNamespace(**{**vars(ONE_RANK), "cp_size": cp_size}),
        torch.device(device),
        number_format=precision_settings("bf16", fp8_recipe=""),
        recompute="selective",
        parallel=ParallelConfig(),
    )
    assert config.recompute_modules == [module]


def test_a_recomputed_mlp_of_our_layers_has_the_same_gradients(
    tmp_path: Path, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "has_fused_kernel", lambda *_: True)
    conversion_setup.save_model(tmp_path, "gemma3_text")
    found = []
    for recompute in ("none", "selective"):
        policy = load_policy(make_config(tmp_path, model={"recompute": recompute}), groups)
        batch = make_batch(4, vocab_size=policy.hf_config.vocab_size)
        microbatches = pack_all(batch, ((0, 1), (2, 3)))
        layers = policy.stages[0].decoder.layers
        assert [layer.recompute_mlp for layer in layers] == [recompute == "selective"] * 4
        update(policy, microbatches, WeightedLoss(batch, microbatches))
        found.append([one.main_grad.clone() for one in policy.stages[0].parameters()])
    assert any(grad.any() for grad in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_megatron_core_cannot_recompute_is_refused(tmp_path: Path, recipe: str) -> None:
    """Experts' activations, where the scales are those of earlier passes."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 32, "num_experts": 4}
    conversion_setup.save_model(tmp_path, "qwen3_moe")
    hf_config = AutoConfig.from_pretrained(tmp_path, **sizes)
    asked = ModelConfig(
        hf_dir=str(tmp_path), precision="fp8", fp8_recipe=recipe, recompute="selective"
    )
    if recipe != "delayed":
        check_shapes(hf_config, ParallelConfig(), asked)
        return
    named = mentions("model.recompute", "'selective'", "model.fp8_recipe", "'delayed'")
    with pytest.raises(ConfigError, match=named):
        check_shapes(hf_config, ParallelConfig(), asked)


class AddsToMainGrad(torch.autograd.Function):
    """A product as Transformer Engine's under `fuse_wgrad_accumulation`."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Any) -> Tensor:
        ctx.inputs, ctx.weight = inputs, weight
        return F.linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weight = ctx.weight
        weight.main_grad.add_(gradient.flatten(0, -2).t() @ ctx.inputs.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, float("nan"))  # whatever was there


def forward_of_linear(self: Any, inputs: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Any]:
    fuses = self.fuse_wgrad_accumulation
    result = AddsToMainGrad.apply(inputs, self.weight) if fuses else F.linear(inputs, self.weight)
    if self.bias is None or self.skip_bias_add:
        return result, self.bias
    return result + self.bias, None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied"])
def test_weight_gradients_that_are_there_already_count_once(
    name: str,
    overlap: bool,
    tmp_path: Path,
    groups: ParallelGroups,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside those that come by autograd (norms, biases, the embedding), and the head's own."""
    save_model(tmp_path, name)
    for linear in LINEARS:
        monkeypatch.setattr(linear, "fuse_wgrad_accumulation", False, raising=False)
        monkeypatch.setattr(linear, "forward", forward_of_linear)
    found = []
    for fuses in (False, True):
        config = make_config(tmp_path, parallel={"overlap_grad_reduce": overlap})
        policy = load_policy(config, groups)
        (stage,) = policy.stages
        if fuses:
            fuse_weight_gradients(stage)
        batch = make_batch()
        microbatches = pack_all(batch, ((0, 1, 2), (3, 4, 5), (6, 7)))
        norms = [
            update(policy, microbatches, WeightedLoss(batch, microbatches)).grad_norm
            for _ in range(2)
        ]
        gradients: list[Tensor] = [parameter.main_grad for parameter in stage.parameters()]
        found.append([torch.tensor(norms), *gradients, *policy._parameters.values()])
    # The same products, added to the same buffer in the same order.
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.fixture
def stage_of_stand_ins(
    fused: None, tmp_path: Path, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Builds a model as on a GPU, of Megatron-core's own layers."""
    conversion_setup.save_model(tmp_path, "qwen2")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "")
    monkeypatch.delenv("NVTE_UNFUSED_ATTN")  # what a model sets goes with the test
    layers = model._layer_spec
    local = lambda *args, **_: layers(*args, transformer_engine=False)  # noqa: E731
    monkeypatch.setattr(model, "_layer_spec", local)
    for linear in LINEARS:
        monkeypatch.setattr(linear, "fuse_wgrad_accumulation", False, raising=False)
    make = model.transformer_config

    def plain(*args: Any, **kwargs: Any) -> TransformerConfig:
        config = make(*args, **kwargs)
        config.apply_rope_fusion = config.bias_activation_fusion = False
        return config

    monkeypatch.setattr(model, "transformer_config", plain)
    hf_config = AutoConfig.from_pretrained(tmp_path)

    def build() -> model.PolicyModel:
        with cpu.device_scope():
            (stage,) = model.build_model(hf_config, groups, CPU, precision="bf16")
        return stage

    return build


def test_its_linears_are_told_to_add_to_main_grad(
    stage_of_stand_ins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And apex, which Megatron-core asks for with TransformerConfig's field, is not needed."""
    stage = stage_of_stand_ins()
    linears: list[Any] = [one for one in stage.modules() if isinstance(one, LINEARS)]
    assert len(linears) > 4 and all(linear.fuse_wgrad_accumulation for linear in linears)
    for linear in LINEARS:
        monkeypatch.delattr(linear, "fuse_wgrad_accumulation")
    with pytest.raises(AssertionError, match="fuse_wgrad_accumulation"):
        stage_of_stand_ins()


class Fp8Product(torch.autograd.Function):
    """A product as Transformer Engine's in fp8, of a frozen weight: no gradient but the input's."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        assert not weight.requires_grad
        ctx.weight = rounded(weight)
        return F.linear(rounded(inputs), ctx.weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return rounded(gradient) @ ctx.weight, None


def rounded(tensor: Tensor) -> Tensor:
    """To fp8, with a scale of the whole tensor."""
    scale = tensor.abs().max() / 448
    return (tensor / scale).to(torch.float8_e4m3fn).to(tensor.dtype) * scale


def forward_with_norm(self: Any, inputs: Tensor, *_: Any, **__: Any) -> Any:
    """As Transformer Engine's linear layer with a norm, in Megatron-core's wrapper."""
    normed = F.rms_norm(inputs, inputs.shape[-1:])
    result = Fp8Product.apply(normed, self.weight) + self.bias
    return ((result, normed), None) if self.return_layernorm_output else (result, None)


def test_factors_beside_a_frozen_fp8_layer_multiply_its_input_in_bf16(
    stage_of_stand_ins: Any, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The normed input, before it is cast to fp8; and no weight asks for a `main_grad`."""
    settings = config_of({"model": {"precision": "fp8"}, "adapter": {"kind": "lora"}}).adapter
    monkeypatch.setattr(ColumnParallelLinear, "return_layernorm_output", False, raising=False)
    stage = stage_of_stand_ins()
    layers = [[range(len(stage.decoder.layers))]]
    exported = Exported(stage.rules, layers, 1, 1, 1, torch.bfloat16)
    lora = Lora(settings, stage.hf_config, groups, exported, seed=1)
    lora.attach(stage)
    assert not any(getattr(one, "fuse_wgrad_accumulation", False) for one in stage.modules())
    monkeypatch.setattr(ColumnParallelLinear, "forward", forward_with_norm)
    name = "decoder.layers.0.self_attention.linear_qkv"
    linear, factors = stage.get_submodule(name), stage.adapter.by_weight[f"{name}.weight"]
    a, b = factors.lora_a, factors.lora_b
    assert a.dtype == b.dtype == torch.bfloat16
    torch.manual_seed(1)
    with torch.no_grad():
        for one in (a, b, *linear.parameters()):
            one.normal_()
    inputs = torch.randn(64, a.shape[1], dtype=torch.bfloat16, requires_grad=True)
    found, _ = linear(inputs)
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    # By hand, with the factors in float32.
    again = inputs.detach().clone().requires_grad_()
    wide_a, wide_b = (one.detach().float().requires_grad_() for one in (a, b))
    normed = F.rms_norm(again, again.shape[-1:])
    base = Fp8Product.apply(normed, linear.weight) + linear.bias
    expected = base + lora.scale * normed.float() @ wide_a.T @ wide_b.T
    (expected * weight.float()).sum().backward()
    # A few roundings to bf16, of 2e-3 each; the input's to fp8 would be ten times that.
    pairs = [(found, expected), (a.grad, wide_a.grad), (b.grad, wide_b.grad)]
    for ours, theirs in [*pairs, (inputs.grad, again.grad)]:
        assert (ours.float() - theirs).norm() < 1e-2 * theirs.float().norm()
    assert linear.weight.grad is None and linear.bias.grad is None


def test_it_may_not_fall_back_to_attention_over_all_pairs(
    stage_of_stand_ins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a second model of a process too: Megatron-core's own method refuses what is set."""
    monkeypatch.delenv("NVTE_UNFUSED_ATTN", raising=False)
    for _ in range(2):
        stage_of_stand_ins()
        assert os.environ["NVTE_UNFUSED_ATTN"] == "0"
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")  # whoever wants it
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    stage_of_stand_ins()
    assert os.environ["NVTE_UNFUSED_ATTN"] == "1"
    assert os.environ["NVTE_FLASH_ATTN"] == "0"


def test_a_megatron_core_that_would_choose_attention_by_itself_is_refused(
    stage_of_stand_ins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HiddenStatesModel, "_set_attention_backend", lambda self: None)
    named = mentions("megatron-core", version(), "_set_attention_backend")
    with pytest.raises(ConfigError, match=named):
        stage_of_stand_ins()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.0.mlp.experts.linear_fc1._extra_state", True),
        ("decoder.layers.0.mlp.experts.linear_fc1._extra_state1", True),
        ("decoder.layers.0.mlp.experts.linear_fc1._extra_state127", True),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight1", False),
        ("decoder.layers.0._extra_state.weight", False),
    ],
)
def test_what_it_keeps_beside_weights_has_a_number_per_expert(name: str, expected: bool) -> None:
    assert _is_extra_state(name) is expected
