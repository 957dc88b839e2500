"""Seconds of a mini-batch in the trainer, term by term."""

import dataclasses
import math

import numpy as np
import pytest
from megatron.core.pipeline_parallel import schedules

from gapo_megatron.scaling.activations import num_in_flight
from gapo_megatron.scaling.training import Training
from gapo_megatron.scaling.workload import Workload
from tests.scaling_setup import IDEAL, WORKLOAD, draw_lengths, training


def test_update_is_three_forward_passes_and_a_head_of_four():
    one = training()
    tokens = 64 * 8 * 0.7 / 8 * 800
    forward = 2 * tokens * (7.07e9 - 152064 * 3584) / 989e12
    head = 2 * tokens * 7 / 8 * 152064 * 3584 / 989e12
    # Attention adds a few percent, adding up gradients too.
    assert one.load.tokens == pytest.approx(tokens)
    assert one.pass_s(backward=False) == pytest.approx(forward + head, rel=0.05)
    assert one.pass_s(backward=True) == pytest.approx(3 * forward + 4 * head, rel=0.06)


def test_clipped_rows_skip_the_backward_pass_of_the_head_alone():
    clipped = training(workload=dataclasses.replace(WORKLOAD, clipped_share=1.0))
    free = training()
    assert clipped.head_s(backward=True) == free.head_s(backward=True) / 4
    assert clipped.head_s(backward=False) == free.head_s(backward=False)
    assert clipped.stage_s(backward=True) == free.stage_s(backward=True)


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
    saved = bf16.stage_s(backward=False) - fp8.stage_s(backward=False)
    assert saved == pytest.approx(flops.layers / 989e12 - flops.layers / 1979e12)
    assert fp8.head_s(backward=True) == bf16.head_s(backward=True)


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
    adding = 10 * sum(none._weights()) / 4.8e12
    assert none.stage_s(backward=True) == pytest.approx(products / rate + adding)
    assert full.stage_s(backward=True) - none.stage_s(backward=True) == pytest.approx(
        (flops.layers + flops.attention) / rate
    )
    assert selective.stage_s(backward=True) - none.stage_s(backward=True) == pytest.approx(
        flops.attention / rate
    )


def test_pipeline_bubble():
    """Equal stages: (m + p - 1) / m of the work, p - 1 over m of it idle."""
    one = training(pp=4, dp=8, workload=dataclasses.replace(WORKLOAD, mean_response_tokens=1))
    stage, head = one.stage_s(backward=True), one.head_s(backward=True)
    m = one.num_microbatches
    assert one.pass_s(backward=True) == pytest.approx(3 * stage + m * (stage + head))
    many = training(pp=4, dp=8, sections={"batch": {"max_tokens_per_microbatch": 4096}})
    few = training(pp=4, dp=8)
    assert many.num_microbatches == math.ceil(many.load.tokens / 4096) > few.num_microbatches
    assert many.pass_s(backward=False) < few.pass_s(backward=False)


def test_unequal_stages_go_at_the_pace_of_the_slowest():
    one = training(pp=4, dp=8, first=4, last=6)
    first, middle, last = (one.stage_s(backward=True, num_layers=n) for n in (4, 9, 6))
    last += one.head_s(backward=True)
    assert last < middle
    m = one.num_microbatches
    assert one.pass_s(backward=True) == pytest.approx(first + last + middle + m * middle)
    equal = training(pp=4, dp=8)
    assert equal.stage_s(backward=True) == equal.stage_s(backward=True, num_layers=7)
    # The optimizer of the rank with most layers: 9 and a table, against 7 and a table.
    layer, table = equal.shape.layer_weights, equal.shape.head_weights
    expected = (9 * layer + table) / (7 * layer + table)
    assert one.optimizer_s() / equal.optimizer_s() == pytest.approx(expected)


