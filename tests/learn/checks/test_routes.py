"""Routes of experts on one rank: ratios, gradients, recomputation and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gapo_megatron.compat import cpu
from gapo_megatron.errors import RolloutError
from gapo_megatron.exchange import GroupChannel
from gapo_megatron.learn import step as learn_module
from gapo_megatron.learn.checks import bounds as bounds_module
from gapo_megatron.learn.checks.carry import carry
from gapo_megatron.learn.checks.rounding import Scores, measure
from gapo_megatron.learn.checks.routes import (
    Recorded,
    Routes,
    StepRoutes,
    recorder,
    replayer,
    summarize,
)
from gapo_megatron.learn.plan import DataParallelRanks, plan_scoring
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.update import update
from gapo_megatron.objective import make_batch
from gapo_megatron.policy import Policy, destroy
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Microbatch
from tests.distributed import conversion_setup
from tests.distributed.policy_setup import VOCAB_SIZE, WeightedLoss, gradients, load_policy
from tests.learn_setup import make_judged, planned, run_learn, with_columns
from tests.messages import mentions
from tests.peers.reference import in_float64, response_log_probs
from tests.routes_setup import (
    NUM_EXPERTS,
    ROLLOUTS,
    TOP_K,
    assert_updates,
    config_of,
    following,
    load_model,
    save_model,
    with_engines_routes,
)
from tests.train_setup import documented_names

pytestmark = pytest.mark.usefixtures("process_group")
# The first mini-batch has no advantage: its update changes no weight.
STILL = make_judged(("wwww", "cccc", "cwww", "ccww"), seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("experts")
    save_model(path)
    return path


@pytest.fixture
def policy(folder: Path) -> Iterator[Policy]:
    yield load_policy(config_of(folder))
    destroy()


def test_the_ratio_is_one_at_equal_weights(tmp_path: Path) -> None:
    """With so many experts Megatron-core 0.19 orders them otherwise where there are gradients."""
    save_model(tmp_path, num_experts=32, num_experts_per_tok=8)
    for replayed in ("trainer", "none"):
        config = config_of(tmp_path, replayed=replayed, optimizer={"weight_decay": 0.0})
        report = run_learn(config, STILL)
        first, second = report.updates
        assert first.grad_norm == 0.0
        assert len(second.ratios) == 8 and set(second.ratios.values()) == {1.0}
        assert report.metrics["experts/same_routes_share"] == 1.0


@pytest.mark.parametrize("replayed", ["trainer", "none"])
def test_updates_are_those_of_a_loop_in_float64(folder: Path, replayed: str) -> None:
    config = config_of(folder, replayed=replayed)
    report = run_learn(config, ROLLOUTS)
    assert_updates([report], folder, config)
    assert 0.5 < report.metrics["experts/same_routes_share"] < 1  # there was something to replay


def test_updates_follow_the_engines_routes_like_a_loop_in_float64(folder: Path) -> None:
    """Routes that no router would choose, so that every pass that chooses freely is seen."""
    config, rollouts = config_of(folder, replayed="rollout"), with_engines_routes(ROLLOUTS)
    report = run_learn(config, rollouts)
    assert_updates([report], folder, config, rollouts)
    measured = run_learn(config, rollouts, measures_rounding=True).metrics
    assert report.metrics.items() <= measured.items()  # passes that measure are not counted
    assert report.metrics["experts/same_routes_share"] < 0.2
    assert report.metrics["experts/engine_same_routes_share"] < 0.2


def scored_by_loop(folder: Path, rollouts: Rollouts) -> list[np.ndarray]:
    """Log-probs in float64 with the engine's routes, as float32."""
    tokens = [
        [held[row].tolist() for row in range(len(rollouts))]
        for held in (rollouts.prompt_ids, rollouts.response_ids)
    ]
    model, temperature = in_float64(load_model(folder)), config_of(folder).rollout.temperature
    with following("rollout", rollouts), torch.no_grad():
        scored = response_log_probs(model, *tokens, temperature)
    return [one.float().numpy() for one in scored]


