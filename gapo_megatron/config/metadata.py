"""The role of a setting: who may change it, and what a change of it means.

Every section of `Config` states the role of its settings, and a setting with another one carries it
in its annotation: `seed: Annotated[Seed, SEED] = 0`. All lists of settings are read from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Rules for changing a setting's value. The defaults are the strictest."""

    resume: bool = False
    """It may change when a run resumes. A change of another setting is logged, and a step that a
    stop interrupted begins again."""
    branch: bool = False
    """It may change in a branch."""
    study: bool = False
    """It may change while a run of a study is not finished."""
    arm: bool = True
    """A report takes runs with different values for different arms."""
    step: bool = True
    """A training step depends on it, if only in its speed."""
    picks_groups: bool = False
    """It decides which of the over-sampled groups an engine finishes first, because it decides how
    many engines there are, or what fits into their caches. A branch and a study then keep it."""
    carried: bool = False
    """Unfinished responses go on with the value that they began with: otherwise their tokens would
    be samples of no distribution."""


class InputPath:
    """Marks a path that a run reads. Two spellings of one place are the same value."""


LEARNED = Role()
"""Role of settings that decide what the policy learns from, and how."""
SAMPLED = replace(LEARNED, carried=True)
"""The distribution that responses are sampled from."""
SEED = Role(arm=False, step=False)
"""Runs of one arm differ in it alone."""
OBJECTIVE = Role(branch=True)
"""Role of settings that a branch may exchange."""
HOW = Role(branch=True, study=True, arm=False)
"""Role of settings that decide how a stage computes, not what it computes."""
ENGINE = replace(HOW, picks_groups=True)
LAYOUT = Role(resume=True, branch=True, study=True, arm=False)
"""Role of settings that decide where numbers are computed and kept."""
SIDES = replace(LAYOUT, picks_groups=True)
"""Role of settings that decide which ranks generate, and which train."""
LIFE = replace(LAYOUT, step=False)
"""Role of settings that decide how long a run goes on, what it writes and what it checks."""
MEASURED = replace(LIFE, arm=True)
"""No step depends on it, but numbers that a report compares do."""
HELD_OUT = Role(branch=True, step=False)
"""The problems that a run is evaluated on: a curve of a study shows one data set."""

INPUT_PATH = InputPath()
