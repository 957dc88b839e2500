"""Judged samples on disk, from which an evaluation resumes and its figures can be recomputed.

    OUTPUT/settings.json                 settings of all samples in the folder
    OUTPUT/aime24/problems.json          digest of the problem file
    OUTPUT/aime24/seed_0/aime24-0.jsonl  some problems, one per line, with all of their samples

A file is named after its first problem (`file_name`) and written atomically, by any rank. So a kill
loses only the samples that are being generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.documents import differences, read_object
from gapo_megatron.io.files import file_name, write_atomically
from gapo_megatron.types import Outcome, Verdict


@dataclass(frozen=True, slots=True)
class Sample:
    """A judged response to a problem."""

    response: str
    """Text without special tokens, of what an environment appended, too."""
    verdict: Verdict
    num_tokens: int
    """Number of sampled tokens, with EOS."""
    truncated: bool
    instructions: tuple[Outcome, ...] = ()
    """IFEval: outcome of each instruction, first all strict, then all loose."""
    num_turns: int = 0
    """The model's turns, if an environment answers it; 0 too if its first call failed."""
    num_calls: int = 0
    """Calls of the environment."""
    num_errors: int = 0
    """Calls that failed."""

    @property
    def is_answered(self) -> bool:
        """Whether it is known that an environment answers the model."""
        return bool(self.num_turns or self.num_calls)


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


_SOLVED = TypeAdapter(Solved)


def seed_folder(output_dir: Path, benchmark: str, seed: int) -> Path:
    """Folder of the samples of one benchmark and seed."""
    return output_dir / benchmark / f"seed_{seed}"


def write_samples(folder: Path, problems: Sequence[Solved]) -> None:
    """Write new problems as one file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(asdict(problem), ensure_ascii=False) + "\n" for problem in problems)
    # A response or a program's message may contain a lone surrogate, which UTF-8 cannot encode.
    text = "".join(lines).encode("utf-8", "replace").decode("utf-8")
    write_atomically(folder / f"{file_name(problems[0].id)}.jsonl", text)


def read_samples(folder: Path) -> dict[str, Solved]:
    """All problems of one benchmark and seed that have samples, by id.

    Raises:
        DataError: a file is damaged, or two contain the same problem.
    """
    return {problem.id: problem for problem in _read(folder)}


def read_ids(folder: Path) -> set[str]:
    """Ids of the problems that have samples, in little memory; raises as `read_samples`."""
    return {problem.id for problem in _read(folder)}


def _read(folder: Path) -> Iterator[Solved]:
    found: set[str] = set()
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                problem = _SOLVED.validate_json(line, strict=True)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                place = ".".join(map(str, first["loc"]))
                why = f"not a problem with its samples ({place}: {first['msg']})"
            else:
                why = f"problem {problem.id} is in another file too" if problem.id in found else ""
            if why:
                raise DataError(
                    f"{path}:{number}: {why}; remove the file to sample its problems again"
                )
            found.add(problem.id)
            yield problem


def keep_settings(path: Path, settings: dict[str, Any], *, done: str = "drawn") -> None:
    """Write the settings of samples, or check that existing samples have the same ones.

    Args:
        path: the file.
        settings: JSON values.
        done: verb for the message: samples were `drawn` or `judged` with these settings.

    Raises:
        ConfigError: existing samples have other settings, which are named; or the file is damaged.
    """
    try:
        before = read_object(path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, indent=2) + "\n")
    else:
        if changed := [*differences(before, settings)]:
            raise ConfigError(
                f"{path.parent} has samples {done} with other settings "
                f"({'; '.join(changed)}): use another --output, or remove the folder"
            )
