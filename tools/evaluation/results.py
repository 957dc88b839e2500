"""Results of an evaluation: figures from judged samples, and the file `results.json`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gapo_megatron.errors import DataError
from gapo_megatron.evaluate.pass_at_k import mean_pass_at_k
from gapo_megatron.io.documents import read_json
from gapo_megatron.io.files import write_atomically
from gapo_megatron.types import Outcome
from gapo_tools.evaluation.benchmarks import BENCHMARKS
from gapo_tools.evaluation.paper import Sampling
from gapo_tools.evaluation.samples import Sample, Solved, read_samples, seed_folder

RESULTS_FILE = "results.json"


def in_order(names: Iterable[str]) -> list[str]:
    """Benchmarks in the order of the paper's columns, the user's own after them by name."""
    given = set(names)
    return [name for name in BENCHMARKS if name in given] + sorted(given - BENCHMARKS.keys())


@dataclasses.dataclass(frozen=True, slots=True)
class SeedResult:
    """One benchmark under one seed. Shares and rates are in 0..1."""

    pass_at_k: list[float]
    """[n], k = 1..n: mean over the problems with at least k known verdicts; NaN if there are none.
    """
    problems_at_k: list[int]
    """[n]: number of these problems."""
    unknown_verdicts: float
    """Share of samples with an unknown verdict, which do not count."""
    truncated: float
    """Share of samples that reached the token limit."""
    response_tokens: float
    """Mean number of tokens per sample."""
    counts: dict[str, tuple[int, int]]
    """Problem -> number of known verdicts, and of correct samples."""
    instructions: dict[str, float] = dataclasses.field(default_factory=dict)
    """IFEval's four accuracies; empty for other benchmarks."""
    environment: dict[str, float] = dataclasses.field(default_factory=dict)
    """The model's `turns` and the environment's `calls` per sample, and `error_share`, the share of
    calls that failed; empty without an environment that answers the model."""


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """Content of `results.json`."""

    model: str
    setting: str
    """Name in paper_tables.toml, for published figures; or ""."""
    sampling: Sampling
    files: dict[str, str]
    """Benchmark -> SHA-256 of its problem file, or of all its files."""
    benchmarks: dict[str, dict[int, SeedResult]]
    """Name -> seed -> figures, in the order of `in_order`."""
    template_date: str = ""
    """Date in the prompts, YYYY-MM-DD; empty: their chat template has none."""

    def values(self, benchmark: str, k: int) -> list[float]:
        """pass@k by seed; `average` is the mean of the paper's six mathematical benchmarks.

        Empty if the benchmark, or one of the six, was not evaluated.
        """
        if benchmark != "average":
            return [seed.pass_at_k[k - 1] for seed in self.benchmarks.get(benchmark, {}).values()]
        six = [name for name, one in BENCHMARKS.items() if one.in_average]
        seeds = set.intersection(*(set(self.benchmarks.get(name, {})) for name in six))
        return [
            math.fsum(self.benchmarks[name][seed].pass_at_k[k - 1] for name in six) / len(six)
            for seed in sorted(seeds)
        ]


def measure(problems: Sequence[Solved], *, num_samples: int) -> SeedResult:
    """Compute the figures of one benchmark under one seed.

    Args:
        problems: all problems of the benchmark.
        num_samples: n, samples per problem.
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
        environment=_environment_figures(samples),
    )


def _environment_figures(samples: Sequence[Sample]) -> dict[str, float]:
    if not any(sample.is_answered for sample in samples):
        return {}
    num_calls = sum(sample.num_calls for sample in samples)
    return {
        "turns": sum(sample.num_turns for sample in samples) / len(samples),
        "calls": num_calls / len(samples),
        "error_share": sum(sample.num_errors for sample in samples) / max(num_calls, 1),
    }


def _instruction_accuracies(samples: Sequence[Sample]) -> dict[str, float]:
    """Shares of followed instructions and of samples that follow all; known verdicts only."""
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
    date: str = "",
    files: dict[str, str],
    problem_ids: dict[str, Iterable[str]],
    seeds: Sequence[int],
) -> Results:
    """Measure every benchmark and seed with samples of all problems; skip the others.

    Args:
        output_dir: folder of the evaluation. Other benchmarks and seeds in its `results.json` stay,
            because all samples in a folder have the same settings and weights.
        model: Hugging Face folder.
        setting: see `Results`; "" keeps the one in `results.json`.
        sampling: sampling settings.
        date: see `Results.template_date`.
        files: see `Results`.
        problem_ids: ids of the problems by benchmark.
        seeds: seeds to look for.

    Raises:
        DataError: existing samples or results are damaged.
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
                        f"{len(one.samples)} samples, not {sampling.num_samples}; remove its file "
                        "to sample its problems again"
                    )
            if all(problem in kept for problem in ids):
                found.setdefault(name, {})[seed] = measure(
                    [kept[problem] for problem in ids],
                    num_samples=sampling.num_samples,
                )
    ordered = {name: dict(sorted(found[name].items())) for name in in_order(found)}
    files = {name: files[name] for name in ordered}
    return Results(model, setting, sampling, files, ordered, date)


def write_results(results: Results, output_dir: Path) -> Path:
    """Write `results.json`; NaN becomes null."""
    path = output_dir / RESULTS_FILE
    write_atomically(path, json.dumps(_without_nan(dataclasses.asdict(results)), indent=1) + "\n")
    return path


def read_results(output_dir: Path) -> Results:
    """Read the file of `write_results`.

    Raises:
        DataError: the folder has none, or it is damaged.
    """
    path = output_dir / RESULTS_FILE
    try:
        raw = read_json(path, error=DataError)
    except FileNotFoundError:
        raise DataError(f"{output_dir}: has no {RESULTS_FILE} of an evaluation") from None
    try:
        # JSON has no NaN: it is written as null, which nothing else is.
        text = json.dumps(_with_nan(raw))
        results = TypeAdapter(Results).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{path}: damaged: {place}: {first['msg']}; remove it and run the command "
            "that wrote it again"
        ) from None
    return results


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
