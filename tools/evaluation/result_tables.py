"""Tables of an evaluation's results."""

from __future__ import annotations

from gapo_tools.evaluation.benchmarks import BENCHMARKS
from gapo_tools.evaluation.results import Results, SeedResult
from gapo_tools.evaluation.statistics import SOLVED_ABOVE, num_solved
from gapo_tools.evaluation.table import Table, mean, percent, with_interval


def powers_of_two(limit: int) -> list[int]:
    """Powers of two below `limit`, and `limit`."""
    return sorted({2**i for i in range(limit.bit_length()) if 2**i < limit} | {limit})


def results_tables(results: Results) -> list[Table]:
    """Tables of one evaluation: pass@k, samples, IFEval's accuracies, and an environment's calls.

    The last two only if there are any.
    """
    tables = [_pass_table(results), _samples_table(results)]
    if any(seed.instructions for seeds in results.benchmarks.values() for seed in seeds.values()):
        tables.append(_instructions_table(results))
    if any(seed.environment for seeds in results.benchmarks.values() for seed in seeds.values()):
        tables.append(_environment_table(results))
    return tables


def _pass_table(results: Results) -> Table:
    num_samples = results.sampling.num_samples
    ks = powers_of_two(num_samples)
    rows, num_seeds = [], set()
    for name in ["average", *results.benchmarks]:
        values = [results.values(name, k) for k in ks]
        if values[0]:
            rows.append([title(name), *map(with_interval, values)])
            num_seeds.add(len(values[0]))
    notes = []
    if num_seeds != {1}:
        notes.append(
            f"± is the 95 % interval of the mean (Student's t) over "
            f"{' or '.join(map(str, sorted(num_seeds)))} sampling seeds."
        )
    left = [
        f"{title(name)} {min(seed.problems_at_k[-1] for seed in seeds.values())} of "
        f"{max(len(seed.counts) for seed in seeds.values())}"
        for name, seeds in results.benchmarks.items()
        if any(seed.problems_at_k[-1] < len(seed.counts) for seed in seeds.values())
    ]
    if left:
        notes.append(
            f"Unknown verdicts do not count, so pass@{num_samples} is over fewer problems "
            f"({', '.join(left)})."
        )
    return Table(
        f"{results.model}: pass@k in %, {results.sampling.text}",
        ["benchmark", *(f"pass@{k}" for k in ks)],
        rows,
        notes=notes,
    )


def _samples_table(results: Results) -> Table:
    solved = f"solved > {100 * SOLVED_ABOVE:g} %"
    columns = ["benchmark", "problems", solved, "seeds", "tokens", "truncated %", "unknown %"]
    rows = []
    for name, by_seed in results.benchmarks.items():
        seeds = list(by_seed.values())
        rows.append(
            [
                title(name),
                str(len(seeds[0].counts)),
                f"{mean([_num_solved(seed) for seed in seeds]):.1f}",
                str(len(seeds)),
                f"{mean([seed.response_tokens for seed in seeds]):.0f}",
                percent(mean([seed.truncated for seed in seeds])),
                percent(mean([seed.unknown_verdicts for seed in seeds]), digits=2),
            ]
        )
    return Table(
        "Samples: problems that more of them solve than the share given, mean length, share "
        "truncated at T_max, share with unknown verdict",
        columns,
        rows,
    )


def _num_solved(seed: SeedResult) -> int:
    return num_solved(correct / known for known, correct in seed.counts.values() if known)


def _environment_table(results: Results) -> Table:
    rows = []
    for name, by_seed in results.benchmarks.items():
        found = [seed.environment for seed in by_seed.values() if seed.environment]
        if not found:  # every episode ended before its first turn and its first call
            continue
        turns, calls, errors = (
            mean([one[key] for one in found]) for key in ("turns", "calls", "error_share")
        )
        rows.append([title(name), f"{turns:.2f}", f"{calls:.2f}", percent(errors, digits=2)])
    return Table(
        f"Environment {results.sampling.environment}: turns of the model and calls per sample, "
        "share of calls that failed",
        ["benchmark", "turns", "calls", "failed %"],
        rows,
    )


def _instructions_table(results: Results) -> Table:
    columns = ["IFEval", "strict", "loose"]
    rows = []
    for unit, shown in {"prompt": "prompts", "instruction": "instructions"}.items():
        cells = [
            with_interval([seed.instructions[f"{unit}_{mode}"] for seed in by_seed.values()])
            for by_seed in results.benchmarks.values()
            if all(seed.instructions for seed in by_seed.values())
            for mode in ("strict", "loose")
        ]
        rows.append([shown, *cells])
    return Table("Followed, in % of known verdicts", columns, rows)


def title(benchmark: str) -> str:
    """Title of a benchmark's column or row."""
    if benchmark == "average":
        return "Avg."
    return BENCHMARKS[benchmark].title if benchmark in BENCHMARKS else benchmark
