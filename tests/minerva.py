"""Minerva's answers with the units that their own solutions write behind the box."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gapo_megatron.rewards.math.boxes import closing_bracket

_END = re.compile(
    r"\\(?:end|simeq|lambda|\\|[\])])|[.=\[,]|(?<=[a-zA-Z\d}])\s*\$(?!\s*[a-z]*/)|\$\$"
    r"|\s(?:in|is|since|away|brighter|when|about|could|oxygen|times|complete|Since)\b"
)
_NO_UNIT = re.compile(
    r"(?:[\s$\d]|\\quad|\\pm|\{ \})*|/.*|\^.*|.*(?:ferrets|bushels|that the|directions).*"
)
_UNWRAPPED = re.compile(
    r"(?<!mathrm)(?<!text)(?<!text )(?<!operatorname)\{(~?[A-Za-z]+)\}|^\s*([ms])(?=\^)"
)


def units(data: Path) -> list[tuple[str, str]]:
    """Different pairs (reference, the reference with its unit), sorted."""
    rows = json.loads((data / "minerva_math" / "deepscaler_test.json").read_text("utf-8"))
    found = set()
    for row in rows:
        solution = row["solution"]
        start = solution.index("{", solution.rfind("\\boxed"))
        tail = " ".join(solution[closing_bracket(solution, start) :].split())
        unit = tail[: end.start()] if (end := _END.search(tail)) else tail
        unit = unit.replace("$", "").replace("\\quad", "").strip()
        answer = (row["answer"] if isinstance(row["answer"], str) else row["answer"][0]).strip()
        if _NO_UNIT.fullmatch(unit) or answer[-1] not in "0123456789}Z" or "text" in answer:
            continue
        unit = _UNWRAPPED.sub(lambda one: f"\\mathrm{{{one[1] or one[2]}}}", unit)
        unit = unit if "\\" in unit else f"\\text{{ {unit}}}"
        found.add((answer, f"{answer} {unit}"))
    return sorted(found)
