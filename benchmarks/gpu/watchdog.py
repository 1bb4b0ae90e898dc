"""Runs a process whose lines are read while it runs, and kills it with all its children when it takes too long.

The process leads a session and a process group of its own: a signal to the group also ends its children, and a signal
to this process's group does not reach it. It ends with this process (worker.py).
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryDirectory
from threading import Thread

_LAST_LINES = 25
_POLL_SECONDS = 0.5


class Watched:
    """A process. `limit` is the moment (time.monotonic) at which it is killed, and may be moved while it runs."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], limit: float) -> None:
        self.command, self.environment, self.limit = command, environment, limit
        self.returncode: int | None = None
        self.was_killed = False
        self.last_lines = ""  # of stderr

    def lines(self) -> Iterator[str]:
        """Yield the lines of stdout as they come; end when the process has ended, or was killed."""
        with TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+", errors="replace") as errors:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                env=dict(self.environment),
                start_new_session=True,
            )
            try:
                yield from self._read(process)
            finally:
                kill_group(process)
                self.returncode = process.wait()
                errors.seek(0)
                self.last_lines = "\n".join(errors.read().splitlines()[-_LAST_LINES:])

    def report(self) -> str:
        """How the process ended and the end of its stderr; what says most is the last line."""
        if self.returncode is not None and self.returncode > 0:
            return f"the process ended with exit status {self.returncode}\n{self.last_lines}".strip()
        by = signal.Signals(-self.returncode).name if self.returncode else "itself"
        how = "was killed: it took too long" if self.was_killed else f"was ended by {by}"
        return f"{self.last_lines}\nthe process {how}".strip()

    def _read(self, process: "subprocess.Popen[str]") -> Iterator[str]:
        """Lines until the end of stdout; once the process has ended, children that hold stdout are not waited for."""
        found: Queue[str | None] = Queue()
        Thread(target=_forward, args=(process, found), daemon=True).start()
        while time.monotonic() < self.limit:
            try:
                line = found.get(timeout=_POLL_SECONDS)
            except Empty:
                if process.poll() is not None:
                    return
                continue
            if line is None:
                if _ended(process, self.limit):
                    return
                break
            yield line
        self.was_killed = True


def kill_group(process: "subprocess.Popen[str]") -> None:
    """Kill a process that leads a group, and all of the group."""
    with suppress(OSError):  # the group has ended
        os.killpg(process.pid, signal.SIGKILL)


def _ended(process: "subprocess.Popen[str]", limit: float) -> bool:
    """Whether the process ends before the limit, its stdout closed already."""
    try:
        process.wait(timeout=max(_POLL_SECONDS, limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _forward(process: "subprocess.Popen[str]", found: "Queue[str | None]") -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            found.put(line)
    found.put(None)
