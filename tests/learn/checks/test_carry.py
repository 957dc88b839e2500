"""Open groups are scored once, at the weights that sampled them, and kept in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gapo_megatron import checkpoint
from gapo_megatron.checkpoint import files
from gapo_megatron.checkpoint.open_groups import (
    load_open_groups,
    serialised_groups,
)
from gapo_megatron.config import Config
from gapo_megatron.errors import ConfigError
from gapo_megatron.exchange import GroupChannel, deal_tokens
from gapo_megatron.io.run_folder import mark_finished
from gapo_megatron.learn.checks import carry as carry_module
from gapo_megatron.learn.plan import DataParallelRanks
from gapo_megatron.policy import Policy, destroy
from gapo_megatron.rollout.table import to_episodes, to_rollouts
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Episode, Prompt
from tests.attempt_setup import make_attempt
from tests.dist import run_distributed, single_rank
from tests.distributed.checkpoint_setup import make_state
from tests.distributed.policy_setup import (
    VOCAB_SIZE,
    load_policy,
    make_config,
    reference_log_probs,
    save_model,
)
from tests.learn_setup import spread
from tests.messages import mentions

Group = tuple[Episode, ...]


def save_open_groups(folder: Path, groups: Sequence[Group]) -> None:
    for name, content in serialised_groups(groups).items():
        files.write(folder / name, content)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
    "dp": {},
}


def make_open_groups() -> list[Group]:
    """Groups with responses not begun, begun in this step, from two steps (two), and from earlier.

    The last response was finished by an earlier step.
    """
    random = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return random.integers(0, VOCAB_SIZE, count).astype(np.int32)

    def log_probs(count: int) -> np.ndarray:
        return -random.random(count, dtype=np.float32)

    def group(number: int) -> Group:
        prompt = Prompt(f"p{number}", tuple(tokens(number + 1).tolist()), answer="1", level="easy")
        lengths = [(0, 0), (9 + number, 0), (40 - number, 11), (13, 12), (17, 17)]
        return tuple(
            Episode(
                prompt,
                sample,
                tokens(num_tokens),
                log_probs(num_tokens),
                finished=sample >= 3,
                carried_log_probs=log_probs(num_carried) if num_carried else None,
                carried_versions=np.arange(num_carried, dtype=np.int32) // 9 + 1
                if num_carried
                else None,
            )
            for sample, (num_tokens, num_carried) in enumerate(lengths)
        )

    return [group(number) for number in range(4)]


GROUPS = make_open_groups()


def with_masks(groups: list[Group]) -> list[Group]:
    """Every third token of the second and third responses is appended by the environment."""

    def mask(one: Episode) -> Episode:
        is_sampled = np.arange(len(one.token_ids)) % 3 > 0
        carried = one.carried_log_probs
        if carried is not None:
            carried = carried * is_sampled[: len(carried)]
        return replace(one, carried_log_probs=carried, response_mask=is_sampled)

    return [tuple(mask(one) if one.sample in (1, 2) else one for one in group) for group in groups]


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    """Micro-batches of a few sequences."""
    batch = {"rollouts_per_prompt": 5, "max_tokens_per_microbatch": 100} | sections.pop("batch", {})
    return make_config(folder, batch=batch, **sections)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[Policy]:
    with single_rank():
        yield load_policy(config_of(folder))
        destroy()


def carry(
    policy: Policy, groups: list[Group], config: Config, *, policy_version: int
) -> list[Group]:
    """`learn.checks.carry` of groups whose tokens are spread over all ranks; gathered on each."""
    world_size, channel = dist.get_world_size(), GroupChannel(dist.group.WORLD)
    rollouts = to_rollouts(groups, policy_version=policy_version)
    held = spread(rollouts, np.arange(len(rollouts)) % world_size)
    carried = carry_module.carry(
        policy,
        held,
        max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
        ranks=DataParallelRanks.gather(policy.groups, None),
        channel=channel,
    )
    assert carried.rows_here == held.rows_here
    wanted = [range(len(rollouts))] * world_size
    everything = deal_tokens(carried, wanted, channel=channel, tag=9)
    return to_episodes(everything, [group[0].prompt for group in groups])


def carried_of(groups: Sequence[Group]) -> list[list[tuple[Any, Any]]]:
    def listed(array: np.ndarray | None) -> list[float] | None:
        return None if array is None else array.tolist()

    return [
        [(listed(one.carried_versions), listed(one.carried_log_probs)) for one in group]
        for group in groups
    ]


def pairs(found: Sequence[Group], expected: Sequence[Group]) -> Iterator[tuple[Episode, Episode]]:
    """Episodes as groups of equal size."""
    for ours, theirs in zip(found, expected, strict=True):
        yield from zip(ours, theirs, strict=True)


def assert_scored(groups: list[Group], model: Any) -> None:
    """At version 5 new tokens get the model's log-probs; others keep theirs, bitwise."""
    for one, old in pairs(groups, GROUPS):
        assert (one.prompt, one.sample, one.finished) == (old.prompt, old.sample, old.finished)
        assert one.token_ids.tolist() == old.token_ids.tolist()
        assert one.log_probs.tolist() == old.log_probs.tolist()
        if not len(old.token_ids):
            assert one.carried_log_probs is None and one.carried_versions is None
            continue
        log_probs, before = one.carried_log_probs, old.carried_log_probs
        assert log_probs is not None
        assert log_probs.dtype == np.float32 and len(log_probs) == len(old.token_ids)
        first = 0 if before is None else len(before)
        if before is not None:
            assert log_probs[:first].tolist() == before.tolist()
        versions = [1] * min(first, 9) + [2] * (first - 9) + [5] * (len(log_probs) - first)
        assert one.carried_versions is not None and one.carried_versions.tolist() == versions
        prompt_ids = np.array(one.prompt.token_ids, np.int32)
        with torch.no_grad():
            (expected,) = reference_log_probs(model, Rollouts.of([prompt_ids], [old.token_ids]))
        # float32 log-probs of order 5, to about 1e-6.
        difference = np.abs(expected.numpy()[first:] - log_probs[first:])
        assert difference.max(initial=0) < 1e-5


