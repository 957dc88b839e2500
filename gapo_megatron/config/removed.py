"""Settings of older versions: a file that has one at its former default still loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Removed:
    """A setting that no longer exists."""

    defaults: tuple[Any, ...]
    """Former default values. Run folders and archives hold them; they are ignored."""
    instead: str
    """What to write instead, for any other value."""


REMOVED = {
    "rollout.verify_sequences": Removed(
        defaults=(4,),
        instead="this setting was removed: every weight sync compares 4 sequences. "
        "Remove the line; rollout.verify_bound sets how far they may differ",
    ),
    "metrics.noise_floor_every_steps": Removed(
        defaults=(0, 50, 100),  # as configs of this package had them
        instead="the noise floor is no longer measured; metrics.rounding_every_steps sets how "
        "often a step's ratios are compared with unrounded ones (docs/numerics.md)",
    ),
    "metrics.noise_floor_limit": Removed(
        defaults=(1.0, 100),
        instead="the noise floor is no longer measured, and no run is refused for it. Remove the "
        "line; the metric numerics/ratio_correlation shows whether rounding decides what is "
        "clipped",
    ),
}


def drop_removed(tree: Any) -> Any:
    """Drop removed settings that have their former default from the tree of a config."""
    if not isinstance(tree, dict):
        return tree
    for name, removed in REMOVED.items():
        section, _, key = name.partition(".")
        values = tree.get(section)
        if isinstance(values, dict) and key in values and values[key] in removed.defaults:
            kept = {one: value for one, value in values.items() if one != key}
            tree = {**tree, section: kept}
    return tree
