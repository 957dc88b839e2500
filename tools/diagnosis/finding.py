"""One line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gapo_megatron.launch.node_checks import Check

Status = Literal["ok", "warn", "fail"]
"""ok: fine. warn: works, or is not needed on this machine. fail: training cannot run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    section: str
    name: str
    status: Status
    detail: str
    advice: str = ""
    """What to do about it; empty if it is ok."""


def judge(
    section: str, name: str, good: bool, detail: str, advice: str, *, bad: Status = "fail"
) -> Finding:
    """A finding that is ok if `good`, else `bad` with advice."""
    return Finding(section, name, *(("ok", detail) if good else (bad, detail, advice)))


def from_check(section: str, check: Check, advice: str, *, bad: Status = "fail") -> Finding:
    """A check of the preflight, as a finding."""
    return judge(section, check.name, check.ok, check.detail, advice, bad=bad)
