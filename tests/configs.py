"""Configs of runs for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapo_megatron.config import Config, parse_config

Sections = Mapping[str, Mapping[str, Any]]

_REQUIRED: Sections = {
    "run": {"output_dir": "unused", "num_steps": 1},
    "model": {"hf_dir": "unused"},
    "data": {"train_path": "unused"},
    "rollout": {"max_response_tokens": 8},
    "reward": {"kind": "exact"},
}


def merged(*layers: Sections) -> dict[str, dict[str, Any]]:
    """Sections whose keys are those of all layers; the last one decides."""
    tree: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, values in layer.items():
            tree[section] = tree.get(section, {}) | dict(values)
    return tree


def config_of(*layers: Sections) -> Config:
    """The keys that a config must have, with short values, under those of the layers."""
    return parse_config(merged(_REQUIRED, *layers), source="test")
