"""Tables on the terminal: columns where they fit, else one block of lines per row. No word and no number is broken."""

import sys
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.cli.console import visible

Cell = str | Text

PIPED_COLUMNS = 200  # a piped table may be wider than any terminal, but is not without end
_SEPARATOR = 3  # columns between two cells
_LEAST_TEXT = 24  # a text in a narrower column is harder to read than a block of lines


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], left: int = 1) -> None:
    """Print a table: the first `left` columns left-aligned, the others (figures) right-aligned.

    Where the terminal is too narrow, the widest of the left columns is wrapped between words; if that is not enough,
    every row becomes a block of lines, one per column.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_COLUMNS)
    cells = [[cell if isinstance(cell, Text) else Text(visible(cell)) for cell in row] for row in rows]
    widths = _widths(header, cells, left, console.width)
    if widths is None:
        _print_blocks(console, title, header, cells)
    else:
        console.print(_table(title, header, cells, left, widths), soft_wrap=not sys.stdout.isatty())


def _widths(header: Sequence[str], rows: Sequence[Sequence[Text]], left: int, columns: int) -> list[int] | None:
    """Width of every column; None if the table does not fit even with its widest left column wrapped."""
    lines = [[Text(name) for name in header], *rows]
    widths = [max(cell.cell_len for cell in column) for column in zip(*lines, strict=True)]
    missing = sum(widths) + _SEPARATOR * (len(widths) - 1) - columns
    if missing > 0:
        widest = max(range(left), key=lambda index: widths[index])
        words = [word for line in lines for word in line[widest].plain.split()]
        widths[widest] -= missing
        if widths[widest] < max(_LEAST_TEXT, *map(cell_len, words)):
            return None
    return widths


def _table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Text]], left: int, widths: Sequence[int]
) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for index, (name, width) in enumerate(zip(header, widths, strict=True)):
        table.add_column(Text(name), justify="left" if index < left else "right", width=width)
    for row in rows:
        table.add_row(*row)
    return table


def _print_blocks(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """Print each row as its first cell and, indented, the others with their column's name."""
    if title:
        console.print(Text(title, style="bold"), soft_wrap=True)
    name_width = max((len(name) for name in header[1:]), default=0)
    for row in rows:
        console.print(row[0], soft_wrap=True)
        for name, cell in zip(header[1:], row[1:], strict=True):
            if cell.plain:
                _print_entry(console, f"  {name:<{name_width}}  ", cell)


def _print_entry(console: Console, beginning: str, cell: Text) -> None:
    """Print one cell after its column's name, on further lines if the terminal is narrow, broken between words."""
    room = max(console.width - len(beginning), _LEAST_TEXT)
    lines = textwrap.wrap(cell.plain, room, break_long_words=False, break_on_hyphens=False) or [""]
    if len(lines) == 1:
        console.print(Text(beginning) + cell, soft_wrap=True)
        return
    for index, line in enumerate(lines):
        console.print(Text((beginning if index == 0 else " " * len(beginning)) + line), soft_wrap=True)
