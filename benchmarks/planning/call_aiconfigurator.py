"""Times of serving rows as aiconfigurator predicts them; run by the Python that has it, for `peer_planner`.

Reads a JSON list of rows from standard input and writes one of {"tpot", "ttft"} in ms, or {"error"}, for each.
"""

import json
import sys
from typing import Any

from aiconfigurator.cli.api import cli_estimate


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """Return its prediction for one row, by the newest tables that it has of the row's engine."""
    try:
        found = cli_estimate(row.pop("model"), row.pop("system"), **row)
    except Exception as error:  # noqa: BLE001 (whatever it raises for a row is that row's outcome)
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    return {"tpot": float(found.tpot), "ttft": float(found.ttft)}


if __name__ == "__main__":
    print(json.dumps([predicted(row) for row in json.load(sys.stdin)]))
