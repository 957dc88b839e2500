"""Groups that the next step continues, with all tokens sampled so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gapo_megatron.checkpoint import files
from gapo_megatron.config import Config
from gapo_megatron.config.roles import changes, role_of
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.manifest import Manifest
from gapo_megatron.types import Episode, Prompt

OPEN_GROUPS_NAME = "open_groups.pt"


def serialised_groups(groups: Sequence[Sequence[Episode]]) -> dict[str, bytes]:
    """Content of the file of open groups with all their tokens, by its name; no file without any.

    Only on rank 0.
    """
    return {OPEN_GROUPS_NAME: files.serialise({"groups": to_content(groups)})} if groups else {}


def load_open_groups(folder: Path) -> list[tuple[Episode, ...]]:
    """Read the file of `serialised_groups`, written by any layout. No collective.

    Raises:
        CheckpointError: the file is missing, damaged or misshapen; names it.
    """
    path = folder / OPEN_GROUPS_NAME
    if not path.exists():
        return []
    with files.reading(path) as content:
        groups = from_content(content["groups"])
        if not groups:
            raise ValueError("no groups")
        return groups


def to_content(groups: Sequence[Sequence[Episode]]) -> list[Any]:
    """Open groups with all their tokens, as tensors and plain values."""
    return [
        {"prompt": asdict(group[0].prompt), "rollouts": list(map(_to_fields, group))}
        for group in groups
    ]


def from_content(content: Any) -> list[tuple[Episode, ...]]:
    """What `to_content` made.

    Raises:
        LookupError, TypeError, ValueError: it did not make it.
    """
    groups = []
    for one in files.plain(content, list):
        prompt = _to_prompt(one["prompt"])
        episodes = (_to_episode(prompt, i, fields) for i, fields in enumerate(one["rollouts"]))
        groups.append(tuple(episodes))
    if len({*map(len, groups)}) > 1 or not all(groups):
        raise ValueError(f"groups of {sorted({*map(len, groups)})} responses")
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
    old, mask = episode.carried_log_probs, episode.response_mask
    versions = episode.carried_versions
    num_carried = 0 if versions is None else len(versions)
    assert num_carried == len(episode.token_ids), (
        f"{num_carried} of {len(episode.token_ids)} tokens"
    )
    return {
        "token_ids": torch.from_numpy(episode.token_ids),
        "log_probs": torch.from_numpy(episode.log_probs),
        "truncated": episode.truncated,
        "finished": episode.finished,
        "versions": None if versions is None else torch.from_numpy(versions),
        "old_log_probs": None if old is None else torch.from_numpy(old),
        "response_mask": None if mask is None else torch.from_numpy(mask),
        "routes": None if episode.routes is None else torch.from_numpy(episode.routes),
    }


def _to_prompt(fields: dict[str, Any]) -> Prompt:
    prompt = Prompt(**fields)
    for text in (prompt.id, prompt.answer, prompt.level):
        files.plain(text, str)
    for number in files.plain(prompt.token_ids, tuple):
        _int32(number)
    if not prompt.token_ids:
        raise ValueError("a prompt without tokens")
    return prompt


def _int32(value: Any) -> int:
    number: int = files.plain(value, int)
    if not 0 <= number < 2**31:
        raise ValueError(f"{number} instead of a number below 2**31")
    return number


def _to_episode(prompt: Prompt, sample: int, fields: dict[str, Any]) -> Episode:
    token_ids = files.column(fields["token_ids"], torch.int32)
    old, versions = fields["old_log_probs"], _to_versions(fields["versions"], len(token_ids))
    if old is not None:
        old = files.column(old, torch.float32).numpy()
        if not 0 < len(old) <= len(token_ids):
            raise ValueError(f"{len(old)} old log-probs of {len(token_ids)} tokens")
    mask = fields["response_mask"]
    if mask is not None:
        mask = files.column(mask, torch.bool, length=len(token_ids)).numpy()
        if not mask.any():
            raise ValueError("a response without a sampled token")
    routes = fields["routes"]
    if routes is not None:
        routes = files.matrix(routes, torch.uint8).numpy()
        if not 0 < len(routes) < len(prompt.token_ids) + len(token_ids) or not routes.size:
            raise ValueError(f"routes of {len(routes)} tokens")
    return Episode(
        prompt,
        sample,
        token_ids=token_ids.numpy(),
        log_probs=files.column(fields["log_probs"], torch.float32, length=len(token_ids)).numpy(),
        truncated=files.plain(fields["truncated"], bool),
        finished=files.plain(fields["finished"], bool),
        response_mask=mask,
        carried_log_probs=old,
        carried_versions=versions,
        routes=routes,
    )


def _to_versions(versions: Any, num_tokens: int) -> np.ndarray | None:
    """Versions of the weights that sampled each token; None without tokens."""
    if versions is None and not num_tokens:
        return None
    return files.column(versions, torch.int32, length=num_tokens).numpy()
