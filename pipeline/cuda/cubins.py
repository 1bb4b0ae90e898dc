"""One kernel with its constants -> a cubin for one SM, without a card, torch or nvcc.

A cubin is launched with its arguments in the catalogue's order and two more pointers behind them, null here: Triton's
global and profiling scratch. 32 * num_warps threads a block, `shared_bytes` of dynamic shared memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ingot.errors import BuildError, UsageError, did_you_mean, one_of
from ingot.pipeline.cuda.catalog import CATALOG

SMS = (80, 86, 89, 90, 120)
FLOAT8 = "fp8e4nv"
_FLOAT8_FROM = 89
_ALIGNED = [["tt.divisibility", 16]]
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}

Constant = int | float | bool | str


@dataclass(frozen=True)
class KernelRequest:
    """What is to be compiled.

    types        what stands for each of the catalogue's letters: {"T": "fp16", "KV": "fp8e4nv", ...}
    constants    the function's constants; a dtype by its Triton name ("fp16")
    aligned      integer arguments that are multiples of 16; all pointers are taken to be
    """

    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, Constant]
    aligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: its code, its name in it, and how it is launched."""

    code: bytes = field(repr=False)
    symbol: str
    arguments: tuple[tuple[str, str], ...]
    num_warps: int
    shared_bytes: int


def compile_kernel(request: KernelRequest, sm: int) -> Cubin:
    """Compile for one of SMS.

    UsageError for an SM that is none of them; BuildError where Triton is missing, where cards of that SM lack what
    the kernel needs, or where the kernel does not compile.
    """
    if sm not in SMS:
        raise UsageError(f"no cubins are made for SM {sm}; allowed: {', '.join(map(str, SMS))}")
    arguments = _arguments(request)
    if sm < _FLOAT8_FROM and any(FLOAT8 in kind for kind in arguments.values()):
        raise BuildError(
            f"{request.kernel}: 8-bit floats need SM {_FLOAT8_FROM} or newer, this is SM {sm}; use int8, or 16 bits"
        )
    triton, function = _triton(), _function(request.kernel)
    signature = {name: arguments.get(name, "constexpr") for name in function.arg_names}
    aligned = {
        (at,): _ALIGNED for at, (name, kind) in enumerate(signature.items()) if "*" in kind or name in request.aligned
    }
    constants = {name: _constant(triton, value) for name, value in request.constants.items()}
    source = triton.compiler.ASTSource(function, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": request.num_warps, "num_stages": request.num_stages, "enable_fp_fusion": True}
    target = triton.backends.compiler.GPUTarget("cuda", sm, 32)
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:
        raise BuildError(f"{request.kernel} does not compile for SM {sm}: {error}") from error
    meta = compiled.metadata
    if meta.global_scratch_size or meta.num_ctas != 1:
        raise BuildError(f"{request.kernel} asks for scratch memory or clusters, which the launch program has not")
    return Cubin(compiled.asm["cubin"], meta.name, tuple(arguments.items()), meta.num_warps, meta.shared)


def _arguments(request: KernelRequest) -> dict[str, str]:
    """The launch signature with its letters replaced."""
    if request.kernel not in CATALOG:
        near = did_you_mean(request.kernel, CATALOG)
        raise UsageError(f"no kernel is named {request.kernel!r}; kernels: {one_of(CATALOG)}.{near}")
    listed = CATALOG[request.kernel].arguments
    missing = {kind[1:] for kind in listed.values() if kind[1:].isupper()} - set(request.types)
    if missing:
        raise UsageError(f"{request.kernel}: no type is given for {one_of(sorted(missing))}")
    return {name: f"*{request.types[kind[1:]]}" if kind[1:].isupper() else kind for name, kind in listed.items()}


def _constant(triton: Any, value: Constant) -> Any:
    return getattr(triton.language, _DTYPES[value]) if isinstance(value, str) else value


def _function(kernel: str) -> Any:
    module, _, name = CATALOG[kernel].function.partition(".")
    return getattr(import_module(f"ingot.kernels.{module}"), name)


def _triton() -> Any:
    try:
        return import_module("triton")
    except ImportError as error:
        raise BuildError("building for CUDA needs Triton: pip install 'ingot[cuda]'") from error
