"""A run's curves in TensorBoard: all numbers, and a page of those that people look at first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gapo_megatron.io.metric_files import Value

LAYOUT = {
    "learning": {
        "reward": ["reward/mean"],
        "pass@k": ["eval/pass@[0-9]+"],
        "groups without a signal": ["groups/(none|all)_correct_share"],
        "unknown verdicts": ["reward/unknown_share"],
        "response length": ["rollout/response_length/mean"],
        "truncated responses": ["rollout/truncated"],
    },
    "clip": {
        "clipped": ["clip/fraction_(sequences|tokens)", "clip/gradient_mass_lost"],
        "clipped by c, correct responses": ["per_c/correct/clip_fraction_sequences/c[0-9]+"],
        "clipped by c, wrong responses": ["per_c/wrong/clip_fraction_sequences/c[0-9]+"],
        "ratio - 1 by c, correct responses": ["per_c/correct/ratio_deviation/c[0-9]+"],
        "differs from the fixed clip, correct responses": ["clip/dose_(decisions|gradient)"],
        "correlation of ratio and advantage": ["ratio/advantage_correlation_window"],
    },
    "health": {
        "gradient norm": ["optim/grad_norm"],
        "entropy": ["rollout/entropy"],
        "mismatch with the engine": ["mismatch/mean_abs_log_prob_diff"],
        "rounding and signal of the ratios": ["numerics/ratio_(signal|rounding)"],
    },
    "speed": {
        "seconds of a step by stage": ["time/(step|rollout|reward|old_log_probs|update|sync)_s"],
        "tokens per second": ["perf/tokens_per_s"],
    },
}
"""Page "Custom Scalars": per category the charts, each with patterns of the names that it shows."""


def open_tensorboard(run_dir: Path, *, resume_step: int) -> Any:
    """A writer of `run_dir/tensorboard`, with the layout; hides what a resumed run writes again."""
    from torch.utils.tensorboard import SummaryWriter  # 3 s of import, only where it is used

    # Also at step 0: a run killed before its first checkpoint starts again.
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step)
    writer.add_custom_scalars(
        {
            category: {title: ["Multiline", names] for title, names in charts.items()}
            for category, charts in LAYOUT.items()
        }
    )
    return writer


def add_scalars(writer: Any, values: Mapping[str, Value], step: int) -> None:
    """Write all values of a step as one event: two hundred single events take 35 ms."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    scalars = [Summary.Value(tag=key, simple_value=value) for key, value in values.items()]
    writer.file_writer.add_summary(Summary(value=scalars), step)
    writer.flush()
