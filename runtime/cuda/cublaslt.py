"""Matmuls of a launch program by cuBLASLt: the algorithm is chosen once, the matmul queued many times.

cuBLASLt is column-major: contiguous rows are columns to it, and y = x @ W^T becomes y^T = W @ x^T:

    A   [columns, n]      W, read transposed
    B   [columns, rows]   x, a column every x_stride elements
    D   [n, rows]         y, a column every out_stride elements; the bias is a column, added to each

Operands keep their stored type, and sums are float32. float8 codes have a scale for each row of W and of x: "outer
vectors", which GPUs of SM 90 multiply with. Split-K is allowed only with partials that are stored in float32 and added
by a separate kernel, so that the order of a sum never depends on timing. The algorithm is the first that cuBLASLt's
heuristic returns. The heuristic runs once per shape and knows nothing of addresses except that they are multiples of
16 bytes: all layers get the same algorithm, and so does every load with the same library on the same GPU.

A call allocates nothing and so can be captured into a CUDA graph: all calls share one workspace, because they run in
order on one stream. What cuBLASLt allocates on a kernel's first run is allocated when the loader rehearses the program.

The library is the one that cuda-pathfinder finds: of the wheel nvidia-cublas, of conda or of a CUDA toolkit. It is
loaded only with a program whose matmuls it may compute. Numbers and prototypes: cublasLt.h of CUDA 12.9 and 13.
"""

import ctypes
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from ingot.artifact.programs.launch_program import LibraryMatmul
from ingot.errors import EngineError
from ingot.runtime.cuda.driver.device import Device, Queue, Stream
from ingot.version import install_command

_log = logging.getLogger(__name__)

WITHOUT = "or build without cublaslt in the table of tiles (gpu.tiles)"
WORKSPACE_BYTES = 32 * 2**20  # what cuBLAS uses on the largest GPUs (cuBLAS: cublasSetWorkspace)
_ALIGNED_BYTES = 16  # every operand of a launch program is at a multiple of it
TYPES = {"fp32": 0, "fp16": 2, "bf16": 14, "fp8e4nv": 28}
"""Triton's names -> cudaDataType"""

COMPUTE_32F = 68
OPERATION: Mapping[str, tuple[int, type[Any]]] = {
    "TRANSA": (3, c_int32),
    "EPILOGUE": (7, c_uint32),
    "BIAS_POINTER": (8, c_void_p),
    "A_SCALE_POINTER": (17, c_void_p),
    "B_SCALE_POINTER": (18, c_void_p),
    "A_SCALE_MODE": (31, c_int32),
    "B_SCALE_MODE": (32, c_int32),
}
"""Attributes of a matmul, and the types of their values"""
PREFERENCE: Mapping[str, tuple[int, type[Any]]] = {
    "MAX_WORKSPACE_BYTES": (1, c_uint64),
    "REDUCTION_SCHEME_MASK": (3, c_uint32),
    "MIN_ALIGNMENT_A_BYTES": (5, c_uint32),
    "MIN_ALIGNMENT_B_BYTES": (6, c_uint32),
    "MIN_ALIGNMENT_C_BYTES": (7, c_uint32),
    "MIN_ALIGNMENT_D_BYTES": (8, c_uint32),
}
"""Attributes of the wanted algorithms"""
TRANSPOSED, ADD_BIAS, IN_FLOAT32, OUTER_VECTOR = 1, 4, 2, 3


class Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and what it needs."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_P = c_void_p
PROTOTYPES: Mapping[str, tuple[type[Any], ...]] = {
    "cublasLtGetVersion": (c_size_t,),
    "cublasLtGetStatusString": (c_char_p, c_int),
    "cublasLtCreate": (c_int, _P),
    "cublasLtDestroy": (c_int, _P),
    "cublasLtMatmulDescCreate": (c_int, _P, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_int, _P, c_int, _P, c_size_t),
    "cublasLtMatmulDescDestroy": (c_int, _P),
    "cublasLtMatrixLayoutCreate": (c_int, _P, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutDestroy": (c_int, _P),
    "cublasLtMatmulPreferenceCreate": (c_int, _P),
    "cublasLtMatmulPreferenceSetAttribute": (c_int, _P, c_int, _P, c_size_t),
    "cublasLtMatmulPreferenceDestroy": (c_int, _P),
    "cublasLtMatmulAlgoGetHeuristic": (c_int, *[_P] * 7, c_int, _P, _P),
    "cublasLtMatmul": (c_int, *[_P] * 14, c_size_t, _P),
}
"""The library's functions: the type of their result, and of their arguments"""


def load_library() -> Any:
    """Load cuBLASLt. EngineError where it is not installed."""
    try:
        found = import_module("cuda.pathfinder").load_nvidia_dynamic_lib("cublasLt")
        return ctypes.CDLL(found.abs_path)
    # RuntimeError: not found. A list of folders follows the first line.
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise EngineError(f"cuBLASLt cannot be loaded ({reason}): {install_command('cublas')}, {WITHOUT}") from error


class CublasLt:
    """Matmuls on one stream of the current device. Implements `programs.MatmulBinder`.

    EngineError when the library is missing, when the device has no memory for the workspace, when the library has no
    algorithm for a matmul, and, naming its node, when the library reports an error.
    """

    def __init__(self, device: Device, stream: Stream, load: Callable[[], Any] = load_library) -> None:
        self._library = CublasLtLibrary(load())
        self._library.start()
        self._device, self._stream = device, stream
        self._workspace = device.allocate(WORKSPACE_BYTES, "the workspace of cuBLASLt")
        self._preference = self._library.preference(WORKSPACE_BYTES, _ALIGNED_BYTES)
        self._plans: dict[_Shape, _Plan] = {}
        self._bound: dict[object, Queue] = {}
        _log.info("cuBLASLt %d", self._library.version)

    def __call__(self, matmul: LibraryMatmul, addresses: Mapping[str, int]) -> Queue:
        """Bind a matmul to the addresses of x, weight and out, and of bias and scales if it has them."""
        assert matmul.weight.type == matmul.x.type
        assert not any(address % _ALIGNED_BYTES for address in addresses.values()), addresses
        key = (_Shape.of(matmul), matmul.alpha, *sorted(addresses.items()))
        if key not in self._bound:
            self._bound[key] = self._bind(matmul, addresses)
        return self._bound[key]

    @property
    def version(self) -> str:
        """The library's version."""
        return f"cuBLASLt {self._library.version}"

    def close(self) -> None:
        """Free everything. Idempotent."""
        if self._library.handle is not None:
            self._library.close()
            self._bound.clear()
            self._plans.clear()
            with suppress(EngineError):  # after a lost context nothing can be freed
                self._device.free(self._workspace)

    def _bind(self, matmul: LibraryMatmul, addresses: Mapping[str, int]) -> Queue:
        library, shape = self._library, _Shape.of(matmul)
        operation = library.operation(addresses)
        if shape not in self._plans:
            self._plans[shape] = self._plan(shape, operation, matmul.node)
        plan, out = self._plans[shape], addresses["out"]
        factors = np.array([matmul.alpha, 0.0], np.float32)  # of A @ B, and of D's old content
        alpha, beta = (factors[index:].ctypes.data for index in range(2))
        algorithm = ctypes.addressof(plan.found.algorithm)
        left, right = (addresses["weight"], plan.a), (addresses["x"], plan.b)
        operands = (alpha, *left, *right, beta, out, plan.d, out, plan.d)
        given = (library.handle, operation, *operands, algorithm, self._workspace, WORKSPACE_BYTES)

        def queue(stream: Stream, kept: object = (factors, plan)) -> None:
            assert library.handle is not None, "cuBLASLt is closed"
            assert stream is self._stream, "the workspace is for one stream"
            library.call(f"queueing {matmul.node!r}", "cublasLtMatmul", *given, int(stream))

        return queue

    def _plan(self, shape: "_Shape", operation: int, node: str) -> "_Plan":
        """Make the layouts, and take the first algorithm that the heuristic returns for them."""
        library, found, count = self._library, Found(), c_int()
        a = library.layout(shape.x_type, shape.columns, shape.n, shape.columns)
        b = library.layout(shape.x_type, shape.columns, shape.rows, shape.x_stride)
        d = library.layout(shape.out_type, shape.n, shape.rows, shape.out_stride)
        given = (library.handle, operation, a, b, d, d, self._preference, 1)
        status = library.functions.cublasLtMatmulAlgoGetHeuristic(*given, ctypes.byref(found), ctypes.byref(count))
        if status or count.value == 0 or found.state:
            reason = library.words(status or found.state) if status or found.state else "none found"
            raise EngineError(
                f"{node!r}: cuBLASLt {library.version} has no algorithm for {shape} on {self._device.name} ({reason});"
                f" run `ingot tune` with this version and build with its table, {WITHOUT}"
            )
        _log.debug("cuBLASLt: %s: %d bytes of workspace", shape, found.workspace_bytes)
        return _Plan(a, b, d, found)


@dataclass(frozen=True)
class _Shape:
    """The facts that the choice of an algorithm depends on."""

    rows: int
    n: int
    columns: int
    x_stride: int
    out_stride: int
    x_type: str
    out_type: str
    has_bias: bool

    @classmethod
    def of(cls, matmul: LibraryMatmul) -> "_Shape":
        sizes = (matmul.rows, matmul.n, matmul.columns, matmul.x_stride, matmul.out_stride)
        return cls(*sizes, matmul.x.type, matmul.out.type, matmul.bias is not None)

    def __str__(self) -> str:
        bias = " with a bias" if self.has_bias else ""
        return f"{self.rows} x {self.n} x {self.columns} (rows, n, columns) of {self.x_type} to {self.out_type}{bias}"


@dataclass(frozen=True)
class _Plan:
    """Layouts of A, B and D for one shape, and the heuristic's result."""

    a: int
    b: int
    d: int
    found: Found


class CublasLtLibrary:
    """The library's handle, once it has started, and descriptors. EngineError when the library reports an error."""

    def __init__(self, functions: Any) -> None:
        self.functions = functions
        for name, (result, *arguments) in PROTOTYPES.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
        self._made: list[tuple[str, int]] = []
        self.handle: int | None = None

    @property
    def version(self) -> int:
        """Version of the library: 10000 * major + 100 * minor + patch."""
        return int(self.functions.cublasLtGetVersion())

    def start(self) -> None:
        """Make the handle, on the current device."""
        self.handle = self._make("starting", "cublasLtCreate", "cublasLtDestroy")

    def call(self, what: str, name: str, *given: Any) -> None:
        """Call a function of the library. EngineError names `what`."""
        status = getattr(self.functions, name)(*given)
        if status:
            raise EngineError(f"cuBLASLt: {what}: {self.words(status)}")

    def words(self, status: int) -> str:
        """Say what a status means."""
        return str(self.functions.cublasLtGetStatusString(status).decode(errors="replace"))

    def operation(self, addresses: Mapping[str, int]) -> int:
        """Describe D = alpha * A^T @ B in float32, plus the column "bias", times the "weight_scales" and "x_scales"."""
        made = self._make(
            "describing a matmul", "cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy", COMPUTE_32F, TYPES["fp32"]
        )
        attributes = {"TRANSA": TRANSPOSED}
        if "bias" in addresses:
            attributes |= {"EPILOGUE": ADD_BIAS, "BIAS_POINTER": addresses["bias"]}
        for operand, name in (("A", "weight_scales"), ("B", "x_scales")):
            if name in addresses:
                attributes |= {f"{operand}_SCALE_MODE": OUTER_VECTOR, f"{operand}_SCALE_POINTER": addresses[name]}
        self._set("cublasLtMatmulDescSetAttribute", made, OPERATION, attributes)
        return made

    def layout(self, type_: str, rows: int, columns: int, stride: int) -> int:
        """Describe a matrix [rows, columns] of a type that Triton names, with a column every `stride` elements."""
        create, destroy = "cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy"
        return self._make("describing a matrix", create, destroy, TYPES[type_], rows, columns, stride)

    def preference(self, workspace_bytes: int, aligned_bytes: int) -> int:
        """Describe the algorithms wanted: by workspace size, by alignment, and with a fixed order of sums."""
        create, destroy = "cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy"
        made = self._make("preferring algorithms", create, destroy)
        attributes = {
            "MAX_WORKSPACE_BYTES": workspace_bytes,
            "REDUCTION_SCHEME_MASK": IN_FLOAT32,
            **{f"MIN_ALIGNMENT_{operand}_BYTES": aligned_bytes for operand in "ABCD"},
        }
        self._set("cublasLtMatmulPreferenceSetAttribute", made, PREFERENCE, attributes)
        return made

    def close(self) -> None:
        """Free all descriptors and the handle, ignoring errors. Idempotent."""
        while self._made:
            destroy, made = self._made.pop()
            getattr(self.functions, destroy)(made)
        self.handle = None

    def _make(self, what: str, create: str, destroy: str, *given: int) -> int:
        made = c_void_p()
        self.call(what, create, ctypes.byref(made), *given)
        assert made.value is not None
        self._made.append((destroy, made.value))
        return made.value

    def _set(
        self, function: str, owner: int, known: Mapping[str, tuple[int, type[Any]]], values: Mapping[str, int]
    ) -> None:
        """Set attributes from memory of the types that the library reads."""
        for name, value in values.items():
            number, type_ = known[name]
            memory = type_(value)
            self.call(f"setting {name}", function, owner, number, ctypes.byref(memory), ctypes.sizeof(memory))
