"""Engines of partial rollouts end together: at which step, with which groups, and on an error."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gapo_megatron.clock import Stopwatch
from gapo_megatron.data.source import PromptSource
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.generate import Hooks, generate
from gapo_megatron.rollout.progress import Occupancy
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.rollouter import _Step
from gapo_megatron.rollout.table import to_rollouts
from gapo_megatron.types import Prompt
from tests.dist import run_distributed
from tests.rollout.test_sample import ATTEMPT, Setup, config_of, open_group
from tests.scripted_engine import ScriptedEngine, ThreadReplicas, place_of

SETTINGS = SamplingSettings(num_samples=2, max_response_tokens=200, seed=7)
LENGTHS = {"0": 3, "1": 5, "2": 30, "3": 9, "4": 90, "5": 90}
"""Tokens of both responses to a problem."""


def run_engine(engine: ScriptedEngine, problems: str, *, wanted: int, hooks: Hooks) -> Any:
    """Lengths of the responses by problem; None if the generation was aborted."""
    prompts = [Prompt(one, (1,), "") for one in problems]
    tally = engine.replicas.tally(wanted)
    groups = generate(engine, prompts, SETTINGS, num_groups=tally, hooks=hooks)
    assert engine.num_requests() == (0, 0)
    if groups is None:
        return None
    return {group[0].prompt.id: [len(one.token_ids) for one in group] for group in groups}


def say(request: Request) -> list[int]:
    return [5] * LENGTHS[place_of(request)[0]]


def end(problems: tuple[str, str], wanted: int, asked: tuple[int, ...]) -> Any:
    """Two engines of two ranks each; after eight steps these ranks are asked to abort."""
    replicas = Replicas.create(2, gloo_group=dist.group.WORLD)
    engine = ScriptedEngine(say, replicas=replicas)

    def should_abort(elapsed_s: float) -> bool:
        return replicas.rank in asked and engine.num_steps >= 8

    hooks = Hooks(should_abort=should_abort)
    lengths = run_engine(engine, problems[replicas.rank // 2], wanted=wanted, hooks=hooks)
    return engine.num_steps, lengths


def test_all_ranks_of_all_engines_stop_at_the_same_step() -> None:
    """Three groups are whole after nine steps: reported at the 16th, known at the 24th.

    A group counts once, though both ranks of its engine have it, and the engine's first rank alone
    says whether to abort.
    """
    found = run_distributed(end, 4, ("014", "235"), 3, (1, 3))
    first, second = {"0": [3, 3], "1": [5, 5], "4": [24, 24]}, {"2": [24, 24], "3": [9, 9]}
    assert found == [(24, first)] * 2 + [(24, second | {"5": [24, 24]})] * 2


def test_an_engine_that_has_nothing_ends_with_the_others() -> None:
    everything = {one: [LENGTHS[one]] * 2 for one in "0123"}
    assert run_distributed(end, 4, ("", "0123"), 4, ()) == [(0, {})] * 2 + [(30, everything)] * 2


def test_an_engine_that_is_asked_to_abort_ends_all_of_them() -> None:
    """Asked and reported at the eighth step, known at the 16th."""
    assert run_distributed(end, 4, ("014", "235"), 6, (2,)) == [(16, None)] * 4


def fail(folder: str) -> None:
    """The second rank is gone in its tenth step; the first one says what it then does."""
    replicas = Replicas.create(1, gloo_group=dist.group.WORLD)

    def before_step() -> None:
        if replicas.rank == 1 and engine.num_steps == 9:
            os._exit(0)

    engine = ScriptedEngine(say, replicas=replicas, before_step=before_step)
    hooks = Hooks(should_abort=lambda elapsed_s: False)
    try:
        run_engine(engine, ("014", "235")[replicas.rank], wanted=6, hooks=hooks)
    except RuntimeError as error:
        assert engine.num_requests() == (0, 0), "requests are left behind"
        Path(folder, "error").write_text(f"{engine.num_steps} steps: {error}")
    os._exit(0)


def test_an_engine_whose_peer_is_gone_fails_within_two_intervals(tmp_path: Path) -> None:
    """It does not wait for reports that never come."""
    run_distributed(fail, 2, str(tmp_path))
    assert (tmp_path / "error").read_text().partition(" steps: ")[0] in ("16", "24")


@pytest.mark.parametrize("version_of_nothing", [0, 1, 2])
def test_a_group_without_a_token_is_no_older_than_this_step(version_of_nothing: int) -> None:
    """Its row names a version that a resume does not keep; both groups are whole together."""
    source = PromptSource([Prompt(one, (1,), "") for one in "01"], seed=0)
    groups = [open_group(source.problems[0]), open_group(source.problems[1], num_tokens=1)]
    rollouts = to_rollouts(groups, problems=[0, 1], policy_version=version_of_nothing)

    def sample(replicas: ThreadReplicas) -> list[int]:
        config = config_of(6, oversampling=1.5, partial_rollouts=True)
        setup = Setup(config, source, replicas=replicas, length=lambda *_: 5)
        setup.engine.policy_version = 2
        opened = rollouts.spread(rank=replicas.rank, size=2)
        now = _Step(2, ATTEMPT, Stopwatch(), Occupancy())
        sampled = setup.rollouter._sample([], opened, 1, now)
        assert sampled is not None
        return sampled[0].problems

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(sample, ThreadReplicas.of(2, size=1))] == [[1], [1]]
