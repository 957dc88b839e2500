"""The policy on one rank against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from gapo_megatron.compat import cpu
from gapo_megatron.compat.megatron import share_rotary_tables
from gapo_megatron.compat.megatron_checkpoint import sharded_tensors
from gapo_megatron.config import ParallelConfig
from gapo_megatron.errors import ConfigError, ConversionError, DivergenceError
from gapo_megatron.learn.score import Scored, log_probs
from gapo_megatron.learn.update import UpdateResult, update
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.rules import find_rule
from gapo_megatron.policy import ParallelGroups, Policy, initialize
from gapo_megatron.policy.load import load_weights
from gapo_megatron.policy.model import build_model
from gapo_megatron.policy.optimizer import inner_optimizers
from tests.convert_setup import make_config as make_hf_config
from tests.distributed.conversion_setup import hf_config
from tests.distributed.policy_setup import (
    EP,
    MODELS,
    PP,
    TP,
    WeightedLoss,
    copies,
    equal,
    load_policy,
    make_batch,
    make_config,
    pack_all,
    read_weights,
    reference_log_probs,
    save_model,
)
from tests.formats.test_convert_torch_dist import Weights, fill, make_model, save
from tests.messages import mentions

BATCH = make_batch()
TWO_MICROBATCHES = ((0, 1, 2, 3, 4), (5, 6, 7))
# Multiples of 16.
FP8_SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}


def build(folder: Path, groups: ParallelGroups, **sections: dict[str, object]) -> Policy:
    return load_policy(make_config(folder, **sections), groups)


def train(policy: Policy, *, num_updates: int = 1) -> tuple[list[UpdateResult], list[Tensor]]:
    """Updates on BATCH, and the log-probs each forward pass saw."""
    microbatches = pack_all(BATCH, TWO_MICROBATCHES)
    loss = WeightedLoss(BATCH, microbatches)
    return [update(policy, microbatches, loss) for _ in range(num_updates)], loss.seen


def gradients(policy: Policy) -> list[Tensor]:
    return [parameter.main_grad.clone() for parameter in policy.stages[0].parameters()]


def optimizer_state(policy: Policy) -> dict[str, list[Tensor]]:
    """Optimizer state beside weights and gradients, by name, without views of weights."""
    (adam,) = inner_optimizers(policy.optimizer)
    held = {weight.untyped_storage().data_ptr() for weight in policy.stages[0].parameters()}
    masters = [one for group in adam.param_groups for one in group["params"]]
    return {
        "masters": [one for one in masters if one.untyped_storage().data_ptr() not in held],
        **{name: [adam.state[one][name] for one in masters] for name in ("exp_avg", "exp_avg_sq")},
    }


def saved_state(policy: Policy) -> list[Tensor]:
    """Every tensor that a checkpoint would hold now."""
    state = policy.sharded_state_dict()
    of_optimizer = [x.data for x in sharded_tensors(state["optimizer"])]
    policy.gather_optimizer_state([(one, one) for one in of_optimizer])
    return [x.data.clone() for x in nested_values(state) if isinstance(x, ShardedTensor)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_what_the_engine_has_no_room_for_leaves_the_device(
    offload: str, precision: str, folder: Path, groups: ParallelGroups
) -> None:
    found = []
    for leaves in (False, True):
        sections = {"optimizer": {"offload": offload}, "model": {"precision": precision}}
        policy = build(folder, groups, **sections)
        assert bool(optimizer_state(policy)["masters"]) == (precision != "fp32")
        if leaves:  # nothing to give back yet
            policy.make_room()
        train(policy)
        (buffer,) = policy.model[0].buffers
        if leaves:
            before, saved = optimizer_state(policy), saved_state(policy)
            places = {name: [x.data_ptr() for x in before[name]] for name in before}
            num_bytes = buffer.param_data.untyped_storage().nbytes()
            policy.make_room()
            assert buffer.grad_data.untyped_storage().nbytes() == 0
            assert buffer.param_data.untyped_storage().nbytes() == num_bytes > 0
            for _ in range(2):
                policy.make_room()
                policy.make_room_of_weights()
            there = 0 if offload == "all" else num_bytes
            assert buffer.param_data.untyped_storage().nbytes() == there
            while_away = saved_state(policy)
            assert len(saved) > 3
            assert all(torch.equal(a, b) for a, b in zip(saved, while_away, strict=True))
            log_probs(policy, pack_all(BATCH, TWO_MICROBATCHES))
            # Weights are where everyone looks for them, and all views of them are.
            assert buffer.param_data.untyped_storage().nbytes() == num_bytes
            start = buffer.param_data.data_ptr()
            for weight in policy.stages[0].parameters():
                assert start <= weight.data_ptr() < start + num_bytes
            # The same tensors, all of them in other memory or none.
            for name, tensors in optimizer_state(policy).items():
                assert all(a is b for a, b in zip(tensors, before[name], strict=True))
                moved = [x.data_ptr() != y for x, y in zip(tensors, places[name], strict=True)]
                assert moved == [offload != "none"] * len(tensors)
            policy.make_room_of_weights()
        train(policy)
        assert buffer.grad_data.untyped_storage().nbytes() == 4 * buffer.numel > 0
        if leaves:
            policy.make_room_of_weights()
        found.append([*copies(policy).values(), *gradients(policy), *saved_state(policy)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_whoever_reads_weights_finds_them(
    folder: Path, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gapo_megatron.policy.policy.load_state", lambda *_, **__: None)
    sections = {"optimizer": {"offload": "all"}, "objective": {"kl_coef": 0.1}}
    policy, initial = build(folder, groups, **sections), dict(read_weights(folder))
    train(policy)
    trained = copies(policy)
    stage = {name: weight.clone() for name, weight in policy.stages[0].named_parameters()}
    policy.make_room_of_weights()
    with policy.reference_weights():
        assert equal(copies(policy), initial)
        policy.make_room_of_weights()
    policy.make_room_of_weights()
    assert equal(copies(policy), trained)
    policy.make_room_of_weights()
    policy.load_hf_weights(initial.items())
    assert equal(copies(policy), initial)
    policy.make_room_of_weights()
    policy.load_state_dict({"model": {"stage_0": stage}, "optimizer": {}, "num_updates": 1})
    assert equal(copies(policy), trained)


def test_segments_expand_in_passes_and_not_while_the_engine_allocates(
    folder: Path, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, used = build(folder, groups, optimizer={"offload": "all"}), []
    monkeypatch.setattr(policy._segments, "use", used.append)
    for _ in range(2):
        train(policy)
        log_probs(policy, pack_all(BATCH, TWO_MICROBATCHES))
        policy.make_room()
        copies(policy)  # received by the engine
        policy.make_room_of_weights()
        policy.sharded_state_dict()
    assert used == 2 * [True, True, True, False]


def test_what_is_not_the_optimizers_cannot_be_gathered(
    folder: Path, groups: ParallelGroups
) -> None:
    """It would be written with any content."""
    policy = build(folder, groups)
    policy.sharded_state_dict()
    with pytest.raises(AssertionError, match="optimizer"):
        policy.gather_optimizer_state([(torch.zeros(3), torch.zeros(3))])


def test_rotary_tables_are_few_whatever_the_lengths(groups: ParallelGroups) -> None:
    """Frequencies of Megatron-core's own rotary embedding, used with Transformer Engine."""
    with cpu.device_scope():
        rotary = RotaryEmbedding(8, 1.0, use_cpu_initialization=True, cp_group=groups.cp_group)
        whole = rotary.get_emb(1024)
        share_rotary_tables(rotary)
        RotaryEmbedding.forward.cache_clear()
        for longest in range(1, 1001):
            packed = PackedSeqParams(qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest)
            length = rotary.get_rotary_seq_len(None, None, None, None, packed)
            table = rotary(length, packed_seq=True)
            assert longest <= len(table) < 2 * longest
            assert torch.equal(table, whole[:length])
    assert RotaryEmbedding.forward.cache_info().currsize == 11


