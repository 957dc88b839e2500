"""Groups that the next step continues, with all tokens sampled so far."""

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
from gapo_megatron.formats.manifest import Manifest
from gapo_megatron.rollout.alternatives import of_text, to_text
from gapo_megatron.types import Episode, Prompt, TurnSettings

OPEN_GROUPS_NAME = "open_groups.pt"


def serialised_groups(groups: Sequence[Sequence[Episode]]) -> dict[str, bytes]:
    """Content of the file of open groups with all their tokens, by its name; no file without any.

    Only on rank 0.
    """
    return {OPEN_GROUPS_NAME: files.serialise({"groups": to_content(groups)})} if groups else {}


def load_open_groups(folder: Path) -> list[tuple[Episode, ...]]:
    """Read the file of `serialised_groups`, written by any layout. No collective.

    Raises:
        CheckpointError: the file is damaged; names it.
    """
    path = folder / OPEN_GROUPS_NAME
    if not path.exists():
        return []
    with files.reading(path) as content:
        return from_content(content["groups"])


def to_content(groups: Sequence[Sequence[Episode]]) -> list[Any]:
    """Open groups with all their tokens, as tensors and plain values."""
    return [
        {"prompt": asdict(group[0].prompt), "rollouts": list(map(_to_fields, group))}
        for group in groups
    ]


def from_content(content: list[Any]) -> list[tuple[Episode, ...]]:
    """What `to_content` made."""
    groups = []
    for one in content:
        prompt = Prompt(**one["prompt"])
        episodes = (_to_episode(prompt, i, fields) for i, fields in enumerate(one["rollouts"]))
        groups.append(tuple(episodes))
    return groups


def require_same_sampling(path: Path, found: Manifest, config: Config) -> None:
    """Refuse other sampling settings for the open groups of the checkpoint in `path`, if any.

    Raises:
        ConfigError: names field, both values and the rule.
    """
    if OPEN_GROUPS_NAME not in found.files:
        return
    for name, (before, now) in changes(found.config, config).items():
        if role_of(name).carried:
            raise ConfigError(
                f"{name} ({now}) must be {before}, as in {path}, whose unfinished groups the run "
                f"continues; to change it, first run with {before} and "
                "batch.partial_rollouts=false to the next checkpoint between steps, which has no "
                "unfinished groups"
            )


def _to_fields(episode: Episode) -> dict[str, Any]:
    versions = episode.carried_versions
    num_carried = 0 if versions is None else len(versions)
    assert num_carried == len(episode.token_ids), (
        f"{num_carried} of {len(episode.token_ids)} tokens"
    )
    arrays = {
        "token_ids": episode.token_ids,
        "log_probs": episode.log_probs,
        "versions": versions,
        "old_log_probs": episode.carried_log_probs,
        "response_mask": episode.response_mask,
        "conversations": episode.conversations,
        "routes": episode.routes,
    }
    return {
        **{name: None if one is None else torch.from_numpy(one) for name, one in arrays.items()},
        "failure": episode.failure,
        "final_text": episode.final_text,
        "turn": asdict(episode.turn),
        "alternatives": None if episode.alternatives is None else to_text(episode.alternatives),
        "truncated": episode.truncated,
        "finished": episode.finished,
    }


def _to_episode(prompt: Prompt, sample: int, fields: dict[str, Any]) -> Episode:
    values: dict[str, Any] = {
        name: one.numpy() if isinstance(one, torch.Tensor) else one for name, one in fields.items()
    }
    values["carried_log_probs"] = values.pop("old_log_probs")
    values["carried_versions"] = values.pop("versions")
    if "turn" in values:  # not in checkpoints of before it
        values["turn"] = TurnSettings.of(values["turn"])
    if values.get("alternatives") is not None:
        values["alternatives"] = of_text(values["alternatives"])
    return Episode(prompt, sample, **values)
