"""Judged samples on disk: what makes an evaluation resume, and its figures reproducible.

    OUTPUT/settings.json                 how all samples are drawn; others never mix
    OUTPUT/aime24/problems.json          which file the problems are from
    OUTPUT/aime24/seed_0/aime24-0.jsonl  some problems, one a line, with all of their samples

A file is named after its first problem and appears whole or not at all, so a kill loses only what
was being generated; which rank wrote it does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapo_megatron.data.rows import read_lines
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.documents import read_json
from gapo_megatron.io.files import write_atomically
from gapo_megatron.types import Outcome, Verdict


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to a problem, judged."""

    response: str
    """Text, without special tokens."""
    verdict: Verdict
    num_tokens: int
    """EOS included."""
    truncated: bool
    instructions: tuple[Outcome, ...] = ()
    """IFEval: of each instruction alone, strict, and then of each loose."""


@dataclass(frozen=True, slots=True)
class Solved:
    """One problem with all of its samples."""

    id: str
    level: str
    samples: tuple[Sample, ...]

    @property
    def num_known(self) -> int:
        """Samples whose verdict is known."""
        return sum(sample.verdict.outcome is not Outcome.UNKNOWN for sample in self.samples)

    @property
    def num_correct(self) -> int:
        return sum(sample.verdict.outcome is Outcome.CORRECT for sample in self.samples)


def seed_folder(output_dir: Path, benchmark: str, seed: int) -> Path:
    """Folder of the samples of one benchmark and seed."""
    return output_dir / benchmark / f"seed_{seed}"


def write_samples(folder: Path, problems: Sequence[Solved]) -> None:
    """Keep problems, none of which is there yet, as one file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(_to_json(problem), ensure_ascii=False) + "\n" for problem in problems)
    # A lone half of a surrogate pair, in a response or a program's complaint, has no form in UTF-8.
    text = "".join(lines).encode("utf-8", "replace").decode("utf-8")
    write_atomically(folder / f"{problems[0].id}.jsonl", text)


def read_samples(folder: Path) -> dict[str, Solved]:
    """Everything kept of one benchmark and seed, by problem; empty if there is nothing yet.

    Raises:
        DataError: a file is damaged, or two hold the same problem.
    """
    return {problem.id: problem for problem in _read(folder)}


def read_ids(folder: Path) -> set[str]:
    """Ids of the problems that are kept; raises as `read_samples`, without its memory."""
    return {problem.id for problem in _read(folder)}


def _read(folder: Path) -> Iterator[Solved]:
    found: set[str] = set()
    for path in sorted(folder.glob("*.jsonl")):
        try:
            for number, row in read_lines(path):
                problem = _from_json(row, where=f"{path}:{number}")
                if problem.id in found:
                    raise DataError(f"{path}:{number}: problem {problem.id} is in another file too")
                found.add(problem.id)
                yield problem
        except DataError as error:
            raise DataError(
                f"{error}; remove the file, and its problems are sampled again"
            ) from None


def keep_settings(path: Path, settings: dict[str, Any], *, done: str = "drawn") -> None:
    """Write what samples depend on, or see that those already there depend on the same.

    Args:
        path: path of the file.
        settings: JSON.
        done: verb for the message: the samples were `drawn` or `judged` under these settings.

    Raises:
        ConfigError: they were not, and what differs is named; or the file is damaged.
    """
    try:
        before = read_json(path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, indent=2) + "\n")
    else:
        if not isinstance(before, dict):
            raise ConfigError(f"{path} must hold an object, not {type(before).__name__}")
        differences = [
            f"{key} was {before.get(key)!r}, is {settings.get(key)!r}"
            for key in sorted(before.keys() | settings.keys())
            if before.get(key) != settings.get(key)
        ]
        if differences:
            raise ConfigError(
                f"{path.parent} holds samples {done} otherwise ({'; '.join(differences)}): give "
                "another --output, or remove it"
            )


def _to_json(problem: Solved) -> dict[str, Any]:
    return {
        "id": problem.id,
        "level": problem.level,
        "samples": [
            {
                "outcome": sample.verdict.outcome,
                "reason": sample.verdict.reason,
                "num_tokens": sample.num_tokens,
                "truncated": sample.truncated,
                **({"instructions": sample.instructions} if sample.instructions else {}),
                "response": sample.response,
            }
            for sample in problem.samples
        ],
    }


def _from_json(row: Any, *, where: str) -> Solved:
    try:
        samples = tuple(map(_sample, row["samples"]))
        return Solved(_typed(row, "id", str), _typed(row, "level", str), samples)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error!s:.200}"
        raise DataError(f"{where}: not a problem with samples ({why})") from None


def _sample(row: Any) -> Sample:
    outcomes = tuple(map(Outcome, row.get("instructions", ())))
    if len(outcomes) % 2:
        raise ValueError("instructions are not as many strict as loose")
    return Sample(
        response=_typed(row, "response", str),
        verdict=Verdict(Outcome(row["outcome"]), _typed(row, "reason", str)),
        num_tokens=_typed(row, "num_tokens", int),
        truncated=_typed(row, "truncated", bool),
        instructions=outcomes,
    )


def _typed(row: dict[str, Any], key: str, kind: type) -> Any:
    if type(row[key]) is not kind:
        raise TypeError(f"{key} ({row[key]!r:.60}) must be {kind.__name__}")
    return row[key]
