"""Which launches of Ingot's matmul kernel a library computes instead, where it is installed.

A program without measured tiles leaves open whose kernel is faster. With a plain weight, or weight and input of float8,
and more rows than decoding has a matmul is compute-bound, and a vendor's library is tuned for every GPU: it multiplies
where it is installed, Ingot's kernel elsewhere. A table of measured tiles has decided already, and a batch-invariant
program has one kernel.
"""

from collections.abc import Mapping

from ingot.artifact.programs.launch_program import Argument, CudaProgram, Kernel, Launch, LaunchProgram, LibraryMatmul
from ingot.settings import cublaslt

ARGUMENTS = (  # of kernels/matmul.py
    "x", "weight", "x_scales", "weight_scales", "bias", "out", "rows", "x_stride", "out_stride", "alpha", "softcap",
)  # fmt: skip
FROM_ROWS = 65  # fewer share one order of sums in all buckets
_FLOATS, _FLOAT8 = 0, 1
"""Kinds of kernels/matmul.py"""
_FLOAT8_MULTIPLE = 16
"""n and columns are multiples of it (cuBLAS: requirements of float8 kernels)"""


def may_use_library(program: CudaProgram) -> bool:
    """Whether the program leaves it open who multiplies, and has such matmuls."""
    is_open = program.tuned_on is None and not program.batch_invariant and program.activation_type != "fp32"
    return is_open and cublaslt() and any(_launches(program.kernels, one) for one in program.programs)


def library_launches(kernels: Mapping[str, Kernel], program: LaunchProgram) -> tuple[Launch, ...]:
    """Launches of a bucket that a library can compute."""
    return tuple(_launches(kernels, program))


def _launches(kernels: Mapping[str, Kernel], program: LaunchProgram) -> list[Launch]:
    return [
        step
        for step in program.launches
        if isinstance(step, Launch) and library_matmul(kernels[step.kernel], step) is not None
    ]


def library_matmul(kernel: Kernel, launch: Launch) -> LibraryMatmul | None:
    """The same matmul for a library; None where it cannot be: codes, partials, softcaps, gates, few rows."""
    constants = kernel.constants
    if kernel.name != "matmul" or constants["KIND"] not in (_FLOATS, _FLOAT8) or constants["SPLITS"] != 1:
        return None
    if constants["HAS_SOFTCAP"] or "GATE" in constants:
        return None
    given: dict[str, Argument] = dict(zip(ARGUMENTS, launch.arguments, strict=True))
    x, weight, bias, out = (given[name] for name in ("x", "weight", "bias", "out"))
    rows, x_stride, out_stride, alpha = (_number(given[name]) for name in ("rows", "x_stride", "out_stride", "alpha"))
    if rows < FROM_ROWS or x.kind != "buffer" or out.kind != "buffer" or weight.kind not in ("buffer", "weight"):
        return None
    if bias.kind == "weight" and bias.type != out.type:
        return None
    n, columns = int(constants["N"]), int(constants["COLUMNS"])
    of_rows, of_weight = given["x_scales"], given["weight_scales"]
    is_float8 = constants["KIND"] == _FLOAT8
    has_scales = of_rows.kind == "buffer" and of_weight.kind == "weight"
    if is_float8 and (not has_scales or any(size % _FLOAT8_MULTIPLE for size in (n, columns, int(x_stride)))):
        return None
    return LibraryMatmul(
        rows=int(rows),
        n=n,
        columns=columns,
        x=x,
        weight=weight,
        bias=bias if bias.kind == "weight" else None,
        x_scales=of_rows if is_float8 and of_rows.kind == "buffer" else None,
        weight_scales=of_weight if is_float8 and of_weight.kind == "weight" else None,
        out=out,
        x_stride=int(x_stride),
        out_stride=int(out_stride),
        alpha=alpha,
        node=launch.node,
    )


def _number(argument: Argument) -> float:
    assert argument.kind == "number"
    return argument.value
