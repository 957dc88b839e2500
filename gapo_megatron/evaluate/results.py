"""Results of an evaluation: figures from judged samples; reads and writes `results.json`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gapo_megatron.data.benchmarks import BENCHMARKS
from gapo_megatron.errors import DataError
from gapo_megatron.evaluate.paper import Sampling
from gapo_megatron.evaluate.pass_at_k import mean_pass_at_k
from gapo_megatron.evaluate.samples import Sample, Solved, read_samples, seed_folder
from gapo_megatron.io.documents import read_json
from gapo_megatron.io.files import write_atomically
from gapo_megatron.types import Outcome

RESULTS_FILE = "results.json"


@dataclasses.dataclass(frozen=True, slots=True)
class SeedResult:
    """One benchmark under one seed. Shares and rates are in 0..1."""

    pass_at_k: list[float]
    """[n], k = 1..n: mean over the problems that keep k samples with a known verdict; NaN: none."""
    problems_at_k: list[int]
    """[n], how many problems that is."""
    unknown_verdicts: float
    """Share of samples; they are left out."""
    truncated: float
    """Share of samples that reached the token limit."""
    response_tokens: float
    """Mean."""
    counts: dict[str, tuple[int, int]]
    """Problem -> samples with a known verdict, and how many of them are correct."""
    instructions: dict[str, float]
    """IFEval's four accuracies; empty for other benchmarks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """Content of `results.json`."""

    model: str
    setting: str
    """Name in docs/paper_tables.toml, whose published figures can be set beside; or ""."""
    sampling: Sampling
    files: dict[str, str]
    """Benchmark -> SHA-256 of its problem file; of several, each in turn."""
    benchmarks: dict[str, dict[int, SeedResult]]
    """Name -> seed -> figures, in the order of the paper's columns."""

    def values(self, benchmark: str, k: int) -> list[float]:
        """pass@k by seed; `average` is the mean of the paper's six mathematical benchmarks.

        Empty where the benchmark (or one of the six) was not evaluated.
        """
        if benchmark != "average":
            return [seed.pass_at_k[k - 1] for seed in self.benchmarks.get(benchmark, {}).values()]
        six = [name for name, one in BENCHMARKS.items() if one.in_average]
        seeds = set.intersection(*(set(self.benchmarks.get(name, {})) for name in six))
        return [
            math.fsum(self.benchmarks[name][seed].pass_at_k[k - 1] for name in six) / len(six)
            for seed in sorted(seeds)
        ]

    def solve_rates(self, benchmark: str) -> dict[str, float]:
        """Problem -> mean over seeds of its solve rate; NaN where no verdict is known."""
        totals: Counter[str] = Counter()
        correct: Counter[str] = Counter()
        for seed in self.benchmarks[benchmark].values():
            for problem, (num_known, num_correct) in seed.counts.items():
                totals[problem] += num_known
                correct[problem] += num_correct
        return {
            problem: correct[problem] / total if total else math.nan
            for problem, total in totals.items()
        }


def measure(problems: Sequence[Solved], *, num_samples: int) -> SeedResult:
    """Figures of one benchmark under one seed.

    Args:
        problems: all of the benchmark's.
        num_samples: n, per problem.
    """
    counts = {problem.id: (problem.num_known, problem.num_correct) for problem in problems}
    samples = [sample for problem in problems for sample in problem.samples]
    num_known = sum(known for known, _ in counts.values())
    return SeedResult(
        pass_at_k=[mean_pass_at_k(counts.values(), k) for k in range(1, num_samples + 1)],
        problems_at_k=[
            sum(known >= k for known, _ in counts.values()) for k in range(1, num_samples + 1)
        ],
        unknown_verdicts=1 - num_known / len(samples),
        truncated=sum(sample.truncated for sample in samples) / len(samples),
        response_tokens=sum(sample.num_tokens for sample in samples) / len(samples),
        counts=counts,
        instructions=_instruction_accuracies(samples),
    )


def _instruction_accuracies(samples: Sequence[Sample]) -> dict[str, float]:
    """Shares of followed instructions, and of samples that follow all of theirs; known ones."""
    accuracies = {}
    for mode, half in (("strict", 0), ("loose", 1)):
        parts = [
            sample.instructions[half * len(sample.instructions) // 2 :][
                : len(sample.instructions) // 2
            ]
            for sample in samples
            if sample.instructions
        ]
        if not parts:
            return {}
        worst_first = (Outcome.WRONG, Outcome.UNKNOWN, Outcome.CORRECT)
        by_prompt = [min(part, key=worst_first.index) for part in parts]
        accuracies[f"prompt_{mode}"] = _share_correct(by_prompt)
        accuracies[f"instruction_{mode}"] = _share_correct([one for part in parts for one in part])
    return accuracies


