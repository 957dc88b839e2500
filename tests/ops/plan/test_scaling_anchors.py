"""Published step times against the model, without tuning."""

import pytest

from benchmarks.anchors import ANCHORS
from gapo_megatron.ops.plan.hardware import GPUS, Efficiency
from gapo_megatron.ops.plan.times import step_time


def test_the_model_that_is_not_shipped_is_the_published_one():
    (anchor,) = [one for one in ANCHORS if one.model == "Qwen3-32B"]
    assert anchor.shape.num_parameters == pytest.approx(32_762_123_264, rel=1e-4)


def test_lengths_of_the_anchors_are_the_published_rates():
    """NeMo-RL prints tokens per second and GPU: sequences x mean length / step / GPUs."""
    nemo = ANCHORS[0]
    sequences = nemo.rollout_prompts * nemo.rollouts_per_prompt
    rate = sequences * nemo.workload.mean_tokens / nemo.published["total"]
    assert rate / nemo.layout.world_size == pytest.approx(1102, rel=0.01)


@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda anchor: anchor.name)
def test_published_step_times(anchor):
    """Within a factor of two, without tuning: docs/planned_layouts.md has how far."""
    predicted = anchor.predict(Efficiency()).total_s
    assert 0.5 < predicted / anchor.published["total"] < 2.0


def test_peers_compute_what_this_package_leaves_out():
    verl = next(anchor for anchor in ANCHORS if "verl" in anchor.name)
    assert verl.workload.active_share == 1.0
    ours = step_time(
        verl.shape,
        verl.config(),
        verl.layout,
        verl.workload,
        GPUS["h20"],
        Efficiency(),
    )
    theirs = verl.predict(Efficiency())
    # Sixteen old passes instead of fifteen.
    assert theirs.old_log_probs_s == pytest.approx(ours.old_log_probs_s * 16 / 15)
    assert theirs.update_s == ours.update_s
