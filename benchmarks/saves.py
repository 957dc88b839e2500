"""How long training waits for a checkpoint: all of it, or until what is written is copied.

    python benchmarks/saves.py              (needs the model of studies/language/README.md)
    python benchmarks/saves.py --repetitions 5 -- model.hf_dir=MODEL model.precision=fp32

One rank. Each repetition saves twice, in turns, after an update: once as training waits for it, and
once in the background, where updates follow until the files are written and it is published. The
first repetition is dropped. "Blocked" is what training waits for: beginning and publication. The
memory of the copies is kept, as in a run with `checkpoint.background`, so its first use is in the
repetition that is dropped, whose times are printed apart. Beside it, how long it takes to copy as
many bytes as the checkpoint has from one place in memory to another that is in use: the least that
training could wait for. An update has 2 sequences of 64 tokens, and is timed without a save, too.
All figures but ratios are seconds or MiB; ratios are of the same repetition.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gapo_megatron import checkpoint
from gapo_megatron.checkpoint import Room, State
from gapo_megatron.config import load_config
from gapo_megatron.learn.update import update
from gapo_megatron.policy import Policy, initialize
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.run import process_group

CONFIG = Path(__file__).resolve().parents[1] / "configs/demo_language.toml"
OWNER = SimpleNamespace(name="benchmark", alive=lambda: None, require_ownership=lambda: None)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the result."""
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def copying(mib: float) -> float:
    """Seconds of a copy from memory to memory that has been written to before."""
    source, target = (torch.ones(int(mib * 2**18)) for _ in range(2))
    return timed(lambda: target.copy_(source))[0]


def main() -> None:
    """Measure, and print the medians with the least and the greatest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the config")
    arguments = parser.parse_args()
    config = load_config(CONFIG, ["model.precision=bf16", *arguments.overrides])
    world = process_group.start(config.parallel.timeout_s)
    policy = Policy.build(config, initialize(config.parallel), world.device)
    policy.load_initial_weights()
    ids = np.random.default_rng(0).integers(100, 40000, (2, 64), dtype=np.int32)
    batch = policy.pack(Rollouts.of(ids[:, :1], ids[:, 1:]), range(2))

    def learn() -> None:
        update(policy, [batch], lambda scored: (-scored.log_probs.mean(), {}))

    rows: list[dict[str, float]] = []
    room = Room()
    with tempfile.TemporaryDirectory() as folder:
        of_run: dict[str, Any] = {"policy": policy, "config": config, "attempt": OWNER}
        for repetition in range(1 + arguments.repetitions):
            update_s, _ = timed(learn)
            policy.make_room()
            whole_s, path = timed(lambda: checkpoint.save(folder, State(step=1), **of_run))
            mib = sum(file.stat().st_size for file in path.iterdir()) / 2**20
            learn()
            policy.make_room()
            begun_s, saving = timed(
                lambda: checkpoint.begin_save(
                    folder, State(step=1), in_background=True, room=room, **of_run
                )
            )
            assert saving.in_background, "too little memory"
            beside: list[float] = []
            while not saving.is_written():
                beside.append(timed(learn)[0])
            published_s, _ = timed(saving.finish)
            row = {"checkpoint, MiB": mib, "update": update_s, "waited for": whole_s}
            row |= {"in the background: blocked": begun_s + published_s}
            row |= {"until it was copied": begun_s, "for its publication": published_s}
            row |= {"a copy of as many bytes": copying(mib)}
            row |= {"until it was whole": saving.whole_s}
            row |= {"update beside it": statistics.median(beside)}
            row |= {"blocked / waited for, %": 100 * (begun_s + published_s) / whole_s}
            row |= {"update beside it / update": statistics.median(beside) / update_s}
            if repetition == 0:
                print(f"dropped: blocked {begun_s + published_s:.4g}, copied after {begun_s:.4g}")
                continue
            rows.append(row)
    print("| | median | least | greatest |\n|---|---|---|---|")
    for name in rows[0]:
        values = [row[name] for row in rows]
        print(
            f"| {name} | {statistics.median(values):.4g} | {min(values):.4g} | {max(values):.4g} |"
        )


if __name__ == "__main__":
    main()
