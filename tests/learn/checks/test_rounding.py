"""Rounding of a step's ratios: comparison, results and messages, on several layouts."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import BatchConfig, Config
from gapo_megatron.learn.checks import rounding
from gapo_megatron.learn.checks.rounding import Scores, measure
from gapo_megatron.learn.plan import ROUNDING_SEQUENCES, plan_step, rounding_share
from gapo_megatron.learn.step import learn
from gapo_megatron.objective import upper_clip
from gapo_megatron.policy import ParallelGroups, Policy, destroy, exact
from gapo_megatron.policy.exact import exact_stages
from gapo_megatron.rollouts import Batch
from tests.batches import random_rollouts
from tests.dist import run_distributed, single_rank
from tests.distributed import conversion_setup
from tests.distributed.policy_setup import (
    VOCAB_SIZE,
    load_policy,
    make_batch,
    make_config,
    read_weights,
    reference_log_probs,
    save_model,
)
from tests.messages import mentions

K, NUM_SEQUENCES = 4, 24
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
    "dp": {},
    "virtual pp": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
}
GRPO = {"method": "grpo"}


def batch_of(*, data_parallel_size: int = 1, measured_share: float = 1.0, **facts: Tensor) -> Batch:
    """c = 1, 2, 3 of k = 4 in turns, A of both signs; every fourth sequence has A = 0.

    Planned for a step of two mini-batches.
    """
    index = torch.arange(NUM_SEQUENCES)
    advantages = torch.where(index % 2 == 0, 0.5, -0.5).double()
    advantages[index % 4 == 3] = 0
    columns = {"advantages": advantages, "num_correct": 1 + index % 3} | facts
    batch = make_batch(NUM_SEQUENCES).changed(sample=index % K)
    batch = replace(batch, group_size=torch.full_like(index, K), **columns)
    sizes = BatchConfig(rollout_prompts=6, minibatch_prompts=3, rollouts_per_prompt=K)
    plan = plan_step(
        batch,
        sizes,
        needs_every_sequence=False,
        data_parallel_size=data_parallel_size,
        measured_share=measured_share,
    )
    return replace(batch, plan=plan)


BATCH = batch_of()


@pytest.mark.parametrize(("seed", "num_ranks"), [*enumerate([1, 2, 5, 9, 30, 60])])
def test_as_many_spaced_sequences_are_measured_as_fit(seed: int, num_ranks: int) -> None:
    """Of uneven lengths, with fewer sequences than ranks, and several conversations."""
    random, rollouts = np.random.default_rng(seed), random_rollouts(seed, 12)
    count = len(rollouts)
    batch = Batch(
        rollouts.table,
        advantages=torch.from_numpy(random.integers(-1, 2, count).astype(np.float64)),
        num_correct=torch.ones(count, dtype=torch.int64),
        group_size=torch.full((count,), 3),
        valid=torch.from_numpy(random.random(count) < 0.8),
    )
    share = float(random.uniform(0.0, 0.6))
    plan = plan_step(
        batch,
        BatchConfig(rollout_prompts=12, minibatch_prompts=4, rollouts_per_prompt=3),
        needs_every_sequence=False,
        data_parallel_size=num_ranks,
        measured_share=share,
    )
    active = (batch.valid & (batch.advantages != 0)).nonzero().flatten()
    most = min(max(ROUNDING_SEQUENCES, 2 * num_ranks), len(active))
    spaced = [active[torch.arange(n) * len(active) // n] for n in range(most + 1)]
    budget = share * plan.num_tokens_computed
    fitting = [one for one in spaced if int(batch.num_fed_tokens[one].sum()) <= budget]
    measured = sorted(i for rank in plan.rounding for rows in rank for i in rows)
    assert measured == fitting[-1].tolist()


def model_of(layout: str, folder: Path) -> Path:
    """A model for this layout: with experts, with four layers, or the smallest."""
    if layout == "ep":
        conversion_setup.save_model(folder, "qwen3_moe", vocab_size=VOCAB_SIZE)
    else:
        save_model(folder, "qwen2_tied", num_layers=4 if layout == "virtual pp" else 2)
    return folder


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[Policy]:
    with single_rank():
        yield load_policy(config_of(folder))
        destroy()


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    return make_config(folder, **{"batch": {"rollouts_per_prompt": K}} | sections)


def moved(folder: Path, seed: int = 1) -> Iterator[tuple[str, Tensor]]:
    """The weights after a step: each moved by a random thousandth of its size."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in read_weights(folder):
        yield name, tensor * (1 + 1e-3 * torch.randn(tensor.shape, generator=generator))