def _share_correct(outcomes: Sequence[Outcome]) -> float:
    known = len(outcomes) - outcomes.count(Outcome.UNKNOWN)
    return outcomes.count(Outcome.CORRECT) / known if known else math.nan


def collect(
    output_dir: Path,
    *,
    model: str,
    setting: str,
    sampling: Sampling,
    files: dict[str, str],
    problem_ids: dict[str, Iterable[str]],
    seeds: Sequence[int],
) -> Results:
    """Measure every benchmark and seed that is kept whole; the others are left out.

    Args:
        output_dir: the evaluation's folder. Other benchmarks and seeds of its `results.json`
            stay: all samples in one folder are drawn alike from the same weights.
        model: Hugging Face folder.
        setting: see `Results`; if "", the one in `results.json` stays.
        sampling: how the samples were drawn.
        files: see `Results`.
        problem_ids: ids of every benchmark's problems.
        seeds: seeds to look for.

    Raises:
        DataError: samples or results that are there are damaged.
    """
    found: dict[str, dict[int, SeedResult]] = {}
    if (output_dir / RESULTS_FILE).exists():
        before = read_results(output_dir)
        found, files, setting = before.benchmarks, before.files | files, setting or before.setting
    for name in problem_ids:
        for seed in seeds:
            kept = read_samples(seed_folder(output_dir, name, seed))
            ids = list(problem_ids[name])
            for one in kept.values():
                if len(one.samples) != sampling.num_samples:
                    raise DataError(
                        f"{seed_folder(output_dir, name, seed)}: problem {one.id} has "
                        f"{len(one.samples)} samples, not {sampling.num_samples}; remove its file, "
                        "and its problems are sampled again"
                    )
            if all(problem in kept for problem in ids):
                found.setdefault(name, {})[seed] = measure(
                    [kept[problem] for problem in ids],
                    num_samples=sampling.num_samples,
                )
    ordered = {name: dict(sorted(found[name].items())) for name in BENCHMARKS if name in found}
    return Results(model, setting, sampling, {name: files[name] for name in ordered}, ordered)


def write_results(results: Results, output_dir: Path) -> Path:
    """Write `results.json`; NaN becomes null."""
    path = output_dir / RESULTS_FILE
    write_atomically(path, json.dumps(_without_nan(dataclasses.asdict(results)), indent=1) + "\n")
    return path


def read_results(output_dir: Path) -> Results:
    """Read what `write_results` wrote.

    Raises:
        DataError: the folder holds none, or it is damaged.
    """
    path = output_dir / RESULTS_FILE
    try:
        raw = read_json(path, error=DataError)
    except FileNotFoundError:
        raise DataError(f"{output_dir}: holds no {RESULTS_FILE} of an evaluation") from None
    try:
        # Of a number null is NaN, which is no number of JSON, and nothing else has one.
        text = json.dumps(_with_nan(raw))
        results = TypeAdapter(Results).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: damaged: {place}: {first['msg']}{_IF_DAMAGED}") from None
    for name, seeds in results.benchmarks.items():
        if why := _flaw(results, name, seeds):
            raise DataError(f"{path}: damaged: benchmarks.{name}: {why}{_IF_DAMAGED}")
    return results


_IF_DAMAGED = "; remove it, and the command that wrote it does so again"


def _flaw(results: Results, name: str, seeds: dict[int, SeedResult]) -> str:
    """Contradiction in a benchmark's figures, or ""."""
    if name not in BENCHMARKS:
        return f"is not one of {', '.join(BENCHMARKS)}"
    if name not in results.files or not seeds:
        return "has no file, or no seed"
    for seed, one in seeds.items():
        if not results.sampling.num_samples == len(one.pass_at_k) == len(one.problems_at_k):
            return f"{seed}: pass_at_k and problems_at_k are not of sampling.num_samples numbers"
        if not one.counts or not all(0 <= right <= known for known, right in one.counts.values()):
            return f"{seed}: counts must be of known verdicts, and how many of them are correct"
        if {*one.instructions} not in (set(), _ACCURACIES):
            return f"{seed}: instructions must be {', '.join(sorted(_ACCURACIES))}"
    return ""


_ACCURACIES = {
    f"{unit}_{mode}" for unit in ("prompt", "instruction") for mode in ("strict", "loose")
}


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_nan(one) for one in value]
    return math.nan if value is None else value


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value
