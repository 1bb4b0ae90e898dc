"""One kernel with its constants -> a cubin for one SM, without a card, torch or nvcc.

A cubin is launched with its arguments in the catalogue's order and two more pointers behind them, null here: Triton's
global and profiling scratch. 32 * num_warps threads a block, `shared_bytes` of dynamic shared memory.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from ingot.artifact.launch_program import Constant, CubinFacts, Kernel
from ingot.errors import BuildError, UsageError
from ingot.pipeline.cuda.catalog import signature
from ingot.pipeline.targets import FLOAT8_FROM, SMS

FLOAT8 = "fp8e4nv"
_ALIGNED = [["tt.divisibility", 16]]
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def require_sms(sms: Iterable[int]) -> None:
    """UsageError for an SM that no cubins are made for."""
    for sm in sms:
        if sm not in SMS:
            raise UsageError(f"no cubins are made for SM {sm}; allowed: {', '.join(map(str, SMS))}")


def compile_kernel(kernel: Kernel, sm: int) -> tuple[bytes, CubinFacts]:
    """The cubin for one of SMS, and how it is launched.

    UsageError for an SM that is none of them; BuildError where Triton is missing, where cards of that SM lack what
    the kernel needs, or where the kernel does not compile.
    """
    require_sms([sm])
    if sm < FLOAT8_FROM and f"*{FLOAT8}" in kernel.types:
        raise BuildError(
            f"{kernel.name}: 8-bit floats need SM {FLOAT8_FROM} or newer, this is SM {sm}; use int8, or 16 bits"
        )
    triton, function = _triton(), _function(kernel.name)
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": True}
    target = triton.backends.compiler.GPUTarget("cuda", sm, 32)
    try:
        compiled = triton.compile(_source(triton, function, kernel), target=target, options=options)
    except Exception as error:
        raise BuildError(f"{kernel.name} does not compile for SM {sm}: {error}") from error
    meta = compiled.metadata
    if meta.global_scratch_size or meta.num_ctas != 1 or meta.num_warps != kernel.num_warps:
        raise BuildError(f"{kernel.name} asks for scratch memory, clusters or warps that the launch program has not")
    return compiled.asm["cubin"], CubinFacts(symbol=meta.name, shared_bytes=meta.shared)


def _source(triton: Any, function: Any, kernel: Kernel) -> Any:
    listed = dict(zip(signature(kernel.name).arguments, kernel.types, strict=True))
    aligned = {name for place, name in enumerate(listed) if place in kernel.aligned or "*" in listed[name]}
    types = {name: listed.get(name, "constexpr") for name in function.arg_names}
    attributes = {(place,): _ALIGNED for place, name in enumerate(types) if name in aligned}
    constants = {name: _constant(triton, value) for name, value in kernel.constants.items()}
    return triton.compiler.ASTSource(function, signature=types, constexprs=constants, attrs=attributes)


def _constant(triton: Any, value: Constant) -> Any:
    return getattr(triton.language, _DTYPES[value]) if isinstance(value, str) else value


def _function(kernel: str) -> Any:
    module, _, name = signature(kernel).function.partition(".")
    return getattr(import_module(f"ingot.kernels.{module}"), name)


def _triton() -> Any:
    try:
        return import_module("triton")
    except ImportError as error:
        raise BuildError("building for CUDA needs Triton: pip install 'ingot[cuda]'") from error
