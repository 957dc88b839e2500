"""The noise floor: what it compares, when it is measured, what it says, and on which ranks."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.config.methods import METHODS
from gapo_megatron.errors import ConfigError
from gapo_megatron.learn import noise_floor, score
from gapo_megatron.learn.noise_floor import NoiseFloor, measure_noise_floor, watch_noise_floor
from gapo_megatron.objective.families import FAMILIES
from gapo_megatron.policy import Policy, destroy, initialize
from gapo_megatron.types import Batch, Microbatch
from tests.dist import run_distributed, single_rank
from tests.distributed.policy_setup import make_batch, make_config, read_weights, save_model
from tests.messages import mentions

BATCH = make_batch(24)
SHIFT = 1e-3
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
    "dp": {},
}
original_log_probs = score.log_probs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    save_model(path, "qwen2_tied")
    return path


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[Policy]:
    with single_rank():
        yield build(make_config(folder))
        destroy()


def build(config: Config) -> Policy:
    policy = Policy.build(config, initialize(config.parallel), "cpu")
    policy.load_hf_weights(read_weights(Path(config.model.hf_dir)))
    return policy


def shifted_log_probs(policy: Policy, microbatches: Sequence[Microbatch], **_: Any) -> list[Any]:
    """Sequence i of the batch gets (i + 1) * SHIFT a token, but only in company."""
    values = original_log_probs(policy, microbatches)
    return [
        part
        if part is None or len(m.indices) < 2
        else part + SHIFT * (torch.tensor(m.indices)[m.sequence_ids] + 1)
        for m, part in zip(microbatches, values, strict=True)
    ]


def shifts(indices: Sequence[int]) -> list[float]:
    """|ratio - 1| of sequences `indices` under `shifted_log_probs`."""
    return [math.expm1(SHIFT * (index + 1)) for index in indices]


def only_valid(batch: Batch, valid: Sequence[int]) -> Batch:
    mask = torch.zeros(len(batch), dtype=torch.bool)
    mask[list(valid)] = True
    return replace(batch, valid=mask)


# --- what is compared -----------------------------------------------------------------------------


def test_fp32_has_a_floor_near_zero(policy: Policy, folder: Path) -> None:
    found = measure_noise_floor(policy, BATCH, make_config(folder))
    assert found is not None
    # A float32 log-prob of order 5 is good to 1e-6, and D is a mean of differences of such.
    assert 0 <= found.mean <= found.max < 1e-5


def test_both_passes_score_the_same_sequences_in_other_company(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[tuple[int, ...]]] = []

    def watched(policy: Policy, microbatches: Sequence[Microbatch], **_: Any) -> list[Any]:
        seen.append([m.indices for m in microbatches])
        assert all(m.tokens.shape[1] <= 128 for m in microbatches)
        return original_log_probs(policy, microbatches)

    monkeypatch.setattr(score, "log_probs", watched)
    batch = only_valid(BATCH, [i for i in range(24) if i % 4 != 1])
    measure_noise_floor(
        policy, batch, make_config(folder, batch={"max_tokens_per_microbatch": 128})
    )
    together, alone = seen
    # 18 are valid: every other or third of them, from the first.
    chosen = [0, 3, 6, 8, 12, 15, 18, 20]
    assert sorted(index for indices in together for index in indices) == chosen
    assert 1 < len(together) < len(chosen) and all(len(indices) > 1 for indices in together)
    order = [index for indices in together for index in indices]
    assert alone == [(index,) for index in reversed(order)]


@pytest.mark.parametrize("method", ["gapo", "grpo", "dr_grpo", "cispo"])
def test_a_shift_by_packing_is_found_in_the_methods_own_ratio(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(score, "log_probs", shifted_log_probs)
    config = make_config(folder, objective={"method": method})
    found = measure_noise_floor(policy, BATCH, config)
    assert found is not None
    chosen = range(0, 24, 3)
    weights = np.ones(8)
    if config.objective.resolve().ratio == "token":
        weights = np.array([len(BATCH.response_ids[i]) for i in chosen])
    # The floor itself is below 1e-5; of single float32 log-probs of order 10 the spacing is 1e-6.
    assert found.mean == pytest.approx(np.average(shifts(chosen), weights=weights), abs=1e-5)
    assert found.max == pytest.approx(shifts([21])[0], abs=1e-5)


def test_a_rule_without_an_edge_has_that_of_its_mask(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "log_probs", shifted_log_probs)
    plain = measure_noise_floor(policy, BATCH, make_config(folder, objective={"method": "sapo"}))
    assert plain is not None and plain.share is None
    objective = {"method": "sapo", "off_policy_mask": 1.0}
    masked = measure_noise_floor(policy, BATCH, make_config(folder, objective=objective))
    assert masked is not None and masked.share is not None
    chosen = range(0, 24, 3)
    lengths = [len(BATCH.response_ids[i]) for i in chosen]
    drift = np.average([SHIFT * (i + 1) for i in chosen], weights=lengths)
    assert masked.share == pytest.approx(drift, abs=1e-5)  # as above


def test_sequences_without_company_say_nothing(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A micro-batch of one is the other packing already: its zero is left out of the mean."""
    monkeypatch.setattr(score, "log_probs", shifted_log_probs)
    batch = make_batch(3)
    for i, (prompt, response) in enumerate([(32, 64), (2, 30), (5, 20)]):
        batch.prompt_ids[i] = np.ones(prompt, dtype=np.int32)
        batch.response_ids[i] = np.ones(response, dtype=np.int32)
        batch.rollout_log_probs[i] = np.zeros(response, dtype=np.float32)
    batch = replace(batch, facts=None)  # those of the tokens
    config = make_config(folder, batch={"max_tokens_per_microbatch": 96})
    found = measure_noise_floor(policy, batch, config)
    assert found is not None
    assert found.mean == pytest.approx(np.mean(shifts([1, 2])), abs=1e-5)

    caplog.set_level(logging.INFO, logger="gapo_megatron")
    for valid in ([], [1]):
        assert watch(policy, only_valid(batch, valid), config) == {}
        assert "micro-batch" in caplog.records[-1].message


