"""Groups that go on at the next step, with all that has been sampled of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gapo_megatron.checkpoint.open_step import write
from gapo_megatron.config import Config
from gapo_megatron.errors import ConfigError
from gapo_megatron.types import Carried, OpenGroup, Prompt, Rollout

OPEN_GROUPS_NAME = "open_groups.pt"


def save_open_groups(folder: Path, groups: Sequence[OpenGroup]) -> None:
    """Write them, the same on every rank; no file where there are none. For rank 0 alone."""
    if groups:
        content = [
            {"prompt": asdict(group.prompt), "rollouts": list(map(_to_fields, group.rollouts))}
            for group in groups
        ]
        write(folder / OPEN_GROUPS_NAME, {"groups": content})


def load_open_groups(folder: Path, config: Config) -> list[OpenGroup]:
    """Read what `save_open_groups` wrote, whatever layout wrote it. No collective.

    Raises:
        ConfigError: they do not fit the run's rollouts; names field, value and rule.
    """
    path = folder / OPEN_GROUPS_NAME
    if not path.exists():
        return []
    content: list[dict[str, Any]] = torch.load(path, weights_only=True)["groups"]
    groups = [
        OpenGroup(Prompt(**one["prompt"]), tuple(map(_from_fields, one["rollouts"])))
        for one in content
    ]
    for group in groups:
        _check(group, config, folder)
    return groups


def _to_fields(rollout: Rollout) -> dict[str, Any]:
    carried = rollout.carried
    num_carried = len(carried.versions) if carried else 0
    assert num_carried == len(rollout.token_ids), (
        f"{num_carried} of {len(rollout.token_ids)} tokens"
    )
    return {
        "token_ids": torch.from_numpy(rollout.token_ids),
        "log_probs": torch.from_numpy(rollout.log_probs),
        "truncated": rollout.truncated,
        "finished": rollout.finished,
        "versions": carried and torch.from_numpy(carried.versions),
        "old_log_probs": carried and torch.from_numpy(carried.old_log_probs),
    }


def _from_fields(fields: dict[str, Any]) -> Rollout:
    carried = None
    if fields["versions"] is not None:
        carried = Carried(fields["versions"].numpy(), fields["old_log_probs"].numpy())
    return Rollout(
        token_ids=fields["token_ids"].numpy(),
        log_probs=fields["log_probs"].numpy(),
        truncated=fields["truncated"],
        finished=fields["finished"],
        carried=carried,
    )


def _check(group: OpenGroup, config: Config, folder: Path) -> None:
    k, limit = config.batch.rollouts_per_prompt, config.rollout.max_response_tokens
    if len(group.rollouts) != k:
        raise ConfigError(
            f"batch.rollouts_per_prompt ({k}) must be {len(group.rollouts)}, as it is in {folder}, "
            "whose unfinished groups the run goes on with"
        )
    least = max(len(one.token_ids) + (not one.finished) for one in group.rollouts)
    if limit < least:
        raise ConfigError(
            f"rollout.max_response_tokens ({limit}) must be at least {least}, for the responses to "
            f"prompt {group.prompt.id!r} in {folder} to go on"
        )
