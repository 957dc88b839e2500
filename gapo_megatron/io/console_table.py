"""A run's steps for people: a table on a terminal, a line each in a log file."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

# Title, key, format, width: the numbers that tell at a glance whether a run is healthy.
_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}", 6),
    ("length", "rollout/response_length/mean", "{:.0f}", 6),
    ("loss", "loss/policy", "{:+.1e}", 8),
    ("clipped", "clip/fraction_sequences", "{:.1%}", 7),
    ("|ratio-1|", "ratio/abs_deviation", "{:.1e}", 9),
    ("grad norm", "optim/grad_norm", "{:.2e}", 9),
    ("A=0", "groups/zero_advantage_share", "{:.0%}", 4),
    ("mismatch", "mismatch/mean_abs_log_prob_diff", "{:.1e}", 9),
)
_ROWS_PER_HEADER = 20


class ConsoleTable:
    """A row per step on a terminal, `key=value` lines in a log file."""

    def __init__(self, *, num_steps: int) -> None:
        self._console = Console(file=sys.stdout, highlight=False)
        self._num_steps = num_steps
        self._num_shown = 0
        self._seconds = 0.0

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show the step's numbers, its time by stage, tokens/s and the time left."""
        self._seconds += values.get("time/step_s", 0.0)
        self._num_shown += 1
        mean_step_s = self._seconds / self._num_shown
        cells = {"step": f"{step + 1}/{self._num_steps}"}
        for title, key, form, _ in _COLUMNS:
            cells[title] = form.format(values[key]) if key in values else "-"
        cells["seconds"] = f"{values.get('time/step_s', 0.0):.1f}"
        cells["tokens/s"] = f"{values.get('perf/tokens_per_s', 0.0):,.0f}"
        cells["left"] = _clock(mean_step_s * (self._num_steps - step - 1))
        split = _split(values)
        if self._console.is_terminal:
            self._console.print(self._row(cells, split))
        else:
            words = (f"{title.replace(' ', '_')}={cell}" for title, cell in cells.items())
            print(*words, f"split={split.replace(' ', ',')}", flush=True)

    def _row(self, cells: Mapping[str, str], split: str) -> Table:
        """One row of a table whose columns keep their widths; the header returns now and then."""
        widths = {title: width for title, _, _, width in _COLUMNS}
        step_width = 2 * len(str(self._num_steps)) + 1
        widths |= {"step": max(step_width, 4), "seconds": 7, "tokens/s": 9, "left": 8}
        table = Table(box=None, pad_edge=False, show_header=self._num_shown % _ROWS_PER_HEADER == 1)
        for title in cells:
            style = "bold green" if title == "reward" else "bold" if title == "step" else None
            table.add_column(title, justify="right", width=widths[title], style=style, no_wrap=True)
        table.add_column("where the time went", style="dim", no_wrap=True)
        table.add_row(*cells.values(), split)
        return table


def _split(values: Mapping[str, float]) -> str:
    """Shares of the step's time by stage, largest first: `rollout 61% update 30%`."""
    total = values.get("time/step_s", 0.0)
    stages = [
        (seconds / total, key.removeprefix("time/").removesuffix("_s"))
        for key, seconds in values.items()
        if key.startswith("time/") and key != "time/step_s" and total > 0
    ]
    return " ".join(f"{name} {share:.0%}" for share, name in sorted(stages, reverse=True)[:4])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