# --- when it is measured, and what it says --------------------------------------------------------


def watch(
    policy: Policy, batch: Batch, config: Config, *, step: int = 0, first_sampled: int = 0
) -> dict[str, float]:
    return watch_noise_floor(
        policy, batch, config, Stopwatch(), step=step, first_sampled=first_sampled
    )


def test_measured_every_so_many_steps_and_recorded_as_an_uninterrupted_run_would(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gapo_megatron")
    measured: list[int] = []
    step = 0

    def measure(*_: Any) -> NoiseFloor:
        measured.append(step)
        return NoiseFloor(1e-6, 2e-6, share=0.0)

    monkeypatch.setattr(noise_floor, "measure_noise_floor", measure)

    def run(every: int, first_sampled: int) -> list[int]:
        """Steps that recorded something."""
        nonlocal step
        measured.clear()
        config = make_config(folder, metrics={"noise_floor_every_steps": every})
        recorded = []
        for step in range(first_sampled, 8):
            stopwatch = Stopwatch()
            metrics = watch_noise_floor(
                policy, BATCH, config, stopwatch, step=step, first_sampled=first_sampled
            )
            timed = "time/noise_floor_s" in stopwatch.lap(num_tokens=1)
            assert timed == (step in measured)
            if metrics:
                recorded.append(step)
        return recorded

    assert run(3, first_sampled=0) == measured == [0, 3, 6]
    caplog.clear()
    assert run(3, first_sampled=4) == [6]
    assert measured == [4, 6]
    assert len(caplog.records) == 2 and "1.0e-06" in caplog.records[0].message
    assert run(0, first_sampled=0) == measured == []
    assert run(0, first_sampled=4) == measured == []
    config = make_config(folder)
    assert config.metrics.noise_floor_every_steps == 50


@pytest.mark.parametrize(
    ("changes", "shift_over_share"),
    [
        ({"method": "gapo"}, 3e-3),
        ({"method": "grpo"}, 0.2),
        ({"method": "cispo"}, 0.28),  # eps_low = 1 is no bound: the upper one is nearer
    ],
)
def test_the_share_of_a_band_is_the_floor_by_its_nearer_width(
    policy: Policy,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    shift_over_share: float,
) -> None:
    monkeypatch.setattr(score, "log_probs", shifted_log_probs)
    found = measure_noise_floor(policy, BATCH, make_config(folder, objective=changes))
    assert found is not None
    assert found.share == pytest.approx(found.mean / shift_over_share, rel=1e-12)


def test_a_product_ratio_has_the_floor_of_its_sum(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "log_probs", shifted_log_probs)
    config = make_config(folder)
    product = replace(METHODS["gapo"], name="gapo, product", ratio="product")
    monkeypatch.setattr(type(config.objective), "resolve", lambda _: product)
    found = measure_noise_floor(policy, BATCH, config)
    assert found is not None
    lengths = [len(BATCH.response_ids[i]) for i in range(0, 24, 3)]
    sums = [
        math.expm1(SHIFT * (index + 1) * length)
        for index, length in zip(range(0, 24, 3), lengths, strict=True)
    ]
    # The floor itself: a sum over at most a hundred tokens of 1e-6 each.
    assert found.mean == pytest.approx(np.mean(sums), rel=1e-3)
    assert found.share == pytest.approx(found.mean / 3e-3, rel=1e-12)


def without_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, family in FAMILIES.items():
        monkeypatch.setitem(FAMILIES, name, replace(family, edge_share=None))


def test_a_rule_without_an_edge_has_no_share_neither_warns_nor_refuses(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_edge(monkeypatch)
    monkeypatch.setattr(score, "log_probs", shifted_log_probs)
    config = make_config(folder, objective={"method": "cispo"})
    found = measure_noise_floor(policy, BATCH, config)
    assert found is not None and found.share is None and found.mean > 1e-3
    caplog.clear()
    metrics = watch(policy, BATCH, config)
    assert metrics["numerics/noise_floor_mean"] == found.mean
    assert "numerics/noise_floor_share" not in metrics
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("has_edge", [True, False])
def test_an_off_policy_mask_is_an_edge(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch, has_edge: bool
) -> None:
    """On the mean log-ratio of a sequence, also beside token ratios and rules without an edge."""
    if not has_edge:
        without_edge(monkeypatch)
    monkeypatch.setattr(score, "log_probs", shifted_log_probs)
    delta = 0.02
    objective = {"method": "grpo", "off_policy_mask": delta}
    found = measure_noise_floor(policy, BATCH, make_config(folder, objective=objective))
    assert found is not None
    chosen = range(0, 24, 3)
    weights = [len(BATCH.response_ids[i]) for i in chosen]
    # Nearer than grpo's 0.2 everywhere, and of all tokens of a sequence alike.
    expected = np.average([SHIFT * (i + 1) / delta for i in chosen], weights=weights)
    assert found.share == pytest.approx(expected, abs=1e-5 / delta)


@pytest.mark.parametrize(
    ("method", "eps_low", "eps_high_max"), [("gapo", 3e-3, 5e-3), ("dapo", 0.2, 0.28)]
)
def test_recorded_beside_the_clip_of_the_method(
    policy: Policy, folder: Path, method: str, eps_low: float, eps_high_max: float
) -> None:
    config = make_config(folder, objective={"method": method})
    found = measure_noise_floor(policy, BATCH, config)
    assert found is not None
    assert watch(policy, BATCH, config) == {
        "numerics/noise_floor_mean": found.mean,
        "numerics/noise_floor_max": found.max,
        "numerics/noise_floor_share": found.share,
        "numerics/eps_low": eps_low,
        "numerics/eps_high_max": eps_high_max,
    }


def warnings_at(
    policy: Policy,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    found: NoiseFloor,
) -> list[str]:
    monkeypatch.setattr(noise_floor, "measure_noise_floor", lambda *_: found)
    caplog.clear()
    watch(policy, BATCH, config, step=50)
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("eps_low", [3e-3, 7e-5])
def test_warns_exactly_above_a_tenth_of_the_way_to_the_edge(
    policy: Policy,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eps_low: float,
) -> None:
    def warnings(found: NoiseFloor, **sections: dict[str, Any]) -> list[str]:
        config = make_config(folder, objective={"eps_low": eps_low}, **sections)
        return warnings_at(policy, config, monkeypatch, caplog, found)

    bound = 0.1 * eps_low
    assert warnings(NoiseFloor(bound, max=1.0, share=0.1)) == []
    # A large deviation is no warning by itself: the rule may decide on something else.
    assert warnings(NoiseFloor(0.5, max=1.0, share=None)) == []
    (message,) = warnings(NoiseFloor(1.001 * bound, max=1.5 * bound, share=0.1001))
    figures = (f"{1.001 * bound:.1e}", f"{1.5 * bound:.1e}", f"{eps_low:g}")
    assert re.search(mentions(*figures, "objective.eps_low", "objective.eps_high_max"), message)
    assert "off_policy_mask" not in message


def test_the_warning_names_an_off_policy_mask(
    policy: Policy,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_config(folder, objective={"method": "grpo", "off_policy_mask": 2e-4})
    found = NoiseFloor(1e-4, 2e-4, share=0.5)
    (message,) = warnings_at(policy, config, monkeypatch, caplog, found)
    assert re.search(mentions("grpo", "0.0002", "0.2", "objective.off_policy_mask"), message)


@pytest.mark.parametrize(
    ("model", "named", "not_named"),
    [
        (
            {"precision": "fp8"},
            ["model.fp8_recipe", "tensorwise", "blockwise", "mxfp8", "fp8", "bf16", "fp32"],
            [],
        ),
        (
            {"precision": "fp8", "fp8_recipe": "blockwise"},
            ["fp8", "bf16", "fp32"],
            ["model.fp8_recipe", "mxfp8"],
        ),
        ({"precision": "bf16"}, ["bf16", "fp32"], ["fp8"]),
        ({"precision": "fp32"}, ["fp32"], ["bf16", "fp8"]),
    ],
)
def test_the_warning_names_what_this_run_can_change(
    policy: Policy,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model: dict[str, object],
    named: list[str],
    not_named: list[str],
) -> None:
    config = make_config(folder, model=model)
    (message,) = warnings_at(policy, config, monkeypatch, caplog, NoiseFloor(1e-2, 1e-2, share=2.0))
    assert re.search(mentions("model.precision", "objective.eps_low", *named), message)
    assert not [word for word in not_named if word in message]


@pytest.mark.parametrize("limit", [1.0, 4.0])
def test_a_run_does_not_start_where_the_clip_is_noise(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    metrics = {} if limit == 1 else {"noise_floor_limit": limit}
    config = make_config(folder, metrics=metrics, objective={"eps_low": 1e-3})

    def start(mean: float, **at: int) -> dict[str, float]:
        found = NoiseFloor(mean, 1.0, share=mean / 1e-3)
        monkeypatch.setattr(noise_floor, "measure_noise_floor", lambda *_: found)
        return watch(policy, BATCH, config, **at)

    bound = limit * 1e-3
    assert start(0.999 * bound)
    figures = (f"{limit:g}", f"{1.01 * bound:.1e}", "0.001")
    named = mentions("metrics.noise_floor_limit", "objective.eps_low", *figures)
    with pytest.raises(ConfigError, match=named):
        start(1.01 * bound)
    # Not later, nor where a run resumes: one unlucky sample must not cost hours of work.
    assert start(1.01 * bound, step=50)
    assert start(1.01 * bound, step=50, first_sampled=50)


# --- over ranks -----------------------------------------------------------------------------------


def over_layouts(folder: Path) -> dict[str, list[Any]]:
    """Floors by layout: as it is, with a shift, and with one or two sequences for all ranks."""
    result = {}
    for name, parallel in LAYOUTS.items():
        config = make_config(folder, parallel=parallel)
        policy = build(config)
        found = [measure_noise_floor(policy, BATCH, config)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(score, "log_probs", shifted_log_probs)
            for batch in (BATCH, only_valid(BATCH, [4]), only_valid(BATCH, [0, 4, 5])):
                found.append(measure_noise_floor(policy, batch, config))
        destroy()
        result[name] = [None if one is None else asdict(one) for one in found]
    return result


def test_every_rank_holds_the_same_bits_in_every_layout(folder: Path) -> None:
    first, second = run_distributed(over_layouts, 2, folder)
    assert first == second
    for name, (plain, shifted, one, few) in first.items():
        # As on one rank: float32 log-probs.
        assert 0 <= plain["mean"] <= plain["max"] < 1e-5, name
        assert one is None, name
        # Two data-parallel ranks score twice as many, and both are in the mean.
        chosen = [j * 24 // 16 for j in range(16)] if name == "dp" else range(0, 24, 3)
        assert shifted["mean"] == pytest.approx(np.mean(shifts(chosen)), abs=1e-5), name
        assert shifted["max"] == pytest.approx(max(shifts(chosen)), abs=1e-5), name
        assert shifted["share"] == pytest.approx(shifted["mean"] / 3e-3, rel=1e-12), name
        # Of three sequences one data-parallel rank gets the longest, which then is alone.
        lengths = {i: len(BATCH.prompt_ids[i]) + len(BATCH.response_ids[i]) for i in (0, 4, 5)}
        longest = max(lengths, key=lambda i: lengths[i])
        company = [i for i in lengths if name != "dp" or i != longest]
        assert few["mean"] == pytest.approx(np.mean(shifts(company)), abs=1e-5), name
