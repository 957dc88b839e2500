"""Seconds of a mini-batch in the trainer, term by term."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from gapo_megatron.ops.plan.training import Training
from gapo_megatron.ops.plan.workload import Workload
from tests.scaling_setup import (
    IDEAL,
    WORKLOAD,
    Pass,
    draw_lengths,
    schedule_of,
    training,
)


def stage_s(one: Training, *, backward: bool, rank: int = 0) -> float:
    """A micro-batch on one pipeline rank without the head."""
    return one.stage_s(one.contents[rank], backward=backward)


def test_update_is_three_forward_passes_and_a_head_of_four():
    one = training()
    tokens = 64 * 8 * 0.7 / 8 * 800
    forward = 2 * tokens * (7.07e9 - 152064 * 3584) / 989e12
    head = 2 * tokens * 7 / 8 * 152064 * 3584 / 989e12
    # Attention adds a few percent, adding up gradients too.
    assert one.load.tokens == pytest.approx(tokens)
    assert one.pass_s(backward=False) == pytest.approx(forward + head, rel=0.05)
    assert one.pass_s(backward=True) == pytest.approx(3 * forward + 4 * head, rel=0.06)


def test_an_adapter_trains_its_factors_alone():
    full, lora = training(), training(sections={"adapter": {"kind": "lora", "rank": 8}})
    # Forward: the factors' products besides, of rank 8 beside 3,584.
    assert 1 < stage_s(lora, backward=False) / stage_s(full, backward=False) < 1.02
    # Backward: no product for the gradient of frozen weights, which is none to add up either.
    assert stage_s(lora, backward=True) / stage_s(full, backward=True) == pytest.approx(0.67, 0.03)
    assert lora.head_s(backward=True) == pytest.approx(0.75 * full.head_s(backward=True))
    again = {"recompute": "full"}
    recomputed = training(sections={"adapter": {"kind": "lora", "rank": 8}}, **again)
    share = stage_s(recomputed, backward=True) / stage_s(training(**again), backward=True)
    assert share == pytest.approx(0.75, 0.03)
    # 1 % of the weights are reduced, updated and gathered.
    assert lora.optimizer_s() < 0.02 * full.optimizer_s()


def test_clipped_rows_skip_the_backward_pass_of_the_head_alone():
    clipped = training(workload=dataclasses.replace(WORKLOAD, clipped_share=1.0))
    free = training()
    assert clipped.head_s(backward=True) == free.head_s(backward=True) / 4
    assert clipped.head_s(backward=False) == free.head_s(backward=False)
    assert stage_s(clipped, backward=True) == stage_s(free, backward=True)


def test_rows_without_advantage_cost_nothing_unless_a_term_needs_them():
    every = training(workload=dataclasses.replace(WORKLOAD, active_share=1.0))
    some = training()
    assert some.load.tokens == pytest.approx(0.7 * every.load.tokens)
    with_kl = training(sections={"objective": {"kl_coef": 0.01}})
    assert with_kl.load.tokens == every.load.tokens
    # Three of four mini-batches, and with a KL term all four at the initial weights.
    assert some.old_log_probs_s() == 3 * some.pass_s(backward=False)
    assert with_kl.old_log_probs_s() == 7 * with_kl.pass_s(backward=False)


def test_the_busiest_rank_has_at_least_the_longest_sequence():
    """343 active sequences on 256 ranks: some rank has one that reached the limit."""
    workload = Workload(150, 900, 3092, active_share=343 / 512)
    one = training(dp=256, workload=workload)
    rng = np.random.default_rng(0)
    longest = draw_lengths(rng, (2000, 343), mean=900, spread=0.7).max(axis=1)
    assert one.load.tokens == pytest.approx(150 + longest.mean(), rel=0.01)
    assert one.load.scored_tokens == pytest.approx(longest.mean(), rel=0.01)
    squared = ((150 + longest) ** 2).mean()
    assert one.load.squared_tokens == pytest.approx(squared, rel=0.02)
    # With many sequences to a rank their mean decides.
    assert training(dp=8, workload=workload).load.tokens == pytest.approx(343 / 8 * 1050)


def test_rounds_of_dynamic_sampling_leave_fewer_rows_out():
    once, twice = training(), training(sections={"batch": {"dynamic_sampling_rounds": 1}})
    assert twice.num_sequences == pytest.approx(once.num_sequences * 0.91 / 0.7)


def test_fp8_is_for_the_products_of_the_layers():
    bf16, fp8 = (training(sections={"model": {"precision": p}}) for p in ("bf16", "fp8"))
    flops = bf16._flops()
    saved = stage_s(bf16, backward=False) - stage_s(fp8, backward=False)
    assert saved == pytest.approx(flops.layers / 989e12 - flops.layers / 1979e12)
    assert fp8.head_s(backward=True) == bf16.head_s(backward=True)


def test_fp16_takes_the_time_of_bf16():
    bf16, fp16 = (training(sections={"model": {"precision": p}}) for p in ("bf16", "fp16"))
    for backward in (False, True):
        assert stage_s(fp16, backward=backward) == stage_s(bf16, backward=backward)
        assert fp16.head_s(backward=backward) == bf16.head_s(backward=backward)


def test_the_heads_collectives():
    """Hidden states are gathered there and back, float32 gradients of active rows summed."""
    alone, plain, sequence = training(dp=8), training(tp=8, dp=8, sp=False), training(tp=8, dp=8)
    tokens, rows = alone.load.tokens / 2, alone.load.scored_tokens / 2  # two micro-batches
    gather, summed = tokens * 3584 * 2 * 7 / 8 / 450e9, rows * 3584 * 4 * 7 / 8 / 450e9
    for backward, expected in ((False, (0, gather)), (True, (2 * summed, 2 * gather + summed))):
        products = alone.head_s(backward=backward) / 8
        assert plain.head_s(backward=backward) - products == pytest.approx(expected[0], abs=1e-12)
        assert sequence.head_s(backward=backward) - products == pytest.approx(expected[1])


def test_recomputation_adds_a_forward_pass():
    none, selective, full = (training(recompute=r) for r in ("none", "selective", "full"))
    flops = none._flops()
    rate = 989e12
    # Flash attention goes back at 2.5 times its forward pass.
    products = 3 * flops.layers + 3.5 * flops.attention
    adding = 10 * none.shape.num_parameters / 4.8e12
    assert stage_s(none, backward=True) == pytest.approx(products / rate + adding)
    assert stage_s(full, backward=True) - stage_s(none, backward=True) == pytest.approx(
        (flops.layers + flops.attention) / rate
    )
    # Of a dense layer the MLP; of experts no product; without Transformer Engine attention.
    mlp = 3 * 3584 * 18944
    share = mlp / (mlp + 2 * 3584 * (3584 + 4 * 128))
    assert stage_s(selective, backward=True) - stage_s(none, backward=True) == pytest.approx(
        share * flops.layers / rate
    )
    for model, sections, again in (
        ("Qwen3-30B-A3B", {}, 0),
        ("Qwen2.5-7B", {"model": {"precision": "fp32"}}, flops.attention / 67e12),
    ):
        none, selective = (
            training(model, recompute=r, sections=sections) for r in ("none", "selective")
        )
        more = stage_s(selective, backward=True) - stage_s(none, backward=True)
        assert more == pytest.approx(again)


def test_pipeline_bubble():
    """Equal stages: (m + p - 1) / m of the work, p - 1 over m of it idle."""
    one = training(pp=4, dp=8, workload=dataclasses.replace(WORKLOAD, mean_response_tokens=1))
    stage, head = stage_s(one, backward=True), one.head_s(backward=True)
    middle, m = stage_s(one, backward=True, rank=1), one.num_microbatches  # without embedding
    assert one.pass_s(backward=True) == pytest.approx(stage + 2 * middle + m * (stage + head))
    forward, head = stage_s(one, backward=False), one.head_s(backward=False)
    assert one.pass_s(backward=False) == pytest.approx(3 * forward + m * (forward + head))
    many = training(pp=4, dp=8, sections={"batch": {"max_tokens_per_microbatch": 4096}})
    few = training(pp=4, dp=8)
    assert many.num_microbatches == math.ceil(many.load.tokens / 4096) > few.num_microbatches
    assert many.pass_s(backward=False) < few.pass_s(backward=False)


def test_unequal_stages_go_at_the_pace_of_the_slowest():
    one = training(pp=4, dp=8, first=4, last=6)
    assert [content.num_layers for content in one.contents] == [4, 9, 9, 6]
    first, middle, last = (stage_s(one, backward=True, rank=rank) for rank in (0, 1, 3))
    last += one.head_s(backward=True)
    assert last < middle
    m = one.num_microbatches
    assert one.pass_s(backward=True) == pytest.approx(first + last + middle + m * middle)
    equal = training(pp=4, dp=8)
    assert [content.num_layers for content in equal.contents] == [7, 7, 7, 7]
    # The optimizer of the rank with most weights: 9 layers, against 7 and a table.
    layer, table = equal.shape.layer_weights, equal.shape.head_weights
    expected = 9 * layer / (7 * layer + table)
    # Biases and norms are left out here.
    assert one.optimizer_s() / equal.optimizer_s() == pytest.approx(expected, rel=1e-4)


def test_one_stage_has_both_tables_and_one_where_they_are_one():
    table, name = 151936 * 1536, "Qwen2.5-1.5B"
    ((_, untied, _, _),) = training().contents
    assert untied == training().shape.num_parameters
    ((_, tied, _, _),) = training(name).contents
    assert tied == training(name).shape.num_parameters
    first, last = training(name, pp=2).contents
    assert first.others + last.others == tied + table
    assert first.has_embedding and not last.has_embedding


def test_virtual_stages_shorten_the_bubble():
    """To a seventh, for seven messages in place of one."""
    sections = {"batch": {"max_tokens_per_microbatch": 4500}}
    plain, virtual = (training(pp=4, dp=8, vpp=v, sections=sections) for v in (1, 7))
    assert plain.num_microbatches == 8
    for backward in (False, True):
        stage, head = stage_s(plain, backward=backward), plain.head_s(backward=backward)
        bubble = stage + 2 * stage_s(plain, backward=backward, rank=1)
        expected = bubble + 8 * (stage + head)
        assert plain.pass_s(backward=backward) == pytest.approx(expected)
        sent = 6 * plain._pipeline_s(backward=backward)
        expected = (bubble + 3 * sent) / 7 + 8 * (stage + sent + head)
        assert virtual.pass_s(backward=backward) == pytest.approx(expected)


def test_a_filler_costs_its_place_in_all_virtual_stages_but_one():
    sections = {"batch": {"max_tokens_per_microbatch": 4500}}
    one = training(pp=4, vpp=7, dp=11, sections=sections)
    assert one.num_microbatches == 6
    stage, head = stage_s(one, backward=False), one.head_s(backward=False)
    expected = 3 * stage / 7 + 6 * (stage + head) + 2 * 6 / 7 * stage
    assert one.pass_s(backward=False) == pytest.approx(expected)


def test_of_every_message_the_shape_goes_ahead():
    slow = dataclasses.replace(IDEAL, collective_s=1.0)
    assert training(pp=4, dp=8, efficiency=slow)._pipeline_s(backward=False) == pytest.approx(
        2, rel=0.01
    )
    virtual = training(pp=4, vpp=7, dp=8, efficiency=slow)
    assert virtual._pipeline_s(backward=True) == pytest.approx(7 * 2 * 2, rel=0.01)


def replayed(one: Training, *, backward: bool) -> float:
    """Seconds of a pass in which every rank does its work in the order of Megatron-core's schedule.

    A stage of the model needs the one before, and on the way back the one after it; what is sent is
    there at once. A rank with virtual stages waits after each pass for what its next one in that
    direction needs, and ahead of its first backward pass for the gradient: shapes are exchanged.
    """
    p, v, m = one.layout.pp_size, one.layout.vpp_size, one.num_microbatches

    def cost_s(stage: int, backward: bool) -> float:
        seconds = stage_s(one, backward=backward, rank=stage % p) / v
        return seconds + (one.head_s(backward=backward) if stage == p * v - 1 else 0.0)

    def needed(task: Pass) -> Pass:
        if task.is_backward and task.stage == p * v - 1:
            return task._replace(is_backward=False)
        return task._replace(stage=task.stage + (1 if task.is_backward else -1))

    ends = {Pass(False, number, -1): 0.0 for number in range(m + p)}
    work: list[list[tuple[Pass | None, Pass]]] = []  # (what is done, if anything; what it needs)
    for rank in range(p):
        own = schedule_of(one.layout, m, rank=rank)
        following = dict(itertools.pairwise(own.forward)) | dict(itertools.pairwise(own.backward))
        steps: list[tuple[Pass | None, Pass]] = []
        for number, task in enumerate(own.order if backward else own.forward):
            steps.append((task, needed(task)))
            received = [following.get(task)]
            if backward and number == own.num_ahead - 1:
                received.append(own.backward[0])
            if v > 1:
                steps += [
                    (None, needed(other))
                    for other in received
                    if other and needed(other).stage != other.stage
                ]
        work.append(steps)
    clocks = [0.0] * p
    while any(work):
        for rank, steps in enumerate(work):
            while steps and steps[0][1] in ends:
                task, before = steps.pop(0)
                clocks[rank] = max(clocks[rank], ends[before])
                if task is None:
                    continue
                if task.microbatch < m:  # fillers take no time
                    seconds = cost_s(task.stage, False)
                    if task.is_backward:
                        seconds = cost_s(task.stage, True) - seconds
                    clocks[rank] += seconds
                ends[task] = clocks[rank]
    return max(clocks)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dp", [2, 6, 8, 11, 13, 32, 64])
@pytest.mark.parametrize(
    "cut",
    [
        {"pp": 4},
        {"pp": 4, "first": 4, "last": 6},
        {"pp": 2, "vpp": 2},
        {"pp": 4, "vpp": 7},
        {"pp": 7, "vpp": 4},
        {"pp": 14, "vpp": 2},
        {"pp": 4, "vpp": 2, "first": 6, "last": 6},
    ],
    ids=str,
)
def test_a_pass_is_what_the_schedule_comes_to(cut, dp, backward):
    sections = {"batch": {"max_tokens_per_microbatch": 4500}}
    one = training(**cut, dp=dp, sections=sections)
    expected = replayed(one, backward=backward)
    has_fillers = "vpp" in cut and one.num_microbatches % cut["pp"]
    # Unequal ranks do not all wait for the slowest one; tables make the ends a little slower.
    tolerance = 0.1 if "first" in cut else 0.01 if has_fillers and backward else 1e-9
    assert one.pass_s(backward=backward) == pytest.approx(expected, rel=tolerance)


def test_tensor_parallel_bytes():
    """Sequence parallelism gathers twice again in the backward pass: 10 units against 8."""
    plain, sequence = training(tp=8, dp=1, sp=False), training(tp=8, dp=1)
    hidden = plain.load.tokens / plain.num_microbatches * 3584 * 2
    unit = hidden * 7 / 8 / 450e9
    assert plain._tensor_s(backward=False) == pytest.approx(4 * unit)
    assert plain._tensor_s(backward=True) == pytest.approx(8 * unit)
    assert sequence._tensor_s(backward=True) == pytest.approx(10 * unit)
    assert training(dp=8)._tensor_s(backward=True) == 0


def test_gradients_travel_by_link_or_network():
    link = training(dp=8).optimizer_s()
    network = training(dp=64).optimizer_s()
    weights = training(dp=8).shape.num_parameters
    assert link > weights * 6 * 7 / 8 / 450e9
    # Eight adapters of a node side by side are not the bottleneck: 400 against 450 GB/s.
    assert network == pytest.approx(weights * 6 * 63 / 64 / 400e9, rel=0.2)


def test_the_last_backward_pass_hides_the_reduction_but_for_the_embeddings():
    on = {"parallel": {"overlap_grad_reduce": True}}
    few_tokens = Workload(1, 1, 2)
    # On the network: a byte of each weight, and of the embedding.
    rate = 400e9 / (63 / 64)
    (content,) = training(dp=64).contents
    byte_s = content.others / rate
    embedding_s = 152064 * 3584 / rate
    for workload in (WORKLOAD, few_tokens):
        waits, hides = (
            training(dp=64, workload=workload, sections=sections) for sections in ({}, on)
        )
        forward_s, both_s = (
            hides.stage_s(content, backward=backward) for backward in (False, True)
        )
        backward_s = both_s - forward_s
        hidden_s = min(backward_s, 4 * (byte_s - embedding_s))
        assert (hidden_s < backward_s) == (workload is WORKLOAD)
        assert waits.optimizer_s() - hides.optimizer_s() == pytest.approx(hidden_s)
        # The weights come back after the update, in the open.
        assert hides.optimizer_s() > (2 * byte_s + 4 * embedding_s)
        assert hides.pass_s(backward=True) == waits.pass_s(backward=True)
    one = training(dp=1, sections=on)
    assert one.optimizer_s() == training(dp=1).optimizer_s()


def test_a_dense_model_has_no_collectives_of_experts():
    slow = dataclasses.replace(IDEAL, collective_s=1.0)
    assert training(dp=8, efficiency=slow).optimizer_s() == pytest.approx(2, rel=0.1)
    moe = training("Qwen3-30B-A3B", dp=16, ep=8, efficiency=slow)
    assert moe.optimizer_s() == pytest.approx(4, rel=0.2)


def test_experts_talk_within_the_node_or_across():
    inside = training("Qwen3-30B-A3B", dp=32, ep=8)
    across = training("Qwen3-30B-A3B", dp=32, ep=16)
    tokens = inside.load.tokens / inside.num_microbatches
    sent = tokens * 8 * 2048 * 2
    assert inside._experts_s(backward=False) == pytest.approx(2 * sent * 7 / 8 / 450e9)
    # Of 16 ranks 8 are in the same node: half of the tokens leave it.
    assert across._experts_s(backward=True) == pytest.approx(4 * sent * 8 / 16 / 50e9)
    # A rank's share of the experts is added up over those that hold the same.
    assert across.optimizer_s() < inside.optimizer_s()


def test_context_parallel_ranks_share_the_work_and_pass_keys_on():
    one, two = training(dp=4), training(cp=4, dp=4)
    tokens = one.load.tokens / one.num_microbatches
    assert (two.load, two.num_microbatches) == (one.load, one.num_microbatches)
    assert two.head_s(backward=True) == one.head_s(backward=True) / 4
    # Keys and values of 4 heads x 128, bf16, to three neighbours; twice as much on the way back.
    ring = 3 * tokens / 4 * 2 * 512 * 2 / 450e9
    assert two._context_s(backward=False) == pytest.approx(ring)
    assert two._context_s(backward=True) == pytest.approx(3 * ring)
    assert training(cp=4, dp=4, recompute="full")._context_s(backward=True) == pytest.approx(
        4 * ring
    )
    assert one._context_s(backward=True) == 0
    forward = stage_s(two, backward=False) - 28 * two._context_s(backward=False)
    assert forward == pytest.approx(stage_s(one, backward=False) / 4)
    # Sixteen ranks share gradients and optimizer, as if all were data parallel.
    assert two.optimizer_s() == pytest.approx(training(dp=16).optimizer_s())
