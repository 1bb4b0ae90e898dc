"""Compiles the kernels of a program to cubins for one SM, without a GPU, torch or nvcc, in one process per core.

Each process is `python -m ingot.pipeline.targets.cuda.cubins`: it reads {"sm", "kernel"} as lines of JSON and answers
each with {"code" (base64), "facts"} or {"error"}. Triton caches cubins in Ingot's cache, so that a second build of the
same kernels takes milliseconds.

A cubin is launched with its arguments in the signature's order, followed by two pointers that are null here: Triton's
global and profiling scratch memory (artifact/programs/cubin_parameters.py counts them). A block has 32 * num_warps
threads and `shared_bytes` of dynamic shared memory.
"""

import base64
import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from importlib import import_module
from threading import Lock
from typing import Any

from ingot.artifact.programs.cubin_parameters import require_parameters
from ingot.artifact.programs.launch_program import Constant, CubinFacts, Kernel
from ingot.errors import ArtifactError, BuildError, IngotError, UsageError
from ingot.pipeline.targets.cuda.kernel_signatures import signature
from ingot.pipeline.targets.table import FLOAT8_FROM, SMS
from ingot.progress import report_progress
from ingot.settings import cache_dir, num_threads
from ingot.version import install_command

FLOAT8 = "fp8e4nv"
_ALIGNED = [["tt.divisibility", 16]]
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_MODULE = "ingot.pipeline.targets.cuda.cubins"
_OPERAND = re.compile(r"tensor<(\d+x\d+)x\w+, #ttg\.dot_op<\{opIdx = ([01]), [^}]*kWidth = (\d+)\}>>")
_STDERR_LINES = 20  # last lines that a crashed process wrote