def test_copies_in_fp8_go_with_the_gradients(folder: Path, groups: ParallelGroups) -> None:
    policy = build(folder, groups)
    layer = policy.stages[0].decoder.layers[-1].mlp.linear_fc2
    layer._fp8_workspaces = {"weight": torch.zeros(1)}  # as Transformer Engine's has
    policy.make_room()
    assert layer._fp8_workspaces == {}


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_gradients_and_updates_are_those_of_transformers(
    name: str, tmp_path: Path, groups: ParallelGroups
) -> None:
    model = save_model(tmp_path, name)
    policy = build(tmp_path, groups)
    assert equal(copies(policy), dict(read_weights(tmp_path)))

    # fp32 rounding in another order: sums of up to 96 terms, 1e-6 measured. One sequence at a
    # time there, packed here: any attention across sequences would show as differences of order 1.
    expected = torch.cat([x.detach() for x in reference_log_probs(model, BATCH)])
    packed = pack_all(BATCH, TWO_MICROBATCHES, align=16)
    torch.testing.assert_close(torch.cat(log_probs(policy, packed)), expected, rtol=1e-5, atol=1e-5)

    # No decay on biases and norms; a large eps keeps Adam's step a smooth function of the gradient,
    # where eps = 1e-8 would turn the rounding of a tiny gradient into a step of either sign.
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-3,
    )  # fmt: skip
    results, _ = train(policy, num_updates=3)
    for result in results:
        adam.zero_grad()
        per_sequence = torch.stack([x.sum() for x in reference_log_probs(model, BATCH)])
        loss = -(BATCH.advantages.float() * per_sequence).sum() / BATCH.num_sampled_tokens.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)  # fp32 rounding
        assert norm > 0.1  # clipping took part
        adam.step()
    trained = dict(model.named_parameters())
    for key, value in copies(policy).items():
        # Three steps of at most 1e-3: what is left is the fp32 rounding of the gradient.
        torch.testing.assert_close(value, trained[key].detach(), rtol=0, atol=3e-7, msg=key)


