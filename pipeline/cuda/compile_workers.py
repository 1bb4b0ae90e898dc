"""All kernels of a program compiled, by as many processes as there are cores.

Each process is `python -m ingot.pipeline.cuda.compile_workers`: it reads {"sm", "kernel"} as lines of JSON and answers
each with {"code" (base64), "facts"} or {"error"}. Triton keeps what it compiled in Ingot's cache,
so that a second build of the same kernels takes milliseconds.
"""

import base64
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from ingot.artifact.launch_program import CubinFacts, Kernel
from ingot.errors import BuildError, IngotError
from ingot.pipeline.cuda.cubins import compile_kernel
from ingot.progress import Progress, silent
from ingot.settings import cache_dir, num_threads

_MODULE = "ingot.pipeline.cuda.compile_workers"
_FIRST_LINES = 20  # of a worker's last words


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel."""

    code: bytes
    facts: CubinFacts


def compile_kernels(
    kernels: Mapping[str, Kernel], sm: int, workers: int | None = None, progress: Progress = silent
) -> dict[str, Cubin]:
    """Cubins of the kernels, by key. BuildError names the kernel that does not compile, or says what is missing."""
    job = _Job(kernels, sm, progress)
    count = min(workers or num_threads(), len(kernels))
    with ThreadPoolExecutor(max(count, 1)) as pool:
        for done in [pool.submit(_work, job) for _ in range(count)]:
            done.result()
    return {key: job.made[key] for key in kernels}


class _Job:
    """What is still to be compiled, and what is; shared by the threads that drive the processes."""

    def __init__(self, kernels: Mapping[str, Kernel], sm: int, progress: Progress) -> None:
        self.sm, self.made = sm, dict[str, Cubin]()
        self._kernels, self._progress, self._lock = kernels, progress, Lock()
        self._waiting = deque(kernels)

    def requests(self) -> Iterator[tuple[str, str]]:
        """Keys and requests, until nothing waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                key = self._waiting.popleft()
            yield key, json.dumps({"sm": self.sm, "kernel": self._kernels[key].model_dump()})

    def finish(self, key: str, cubin: Cubin) -> None:
        """Take an answer."""
        with self._lock:
            self.made[key] = cubin
            self._progress(f"compiling kernels for SM {self.sm}", len(self.made), len(self._kernels))

    def give_up(self) -> None:
        """Leave nothing for the others."""
        with self._lock:
            self._waiting.clear()


def _work(job: _Job) -> None:
    """Drive one process until nothing waits."""
    with _start() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for key, request in job.requests():
                process.stdin.write(f"{request}\n")
                process.stdin.flush()
                job.finish(key, _answer(process.stdout.readline(), process))
        except BaseException:
            process.kill()
            job.give_up()
            raise


def _start() -> "subprocess.Popen[str]":
    """A process that compiles whatever this one does: Triton's interpreter, where it is on, would take its place."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton"))
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", _MODULE]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def _answer(line: str, process: "subprocess.Popen[str]") -> Cubin:
    if not line:
        assert process.stderr is not None
        words = process.stderr.read().strip().splitlines()[-_FIRST_LINES:]
        raise BuildError("the process that compiles kernels ended: " + ("\n".join(words) or "without a word"))
    answer = json.loads(line)
    if "error" in answer:
        raise BuildError(answer["error"])
    return Cubin(base64.b64decode(answer["code"]), CubinFacts.model_validate(answer["facts"]))


def _serve() -> None:
    """Answer the lines of stdin. Whatever else prints goes to stderr: stdout is for answers alone."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            code, facts = compile_kernel(Kernel.model_validate(request["kernel"]), request["sm"])
            answer: dict[str, object] = {"code": base64.b64encode(code).decode(), "facts": facts.model_dump()}
        except IngotError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