def over_a_step(
    folder: Path, config: Config, groups: ParallelGroups | None = None
) -> dict[str, float]:
    """Metrics of a step that moves the weights by `moved`."""
    policy = load_policy(config, groups)
    batch = batch_of(data_parallel_size=policy.groups.dp_size)
    before = Scores.of(policy, batch)
    policy.load_hf_weights(moved(folder))
    return measured(policy, batch, before, config)


def measured(policy: Policy, batch: Batch, before: Scores, config: Config) -> dict[str, float]:
    """`measure` with the sections that `learn` gives it."""
    return measure(policy, batch, before, config.objective, config.rollout)


def planted(policy: Policy, config: Config, noise: dict[int, float]) -> dict[str, float]:
    """Metrics if rounding alone changed the log-ratio of these sequences by these amounts."""
    before = Scores.of(policy, BATCH)
    after = Scores(
        {i: before.in_run[i] + noise.get(i, 0.0) for i in before.in_run},
        {i: before.exact[i].clone() for i in before.exact},
    )
    return between(policy, config, before, after)


def between(
    policy: Policy, config: Config, before: Scores, after: Scores, batch: Batch = BATCH
) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scores, "of", lambda *_: after)
        return measured(policy, batch, before, config)


# --- what is compared -----------------------------------------------------------------------------


def shares_of(batch: Batch) -> tuple[tuple[tuple[int, ...], ...], ...]:
    assert batch.plan is not None
    return batch.plan.rounding


def test_sixteen_sequences_with_an_advantage_or_two_of_each_rank() -> None:
    for size, expected in ((1, 16), (2, 16), (9, 18)):
        shares = shares_of(batch_of(data_parallel_size=size))
        found = [i for rank in shares for indices in rank for i in indices]
        assert len(found) == len(set(found)) == expected
        assert not any(i % 4 == 3 for i in found)
        assert len({len(rank) for rank in shares}) == 1
    few = batch_of(valid=torch.arange(NUM_SEQUENCES) < 3)
    assert len(shares_of(few)[0][0]) == 3


@pytest.mark.parametrize(
    ("precision", "exact_cost"), [("fp32", 4), *((name, 15) for name in ("bf16", "fp16", "fp8"))]
)
def test_measuring_costs_at_most_half_of_the_updates(precision: str, exact_cost: int) -> None:
    """The most evenly spaced sequences, at most 16, for which that holds; perhaps none."""
    batch, counts = batch_of(), set()
    computed = int(batch.num_fed_tokens[batch.advantages != 0].sum())
    share = rounding_share(precision)
    for factor in (1e-3, 1.0, 10.0, 100.0):
        [chosen] = shares_of(batch_of(measured_share=share * factor))
        measured = int(batch.num_fed_tokens[[i for part in chosen for i in part]].sum())
        assert 2 * (1 + exact_cost) * measured <= 0.5 * factor * 3 * computed
        counts.add(sum(map(len, chosen)))
    assert min(counts) == 0 and max(counts) == 16 and len(counts) > 2


def test_exact_log_probs_are_float64s_in_fp32_and_float32s_of_rounded_weights_in_16_bits(
    policy: Policy,
    folder: Path,
) -> None:
    for precision, dtype, bound in (
        ("fp32", torch.float64, 1e-6),  # the rotary tables of both are float32
        ("bf16", torch.bfloat16, 5e-5),
        ("fp16", torch.float16, 5e-5),
    ):
        config = config_of(folder, model={"precision": precision})
        scores = Scores.of(load_policy(config, policy.groups), BATCH)
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.to(dtype))
            expected = reference_log_probs(model.double(), BATCH)
        for i, values in scores.exact.items():
            assert values.dtype == (dtype if precision == "fp32" else torch.float32)
            assert (values.double() - expected[i]).abs().max() < bound
        assert scores.in_run.keys() == scores.exact.keys()
        assert scores.in_run[0].dtype == torch.float32