def test_recomputed_layers_replay_the_routes_of_their_own_micro_batch(folder: Path) -> None:
    """Pipeline stages run micro-batches forward before the backward pass of an earlier one."""
    found = []
    for recompute in ("none", "full"):
        policy = load_policy(config_of(folder, model={"recompute": recompute}))
        batch = make_batch(ROLLOUTS, config_of(folder).objective.resolve())
        (stage,), sums = policy.stages, []
        for indices in ((0, 1, 2), (4, 5)):
            one = policy.pack(batch, indices)
            one = replace(one, choose_experts=replayer(any_routes(one)))
            with cpu.device_scope():
                hidden = stage(
                    input_ids=one.tokens,
                    position_ids=one.position_ids,
                    attention_mask=None,
                    packed_seq_params=stage.packing(one),
                )
            sums.append(hidden.square().sum())
        with cpu.device_scope():
            sums[0].backward()
        found.append(gradients(policy))
        destroy()
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())
    assert any(gradient.any() for gradient in found[0].values())


def any_routes(microbatch: Microbatch) -> Routes:
    """Three different experts for each token of both layers."""
    random = torch.Generator().manual_seed(0)
    shape = (microbatch.tokens.shape[1], NUM_EXPERTS)
    return {
        layer: torch.rand(shape, generator=random).argsort(dim=1)[:, :TOP_K].sort(dim=1).values
        for layer in (0, 1)
    }


def test_only_the_old_pass_records_and_only_updates_follow(folder: Path) -> None:
    """The reference of a KL term is neither recorded nor replayed; a pass for bounds replays."""
    passes, chosen, kept = [], [], []
    recording = StepRoutes.recording

    def watched(policy: Policy, microbatches: Sequence[Microbatch], **options: Any) -> Any:
        passes.append({one.choose_experts is not None for one in microbatches})
        return log_probs(policy, microbatches, **options)

    def recorded(self: StepRoutes, *args: Any) -> list[Microbatch]:
        kept.append(self)
        return recording(self, *args)

    def of_bounds(policy: Policy, microbatches: Sequence[Microbatch], **options: Any) -> Any:
        for routes, one in zip(kept[0]._routes[1], microbatches, strict=True):
            assert one.choose_experts is not None
            nothing = {layer: torch.zeros_like(ids) for layer, ids in routes.items()}
            replayed = {layer: one.choose_experts(layer, ids) for layer, ids in nothing.items()}
            chosen.append(all(torch.equal(ids, routes[layer]) for layer, ids in replayed.items()))
        return log_probs(policy, microbatches, **options)

    config = config_of(folder, objective={"kl_coef": 0.1, "method": "bapo"})
    with (
        patch.object(learn_module, "log_probs", watched),
        patch.object(bounds_module, "log_probs", of_bounds),
        patch.object(StepRoutes, "recording", recorded),
    ):
        run_learn(config, ROLLOUTS)
    assert passes == [{True}, {False}, {False}]
    assert chosen and all(chosen)


@pytest.mark.parametrize("replayed", ["trainer", "none", "rollout"])
def test_a_stop_between_updates_changes_no_bit(folder: Path, tmp_path: Path, replayed: str) -> None:
    """Neither of what is learned nor of the metrics: all of them are there."""
    config, rollouts = config_of(folder, replayed=replayed), ROLLOUTS
    if replayed == "rollout":
        rollouts = with_engines_routes(ROLLOUTS)
    whole = run_learn(config, rollouts, measures_rounding=True)
    stopped = run_learn(config, rollouts, measures_rounding=True, stop_in=tmp_path)
    assert stopped.metrics == whole.metrics
    assert all(torch.equal(stopped.after[name], one) for name, one in whole.after.items())
    logged = {name for name in whole.metrics if name.startswith("experts/")}
    documented = {name for name in documented_names() if name.startswith("experts/")}
    of_engine = {name for name in documented if name.startswith("experts/engine_")}
    assert of_engine and logged == documented - (set() if replayed == "rollout" else of_engine)


