"""Sections of the configuration, and the role of a setting: when it may change.

Every section of `Config` names the role of its settings. A setting with a different role has it in
its annotation: `seed: Annotated[Seed, SEED] = 0`. All lists of settings are derived from the roles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Rules for changing a setting's value. The defaults are the strictest."""

    resume: bool = False
    """May change when a run resumes. A change of any other setting is logged, and an interrupted
    step starts over."""
    branch: bool = False
    """May change in a branch."""
    study: bool = False
    """May change while a run of a study is unfinished."""
    arm: bool = True
    """Runs with different values are different arms of a report."""
    step: bool = True
    """A training step depends on it, at least in its speed."""
    picks_groups: bool = False
    """Decides which of the over-sampled groups finish first: it sets the number of engines or the
    size of their caches. With over-sampling, a branch and a study must keep it."""
    fixed: bool = False
    """May not change at all: `run.allow_changes` cannot name it."""
    carried: bool = False
    """Unfinished responses continue with the value that they started with: otherwise their tokens
    would not be samples of one distribution."""


class InputPath:
    """Marks a path that a run reads. Two paths to the same file are the same value."""


LEARNED = Role()
"""Role of settings that decide what the policy learns from, and how."""
SAMPLED = replace(LEARNED, carried=True)
"""Role of settings that decide which distribution responses are sampled from."""
FIXED = Role(fixed=True)
"""Role of settings that decide what a checkpoint holds."""
CHECKED = Role(resume=True, branch=True, study=True)
"""Role of settings that a checkpoint's own record is compared with, by what they lead to."""
SEED = Role(arm=False, step=False)
"""Role of settings that may differ between the runs of one arm."""
OBJECTIVE = Role(branch=True)
"""Role of settings that a branch may change."""
HOW = Role(branch=True, study=True, arm=False)
"""Role of settings that decide how a stage computes, not what it computes."""
ENGINE = replace(HOW, picks_groups=True)
"""Role of settings that size an engine."""
LAYOUT = Role(resume=True, branch=True, study=True, arm=False)
"""Role of settings that decide where numbers are computed and kept."""
SIDES = replace(LAYOUT, picks_groups=True)
"""Role of settings that decide which ranks generate, and which train."""
LIFE = replace(LAYOUT, step=False)
"""Role of settings that decide how long a run lasts, what it writes and what it checks."""
MEASURED = replace(LIFE, arm=True)
"""Role of settings that no step depends on, but numbers that a report compares do."""
HELD_OUT = Role(branch=True, step=False)
"""Role of the held-out problems: each curve of a study is about one data set."""

INPUT_PATH = InputPath()


class Section(BaseModel):
    """A section of a config. Settings have the role of their section or of their annotation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    role: ClassVar[Role]
    """Role of the settings whose annotation names none."""
    kept: ClassVar[str] = "this version does not know it"
    """Why a branch must keep the values of the run that it continues."""

    @classmethod
    def roles(cls) -> dict[str, Role]:
        """The role of each setting, by name."""
        return {
            name: next((one for one in field.metadata if isinstance(one, Role)), cls.role)
            for name, field in cls.model_fields.items()
        }
