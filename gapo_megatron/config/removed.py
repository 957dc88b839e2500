"""Settings of older versions: a file that leaves one as it was still loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Removed:
    """A setting that there is no more."""

    defaults: tuple[Any, ...]
    """Its former default values: run folders and archives hold them, and they change nothing."""
    instead: str
    """Advice on what to write instead of another value."""


REMOVED = {
    "rollout.verify_sequences": Removed(
        defaults=(4,),
        instead="there is no such setting any more: every weight sync compares 4 sequences. "
        "Remove the line; rollout.verify_bound sets how far they may differ",
    ),
    "metrics.noise_floor_every_steps": Removed(
        defaults=(0, 50, 100),  # as configs of this package had them
        instead="the noise floor is no longer measured; metrics.rounding_every_steps says how "
        "often a step's ratios are compared with those without rounding (docs/numerics.md)",
    ),
    "metrics.noise_floor_limit": Removed(
        defaults=(1.0, 100),
        instead="the noise floor is no longer measured, and no run is refused for it. Remove the "
        "line; numerics/ratio_correlation says whether the clip decides on rounding",
    ),
}


def drop_removed(tree: Any) -> Any:
    """A config's tree without the removed settings that have their former default."""
    if not isinstance(tree, dict):
        return tree
    for name, removed in REMOVED.items():
        section, _, key = name.partition(".")
        values = tree.get(section)
        if isinstance(values, dict) and key in values and values[key] in removed.defaults:
            kept = {one: value for one, value in values.items() if one != key}
            tree = {**tree, section: kept}
    return tree