def test_recomputation_gives_the_same_gradients_and_the_ratio_is_one(
    folder: Path, groups: ParallelGroups
) -> None:
    found = []
    for recompute in ("none", "selective", "full"):
        policy = build(folder, groups, model={"recompute": recompute})
        train(policy)
        found.append(gradients(policy))
        old = log_probs(policy, pack_all(BATCH, TWO_MICROBATCHES))
        _, new = train(policy)
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
        # The same kernels on the same inputs: the same bits.
        assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True)), recompute


def test_a_loss_without_gradient_is_a_step_of_zero(folder: Path, groups: ParallelGroups) -> None:
    policy = build(folder, groups, optimizer={"weight_decay": 0.0})
    before = copies(policy)
    result = update(policy, pack_all(BATCH, [()]), lambda *_: (torch.tensor(1.0), {}))
    assert result.grad_norm == 0.0
    assert equal(copies(policy), before)


def test_bf16_keeps_fp32_master_weights(folder: Path, groups: ParallelGroups) -> None:
    model = save_model(folder, "qwen2_tied")
    # Steps of at most 1e-5 x 1 / 1e-3 of the clipped gradient: far below a bf16 weight's spacing.
    policy = build(folder, groups, model={"precision": "bf16"}, optimizer={"learning_rate": 1e-5})
    before = copies(policy)
    assert all(tensor.dtype == torch.bfloat16 for tensor in before.values())
    expected = torch.cat([x.detach() for x in reference_log_probs(model, BATCH)])
    found = torch.cat(log_probs(policy, pack_all(BATCH, TWO_MICROBATCHES)))
    # bf16 has 8 bits: 2^-8 of logits of order 10, over two layers. fp32 agrees to 1e-5.
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() < 0.05
    masters = [p for group in policy.optimizer.param_groups for p in group["params"]]
    assert all(p.dtype == torch.float32 for p in masters)
    start = torch.cat([p.detach().flatten().clone() for p in masters])
    results, _ = train(policy, num_updates=2)
    moved = (torch.cat([p.detach().flatten() for p in masters]) - start).abs()
    after = copies(policy)
    unchanged = sum(int((before[name] == after[name]).sum()) for name in before)
    assert (moved > 0).float().mean() > 0.5
    assert unchanged > 0.9 * len(start)
    assert results[0].grad_norm > 0


def test_divergence_leaves_everything_as_it_was(folder: Path, groups: ParallelGroups) -> None:
    policy, other = build(folder, groups), build(folder, groups)
    train(policy), train(other)
    before = copies(policy)
    microbatches = pack_all(BATCH, TWO_MICROBATCHES)
    for factor in (float("nan"), float("inf")):
        with pytest.raises(DivergenceError, match=mentions("update 1", "gradient norm")):
            update(policy, microbatches, lambda scored, f=factor: (scored.log_probs.sum() * f, {}))
    with pytest.raises(DivergenceError):  # a finite gradient does not excuse the loss
        update(policy, microbatches, lambda scored: (scored.log_probs.sum() * 0 + torch.inf, {}))
    assert equal(copies(policy), before)
    assert policy.num_updates == 1
    train(policy), train(other)
    assert equal(copies(policy), copies(other))  # moments and step count were untouched too


