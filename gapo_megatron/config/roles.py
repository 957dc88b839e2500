"""Which settings a run may change when it goes on: after a stop, and in a branch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from gapo_megatron.config import Config

Changes = dict[str, tuple[Any, Any]]
"""Setting -> (its value there, here), where the two differ."""

# What may change between the parts of one run without changing what it computes. With over-sampling
# the number of engines does change it; but that is the number of processes, which no setting tells.
_FREE = (
    "run.output_dir",
    "run.num_steps",
    "run.hang_timeout_s",
    "run.stop_margin_s",
    "parallel.",
    "optimizer.offload",
    "rollout.verify_",
    "checkpoint.",
    "evaluation.",
    "metrics.",
    "supervised",
)
# Besides: the intervention itself, and how (not what) the other stages compute.
_FREE_IN_A_BRANCH = (
    *_FREE,
    "objective.",
    "model.recompute",
    "model.head",
    "data.eval_path",
    "batch.max_tokens_per_microbatch",
    "rollout.tensor_parallel_size",
    "rollout.memory_fraction",
    "rollout.cpu_kv_cache_gib",
    "rollout.enforce_eager",
    "reward.num_workers",
)
# Not free where the groups that an engine finishes first are learned from: which ones these are is
# decided by its company, that is by the number of engines and by what fits into their caches.
_DECIDE_WHAT_IS_FIRST = (
    "rollout.tensor_parallel_size",
    "rollout.memory_fraction",
    "rollout.cpu_kv_cache_gib",
    "rollout.enforce_eager",
)
# Of everything else; by section, because a whole section must agree but for the keys above.
_WHY_A_BRANCH_KEEPS = {
    "run": "prompts and samples are drawn by it",
    "model": "weights and optimizer state are this model's",
    "data": "the branch goes on in the same problems",
    "batch": "a step, an update and c must mean the same",
    "rollout": "samples must come from the same distribution; of over-sampled groups the same ones "
    "must be finished first",
    "reward": "verdicts must mean the same",
    "optimizer": "its state goes on, and the objective alone is exchanged",
}
_PATHS = ("model.hf_dir", "model.megatron_dir", "data.train_path", "data.eval_path")
# What a config that is older than a setting had for it. So a new setting must have as its default
# what was done before there was one.
_DEFAULTS = {
    section: field.annotation.model_construct().model_dump(mode="json")
    for section, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}


def changes(before: Mapping[str, Any], config: Config) -> Changes:
    """What differs from a manifest's config and decides what is computed."""
    return {
        name: pair
        for name, pair in _differing(before, config).items()
        if not name.startswith(_FREE)
    }


def changed_work(before: Mapping[str, Any], config: Config) -> Changes:
    """What differs and decides what is computed, and not merely how.

    Of what a branch may change that is all but the objective and the data.
    """
    how = tuple(name for name in _free(config) if not name.startswith(("objective.", "data.")))
    return {
        name: pair for name, pair in _differing(before, config).items() if not name.startswith(how)
    }


def broken_rules(before: Mapping[str, Any], config: Config) -> list[str]:
    """What a branch may not change, and does: a line for each with field, both values and rule."""
    free = _free(config)
    return [
        f"{name} is {there!r} there and {here!r} here: {_why(name)}"
        for name, (there, here) in _differing(before, config).items()
        if not name.startswith(free)
    ]


def _why(name: str) -> str:
    return _WHY_A_BRANCH_KEEPS.get(name.split(".")[0], "this version does not know it")


def _free(config: Config) -> tuple[str, ...]:
    """In a branch of that config."""
    if config.batch.oversampling > 1:
        return tuple(name for name in _FREE_IN_A_BRANCH if name not in _DECIDE_WHAT_IS_FIRST)
    return _FREE_IN_A_BRANCH


def flat(config: Config) -> dict[str, Any]:
    """Every setting by its whole name, `section.key`, as JSON has it."""
    return dict(_flat(config.model_dump(mode="json")))


def _differing(before: Mapping[str, Any], config: Config) -> Changes:
    there = dict(_flat(_DEFAULTS)) | dict(_flat(before))
    here = flat(config)
    return {
        name: (there.get(name), here.get(name))
        for name in dict.fromkeys([*there, *here])
        if not _agree(name, there.get(name), here.get(name))
    }


def _agree(name: str, there: Any, here: Any) -> bool:
    # A manifest may say anything.
    if name in _PATHS and there and here and isinstance(there, str) and "\0" not in there:
        return os.path.realpath(there) == os.path.realpath(here)
    return bool(there == here)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
