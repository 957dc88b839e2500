"""What a sync of a policy with low-rank factors sends, and what an engine makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from gapo_megatron.errors import WeightSyncError
from gapo_megatron.rollout import sync as sync_module
from gapo_megatron.rollout.adapter_sync import Sending
from gapo_megatron.rollout.engine import Needs
from gapo_megatron.rollout.sync import prompts_as_sequences, sync
from gapo_megatron.types import Prompt
from tests.adapter_setup import FakeAdapter, FakePolicy, make_factors, with_factors
from tests.factors_engine import FactorsEngine
from tests.rollout_setup import expected_log_probs, make_model, perturb

SCALE = 1.5


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """The trainer's model; its log-probs are those of its weights and factors in float64."""
    model = make_model(tied=True)

    def score(policy: FakePolicy, probe: Any, group: Any) -> list[Any]:
        exact = with_factors(model, policy.adapter.factors, SCALE)
        return [
            expected_log_probs(exact, probe.prompt_ids[i], probe.response_ids[i])
            for i in range(len(probe))
        ]

    monkeypatch.setattr(sync_module, "score_probe", score)
    return model


def policy_of(model: PreTrainedModel, seed: int, **settings: Any) -> FakePolicy:
    return FakePolicy(model, FakeAdapter(make_factors(model, rank=4, seed=seed, **settings), SCALE))


def other_model() -> PreTrainedModel:
    """For an engine: without a sync it computes something else."""
    model = make_model(tied=True)
    perturb(model, seed=1)
    return model


def probe() -> Any:
    return prompts_as_sequences([Prompt("0", tuple(range(2, 40)), answer="")], 1)


def test_the_base_is_sent_once_and_then_only_factors(trained: PreTrainedModel) -> None:
    engine = FactorsEngine(other_model(), rank=4)
    engine.sleep()
    for version in range(3):
        policy = policy_of(trained, seed=version)
        check = sync(policy, engine, probe(), policy_version=version)  # type: ignore[arg-type]
        assert check.max_abs_diff < 1e-5 and check.merge_rounding is None
        assert engine.policy_version == version
        assert policy.made_room == ["gradients", "weights"]
        assert policy.num_weights_sent == (version == 0)
        engine.sleep()
    assert engine.received == ["weights", "factors", "factors", "factors"]


@pytest.mark.parametrize("needs", ["base", "merged"])
def test_whoever_stops_early_leaves_no_adapter_switched_off(
    trained: PreTrainedModel, needs: Needs
) -> None:
    """Held by somebody, a generator that has stopped would otherwise never end."""
    policy, held = policy_of(trained, seed=0), []

    def stop_early(weights: Any, **_: Any) -> None:
        held.append(weights)
        next(weights)

    engine = FactorsEngine(other_model(), rank=4)
    engine.needs, engine.update_weights = needs, stop_early  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"model\.layers"):
        sync(policy, engine, probe(), policy_version=0)  # type: ignore[arg-type]
    assert policy.adapter.is_on
    with pytest.raises(ZeroDivisionError), Sending(policy, needs).weights() as sent:  # type: ignore[arg-type]
        held.append(sent)
        next(sent)
        raise ZeroDivisionError
    assert policy.adapter.is_on