def test_new_tokens_alone_are_scored_at_the_weights_that_sampled_them(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(folder)
    groups = carry(policy, GROUPS, config, policy_version=5)
    assert_scored(groups, save_model(folder, "qwen2_tied"))
    # Now all are carried, and nothing is left to do.
    monkeypatch.setattr(carry_module, "score", lambda *_, **__: pytest.fail("scored again"))
    again = carry(policy, groups, config, policy_version=6)
    assert carried_of(again) == carried_of(groups)


def test_what_other_ranks_have_begun_is_not_scored_too_late(policy: Policy, folder: Path) -> None:
    """A run that goes on without ranks that only generate: older weights, whose log-probs are lost.

    Those of these weights would be taken for the ones that sampled the tokens.
    """
    first = [replace(one, carried_log_probs=None) if one.sample != 2 else one for one in GROUPS[0]]
    groups = [tuple(first), GROUPS[1]]
    found = carried_of(carry(policy, groups, config_of(folder), policy_version=5))
    alone = carried_of(carry(policy, GROUPS[:2], config_of(folder), policy_version=5))
    versions = [[versions for versions, _ in group] for group in found]
    assert versions == [[versions for versions, _ in group] for group in alone]
    assert [log_probs for _, log_probs in found[0][3:]] == [None, None]
    scored = [log_probs for group in (found[0][:3], found[1]) for _, log_probs in group]
    expected = [log_probs for group in (alone[0][:3], alone[1]) for _, log_probs in group]
    for ours, theirs in zip(scored, expected, strict=True):  # packed with others, to about 1e-6
        assert (ours is None) == (theirs is None) and (
            theirs is None or ours == pytest.approx(theirs, abs=1e-5)
        )
    # Nothing but such responses: their new tokens are carried all the same.
    late = carry(policy, [(replace(first[3], sample=0),)], config_of(folder), policy_version=5)
    assert carried_of(late) == [[found[0][3]]]


def over_layouts(folder: Path) -> dict[str, Any]:
    result = {}
    for name, parallel in LAYOUTS.items():
        config = config_of(folder, parallel=parallel)
        policy = load_policy(config)
        groups = carry(policy, GROUPS, config, policy_version=5)
        # One response: a data parallel rank without any.
        alone = GROUPS[0][:2]
        result[name] = (
            groups,
            carried_of(groups),
            carried_of(carry(policy, [alone], config, policy_version=5)),
        )
        destroy()
    return result


def test_every_rank_holds_the_same_bits_in_every_layout(folder: Path) -> None:
    model = save_model(folder, "qwen2_tied")
    first, second = run_distributed(over_layouts, 2, folder)
    for name, (groups, carried, alone) in first.items():
        assert_scored(groups, model)
        assert carried == second[name][1], name
        assert alone == second[name][2], name
        ((nothing, (version, log_probs)),) = alone
        assert nothing == (None, None), name
        assert version == carried[0][1][0] == [5] * len(log_probs), name
        assert log_probs == pytest.approx(carried[0][1][1], abs=1e-5), name


def test_what_the_environment_gave_is_carried_as_zero(
    policy: Policy, folder: Path, tmp_path: Path
) -> None:
    config, masked = config_of(folder), with_masks(GROUPS)
    plain = carry(policy, GROUPS, config, policy_version=5)
    groups = carry(policy, masked, config, policy_version=5)
    for (one, old), (other, _) in zip(pairs(groups, masked), pairs(plain, GROUPS), strict=True):
        log_probs, is_sampled = one.carried_log_probs, one.is_sampled
        if log_probs is None:
            continue
        assert other.carried_log_probs is not None and log_probs.dtype == np.float32
        assert is_sampled.tolist() == old.is_sampled.tolist()
        assert not log_probs[~is_sampled].any()
        # Sampled tokens have what they have without a mask: which rows are scored is no matter.
        assert log_probs[is_sampled].tolist() == pytest.approx(
            other.carried_log_probs[is_sampled].tolist(), abs=1e-6
        )
    save_open_groups(tmp_path, groups)
    read = load_open_groups(tmp_path)
    assert carried_of(read) == carried_of(groups)
    for one, other in pairs(read, groups):
        if other.response_mask is None:
            assert one.response_mask is None
        else:
            assert one.response_mask is not None and one.response_mask.dtype == bool
            assert one.response_mask.tolist() == other.response_mask.tolist()


CHANGES: dict[str, tuple[Any, Any]] = {
    "batch.rollouts_per_prompt": (5, 4),
    "model.precision": ("fp32", "bf16"),
    "model.fp8_recipe": ("tensorwise", "blockwise"),
    "rollout.max_response_tokens": (64, 65),
    "rollout.temperature": (1.0, 0.9),
    "rollout.top_p": (1.0, 0.9),
}


@pytest.mark.parametrize("name", CHANGES)
def test_open_groups_go_on_as_they_have_begun(
    policy: Policy, folder: Path, tmp_path: Path, name: str
) -> None:
    """Refused before any model is built; for an older checkpoint once it is selected."""
    section, key = name.split(".")
    before, now = CHANGES[name]
    config = config_of(folder, rollout={"max_response_tokens": 64})
    other = config.model_copy(
        update={
            section: getattr(config, section).model_copy(update={key: now}),
            "run": config.run.model_copy(update={"allow_changes": (name,)}),
        }
    )
    groups = carry(policy, GROUPS, config, policy_version=5)

    def save(step: int, config: Config, groups: Sequence[Group]) -> Path:
        return checkpoint.save(
            tmp_path,
            make_state(step, open_groups=groups),
            policy=policy,
            config=config,
            attempt=make_attempt(tmp_path),
        )

    path = save(2, config, groups)
    named = mentions(f"{name} ({now})", before, path, "batch.partial_rollouts=false")
    checkpoint.check_resume(tmp_path, policy.hf_config, config)
    with pytest.raises(ConfigError, match=named):
        checkpoint.check_resume(tmp_path, policy.hf_config, other)
    mark_finished(tmp_path, num_steps=config.run.num_steps)  # a finished run resumes nothing
    checkpoint.check_resume(tmp_path, policy.hf_config, other)
    (tmp_path / "finished.json").unlink()
    state = checkpoint.load_latest(tmp_path, policy=policy, config=config)
    assert state is not None and carried_of(state.open_groups) == carried_of(groups)
    # A checkpoint without open groups may be resumed with other settings.
    newer = save(4, config, [])
    checkpoint.check_resume(tmp_path, policy.hf_config, other)
    state = checkpoint.load_latest(tmp_path, policy=policy, config=other)
    assert state is not None and (state.step, state.open_groups) == (4, ())
    (newer / "trainer_state.json").write_text("")
    with pytest.raises(ConfigError, match=named):
        checkpoint.load_latest(tmp_path, policy=policy, config=other)
