"""A step: verdicts, the weight sync, the sum of its stages."""

import dataclasses

import pytest

from gapo_megatron.ops.plan.hardware import GPUS, Efficiency
from gapo_megatron.ops.plan.times import reward_s, step_time, sync_s
from tests.hf.test_convert_models import NUM_PARAMETERS
from tests.scaling_setup import H200, WORKLOAD, config, hf, layout, training


def test_sync_moves_the_whole_model_through_every_rank():
    alone, cut = sync_s(training(dp=8)), sync_s(training(tp=2, pp=2, dp=2))
    size = 2 * NUM_PARAMETERS["Qwen2.5-7B"]
    assert alone == pytest.approx(2 * size / 4.8e12, rel=1e-6)
    # Halves over the link, and a half's broadcast to the other stage, all in a node.
    assert cut - alone == pytest.approx(size / 2 / 450e9 * 2, rel=1e-6)


def test_rewards():
    costly = Efficiency(verdict_s=0.01)
    assert reward_s(training(efficiency=costly)) == pytest.approx(2048 / 8 / 8 * 0.01)
    four = {"reward": {"num_workers": 4}}
    found = reward_s(training(efficiency=costly, sections=four))
    assert found == pytest.approx(2048 / 8 / 4 * 0.01)
    again = {"batch": {"dynamic_sampling_rounds": 1}}
    found = reward_s(training(efficiency=costly, sections=again))
    assert found == pytest.approx(1.3 * 2048 / 8 / 8 * 0.01)


MACHINE = (WORKLOAD, H200, Efficiency())


def test_step_time_is_made_of_its_stages():
    model = hf("Qwen2.5-7B")
    one = step_time(model, config(), layout(dp=8), WORKLOAD, H200, Efficiency())
    parts = [getattr(one, field.name) for field in dataclasses.fields(one)]
    assert one.total_s == sum(parts)
    assert all(part > 0 for part in parts)
    assert one.update_s == 4 * training(dp=8, efficiency=Efficiency()).update_s()
    # Of four mini-batches three are scored for old log-probs, and bounds take a pass of each that
    # may have moved.
    scoring = {
        (method, old): training(
            dp=8,
            efficiency=Efficiency(),
            sections={"objective": {"method": method, "old_log_probs": old}},
        ).old_log_probs_s()
        for method in ("dapo", "m2po")
        for old in ("trainer", "rollout")
    }
    a_pass = scoring["dapo", "trainer"] / 3
    assert scoring["m2po", "trainer"] == pytest.approx(6 * a_pass)
    assert scoring["dapo", "rollout"] == 0
    assert scoring["m2po", "rollout"] == pytest.approx(4 * a_pass)
    # 12 bytes a weight, an eighth on each, to the host before generation and back.
    offloading = config(optimizer={"offload": True})
    away = step_time(model, offloading, layout(dp=8), WORKLOAD, H200, Efficiency())
    way = 12 * NUM_PARAMETERS["Qwen2.5-7B"] / 8 / (64e9 * 0.75)
    assert away.sync_s == pytest.approx(one.sync_s + way)
    assert away.update_s == pytest.approx(one.update_s + way)
    # And with the weights, of which every rank has a half: 2 bytes each.
    both = [
        step_time(model, config(optimizer={"offload": what}), layout(tp=2, dp=4), *MACHINE)
        for what in ("optimizer", "all")
    ]
    way = NUM_PARAMETERS["Qwen2.5-7B"] / (64e9 * 0.75)
    # Norms are whole on every rank.
    assert both[1].sync_s - both[0].sync_s == pytest.approx(way, rel=1e-4)
    assert both[1].update_s - both[0].update_s == pytest.approx(way, rel=1e-4)
    # The same model on a device with a sixth of the products and a little less bandwidth.
    slow = step_time(model, config(), layout(dp=8), WORKLOAD, GPUS["h20"], Efficiency())
    assert slow.update_s > 5 * one.update_s
    assert slow.generation_s < 2 * one.generation_s