def test_reference_weights_come_and_go_bit_for_bit(folder: Path, groups: ParallelGroups) -> None:
    policy = build(folder, groups, objective={"kl_coef": 0.1})
    train(policy)
    current = copies(policy)
    with pytest.raises(ZeroDivisionError), policy.reference_weights():
        assert equal(copies(policy), dict(read_weights(folder)))
        raise ZeroDivisionError
    assert equal(copies(policy), current)
    with pytest.raises(RuntimeError, match="kl_coef"), build(folder, groups).reference_weights():
        pass


def test_learning_rate_follows_its_schedule_or_is_given(
    folder: Path, groups: ParallelGroups
) -> None:
    falls = {"schedule": "linear", "decay_steps": 4}
    policy = build(folder, groups, optimizer={"learning_rate": 1e-3, "warmup_steps": 2, **falls})
    results, _ = train(policy, num_updates=5)
    assert [r.learning_rate for r in results] == [5e-4, 1e-3, 1e-3, 5e-4, 0]
    microbatches = pack_all(BATCH, TWO_MICROBATCHES)
    loss = WeightedLoss(BATCH, microbatches)
    assert update(policy, microbatches, loss, learning_rate=7.0).learning_rate == 7.0
    assert {group["lr"] for group in policy.optimizer.param_groups} == {7.0}


def test_temperature_and_entropy_reach_the_head(folder: Path, groups: ParallelGroups) -> None:
    model = save_model(folder, "qwen2_tied")
    policy = build(folder, groups, rollout={"temperature": 0.5})
    microbatch = pack_all(BATCH, [(0,)])
    seen = []

    def loss(scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        assert scored.entropy is not None
        seen.append((scored.log_probs, scored.entropy))
        return scored.log_probs.sum() + scored.entropy.sum(), {}

    update(policy, microbatch, loss, with_entropy=True)
    logits = model(microbatch[0].tokens).logits[0][microbatch[0].row_index].detach() / 0.5
    expected = logits.log_softmax(dim=-1)
    (values, entropy) = seen[0]
    # fp32 rounding, as above.
    torch.testing.assert_close(
        values.detach(),
        expected.gather(1, microbatch[0].labels[:, None])[:, 0],
        rtol=1e-5,
        atol=1e-5,
    )
    torch.testing.assert_close(
        entropy.detach(), -(expected.exp() * expected).sum(-1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("precision", "value"),  # finite, but not in this precision; the other is, in bfloat16 too
    [("bf16", 3.4e38), ("fp16", 65536.0)],
)
def test_weights_that_are_not_finite_are_refused(
    precision: str, value: float, folder: Path, tmp_path: Path, groups: ParallelGroups
) -> None:
    policy = Policy.build(make_config(folder, model={"precision": precision}), groups, "cpu")
    tensors = dict(read_weights(folder))
    tensors["model.norm.weight"][-1] = value
    named = mentions("decoder.final_layernorm.weight", precision)
    with pytest.raises(ConversionError, match=named):
        policy.load_hf_weights(tensors.items())
    policy.stages[0].decoder.final_layernorm.weight.data[-1] = torch.nan
    save(policy.stages[0], tmp_path / "saved")
    with pytest.raises(ConversionError, match=mentions("decoder.final_layernorm.weight", "nan")):
        policy.load_megatron_weights(tmp_path / "saved")


def test_user_mistakes_are_config_errors(
    folder: Path, tmp_path: Path, groups: ParallelGroups
) -> None:
    with pytest.raises(ConfigError, match=mentions("model.precision", "fp8", "GPU")):
        build(folder, groups, model={"precision": "fp8"})
    text = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace(": 96,", ": 72,"))
    with pytest.raises(ConfigError, match=mentions(16, "linear_fc2.weight", "64 x 72")):
        build(tmp_path, groups, model={"precision": "fp8"})
    with pytest.raises(ConfigError, match=mentions("model.head", "triton", "bfloat16", "cpu")):
        build(folder, groups, model={"precision": "bf16", "head": "triton"})
    with pytest.raises(ConfigError, match=mentions("model.hf_dir", tmp_path / "nowhere", "read")):
        build(tmp_path / "nowhere", groups)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=mentions("model.hf_dir", "gpt2", "qwen2")):
        build(tmp_path, groups)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=mentions(tmp_path / "config.json", "JSON")):
        build(tmp_path, groups)
    parallel = make_config(folder, parallel={"tensor_model_parallel_size": 2}).parallel
    with pytest.raises(
        ConfigError, match=mentions("world size (1)", "tensor_model_parallel_size (2)")
    ):
        initialize(parallel)
    with pytest.raises(
        ConfigError, match=mentions("world size (1)", "expert_model_parallel_size (4)")
    ):
        initialize(ParallelConfig(expert_model_parallel_size=4))


