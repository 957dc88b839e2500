"""Print a table without cutting cells: columns that do not fit continue below."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import TextType

_FOLDED_LETTERS = 16
"""Least width of a column of text that may fold, unless its longest cell is shorter."""
_FRAME = 3
"""Characters around a column's cells: a space on each side and a line."""
_UNLIMITED = 10_000


def print_whole(console: Console, table: Table) -> None:
    """Print a table without cutting cells, in as few blocks of columns as fit into the console.

    If the columns do not fit side by side, headings are wrapped at spaces. If that is not enough,
    the last columns go into blocks below, and each block repeats the first column. Columns with
    overflow="fold" are text, which is folded into the remaining width.

    Args:
        console: to print to.
        table: with a frame and a header, and without fixed column widths.
    """
    natural = Measurement.get(console, console.options.update(max_width=_UNLIMITED), table).maximum
    if natural <= console.width:
        console.print(table)
        return
    needed = [_needed(console, column) + _FRAME for column in table.columns]
    blocks: list[list[int]] = [[0]]
    for place in range(1, len(needed)):
        taken = sum(needed[column] for column in blocks[-1]) + 1  # the last line of the frame
        if taken + needed[place] > console.width and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(place)
    for number, places in enumerate(blocks):
        widths = {place: needed[place] - _FRAME for place in places}
        console.print(_block(table, widths, title=table.title if number == 0 else None))


def _needed(console: Console, column: Column) -> int:
    """Least width at which no cell and no word of the heading is cut."""
    options = console.options.update(max_width=_UNLIMITED)
    cells = [Measurement.get(console, options, cell).maximum for cell in column.cells]
    longest = max(cells, default=0)
    if column.overflow == "fold":
        longest = min(longest, max(_FOLDED_LETTERS, column.min_width or 0))
    return max(longest, Measurement.get(console, options, column.header).minimum)


def _block(table: Table, widths: dict[int, int], *, title: TextType | None) -> Table:
    """A table of the columns whose numbers are in `widths`, with the same rows."""
    block = Table(title=title, title_justify=table.title_justify)
    for place, width in widths.items():
        column = table.columns[place]
        is_text = column.overflow == "fold"
        block.add_column(
            column.header,
            justify=column.justify,
            overflow=column.overflow,
            width=None if is_text else width,
            min_width=width if is_text else None,
        )
    cells = [list(table.columns[place].cells) for place in widths]
    for row, values in zip(table.rows, zip(*cells, strict=True), strict=True):
        block.add_row(*values, end_section=row.end_section)
    return block