def test_rounding_is_measured_with_the_routes_that_updates_use(
    folder: Path, policy: Policy
) -> None:
    """Before the step routes are recorded; afterwards every pass follows them, if updates do."""
    moved = {}
    for replayed in ("trainer", "none"):
        config = config_of(folder, replayed=replayed)
        policy.load_initial_weights()
        batch = planned(make_batch(ROLLOUTS, config.objective.resolve()), config)
        recorded = Recorded()
        routes = StepRoutes(policy, batch, recorded, replayed=replayed)
        before = Scores.of(policy, batch, routes)
        with torch.no_grad():
            for parameter in policy.stages[0].parameters():
                parameter.mul_(1.02)
        kept = {**recorded.routes}
        metrics = measure(policy, batch, before, config.objective, config.rollout, routes)
        assert kept and not recorded.routes  # freed: the engine needs the memory
        recorded.routes.update(kept)
        # The same by hand, packed in the same way.
        (packing,) = plan_scoring(
            batch,
            max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
            data_parallel_size=1,
            chosen=batch.valid & (batch.advantages != 0),
        )
        packed = [policy.pack(batch, indices) for indices in packing]
        free = log_probs(policy, packed)
        mark = routes.other_way if replayed == "none" else routes.tracing
        following = log_probs(policy, mark(-1, packed))
        squares = [
            float(torch.stack([part.double().mean() for part in difference.split(lengths)])
                  .square().sum())
            for one, a, b in zip(packed, free, following, strict=True)
            for difference, lengths in [(a - b, one.row_offsets.diff().tolist())]
        ]  # fmt: skip
        expected = math.sqrt(sum(squares) / int((batch.advantages != 0).sum()))
        assert metrics["experts/ratio_by_routes"] == pytest.approx(expected, rel=1e-6)
        moved[replayed] = metrics["numerics/ratio_signal"]
    assert moved["trainer"] != moved["none"] and expected > 0


def test_ids_are_kept_in_the_smallest_type_that_holds_them() -> None:
    for num_experts, dtype in ((256, torch.uint8), (257, torch.int16)):
        routes: Routes = {}
        own = torch.tensor([[0, num_experts - 1]])
        assert recorder(routes, num_experts=num_experts)(3, own) is own
        assert routes[3].dtype == dtype
        assert replayer(routes)(3, own - own).tolist() == own.tolist()


def test_metrics_of_counted_tokens() -> None:
    """Two layers of three experts; the second sends one token in four to other experts."""
    counts = torch.tensor([[4, 2, 2, 4, 4, 2, 2], [0, 8, 0, 4, 3, 2, 1]])
    assert summarize(counts) == {
        "experts/max_load": (1.5 + 3) / 2,
        "experts/dead_share": 2 / 6,
        "experts/same_routes_share": 7 / 8,
        "experts/same_routes_share_min": 0.75,
        "experts/engine_same_routes_share": 0.75,
        "experts/engine_same_routes_share_min": 0.5,
    }
    assert not [name for name in summarize(torch.tensor([[4, 2, 2, 0, 0, 0, 0]])) if "same" in name]


