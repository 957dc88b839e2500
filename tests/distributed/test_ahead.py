"""Checkpoints with a batch sampled ahead: kept, refused if damaged, or discarded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron import checkpoint
from gapo_megatron.checkpoint import OpenStep, State
from gapo_megatron.checkpoint.state import AHEAD_NAME
from gapo_megatron.config import Config
from gapo_megatron.policy import Policy, destroy
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import Episode, Prompt
from tests.attempt_setup import make_attempt
from tests.damage import Trap, sign
from tests.dist import run_distributed
from tests.distributed.checkpoint_setup import (
    make_config,
    make_model,
    make_state,
    save,
    stored,
)
from tests.distributed.policy_setup import load_policy
from tests.distributed.test_checkpoint import listen

AFTER = {"epoch": 1, "remaining": [7, 8], "dataset": {"rows": "d"}}


def make_batch() -> Batch:
    rollouts = Rollouts.of(
        [np.array([1, 2], np.int32), np.array([4], np.int32)],
        [np.array([3], np.int32), np.array([5, 6], np.int32)],
        [np.array([-0.1], np.float32), np.array([-1, -2], np.float32)],
    )
    return Batch(
        rollouts.table,
        rollouts.tokens,
        advantages=torch.tensor([0.1, -0.1], dtype=torch.float64),
        num_correct=torch.tensor([1, 1]),
        group_size=torch.tensor([2, 2]),
        valid=torch.tensor([True, False]),
    )


def open_group(name: str, *, version: int) -> tuple[Episode, ...]:
    """A response of two tokens that nobody has scored, and one that has not begun."""
    prompt, ids = Prompt(name, (1, 2), "3"), np.array([4, 5], np.int32)
    versions, log_probs = np.array([0, version], np.int32), np.array([-1, -2], np.float32)
    begun = Episode(prompt, 0, ids, log_probs, finished=False, carried_versions=versions)
    return begun, Episode(prompt, 1, ids[:0], log_probs[:0], finished=False)


def shown(groups: Sequence[Sequence[Episode]]) -> list[tuple[Any, ...]]:
    """Open groups, to be compared."""
    return [
        (
            *(one.prompt, one.sample, one.finished, one.token_ids.tolist()),
            *(one.log_probs.tolist(), one.carried_log_probs),
            None if one.carried_versions is None else one.carried_versions.tolist(),
        )
        for group in groups
        for one in group
    ]


BEFORE_BATCH, AFTER_BATCH = [open_group("a", version=1)], [open_group(i, version=2) for i in "bc"]
"""Groups that are open before the batch that was sampled ahead, and after it."""


def save_ahead(run_dir: Path, policy: Policy, config: Config) -> Path:
    open_step = OpenStep(make_batch(), {"reward/mean": 0.1}, {"eval/pass@1": 1 / 3}, is_ahead=True)
    groups = {"open_groups_before": BEFORE_BATCH, "open_groups": AFTER_BATCH}
    state = make_state(2, open_step=open_step, source=AFTER, **groups)
    attempt = make_attempt(run_dir)
    return checkpoint.save(run_dir, state, policy=policy, config=config, attempt=attempt)


def require_ahead(state: State | None) -> None:
    assert state is not None and state.is_ahead and state.open_step is not None
    assert stored(state) == stored(make_state(2)) and state.source == AFTER
    read, expected = state.open_step, make_batch()
    assert (read.metrics, read.evaluated) == ({"reward/mean": 0.1}, {"eval/pass@1": 1 / 3})
    assert read.progress.num_updates == 0
    for name in ("prompt_ids", "response_ids", "rollout_log_probs"):
        for i, theirs in getattr(expected, name).items():
            ours = getattr(read.batch, name)[i]
            assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()
    assert read.batch.advantages.equal(expected.advantages)
    assert read.batch.valid.equal(expected.valid)
    assert shown(state.open_groups) == shown(AFTER_BATCH)


def keep(hf_dir: str, root: Path, layouts: list[str]) -> None:
    """Read the files of two ranks, in layouts of this number of ranks."""
    if dist.get_world_size() == 2:
        config = make_config(hf_dir, layout="dp2")
        save_ahead(root, load_policy(config), config)
        destroy()
    for layout in layouts:
        config = make_config(hf_dir, layout=layout)
        require_ahead(checkpoint.load_latest(root, policy=load_policy(config), config=config))
        destroy()


def test_what_was_sampled_ahead_is_there_in_every_layout(tmp_path):
    """Before its first update nothing depends on a rank."""
    hf_dir = make_model(tmp_path / "model", hidden_size=32)
    run_distributed(keep, 2, hf_dir, tmp_path / "run", ["dp2", "tp2"])
    run_distributed(keep, 1, hf_dir, tmp_path / "run", ["single"])


def refuse(hf_dir: str, run_dir: Path) -> None:
    """A damaged batch makes the checkpoint incomplete; an older one is loaded."""
    config = make_config(hf_dir, layout="single")
    policy, warnings, trace = load_policy(config), listen(), run_dir / "trace"
    save(run_dir, policy, config, step=1)
    batch = OpenStep(make_batch(), {}, {}).shared()
    for content in (
        batch,  # without the data position
        {**batch, "source": "["},
        {**batch, "source": Trap(trace)},
        {"source": '{"epoch": 1, "remaining": [], "dataset": {"rows": "d"}}'},
        {**batch, "source": json.dumps(AFTER), "groups": 3},
        {**batch, "source": json.dumps(AFTER), "groups": [{"rollouts": []}]},
        b"torn",
    ):
        path = save_ahead(run_dir, policy, config) / AHEAD_NAME
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        sign(path.parent)
        warnings.clear()
        state = checkpoint.load_latest(run_dir, policy=policy, config=config)
        assert state is not None and (state.step, state.open_step) == (1, None)
        assert "step_00000002" in warnings[0] and AHEAD_NAME in warnings[0], content
        assert not trace.exists()
    # And not signed: the digest tells.
    path = save_ahead(run_dir, policy, config) / AHEAD_NAME
    path.write_bytes(path.read_bytes()[:-1])
    warnings.clear()
    state = checkpoint.load_latest(run_dir, policy=policy, config=config)
    assert state is not None and state.step == 1 and AHEAD_NAME in warnings[0]


def test_what_was_sampled_ahead_is_refused_by_name_where_it_is_damaged(tmp_path):
    hf_dir = make_model(tmp_path / "model", hidden_size=32)
    run_distributed(refuse, 1, hf_dir, tmp_path / "run")


def give_back(hf_dir: str, root: Path) -> None:
    """Sampled with other settings, it is discarded and its problems are drawn again."""
    old, warnings = make_config(hf_dir, layout="single"), listen()
    policy = load_policy(old)
    path = save_ahead(root / "old", policy, old)
    objective = old.objective.model_copy(update={"method": "gspo"})
    config = old.model_copy(
        update={
            "objective": objective,
            "run": old.run.model_copy(update={"output_dir": str(root / "new")}),
            "checkpoint": old.checkpoint.model_copy(update={"branch_from": str(path)}),
        }
    )
    point = checkpoint.check_branch(config, policy.hf_config)
    assert point is not None
    checkpoint.begin_branch(point, config, make_attempt(root / "new"))
    for run_dir, settings in (
        (root / "new", config),
        # Resumed with other settings, or on-policy.
        (
            root / "old",
            old.model_copy(
                update={
                    "objective": objective,
                    "run": old.run.model_copy(update={"allow_changes": ("objective.method",)}),
                }
            ),
        ),
        (
            root / "old",
            old.model_copy(
                update={
                    "rollout": old.rollout.model_copy(
                        update={"max_staleness": 1, "generation_ranks": 1}
                    ),
                    "run": old.run.model_copy(update={"allow_changes": ("rollout.max_staleness",)}),
                }
            ),
        ),
    ):
        warnings.clear()
        state = checkpoint.load_latest(run_dir, policy=policy, config=settings)
        assert state is not None and state.open_step is None
        assert state.source == state.source_before, "before its problems were drawn"
        if settings.objective == old.objective:  # a window's steps are those of one objective
            assert stored(state) == stored(make_state(2))
        assert any("step 2" in line and "sampled ahead" in line for line in warnings)
    require_ahead(checkpoint.load_latest(root / "old", policy=policy, config=old))


def test_a_branch_gives_back_what_was_sampled_ahead(tmp_path):
    hf_dir = make_model(tmp_path / "model", hidden_size=32)
    run_distributed(give_back, 1, hf_dir, tmp_path)
