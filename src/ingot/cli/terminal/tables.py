"""Tables on the terminal: columns where they fit, else one block of lines per row. No word and no number is broken."""

import sys
import textwrap
from collections.abc import Mapping, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.cli.terminal.console import visible

Cell = str | Text

PIPED_COLUMNS = 200  # a piped table may be wider than any terminal, but is not without end
_SEPARATOR = 2  # columns between two cells
_EMPTY = ("", "-")
_LEAST_NAME = 11  # columns, so that short lists of facts below each other line up
_LEAST_TEXT = 24  # a text in a narrower column is harder to read than a block of lines


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    left: int = 1,
    optional: Sequence[str] = (),
) -> None:
    """Print a table: the first `left` columns left-aligned, the others (figures) right-aligned.

    A row of one cell is a heading. Where the terminal is too narrow, the `optional` columns are left out one after
    another; then the widest of the left columns is wrapped between words; if that is not enough, every row becomes a
    block of lines, one per column.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_COLUMNS)
    if title:
        console.print(Text(title, style="bold"), soft_wrap=True)
    cells = [[cell if isinstance(cell, Text) else Text(visible(cell)) for cell in row] for row in rows]
    for left_out in range(len(optional) + 1):
        kept = [index for index, name in enumerate(header) if name not in optional[:left_out]]
        names = [header[index] for index in kept]
        shown = [[row[index] for index in kept] if len(row) > 1 else row for row in cells]
        widths = _widths(names, shown, left, console.width, wrap=left_out == len(optional))
        if widths is not None:
            _print(console, _table(names, shown, left, widths))
            return
    _print_blocks(console, header, cells)


def _print(console: Console, table: Table) -> None:
    """Print the table; where it is piped, without the spaces that fill its lines."""
    if sys.stdout.isatty():
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table, soft_wrap=True)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _widths(
    header: Sequence[str], rows: Sequence[Sequence[Text]], left: int, columns: int, wrap: bool
) -> list[int] | None:
    """Width of every column; None if the table does not fit, with `wrap` not even if a left column is wrapped."""
    lines = [row for row in rows if len(row) > 1]
    words = [max(map(cell_len, name.split()), default=0) for name in header]
    for least in ([cell_len(name) for name in header], words):  # a header is wrapped where that helps
        widths = [max(least[index], *(row[index].cell_len for row in lines), 0) for index in range(len(header))]
        widths[0] = max(widths[0], *(row[0].cell_len for row in rows), 0)
        missing = sum(widths) + _SEPARATOR * (len(widths) - 1) - columns
        if missing <= 0:
            break
    if missing > 0:
        widest = max(range(min(left, len(widths))), key=lambda index: widths[index])
        longest = max(cell_len(word) for line in lines for word in line[widest].plain.split())
        widths[widest] -= missing
        if not wrap or widths[widest] < max(_LEAST_TEXT, longest, words[widest]):
            return None
    return widths


def _table(header: Sequence[str], rows: Sequence[Sequence[Text]], left: int, widths: Sequence[int]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, _SEPARATOR - 1, 0, 0),
    )
    for index, (name, width) in enumerate(zip(header, widths, strict=True)):
        table.add_column(Text(name), justify="left" if index < left else "right", width=width)
    for row in rows:
        table.add_row(*row)
    return table


def _print_blocks(console: Console, header: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """Print each row as its first cell and those of columns without a name, then the others on lines of their own."""
    name_width = max((len(name) for name in header[1:]), default=0)
    for row in rows:
        named = dict(zip(header[1:], row[1:], strict=False))  # a heading has no other cells
        beginning = [row[0], *(cell for name, cell in named.items() if not name and cell.plain)]
        console.print(Text("  ").join(beginning), soft_wrap=True)
        for name, cell in named.items():
            if name and cell.plain not in _EMPTY:
                _print_entry(console, f"    {name:<{name_width}}  ", cell)


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values, one below the other; a long value is wrapped between words at a terminal."""
    width = max(_LEAST_NAME, *(len(name) + 1 for name in facts))
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    for name, value in facts.items():
        if sys.stdout.isatty():
            _print_entry(console, f"{name:<{width}}", Text(visible(value)))
        else:
            print(f"{name:<{width}}{visible(value)}")


def _print_entry(console: Console, beginning: str, cell: Text) -> None:
    """Print one cell after its column's name, on further lines if the terminal is narrow, broken between words."""
    room = max(console.width - len(beginning), _LEAST_TEXT)
    lines = textwrap.wrap(cell.plain, room, break_long_words=False, break_on_hyphens=False) or [""]
    if len(lines) == 1:
        console.print(Text(beginning) + cell, soft_wrap=True)
        return
    for index, line in enumerate(lines):
        console.print(Text((beginning if index == 0 else " " * len(beginning)) + line), soft_wrap=True)
