"""What the page shows of a run: its samples by group, and what the clip did by c, as plain JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from gapo_megatron.config import CONFIG_NAME, Config, load_recorded
from gapo_megatron.errors import DataError
from gapo_megatron.io.metric_files import METRICS_NAME, read_rows
from gapo_megatron.io.sample_files import (
    SAMPLES_NAME,
    read_samples,
    read_timelines,
)
from gapo_megatron.io.token_files import TOKENS_NAME, count_tokens, read_tokens, token_files

Row = dict[str, Any]
"""A response: columns of a file of tokens; without one, those of `Sample` alone."""

MOST_STEPS = 200
"""Most steps on a page, over all its runs; at least two of each run."""
MOST_TOKENS = 2_000_000
"""Most tokens on a page, likewise: some 50 MB. Two steps of a run may have more."""
MOST_OF_RESPONSE = 4000
"""Tokens of one response on a page; of a longer one its middle is left out."""
_MOST_CHARACTERS = {"prompt": 8000, "answer": 400, "reason": 400, "response": 6000}
"""Characters of a text on the page, likewise."""


@dataclass(frozen=True)
class RunData:
    """A run, as the page shows it."""

    name: str
    config: Config
    steps: list[int]
    """Steps on the page."""
    num_left_out: int
    """Steps that have samples but are not on the page."""
    has_tokens: bool
    """Whether there is more than text."""
    groups: list[dict[str, Any]]
    """By step and c: see `_group`."""
    clips: list[dict[str, Any]] = field(default_factory=list)
    """By c: see `clips_by_c`."""

    def head(self) -> dict[str, Any]:
        """What the page says of the run itself."""
        method = self.config.objective.resolve()
        return {
            "name": self.name,
            "method": method.name,
            "ratio": method.ratio,
            "steps": self.steps,
            "leftOut": self.num_left_out,
            "hasTokens": self.has_tokens,
            "hasConversations": any(
                "conversations" in one for group in self.groups for one in group["responses"]
            ),
            "clips": self.clips,
        }


def has_samples(folder: Path) -> bool:
    """Whether a run has anything that `read_data` reads.

    Raises:
        DataError: samples.jsonl is damaged.
    """
    return bool(token_files(folder) or read_samples(folder))


def read_data(
    folder: Path, name: str, *, first: int = 0, last: int | None = None, share: int = 1
) -> RunData:
    """Read a run that has finished, or is still training.

    Args:
        folder: the run's.
        name: what the page calls it.
        first: first step to show.
        last: last step to show; None: the newest.
        share: number of runs on the page.

    Raises:
        DataError: no run, no samples, none of these steps, or a damaged file; names it.
        ConfigError: its config is not valid.
    """
    if not (folder / CONFIG_NAME).exists():
        what = "no such folder" if not folder.exists() else f"no run here ({CONFIG_NAME})"
        raise DataError(f"{folder}: {what}; name the folder of a run (run.output_dir)")
    config = load_recorded(folder / CONFIG_NAME)
    files, lines = token_files(folder), read_samples(folder)
    there = sorted({*files, *(one.step for one in lines)})
    if not there:
        raise DataError(
            f"{folder} has neither {TOKENS_NAME}/ nor {SAMPLES_NAME}: its first step is not done, "
            "or metrics.samples_per_step is 0"
        )
    wanted = [step for step in there if first <= step <= (there[-1] if last is None else last)]
    if not wanted:
        raise DataError(
            f"{folder}: no samples of steps {first} to {last}; there are those of steps "
            f"{there[0]} to {there[-1]}"
        )
    num_tokens = {step: count_tokens(files[step]) for step in wanted if step in files}
    steps = _chosen(wanted, num_tokens, share)
    spans = {
        (one.step, one.problem, one.sample): [asdict(span) for span in one.spans]
        for one in read_timelines(folder)
    }
    by_step = {step: [*found] for step, found in groupby(lines, key=lambda one: one.step)}
    groups = []
    for step in steps:
        rows = read_tokens(files[step]) if step in files else [*map(asdict, by_step[step])]
        groups += _groups(rows, spans)
    return RunData(
        name=name,
        config=config,
        steps=steps,
        num_left_out=len(there) - len(steps),
        has_tokens=bool(files),
        groups=groups,
        clips=clips_by_c(read_rows(folder / METRICS_NAME), config, steps[0], steps[-1]),
    )


def _chosen(steps: Sequence[int], num_tokens: dict[int, int], share: int) -> list[int]:
    """As many steps as the page has room for: the first, the last, and evenly between."""
    total = max(sum(num_tokens.get(step, 0) for step in steps), 1)
    room = min(MOST_STEPS, len(steps) * MOST_TOKENS // total) // share
    places = np.linspace(0, len(steps) - 1, min(max(room, 2), len(steps)))
    return [steps[place] for place in places.round().astype(int).tolist()]


def _groups(rows: Sequence[Row], spans: dict[tuple[int, str, int], Any]) -> list[dict[str, Any]]:
    """The groups of a step, those of a smaller c first."""
    ordered = sorted(rows, key=lambda row: (row["c"], row["problem"], row["sample"]))
    return [
        _group([*found], spans)
        for _, found in groupby(ordered, key=lambda row: (row["c"], row["problem"]))
    ]


def _group(rows: Sequence[Row], spans: dict[tuple[int, str, int], Any]) -> dict[str, Any]:
    """Samples of one problem in one step, and what they have in common."""
    first = rows[0]
    return {
        "step": first["step"],
        "problem": first["problem"],
        "source": first["source"],
        "c": first["c"],
        "k": first["k"],
        "prompt": _cut(first["prompt"], "prompt"),
        "answer": _cut(first["answer"], "answer"),
        "responses": [
            _response(row, spans.get((row["step"], row["problem"], row["sample"]), []))
            for row in rows
        ],
    }


def _response(row: Row, spans: list[dict[str, Any]]) -> dict[str, Any]:
    """A response with short names; numbers of tokens have four digits."""
    names = ("sample", "verdict", "grade", "num_tokens", "truncated")
    found: dict[str, Any] = {name: row[name] for name in names}
    found["reason"] = _cut(row["reason"], "reason")
    if metrics := row.get("metrics"):
        found["metrics"] = metrics
    if spans:
        found["spans"] = spans
    if "pieces" not in row:
        return found | {"pieces": [_cut(row["response"], "response")]}
    more = ("advantage", "update", "ratio", "clip_low", "clip_high", "clipped", "clip_side")
    found |= {name: row[name] for name in more}
    columns = {"pieces": row["pieces"], "ids": row["token_ids"]}
    for name in ("log_ratio", "token_clipped", "policy_versions", "response_mask"):
        columns[name] = row[name]
    columns["log_probs"] = row["old_log_probs"]
    if row["old_log_probs"] is not None:
        pairs = zip(row["old_log_probs"], row["rollout_log_probs"], strict=True)
        columns["mismatch"] = [None if a is None or b is None else a - b for a, b in pairs]
    parts = _parts(row["response_mask"], row["conversations"])
    if len(parts) > 1 or not all(row["response_mask"]):
        found["parts"] = parts
    if any(row["conversations"]):
        columns["conversations"] = row["conversations"]
    if all(row["response_mask"]):
        columns["response_mask"] = None
    if len({*row["policy_versions"]}) == 1:
        columns["policy_versions"] = row["policy_versions"][:1]
    return found | {name: _short(one) for name, one in columns.items() if one is not None}


def _parts(is_sampled: Sequence[bool], conversations: Sequence[int]) -> list[dict[str, int]]:
    """The turns of a response, and what an environment appended between them, in time.

    Returns:
        For each `begin` and `end`, numbers of tokens of the whole response; its `conversation`; and
        `turn`, the number of the turn from 1, or 0 where the environment wrote it.
    """
    found, begin, turn = list[dict[str, int]](), 0, 0
    for (conversation, is_turn), of in groupby(zip(conversations, is_sampled, strict=True)):
        end = begin + len([*of])
        turn += is_turn
        number = turn if is_turn else 0
        found.append({"begin": begin, "end": end, "conversation": conversation, "turn": number})
        begin = end
    return found


def _short(values: list[Any]) -> list[Any]:
    """The column without its middle, and numbers with four digits."""
    if len(values) > MOST_OF_RESPONSE:
        half = MOST_OF_RESPONSE // 2
        values = [*values[:half], *values[-half:]]
    return [float(f"{one:.4g}") if isinstance(one, float) else one for one in values]


def _cut(text: str, name: str) -> str:
    most = _MOST_CHARACTERS[name]
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def clips_by_c(
    rows: Sequence[dict[str, float]], config: Config, first: int, last: int
) -> list[dict[str, Any]]:
    """By c: the width of the clip, and what it did to all sequences of these steps.

    Returns:
        For each c with sequences `c`; `high` and `low`, widths of the clip for responses with A > 0
        and A < 0 (null where the method has none); and for each of `correct` and `wrong` (A > 0 and
        A < 0): the number of `sequences`, and means over them: share `clipped`, `deviation`
        (s - 1), `moved` (its size).
    """
    method = config.objective.resolve()
    shown = [row for row in rows if first <= row["step"] <= last]
    found = []
    for c in range(config.batch.rollouts_per_prompt + 1):
        sides = {side: _side(shown, side, c) for side in ("correct", "wrong")}
        if not any(sides.values()):
            continue
        high = low = None
        if method.is_band:
            high, low = _upper_width(config, c), method.eps_low
        found.append({"c": c, "high": high, "low": low, **sides})
    return found


def _side(rows: Sequence[dict[str, float]], side: str, c: int) -> dict[str, float] | None:
    """Sums over the steps' metrics of a c and a side; None without sequences."""
    counts = np.array([row.get(f"per_c/{side}/sequences/c{c}", 0.0) for row in rows])
    if not counts.sum():
        return None

    def mean(name: str) -> float:
        values = [row.get(f"per_c/{side}/{name}/c{c}", 0.0) for row in rows]
        return float(f"{counts @ np.array(values) / counts.sum():.4g}")

    return {
        "sequences": int(counts.sum()),
        "clipped": mean("clip_fraction_sequences"),
        "deviation": mean("ratio_deviation"),
        "moved": mean("ratio_abs_deviation"),
    }


def _upper_width(config: Config, c: int) -> float:
    """Upper width of the clip for a correct response of a whole group."""
    import torch  # seconds, which a wrong command line need not wait

    from gapo_megatron.objective import upper_clip

    method = config.objective.resolve()
    if not method.adaptive:
        return method.eps_high_max
    width = upper_clip(
        torch.tensor([c]),
        group_size=config.batch.rollouts_per_prompt,
        eps_low=method.floor,
        eps_high_max=method.eps_high_max,
    )
    return float(width)