def test_tokens_are_counted_once_and_padding_is_not(folder: Path) -> None:
    """Also where layers are recomputed, or a pass is repeated: their routers are asked again."""
    found = []
    for recompute in ("none", "full"):
        config = config_of(folder, model={"recompute": recompute})
        policy = load_policy(config)
        batch = make_batch(ROLLOUTS, config.objective.resolve())
        padded = replace(policy.pack(batch, (0, 1)))
        padded.is_padding[0, :5] = True
        routes = StepRoutes(policy, batch, replayed="trainer")
        (marked,) = routes.following(0, [padded])
        for _ in range(2):
            update(policy, [marked], WeightedLoss(batch, [padded]))
        found.append(routes._counts)
        destroy()
    num_tokens = int(batch.num_fed_tokens[:2].sum()) - 5
    assert found[0][:, :-4].sum(dim=1).tolist() == [num_tokens * TOP_K] * 2
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_the_routers_own_routes_in_any_order_change_no_bit(tmp_path: Path, name: str) -> None:
    """Nor what an engine says of the first layer of glm4_moe, which has no experts."""
    conversion_setup.save_model(tmp_path, name, vocab_size=VOCAB_SIZE)
    policy = load_policy(config_of(tmp_path))
    packed = policy.pack(ROLLOUTS, range(len(ROLLOUTS)))
    recorded = Recorded()
    own = StepRoutes(policy, ROLLOUTS, recorded, replayed="trainer")
    (free,) = log_probs(policy, own.recording(0, [packed]))
    (routes,) = recorded.routes[0]
    (shape,) = {experts.shape for experts in routes.values()}
    rows = torch.zeros(shape[0], policy.hf_config.num_hidden_layers, shape[1], dtype=torch.uint8)
    for layer, experts in routes.items():
        rows[:, layer] = experts
    assert bool(rows[:, 0].any()) == (name == "qwen3_moe")
    shuffled = np.random.default_rng(0).permuted(rows.numpy(), axis=2).reshape(len(rows), -1)
    assert (shuffled != rows.flatten(1).numpy()).any()
    _, second, *parts = np.split(shuffled, ROLLOUTS.num_fed_tokens.cumsum(0).numpy())[:-1]
    parts = [None, second[:3], *parts]  # tokens without routes are not compared
    rollouts = with_columns(ROLLOUTS, routes=parts)
    of_engine = StepRoutes(policy, rollouts, replayed="rollout")
    (followed,) = log_probs(policy, of_engine.recording(0, [packed]))
    assert of_engine._counts is not None and not of_engine._counts[:, :-4].any()  # updates do
    log_probs(policy, of_engine.following(0, [packed]))
    assert "experts/same_routes_share" not in of_engine.summarize()
    counted = of_engine.summarize()
    log_probs(policy, of_engine.following(1, [packed]))
    assert of_engine.summarize()["experts/same_routes_share"] == 1.0
    destroy()
    assert torch.equal(followed, free)
    assert counted["experts/engine_same_routes_share"] == 1.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda routes: routes[:, TOP_K:], (f"{TOP_K} experts", f"2 layers x {TOP_K}")),
        (lambda routes: routes + np.uint8(NUM_EXPERTS), ("up to", f"below {NUM_EXPERTS}")),
    ],
    ids=["layers", "experts"],
)
def test_routes_of_another_model_are_refused(
    policy: Policy, change: Callable[[np.ndarray], np.ndarray], named: tuple[str, ...]
) -> None:
    """What an engine of the user's own might return: of layers with experts alone, for instance."""
    rows = with_engines_routes(ROLLOUTS)
    routes = [None if (one := rows.routes_of(i)) is None else change(one) for i in range(len(rows))]
    rollouts = with_columns(ROLLOUTS, routes=routes)
    with pytest.raises(RolloutError, match=mentions("sequence 0", "routing_replay", *named)):
        StepRoutes(policy, rollouts, replayed="rollout").following(
            0, [policy.pack(rollouts, (0, 1))]
        )


def test_carried_tokens_are_scored_with_the_engines_routes(folder: Path, policy: Policy) -> None:
    config = config_of(folder, replayed="rollout")
    groups = with_engines_routes(ROLLOUTS).changed(is_finished=False)
    carried = carry(
        policy,
        groups,
        max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
        ranks=DataParallelRanks.gather(policy.groups, None),
        channel=GroupChannel(dist.group.WORLD),
    )
    for found, expected in zip(
        carried.carried_log_probs.values(), scored_by_loop(folder, groups), strict=True
    ):
        assert found == pytest.approx(expected, abs=1e-5)
