"""Kill a generation rank in every phase of a step, and see how the run goes on.

    PYTHONPATH=. python -m benchmarks.lost_ranks [--folder /tmp/lost_ranks]

One rank that trains and two that generate, gloo, real Megatron-core and vLLM: a run of six steps
without a kill, then one for each kill, compared with it byte for byte (metrics, samples, tokens,
weights; in an environment without what the rounding of vLLM's batches decides).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.dying import Death
from tests.run.test_lost_ranks_train import (
    ENVIRONMENT,
    differing,
    in_environment,
    run,
    seconds_to_train,
)
from tests.train_setup import CONFIG, assert_same_run, prepare

PHASES = {
    "idle": ("idle", (5, 30, 60)),
    "sampling": ("decodes", (3, 11, 20)),
    "tool call": ("calls", (5, 20, 33)),
    "verdicts": ("judges", (1, 2, 4)),
    "transfer": ("receives weights", (1, 2, 4)),
    "verify": ("verifies", (1, 2, 4)),
}
"""Moment of `tests.dying`, and how often it comes before the kill."""


def is_equal(root: Path, name: str, *, has_calls: bool) -> bool:
    """Whether a run has learned the same as the one without a kill."""
    if has_calls:
        return not differing(root, name, "calm")
    try:
        assert_same_run(root / name, root / "undisturbed")
    except AssertionError as error:
        print(f"{name}: {str(error).partition(chr(10))[0]}")
        return False
    return True


def main() -> None:
    """Print a row for each phase."""
    parser = argparse.ArgumentParser(description="Kill generation ranks in every phase of a step.")
    parser.add_argument("--folder", type=Path, help="for the runs; default: a temporary one")
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    (folder / "adds.py").write_text(ENVIRONMENT)
    prepare(folder, CONFIG)
    run(folder, "undisturbed")
    run(folder, "calm", in_environment(folder))
    print("| killed while | times | equal | s until the next update: median, most |", flush=True)
    for phase, (moment, counts) in PHASES.items():
        num_equal, seconds = 0, []
        settings = [in_environment(folder)] if moment == "calls" else []
        for rank in (1, 2):
            for count in counts:
                name = f"{moment.replace(' ', '_')}_{rank}_{count}"
                output = run(folder, name, *settings, deaths=[Death(rank, moment, count)])
                assert "is gone" in output, f"nobody died: {name}"
                num_equal += is_equal(folder, name, has_calls=moment == "calls")
                seconds.append(seconds_to_train(folder, name))
        times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}"
        print(f"| {phase} | {len(seconds)} | {num_equal} | {times} |", flush=True)


if __name__ == "__main__":
    main()
