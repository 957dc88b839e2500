"""A run's steps on the console: a table on a terminal, a line per step in a log file."""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Mapping

# Title, key, format, width. The most important come first: a narrow terminal shows as many as fit.
_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}", 6),
    ("unknown", "reward/unknown_share", "{:.0%}", 7),
    ("clipped", "clip/fraction_sequences", "{:.1%}", 7),
    ("seconds", "time/step_s", "{:.1f}", 7),
    ("left", "left", "", 9),
    ("|ratio-1|", "ratio/abs_deviation", "{:.1e}", 9),
    ("length", "rollout/response_length/mean", "{:.0f}", 6),
    ("grad", "optim/grad_norm", "{:.1e}", 7),
    ("tokens/s", "perf/tokens_per_s", "{:.0f}", 9),
    ("mismatch", "mismatch/mean_abs_log_prob_diff", "{:.1e}", 9),
)
_GAP = "  "
_ROWS_PER_HEADER = 20
_LINE_WIDTH = 120
"""Columns of a line in a log file."""
_RECENT_STEPS = 50
"""Steps whose times predict those of the steps to come."""


class ConsoleTable:
    """Prints the columns of a step that fit a terminal, and a `key=value` line elsewhere.

    All numbers are in metrics.jsonl and timings.jsonl.
    """

    def __init__(self, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._num_shown = 0
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Print the step's numbers, its time and the time left."""
        if self._num_shown == 1:
            self._seconds.clear()  # of a start's first step, in which much happens only once
        self._seconds.append(values.get("time/step_s", 0.0))
        self._num_shown += 1
        left_s = sum(self._seconds) / len(self._seconds) * (self._num_steps - step - 1)
        cells = {"step": self._step(step + 1)}
        for title, key, form, _ in _COLUMNS:
            cells[title] = form.format(values[key]) if key in values else "-"
        cells["left"] = "<" * (self._num_shown == 1) + _clock(left_s)
        if sys.stdout.isatty():
            self._print_row(cells)
        else:
            if not values.get("reward/unknown_share"):
                del cells["unknown"]
            _print_line(cells)

    def show_evaluation(self, num_trained: int, values: Mapping[str, float]) -> None:
        """Print pass@1 and pass@k of the weights after `num_trained` steps on a line."""
        found = {
            key.removeprefix("eval/"): f"{value:.1%}"
            for key, value in values.items()
            if key.startswith("eval/pass@")
        }
        if found:
            _print_line({"step": self._step(num_trained), **found})

    def _step(self, number: int) -> str:
        return f"{number}/{self._num_steps}"

    def _print_row(self, cells: Mapping[str, str]) -> None:
        """Print a row of fixed widths; every 20th has the header."""
        room, shown = shutil.get_terminal_size().columns, []
        of_step = max(2 * len(str(self._num_steps)) + 1, len("step"))
        widths = [of_step, *(width for *_, width in _COLUMNS)]
        for title, width in zip(cells, widths, strict=True):
            room -= width
            if room < 0:
                break
            shown.append((title, width))
            room -= len(_GAP)
        is_first = self._num_shown % _ROWS_PER_HEADER == 1
        header = {title: title for title in cells}
        for row in (header, cells) if is_first else (cells,):
            print(_GAP.join(f"{row[title]:>{width}}" for title, width in shown), flush=True)


def _print_line(cells: Mapping[str, str]) -> None:
    """Print a line for grep: as many of the cells, in order, as fit `_LINE_WIDTH`."""
    line = ""
    for title, cell in cells.items():
        longer = f"{line} {title}={cell}".lstrip()
        if len(longer) > _LINE_WIDTH:
            break
        line = longer
    print(line, flush=True)


def _clock(seconds: float) -> str:
    """`5:07:09`; `5d07h` from 100 hours on, to fit the column."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours > 99:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{rest:02d}"