@pytest.mark.parametrize(
    ("name", "changes", "parallel", "named"),
    [
        ("qwen2", {"num_attention_heads": 8}, {TP: 4}, [f"{TP} (4)", "num_key_value_heads (2)"]),
        ("qwen2", {}, {TP: 5}, [f"{TP} (5)", "num_attention_heads (6)"]),
        ("qwen2", {}, {PP: 3}, [f"{PP} (3)", "num_hidden_layers (4)"]),
        ("qwen2", {}, {EP: 2}, [f"{EP} (2)", "qwen2"]),
        ("qwen3_moe", {}, {EP: 3}, [f"{EP} (3)", "num_experts (4)"]),
        ("qwen3_moe", {}, {TP: 2}, ["sequence_parallel", "true"]),
        ("qwen3_moe", {"num_experts_per_tok": 1}, {}, ["num_experts_per_tok (1)"]),
        ("mistral", {"sliding_window": 4096}, {}, ["sliding_window (4096)"]),
        ("qwen3", {"attention_bias": True}, {}, ["attention_bias (true)"]),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, {}, ["attn_logit_softcapping (50.0)"]),
        ("gemma3_text", {"hidden_activation": "silu"}, {}, ["hidden_activation ('silu')"]),
        ("phi3", {"mlp_bias": True}, {}, ["mlp_bias (true)"]),
        ("llama", {"hidden_act": "gelu"}, {}, ["hidden_act ('gelu')"]),
    ],
)
def test_what_cannot_be_computed_is_refused(
    name: str, changes: dict[str, Any], parallel: dict[str, int], named: list[str]
) -> None:
    with pytest.raises(ConfigError, match=mentions(*named)):
        check_shapes(hf_config(name, **changes), ParallelConfig(**parallel))


def test_fp8_needs_layers_of_transformer_engine() -> None:
    model = make_config(Path("unused"), model={"precision": "fp8"}).model
    with pytest.raises(ConfigError, match=mentions("model.precision ('fp8')", "olmo2")):
        check_shapes(hf_config("olmo2", **FP8_SIZES), ParallelConfig(), model)
    check_shapes(hf_config("phi3", **FP8_SIZES), ParallelConfig(), model)


def test_a_window_excludes_transformer_engines_ring() -> None:
    config = make_config(Path("unused"), model={"precision": "bf16"})
    parallel = ParallelConfig(context_parallel_size=2)
    named = ["context_parallel_size (2)", "'bf16'", "sliding_window (16)"]
    for name in ("phi3", "gpt_oss"):
        with pytest.raises(ConfigError, match=mentions(*named)):
            check_shapes(hf_config(name), parallel, config.model)
    check_shapes(hf_config("phi3", sliding_window=None), parallel, config.model)
    check_shapes(hf_config("phi3"), parallel, make_config(Path("unused")).model)  # fp32


@pytest.mark.parametrize("norms", ["te", "local", "plain"])
@pytest.mark.parametrize(
    "metadata", [{}, {"non_homogeneous_layers": True}, {"singleton_local_shards": True}], ids=str
)
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_every_spelling_of_a_megatron_folder_is_loaded(
    model_type: str,
    metadata: dict[str, bool],
    norms: str,
    tmp_path: Path,
    groups: ParallelGroups,
) -> None:
    """Files saved by Megatron-core under its options; "te" imitates Transformer Engine's names."""
    weights = Weights(make_hf_config(model_type, tie_word_embeddings=False))
    with cpu.device_scope():
        writer = make_model(weights.config, norms=norms)
        fill(writer, weights)
        save(writer, tmp_path / "saved", **metadata)
        (stage,) = build_model(weights.config, groups, torch.device("cpu"), precision="fp32")
    load_weights(stage, tmp_path / "saved")
    for name, parameter in stage.named_parameters():
        expected = weights.read(*find_rule(weights.rules, name))
        assert torch.equal(parameter, expected), name