def test_the_policy_is_itself_afterwards(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the copy of its weights is freed, even if a tensor is still referenced."""
    copies: list[Tensor] = []

    def building(policy: Policy) -> list[Any]:
        stages = exact_stages(policy)
        copies.extend(one for stage in stages for one in stage.parameters())
        assert all(one.untyped_storage().size() for one in copies)
        return stages

    monkeypatch.setattr(exact, "exact_stages", building)
    first = Scores.of(policy, BATCH)
    assert copies and not any(one.untyped_storage().size() for one in copies)
    copies.clear()
    second = Scores.of(policy, BATCH)
    for kind in ("in_run", "exact"):
        for i, values in getattr(first, kind).items():
            assert torch.equal(values, getattr(second, kind)[i])
    assert policy.stages[0].config.params_dtype == torch.float32


def test_at_equal_weights_there_is_neither_signal_nor_rounding(
    policy: Policy, folder: Path
) -> None:
    config = config_of(folder)
    metrics = measured(policy, BATCH, Scores.of(policy, BATCH), config)
    assert metrics["numerics/ratio_signal"] == metrics["numerics/ratio_rounding"] == 0
    assert metrics["numerics/clip_decisions_changed"] == 0


@pytest.mark.parametrize("objective", [{}, GRPO], ids=["sequence", "token"])
def test_sums_are_those_of_a_loop(policy: Policy, folder: Path, objective: dict[str, Any]) -> None:
    config = config_of(folder, objective=objective)
    before = Scores.of(policy, BATCH)
    random = np.random.default_rng(0)

    def shifted(scores: dict[int, Tensor], size: float) -> dict[int, Tensor]:
        return {
            i: values.double() + size * torch.from_numpy(random.normal(size=len(values)))
            for i, values in scores.items()
        }

    exact = shifted(before.exact, 0.1)
    after = Scores(
        {
            i: before.in_run[i] + v
            for i, v in shifted({i: exact[i] - before.exact[i] for i in exact}, 0.05).items()
        },
        exact,
    )
    found = between(policy, config, before, after)
    seen, would_be, engine = [], [], []
    for i in before.in_run:
        x = (after.exact[i] - before.exact[i]).double().numpy()
        y = (after.in_run[i].double() - before.in_run[i].double()).numpy()
        seen += [y.mean()] if not objective else [*y]
        would_be += [x.mean()] if not objective else [*x]
        engine.append((BATCH.rollout_log_probs[i] - before.exact[i].numpy()).mean())
    y, x = np.array(seen), np.array(would_be)
    eps_low = config.objective.resolve().eps_low
    rounding_rms = math.sqrt(np.mean((y - x) ** 2))
    expected = {
        "ratio_signal": math.sqrt(np.mean(x**2)),
        "ratio_rounding": rounding_rms,
        "ratio_rounding_share": rounding_rms / eps_low,
        "ratio_correlation": np.corrcoef(x, y)[0, 1],
        "engine_rounding": math.sqrt(np.mean(np.square(engine))),
        "engine_rounding_share": math.sqrt(np.mean(np.square(engine))) / eps_low,
    }
    for name, value in expected.items():
        assert found[f"numerics/{name}"] == pytest.approx(value, rel=1e-9), name


def test_a_decision_counts_where_only_rounding_crosses_the_edge(
    policy: Policy, folder: Path
) -> None:
    """GAPO's upper edge depends on c; below 1 only a wrong response is clipped."""
    config = config_of(folder)
    method = config.objective.resolve()
    chosen = [i for indices in shares_of(BATCH)[0] for i in indices]
    noise = {}
    for c in (1, 2, 3):
        right = next(i for i in chosen if i % 2 == 0 and 1 + i % 3 == c)
        edge = upper_clip(
            torch.tensor([c]),
            group_size=K,
            eps_low=method.eps_low,
            eps_high_max=method.eps_high_max,
        )
        noise[right] = math.log1p(float(edge) * (0.9 if c == 2 else 1.1))
    found = planted(policy, config, noise)
    assert found["numerics/clip_decisions_changed"] == pytest.approx(2 / len(chosen))
    # Rules with bounds of their own for each mini-batch make no decisions here.
    bapo = planted(policy, config_of(folder, objective={"method": "bapo"}), noise)
    assert bapo and not any("decisions" in name for name in bapo)


@pytest.mark.parametrize(("has_carried", "top_p"), [(True, 1.0), (False, 0.9)])
def test_what_the_engine_sampled_with_other_weights_is_not_its_rounding(
    policy: Policy, folder: Path, has_carried: bool, top_p: float
) -> None:
    assert any("engine" in name for name in planted(policy, config_of(folder), {0: 1e-3}))
    config = config_of(folder, rollout={"max_response_tokens": 64, "top_p": top_p})
    with patch.object(type(BATCH), "has_carried", has_carried):
        found = planted(policy, config, {0: 1e-3})
    assert found and not any("engine" in name for name in found)


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_measuring_changes_nothing(policy: Policy, folder: Path, offload: str) -> None:
    """Weights after a step are unchanged, with the optimizer's state offloaded or not."""
    found = []
    for measures in (False, True):
        sizes = {"rollouts_per_prompt": K, "rollout_prompts": 6, "minibatch_prompts": 3}
        config = config_of(
            folder, batch=sizes, optimizer={"learning_rate": 1e-3, "offload": offload}
        )
        stepped = load_policy(config, policy.groups)
        sections = (config.objective, config.rollout)
        metrics = learn(stepped, BATCH, *sections, Stopwatch(), measures_rounding=measures)
        assert metrics is not None
        kept = {name: one for name, one in metrics.items() if "numerics" not in name}
        assert (kept == metrics) != measures
        found.append((kept, {n: t.clone() for n, t in stepped.iterate_hf_weights()}))
    (plain, weights), (measured, others) = found
    assert plain == measured
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_batch_without_an_advantage_has_no_figures(policy: Policy, folder: Path) -> None:
    batch = batch_of(advantages=torch.zeros(NUM_SEQUENCES, dtype=torch.float64))
    config = config_of(folder)
    assert measured(policy, batch, Scores.of(policy, batch), config) == {}


# --- what it finds --------------------------------------------------------------------------------


def _of_layout(folder: Path, layout: dict[str, Any]) -> dict[str, float]:
    found = over_a_step(folder, config_of(folder, parallel=layout))
    destroy()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_finds_what_one_rank_does(tmp_path: Path, layout: str) -> None:
    folder = model_of(layout, tmp_path)
    (expected,) = run_distributed(_of_layout, 1, folder, {})
    first, second = run_distributed(_of_layout, 2, folder, LAYOUTS[layout])
    assert first == second and first.keys() == expected.keys()
    for name, value in expected.items():
        # Rounding of fp32 itself depends on how its sums are cut.
        unit = 3e-3 if name.endswith("share") else 1.0  # eps_low
        bound = {"abs": 1e-6 / unit} if "ratio_rounding" in name else {"rel": 1e-5}
        assert first[name] == pytest.approx(value, **bound), name


# --- when it is measured, and what it says --------------------------------------------------------


def test_measured_at_every_so_many_steps(folder: Path) -> None:
    def is_due(step: int, device: str = "cpu", **sections: dict[str, Any]) -> bool:
        config = config_of(folder, **sections)
        parts = Mock(spec=[], cp_size=config.parallel.context_parallel_size)
        policy = Mock(
            spec=[], precision=config.model.precision, device=torch.device(device), groups=parts
        )
        return rounding.is_due(step, policy, config.objective, config.rollout, config.metrics)

    for every, expected in ((0, []), (1, [*range(8)]), (3, [0, 3, 6])):
        metrics = {"rounding_every_steps": every}
        assert [step for step in range(8) if is_due(step, metrics=metrics)] == expected
    assert not is_due(0), "never in fp32, unless asked for"
    assert not is_due(0, "cuda", metrics={"rounding_every_steps": 1}), "float64 attention on a GPU"
    model = {"precision": "bf16"}
    assert [step for step in range(21) if is_due(step, "cuda", model=model)] == [0, 10, 20]
    in_context = {"parallel": {"context_parallel_size": 2}, "model": {"precision": "bf16"}}
    assert not is_due(0, "cuda", **in_context)
    assert is_due(0, **in_context)


def test_warns_where_the_clip_decides_on_rounding(
    policy: Policy, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(folder)
    before = Scores.of(policy, BATCH)
    signs = {i: 1.0 if n % 2 else -1.0 for n, i in enumerate(before.exact)}
    others = {i: 1.0 if n % 4 < 2 else -1.0 for n, i in enumerate(before.exact)}  # uncorrelated

    def warnings(share: float, config: Config = config, batch: Batch = BATCH) -> list[str]:
        caplog.clear()
        exact = {i: v + 1e-2 * signs[i] for i, v in before.exact.items()}
        seen = {i: v + 1e-2 * (signs[i] + share * others[i]) for i, v in before.in_run.items()}
        between(policy, config, before, Scores(seen, exact), batch)
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

    # The correlation is 1 / sqrt(1 + share^2): 0.9 at 0.484.
    assert warnings(0.47) == []
    (message,) = warnings(0.5)
    # Where nothing can be clipped: one mini-batch, a rule without an edge.
    assert BATCH.plan is not None
    one = replace(BATCH.plan, minibatches=BATCH.plan.minibatches[:1])
    assert warnings(0.5, batch=replace(BATCH, plan=one)) == []
    assert warnings(0.5, config_of(folder, objective={"method": "sapo"})) == []
    assert re.search(
        mentions("model.precision", "objective.eps_low", "objective.eps_high_max"), message
    )
