"""Seconds of a mini-batch in the trainer, term by term."""

import itertools

import numpy as np
import pytest

from gapo_tools.planner.training import Training
from gapo_tools.planner.workload import Workload
from tests.scaling_setup import Pass, draw_lengths, schedule_of, training


def stage_s(one: Training, *, backward: bool, rank: int = 0) -> float:
    """A micro-batch on one pipeline rank without the head."""
    return one.stage_s(one.contents[rank], backward=backward)


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
@pytest.mark.parametrize("dp", [2, 11, 64])
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
