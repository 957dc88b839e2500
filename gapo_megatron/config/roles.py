"""Which settings may change when a run resumes, in a branch, and during a study.

This follows from the roles of the settings (config/section.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from gapo_megatron.config.schema import Config
from gapo_megatron.config.section import (
    HELD_OUT,
    INPUT_PATH,
    LAYOUT,
    LEARNED,
    Role,
    Section,
)

Changes = dict[str, tuple[Any, Any]]
"""Setting -> (value before, value now), for settings that differ."""

_SECTIONS = Config.sections()
_ROLES = {
    f"{section}.{name}": role
    for section, model in _SECTIONS.items()
    for name, role in model.roles().items()
}
_PATHS = frozenset(
    f"{section}.{name}"
    for section, model in _SECTIONS.items()
    for name, field in model.model_fields.items()
    if INPUT_PATH in field.metadata
) | {"data.source.path"}


ALLOWABLE = tuple(
    name
    for name, role in _ROLES.items()
    if name not in _PATHS and not role.fixed and (not role.study or role.picks_groups)
)
"""What `run.allow_changes` may name: settings that decide what a run learns, at least in some runs.
"""


def role_of(name: str) -> Role:
    """Role of a setting `section.key` or of a section; a manifest may hold unknown names."""
    section = _SECTIONS.get(name.partition(".")[0])
    return _ROLES.get(name, section.role if section else LEARNED)


def is_setting(name: str) -> bool:
    """Whether there is a setting `section.key`."""
    return name in _ROLES


def is_input(name: str) -> bool:
    """Whether a setting is a path that a run reads."""
    return name in _PATHS


def is_held_out(name: str) -> bool:
    """Whether a setting names held-out problems."""
    return role_of(name) == HELD_OUT


def changes(before: Mapping[str, Any], config: Config) -> Changes:
    """Settings that differ from a manifest's config and may not change freely in a resume."""
    return {
        name: pair for name, pair in _differing(before, config).items() if not role_of(name).resume
    }


def changed_layout(before: Mapping[str, Any], config: Config) -> Changes:
    """Settings of the parallel layout that differ: where a layer or a token is computed.

    `overlap_grad_reduce` moves neither.
    """
    return {
        name: pair
        for name, pair in _differing(before, config).items()
        if name.startswith("parallel.") and role_of(name) == LAYOUT
        if name != "parallel.overlap_grad_reduce"
    }


def changed_work(before: Mapping[str, Any], config: Config) -> Changes:
    """Settings that differ and decide what a run of a study computes, not only how."""
    return {
        name: pair
        for name, pair in _differing(before, config).items()
        if not role_of(name).study or _picks_groups(name, config)
    }


def broken_rules(before: Mapping[str, Any], config: Config) -> list[str]:
    """List the changes that a branch must not make: a line for each with field, values, reason."""
    lines = []
    for name, (there, here) in _differing(before, config).items():
        if not role_of(name).branch or _picks_groups(name, config):
            section = _SECTIONS.get(name.partition(".")[0], Section)
            lines.append(f"{name} is {there!r} there and {here!r} here: {section.kept}")
    return lines


def flat(config: Config) -> dict[str, Any]:
    """Every setting by its full name, `section.key`, with its JSON value."""
    return dict(_flat(config.model_dump(mode="json")))


def _picks_groups(name: str, config: Config) -> bool:
    """Whether the setting decides which groups a run with this config learns from."""
    return config.batch.oversampling > 1 and role_of(name).picks_groups


def _differing(before: Mapping[str, Any], config: Config) -> Changes:
    there, here = dict(_flat(before)), flat(config)
    return {
        name: (there.get(name), here.get(name))
        for name in dict.fromkeys([*there, *here])
        if not _agree(name, there.get(name), here.get(name))
    }


def _agree(name: str, there: Any, here: Any) -> bool:
    # A manifest may hold a value of any type.
    if name == "data.source":  # what is in the files is compared when they are read
        there, here = _without_paths(there), _without_paths(here)
    if name == "objective.routing_replay":
        there, here = ("trainer" if one is None else one for one in (there, here))
    if name in _PATHS and there and here and isinstance(there, str) and "\0" not in there:
        return os.path.realpath(there) == os.path.realpath(here)
    return bool(there == here)


def _without_paths(sources: Any) -> Any:
    """The sources of a manifest by what they are, not by where their files lie."""
    if not isinstance(sources, list):
        return sources
    return [
        {key: value for key, value in one.items() if key != "path"}
        if isinstance(one, Mapping)
        else one
        for one in sources
    ]


def _flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings by `section.key`; a sub-table is one value. A manifest may hold anything."""
    for section, values in tree.items():
        if isinstance(values, Mapping):
            yield from ((f"{section}.{key}", value) for key, value in values.items())
        else:
            yield section, values