# Of a block: CUDA C++ Programming Guide, technical specifications per compute capability.
MOST_SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel."""

    code: bytes
    facts: CubinFacts


def require_sms(sms: Iterable[int]) -> None:
    """Raise UsageError for an SM without a target."""
    for sm in sms:
        if sm not in SMS:
            raise UsageError(f"kernels cannot be compiled for SM {sm}; allowed: {', '.join(map(str, SMS))}")


def compile_kernels(kernels: Mapping[str, Kernel], sm: int, workers: int | None = None) -> dict[str, Cubin]:
    """Compile the kernels; the cubins have their keys. BuildError names a kernel that does not compile."""
    job = _Job(kernels, sm)
    count = min(workers or num_threads(), len(kernels))
    with ThreadPoolExecutor(max(count, 1)) as pool:
        for done in [pool.submit(copy_context().run, _work, job) for _ in range(count)]:
            done.result()
    return {key: job.made[key] for key in kernels}


def compile_kernel(kernel: Kernel, sm: int) -> Cubin:
    """Compile a kernel for one of SMS.

    UsageError for another SM; BuildError if Triton is missing, if the SM lacks 8-bit floats that the kernel needs, if
    the kernel is for another SM, or if it does not compile.
    """
    compiled = compile_by_triton(kernel, sm)
    meta = compiled.metadata
    has_scratch = meta.global_scratch_size or getattr(meta, "profile_scratch_size", 0)
    if has_scratch or meta.num_ctas != 1 or meta.num_warps != kernel.num_warps:
        raise BuildError(
            f"{kernel.name} needs scratch memory, clusters or warps that the launch program does not provide"
        )
    code = compiled.asm["cubin"]
    try:
        require_parameters(code, kernel, meta.name)
    except ArtifactError as error:
        raise BuildError(f"{kernel.name} for SM {sm}: {error}") from error
    return Cubin(code, CubinFacts(symbol=meta.name, shared_bytes=meta.shared))


def require_shared_memory(cubins: Mapping[str, Cubin], sm: int) -> None:
    """Raise BuildError for a kernel that needs more shared memory than fits a block of the SM."""
    largest = max(cubins.values(), key=lambda cubin: cubin.facts.shared_bytes)
    if largest.facts.shared_bytes > MOST_SHARED_BYTES[sm]:
        raise BuildError(
            f"{largest.facts.symbol} for SM {sm} needs {largest.facts.shared_bytes} bytes of shared memory, of which a "
            f"block has {MOST_SHARED_BYTES[sm]} at most; choose smaller tiles, or fewer stages, in gpu.tiles, or leave "
            "it out"
        )


def compile_by_triton(kernel: Kernel, sm: int) -> Any:
    """Return Triton's compiled kernel, with the code of every stage; errors are those of compile_kernel."""
    require_sms([sm])
    if sm < FLOAT8_FROM and f"*{FLOAT8}" in kernel.types:
        raise BuildError(
            f"{kernel.name}: 8-bit floats need SM {FLOAT8_FROM} or newer, this is SM {sm}; use int8, or 16 bits"
        )
    facts = signature(kernel.name)
    if facts.sm not in (None, sm):
        raise BuildError(f"{kernel.name} uses instructions of SM {facts.sm} alone, this is SM {sm}")
    triton, function = _triton(), _function(kernel.name)
    # Line info has the path and date of the source, which differ.
    triton.knobs.compilation.disable_line_info = True
    own_warps = kernel.num_warps - facts.worker_warps
    options = {"num_warps": own_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": True}
    target = triton.backends.compiler.GPUTarget("cuda", sm, 32)
    try:
        compiled = triton.compile(_source(triton, function, kernel), target=target, options=options)
    except Exception as error:
        reason = _innermost(error)
        raise BuildError(
            f"{kernel.name} does not compile for SM {sm} with Triton {triton.__version__}:"
            f" {type(reason).__name__}: {reason}"
        ) from error
    require_whole_fragments(kernel.name, compiled.asm["ttgir"])
    return compiled


def _innermost(error: BaseException) -> BaseException:
    """The error that began a chain: Triton wraps it in one for each call, which shows the source of that call alone."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return error


def require_whole_fragments(name: str, code: str) -> None:
    """Raise BuildError for a matmul whose inner axis is shorter than the fragments of its operands.

    `code` is Triton's GPU IR. Four threads hold kWidth elements each of an operand's inner axis: 8 of one that is made
    from 4-bit codes. Triton compiles shorter ones without a word, and the result is wrong (seen on an H100).
    """
    for shape, place, width in _OPERAND.findall(code):
        rows, columns = map(int, shape.split("x"))
        inner = columns if place == "0" else rows
        if inner < 4 * int(width):
            raise BuildError(
                f"{name} multiplies along {inner} elements, and Triton's fragments of that operand have "
                f"{4 * int(width)}: results would be wrong; make the tile larger"
            )


def _source(triton: Any, function: Any, kernel: Kernel) -> Any:
    listed = dict(zip(signature(kernel.name).arguments, kernel.types, strict=True))
    aligned = {name for place, name in enumerate(listed) if place in kernel.aligned or "*" in listed[name]}
    types = {name: listed.get(name, "constexpr") for name in function.arg_names}
    attributes = {(place,): _ALIGNED for place, name in enumerate(types) if name in aligned}
    constants = {one.name: one.default for one in function.params if one.is_constexpr and one.has_default}
    constants |= {name: _constant(triton, value) for name, value in kernel.constants.items()}
    kind = triton.compiler.ASTSource
    if function.is_gluon():
        kind = import_module("triton.experimental.gluon._runtime").GluonASTSource
    return kind(function, signature=types, constexprs=constants, attrs=attributes)


def _constant(triton: Any, value: Constant) -> Any:
    return getattr(triton.language, _DTYPES[value]) if isinstance(value, str) else value


def _function(kernel: str) -> Any:
    module, _, name = signature(kernel).function.partition(".")
    return getattr(import_module(f"ingot.kernels.{module}"), name)


def _triton() -> Any:
    try:
        return import_module("triton")
    except ImportError as error:
        raise BuildError(f"building for CUDA needs Triton: {install_command('cuda')}") from error


class _Job:
    """Kernels still to be compiled and finished cubins, shared by the threads that drive the processes."""

    def __init__(self, kernels: Mapping[str, Kernel], sm: int) -> None:
        self.sm, self.made = sm, dict[str, Cubin]()
        self._kernels, self._lock = kernels, Lock()
        self._waiting = deque(kernels)

    def requests(self) -> Iterator[tuple[str, str]]:
        """Yield keys and requests until no kernel waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                key = self._waiting.popleft()
            yield key, json.dumps({"sm": self.sm, "kernel": self._kernels[key].model_dump()})

    def finish(self, key: str, cubin: Cubin) -> None:
        """Store a finished cubin."""
        with self._lock:
            self.made[key] = cubin
            report_progress(f"compiling kernels for SM {self.sm}", len(self.made), len(self._kernels))

    def give_up(self) -> None:
        """Take all waiting kernels from the other threads."""
        with self._lock:
            self._waiting.clear()


def _work(job: _Job) -> None:
    """Drive one process until no kernel waits."""
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
    """Start a process without TRITON_INTERPRET, which would run Triton's interpreter instead of its compiler."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton"))
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", _MODULE]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def _answer(line: str, process: "subprocess.Popen[str]") -> Cubin:
    if not line:
        assert process.stderr is not None
        lines = process.stderr.read().strip().splitlines()[-_STDERR_LINES:]
        raise BuildError("the process that compiles kernels ended: " + ("\n".join(lines) or "no message"))
    answer = json.loads(line)
    if "error" in answer:
        raise BuildError(answer["error"])
    return Cubin(base64.b64decode(answer["code"]), CubinFacts.model_validate(answer["facts"]))


def _serve() -> None:
    """Answer the lines of stdin. Other output goes to stderr: stdout is only for answers."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            cubin = compile_kernel(Kernel.model_validate(request["kernel"]), request["sm"])
            code = base64.b64encode(cubin.code).decode()
            answer: dict[str, object] = {"code": code, "facts": cubin.facts.model_dump()}
        except IngotError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