def test_virtual_stages_shorten_the_bubble():
    """To a seventh, for seven messages in place of one."""
    sections = {"batch": {"max_tokens_per_microbatch": 4500}}
    plain, virtual = (training(pp=4, dp=8, vpp=v, sections=sections) for v in (1, 7))
    assert plain.num_microbatches == 8
    stage, head = plain.stage_s(backward=True), plain.head_s(backward=True)
    assert plain.pass_s(backward=True) == pytest.approx(3 * stage + 8 * (stage + head))
    sent = plain._pipeline_s(backward=True)
    stage += 6 * sent
    assert virtual.pass_s(backward=True) == pytest.approx(3 * stage / 7 + 8 * (stage + head))


def replayed(one: Training, *, backward: bool) -> float:
    """Seconds of a pass in which every rank does its work in the order of Megatron-core's schedule.

    A stage of the model needs the one before, and on the way back the one after it; what is sent is
    there at once.
    """
    p, v, m = one.layout.pp_size, one.layout.vpp_size, one.num_microbatches
    layers = one.layout.layers_of_ranks(one.shape.num_layers)

    def cost_s(place: int, backward: bool) -> float:
        stage_s = one.stage_s(backward=backward, num_layers=layers[place % p]) / v
        return stage_s + (one.head_s(backward=backward) if place == p * v - 1 else 0.0)

    table = schedules.get_schedule_table(m, v, m)
    if v > 1:
        table = schedules.get_schedule_table(m + -m % p, v, p)
    work = []
    for rank in range(p):
        forth = [(False, number, stage * p + rank) for number, stage in table]
        back = [(True, number, (v - 1 - stage) * p + rank) for number, stage in table]
        ahead = min(num_in_flight(one.layout, stage=rank) - 1, len(table))
        both = [task for pair in zip(forth[ahead:], back, strict=False) for task in pair]
        order = [*forth[:ahead], *both, *back[len(table) - ahead :]]
        work.append(order if backward else forth)
    clocks, ends = [0.0] * p, {}
    while any(work):
        for rank, order in enumerate(work):
            while order:
                is_back, number, place = order[0]
                needed = (is_back, number, place + 1 if is_back else place - 1)
                if place == p * v - 1 and is_back:
                    needed = (False, number, place)
                if needed not in ends and (is_back or place > 0):
                    break
                seconds = cost_s(place, False) if number < m else 0.0  # fillers take no time
                if is_back and number < m:
                    seconds = cost_s(place, True) - seconds
                clocks[rank] = max(clocks[rank], ends.get(needed, 0.0)) + seconds
                ends[order.pop(0)] = clocks[rank]
    return max(clocks)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dp", [2, 6, 8, 11, 13])
@pytest.mark.parametrize(
    "cut",
    [
        {"pp": 4},
        {"pp": 4, "first": 4, "last": 6},
        {"pp": 2, "vpp": 2},
        {"pp": 4, "vpp": 7},
        {"pp": 7, "vpp": 4},
        {"pp": 4, "vpp": 2, "first": 6, "last": 6},
    ],
    ids=str,
)
def test_a_pass_is_what_the_schedule_comes_to(cut, dp, backward):
    sections = {"batch": {"max_tokens_per_microbatch": 4500}}
    one = training(**cut, dp=dp, sections=sections)
    expected = replayed(one, backward=backward)
    num_fillers = -one.num_microbatches % cut["pp"] if "vpp" in cut else 0
    # Unequal ranks do not all wait for the slowest one, and that fillers count half is a mean.
    tolerance = 0.15 if num_fillers or "first" in cut else 1e-9
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
    weights = sum(training(dp=8)._weights())
    assert link > weights * 6 * 7 / 8 / 450e9
    # Eight adapters of a node side by side are not the bottleneck: 400 against 450 GB/s.
    assert network == pytest.approx(weights * 6 * 63 / 64 / 400e9, rel=0.2)


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
    forward = two.stage_s(backward=False) - 28 * two._context_s(backward=False)
    assert forward == pytest.approx(one.stage_s(backward=False) / 4)
    # Sixteen ranks share gradients and optimizer, as if all were data parallel.
    assert two.optimizer_s() == pytest.approx(training(dp=16).optimizer_s())
