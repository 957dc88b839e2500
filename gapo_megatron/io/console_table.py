"""A run's steps on the console: a table on a terminal, a line per step in a log file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

# Title, key, format, width. The most important come first: a narrow terminal shows as many as fit.
_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}", 6),
    ("unknown", "reward/unknown_share", "{:.0%}", 7),
    ("clipped", "clip/fraction_sequences", "{:.1%}", 7),
    ("seconds", "time/step_s", "{:.1f}", 7),
    ("left", "left", "", 8),
    ("loss", "loss/policy", "{:+.1e}", 8),
    ("grad norm", "optim/grad_norm", "{:.2e}", 9),
    ("length", "rollout/response_length/mean", "{:.0f}", 6),
    ("|ratio-1|", "ratio/abs_deviation", "{:.1e}", 9),
    ("tokens/s", "perf/tokens_per_s", "{:,.0f}", 9),
    ("A=0", "groups/zero_advantage_share", "{:.0%}", 4),
    ("mismatch", "mismatch/mean_abs_log_prob_diff", "{:.1e}", 9),
)
_GAP = 2
_ROWS_PER_HEADER = 20
_SPLIT = "time by stage"


class ConsoleTable:
    """Prints a row per step within the terminal's width, or a `key=value` line without a terminal.

    The environment variable COLUMNS overrides the width of both. All numbers are in metrics.jsonl
    and timings.jsonl.
    """

    def __init__(self, *, num_steps: int, columns_are_set: bool) -> None:
        self._columns_are_set = columns_are_set
        self._console = Console(file=sys.stdout, highlight=False, markup=False)
        self._num_steps = num_steps
        self._num_shown = 0
        self._seconds = 0.0

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Print the step's numbers, its time and the time left; more if the width allows."""
        self._seconds += values.get("time/step_s", 0.0)
        self._num_shown += 1
        left_s = self._seconds / self._num_shown * (self._num_steps - step - 1)
        cells = {"step": self._step(step + 1)}
        for title, key, form, _ in _COLUMNS:
            cells[title] = form.format(values[key]) if key in values else "-"
        cells["left"] = _clock(left_s)
        if self._console.is_terminal:
            self._console.print(self._row(cells, values))
        else:
            parts = ",".join(_split(values)).replace(" ", ",")
            self._print_line(cells | {"split": parts})

    def show_evaluation(self, num_trained: int, values: Mapping[str, float]) -> None:
        """Print pass@1 and pass@k of the weights after `num_trained` steps on a line."""
        found = {
            key.removeprefix("eval/"): f"{value:.1%}"
            for key, value in values.items()
            if key.startswith("eval/pass@")
        }
        if not found:
            return
        if self._console.is_terminal:
            step = f"{self._step(num_trained):>{self._step_width}}"
            words = [step, "held out:", *(f"{name} {value}" for name, value in found.items())]
            line = "  ".join(_fitting(words, self._console.width, gap=_GAP))
            self._console.print(line, style="bold")
        else:
            self._print_line({"step": self._step(num_trained), **found})

    @property
    def _step_width(self) -> int:
        return max(2 * len(str(self._num_steps)) + 1, 4)

    def _step(self, number: int) -> str:
        return f"{number}/{self._num_steps}"

    def _print_line(self, cells: Mapping[str, str]) -> None:
        """Print a line for grep; if COLUMNS is set, as many whole words as fit."""
        width = self._console.width if self._columns_are_set else sys.maxsize
        keys = (title.replace(" ", "_").replace("=", "") for title in cells)
        words = [f"{key}={cell}" for key, cell in zip(keys, cells.values(), strict=True)]
        print(" ".join(_fitting(words, width, gap=1)), flush=True)

    def _row(self, cells: Mapping[str, str], values: Mapping[str, float]) -> Table:
        """A row with fixed column widths; every 20th has the header."""
        table = Table(
            box=None,
            pad_edge=False,
            padding=(0, _GAP, 0, 0),
            show_header=self._num_shown % _ROWS_PER_HEADER == 1,
        )
        room = self._console.width
        for title, width in (("step", self._step_width), *((t, w) for t, _, _, w in _COLUMNS)):
            if width > room:
                break
            room -= width + _GAP
            style = "bold green" if title == "reward" else "bold" if title == "step" else None
            table.add_column(title, justify="right", width=width, style=style, no_wrap=True)
        shown = list(cells.values())[: len(table.columns)]
        if room >= len(_SPLIT) and len(shown) == len(cells):
            table.add_column(_SPLIT, style="dim", width=room, no_wrap=True)
            shown.append(" ".join(_fitting(_split(values), room, gap=1)))
        table.add_row(*shown)
        return table


def _fitting(words: Sequence[str], width: int, *, gap: int) -> Iterator[str]:
    """The first of `words` that fit into `width`, `gap` apart."""
    for word in words:
        width -= len(word)
        if width < 0:
            return
        yield word
        width -= gap


def _split(values: Mapping[str, float]) -> list[str]:
    """Shares of the step's time by stage, largest first: `rollout 61%`, `update 30%`."""
    total = values.get("time/step_s", 0.0)
    stages = [
        (seconds / total, key.removeprefix("time/").removesuffix("_s"))
        for key, seconds in values.items()
        if key.startswith("time/") and key != "time/step_s" and total > 0
    ]
    return [f"{name} {share:.0%}" for share, name in sorted(stages, reverse=True)[:4]]


def _clock(seconds: float) -> str:
    """`5:07:09`; `5d07h` from 100 hours on, to fit the column."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours > 99:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{rest:02d}"
