"""Groups that go on at the next step, with all that has been sampled of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gapo_megatron.checkpoint import files
from gapo_megatron.config import Config
from gapo_megatron.config.roles import changes, role_of
from gapo_megatron.errors import ConfigError
from gapo_megatron.hf.manifest import Manifest
from gapo_megatron.types import Carried, OpenGroup, Prompt, Rollout

OPEN_GROUPS_NAME = "open_groups.pt"


def save_open_groups(folder: Path, groups: Sequence[OpenGroup]) -> None:
    """Write them, all their tokens here; no file where there are none. For rank 0 alone."""
    if groups:
        content = [
            {"prompt": asdict(group.prompt), "rollouts": list(map(_to_fields, group.rollouts))}
            for group in groups
        ]
        files.write(folder / OPEN_GROUPS_NAME, {"groups": content})


def load_open_groups(folder: Path) -> list[OpenGroup]:
    """Read what `save_open_groups` wrote, whatever layout wrote it. No collective.

    Raises:
        CheckpointError: the file is missing, damaged or misshapen; names it.
    """
    path = folder / OPEN_GROUPS_NAME
    if not path.exists():
        return []
    with files.reading(path) as content:
        return [
            OpenGroup(_to_prompt(one["prompt"]), tuple(map(_from_fields, one["rollouts"])))
            for one in files.plain(content["groups"], list)
        ]


def require_same_sampling(path: Path, found: Manifest, config: Config) -> None:
    """Refuse to go on otherwise with the open groups of the checkpoint in `path`, if it has any.

    Raises:
        ConfigError: names field, both values and the rule.
    """
    if OPEN_GROUPS_NAME not in found.files:
        return
    for name, (before, now) in changes(found.config, config).items():
        if role_of(name).carried:
            raise ConfigError(
                f"{name} ({now}) must be {before}, as in {path}, whose unfinished groups the run "
                f"goes on with; to change it, first go on with {before} and "
                "batch.partial_rollouts=false to the next checkpoint between steps, which has none"
            )


def _to_fields(rollout: Rollout) -> dict[str, Any]:
    carried, mask = rollout.carried, rollout.response_mask
    num_carried = len(carried.old_log_probs) if carried else 0
    assert num_carried == len(rollout.token_ids), (
        f"{num_carried} of {len(rollout.token_ids)} tokens"
    )
    return {
        "token_ids": torch.from_numpy(rollout.token_ids),
        "log_probs": torch.from_numpy(rollout.log_probs),
        "truncated": rollout.truncated,
        "finished": rollout.finished,
        "oldest_version": carried and carried.oldest_version,
        "old_log_probs": carried and torch.from_numpy(carried.old_log_probs),
        "response_mask": None if mask is None else torch.from_numpy(mask),
    }


def _to_prompt(fields: dict[str, Any]) -> Prompt:
    prompt = Prompt(**fields)
    for text in (prompt.id, prompt.answer, prompt.level):
        files.plain(text, str)
    for number in files.plain(prompt.token_ids, tuple):
        files.plain(number, int)
    return prompt


def _from_fields(fields: dict[str, Any]) -> Rollout:
    token_ids = files.column(fields["token_ids"], torch.int32)
    carried = None
    if fields["old_log_probs"] is not None:
        old = files.column(fields["old_log_probs"], torch.float32, length=len(token_ids))
        carried = Carried(files.plain(fields["oldest_version"], int), old.numpy())
    elif len(token_ids):
        raise ValueError("tokens without old log-probs")
    mask = fields.get("response_mask")  # one written before there were masks has none
    if mask is not None:
        mask = files.column(mask, torch.bool, length=len(token_ids)).numpy()
    return Rollout(
        token_ids=token_ids.numpy(),
        log_probs=files.column(fields["log_probs"], torch.float32, length=len(token_ids)).numpy(),
        truncated=files.plain(fields["truncated"], bool),
        finished=files.plain(fields["finished"], bool),
        carried=carried,
        response_mask=mask,
    )
