"""`python -m ingot.pipeline.tensorrt.build_worker REQUEST PLAN`: builds one plan in a process of its own.

All memory goes back when it ends, and a fault within TensorRT ends this process alone. The log goes to stderr, one JSON
object a line; exit code 3 says that the last of them is the reason why there is no plan.
"""

import json
import logging
import sys
from pathlib import Path

from ingot.errors import IngotError
from ingot.pipeline.tensorrt.library import load_library
from ingot.pipeline.tensorrt.network import build_plan
from ingot.pipeline.tensorrt.plan_request import PlanRequest

REFUSED = 3
PEAK_KEY = "peak_bytes"
_STATUS = Path("/proc/self/status")  # getrusage would count what the parent held when this process was forked


class _JsonLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """One line a record."""
        sys.stderr.write(f"{json.dumps({'level': record.levelno, 'message': record.getMessage()})}\n")


def main(request_file: str, plan_file: str) -> int:
    """Build; return the exit code."""
    logging.basicConfig(level=logging.INFO, handlers=[_JsonLines()])
    log = logging.getLogger("ingot.tensorrt")
    try:
        request = PlanRequest.from_json(Path(request_file).read_text(encoding="utf-8"))
        plan = build_plan(load_library(), request)
        with open(plan_file, "wb") as stream:
            stream.write(plan)
    except (IngotError, OSError) as error:
        log.error("%s", error)
        return REFUSED
    print(json.dumps({PEAK_KEY: _peak_bytes()}))
    return 0


def _peak_bytes() -> int | None:
    """The most memory that this process held; None where the system does not tell."""
    if not _STATUS.exists():
        return None
    lines = (line.split() for line in _STATUS.read_text(encoding="ascii").splitlines())
    return next((1024 * int(words[1]) for words in lines if words[0] == "VmHWM:"), None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
