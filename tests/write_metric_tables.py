"""Writes the tables of an engine's metrics in docs/metrics.md and docs/serve.md anew, from the rows in the code.

python -m tests.write_metric_tables
"""

from collections.abc import Iterable
from pathlib import Path

from tests.runtime.engine.test_metrics_export import PAGE, table_rows
from tests.runtime.server.watch.test_prometheus import SERVER_PAGE, server_rows


def write_table(page: Path, first: str, last: str, rows: Iterable[Iterable[str]]) -> None:
    """Replace the rows of a table, from the first line that begins with `first` to the last that begins with `last`."""
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    begin = next(place for place, line in enumerate(lines) if line.startswith(first))
    end = 1 + max(place for place, line in enumerate(lines) if line.startswith(last))
    lines[begin:end] = [f"| {' | '.join(row)} |\n" for row in rows]
    page.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write_table(PAGE, "| `", "| `", table_rows())
    write_table(SERVER_PAGE, "| yes | `vllm:num_requests", "|  | `ingot_context_tokens", server_rows())
