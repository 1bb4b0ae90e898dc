"""Matmuls of a launch program by cuBLASLt: the algorithm is chosen once, the matmul queued many times.

cuBLASLt is column-major: contiguous rows are columns to it, and y = x @ W^T becomes y^T = W @ x^T:

    A   [columns, n]      W, read transposed
    B   [columns, rows]   x, a column every x_stride elements
    D   [n, rows]         y, a column every out_stride elements; the bias is a column, added to each

Operands keep their stored type, and sums are float32. Split-K is allowed only with partials that are stored in float32
and added by a separate kernel, so that the order of a sum never depends on timing. The algorithm is the first that
cuBLASLt's heuristic returns. The heuristic runs once per shape and knows nothing of addresses except that they are
multiples of 16 bytes: all layers get the same algorithm, and so does every load with the same library on the same GPU.

A call allocates nothing and so can be captured into a CUDA graph: all calls share one workspace, because they run in
order on one stream. What cuBLASLt allocates on a kernel's first run is allocated when the loader rehearses the program.

Only this module imports nvmath-python, and only when a program with matmuls of cuBLASLt is loaded.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import LibraryMatmul
from ingot.errors import EngineError
from ingot.runtime.cuda.driver.device import Device, Queue, Stream
from ingot.version import install_command

_log = logging.getLogger(__name__)

WITHOUT = "or build without cublaslt in the table of tiles (gpu.tiles)"
WORKSPACE_BYTES = 32 * 2**20  # what cuBLAS uses on the largest GPUs (cuBLAS: cublasSetWorkspace)
_ALIGNED_BYTES = 16  # every operand of a launch program is at a multiple of it
_TYPES = {"fp32": "CUDA_R_32F", "fp16": "CUDA_R_16F", "bf16": "CUDA_R_16BF"}  # Triton's names -> cudaDataType


class CublasLt:
    """Matmuls on one stream of the current device. Implements `programs.MatmulBinder`.

    EngineError when the bindings or the library are missing, when the device has no memory for the workspace, when the
    library has no algorithm for a matmul, and, naming its node, when the library reports an error.
    """

    def __init__(self, device: Device, stream: Stream, load: Callable[[str], Any] = import_module) -> None:
        self._library = CublasLtLibrary.open(load)
        self._device, self._stream = device, stream
        self._workspace = device.allocate(WORKSPACE_BYTES, "the workspace of cuBLASLt")
        self._preference = self._library.preference(WORKSPACE_BYTES, _ALIGNED_BYTES)
        self._plans: dict[_Shape, _Plan] = {}
        self._bound: dict[object, Queue] = {}
        _log.info("cuBLASLt %d", self._library.version)

    def __call__(self, matmul: LibraryMatmul, addresses: Mapping[str, int]) -> Queue:
        """Bind a matmul to the addresses of x, weight and out, and of the bias if it has one."""
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
        operation = library.operation(addresses.get("bias"))
        if shape not in self._plans:
            self._plans[shape] = self._plan(shape, operation, matmul.node)
        plan, out = self._plans[shape], addresses["out"]
        factors = np.array([matmul.alpha, 0.0], np.float32)  # of A @ B, and of D's old content
        alpha, beta = (factors[index:].ctypes.data for index in range(2))
        algorithm = plan.found["algo"].ctypes.data
        left, right = (addresses["weight"], plan.a), (addresses["x"], plan.b)
        operands = (alpha, *left, *right, beta, out, plan.d, out, plan.d)
        given = (library.handle, operation, *operands, algorithm, self._workspace, WORKSPACE_BYTES)

        def queue(stream: Stream, kept: object = (factors, plan)) -> None:
            assert library.handle is not None, "cuBLASLt is closed"
            assert stream is self._stream, "the workspace is for one stream"
            library.call(f"queueing {matmul.node!r}", library.lt.matmul, *given, int(stream))

        return queue

    def _plan(self, shape: "_Shape", operation: int, node: str) -> "_Plan":
        """Make the layouts, and take the first algorithm that the heuristic returns for them."""
        library, lt = self._library, self._library.lt
        a = library.layout(shape.x_type, shape.columns, shape.n, shape.columns)
        b = library.layout(shape.x_type, shape.columns, shape.rows, shape.x_stride)
        d = library.layout(shape.out_type, shape.n, shape.rows, shape.out_stride)
        found, count = np.zeros(1, lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
        given = (library.handle, operation, a, b, d, d, self._preference, 1, found.ctypes.data, count.ctypes.data)
        try:
            lt.matmul_algo_get_heuristic(*given)
        except lt.cuBLASLtError as error:
            raise self._no_algorithm(shape, node, str(error)) from error
        if count[0] == 0 or found["state"][0] != 0:
            raise self._no_algorithm(shape, node, f"{count[0]} found, state {found['state'][0]}")
        _log.debug("cuBLASLt: %s: %d bytes of workspace", shape, found["workspace_size"][0])
        return _Plan(a, b, d, found)

    def _no_algorithm(self, shape: "_Shape", node: str, reason: str) -> EngineError:
        return EngineError(
            f"{node!r}: cuBLASLt {self._library.version} has no algorithm for {shape} on {self._device.name} "
            f"({reason}); run `ingot tune` with this version and build with its table, {WITHOUT}"
        )


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
    """Layouts of A, B and D for one shape, and the heuristic's result [1]."""

    a: int
    b: int
    d: int
    found: NDArray[Any]


@dataclass
class CublasLtLibrary:
    """A handle of the library and the descriptors made with it. EngineError when the library reports an error."""

    lt: Any  # nvmath.bindings.cublasLt
    blas: Any  # nvmath.bindings.cublas
    types: Any  # nvmath.CudaDataType
    handle: int | None = None
    _operations: list[int] = field(default_factory=list)
    _layouts: list[int] = field(default_factory=list)
    _preferences: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, load: Callable[[str], Any] = import_module) -> "CublasLtLibrary":
        """Open the library on the current device. EngineError when the bindings or the library are missing."""
        try:
            lt, blas = load("nvmath.bindings.cublasLt"), load("nvmath.bindings.cublas")
            library = cls(lt, blas, load("nvmath").CudaDataType)
        except ImportError as error:
            raise EngineError(
                f"the bindings of cuBLASLt cannot be imported ({error}): {install_command('cublas')}, {WITHOUT}"
            ) from error
        try:
            lt.get_version()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]  # a list of folders follows
            raise EngineError(
                f"cuBLASLt cannot be loaded ({reason}): {install_command('cublas')}, {WITHOUT}"
            ) from error
        library.handle = library.call("starting", lt.create)
        return library

    @property
    def version(self) -> int:
        """Version of the library: 10000 * major + 100 * minor + patch."""
        return int(self.lt.get_version())

    def call(self, what: str, function: Callable[..., Any], *given: Any) -> Any:
        """Call the library. EngineError names `what`."""
        try:
            return function(*given)
        except self.lt.cuBLASLtError as error:
            raise EngineError(f"cuBLASLt: {what}: {error}") from error

    def operation(self, bias: int | None) -> int:
        """Describe D = alpha * A^T @ B in float32, plus the column at the address `bias`."""
        compute, scale = int(self.blas.ComputeType.COMPUTE_32F), int(self.types.CUDA_R_32F)
        made = int(self.call("describing a matmul", self.lt.matmul_desc_create, compute, scale))
        self._operations.append(made)
        attributes = {"TRANSA": int(self.blas.Operation.T)}
        if bias is not None:
            attributes |= {"EPILOGUE": int(self.lt.Epilogue.BIAS), "BIAS_POINTER": bias}
        for name, value in attributes.items():
            attribute = self.lt.MatmulDescAttribute[name]
            dtype = self.lt.get_matmul_desc_attribute_dtype(attribute)
            self._set(self.lt.matmul_desc_set_attribute, made, attribute, dtype, value)
        return made

    def layout(self, type_: str, rows: int, columns: int, stride: int) -> int:
        """Describe a matrix [rows, columns] of a type that Triton names, with a column every `stride` elements."""
        kind = int(getattr(self.types, _TYPES[type_]))
        made = int(self.call("describing a matrix", self.lt.matrix_layout_create, kind, rows, columns, stride))
        self._layouts.append(made)
        return made

    def preference(self, workspace_bytes: int, aligned_bytes: int) -> int:
        """Describe the algorithms wanted: by workspace size, by alignment, and with a fixed order of sums."""
        made = int(self.call("preferring algorithms", self.lt.matmul_preference_create))
        self._preferences.append(made)
        attributes = {
            "MAX_WORKSPACE_BYTES": workspace_bytes,
            "REDUCTION_SCHEME_MASK": int(self.lt.ReductionScheme.COMPUTE_TYPE),
            **{f"MIN_ALIGNMENT_{operand}_BYTES": aligned_bytes for operand in "ABCD"},
        }
        for name, value in attributes.items():
            attribute = self.lt.MatmulPreferenceAttribute[name]
            dtype = self.lt.get_matmul_preference_attribute_dtype(attribute)
            self._set(self.lt.matmul_preference_set_attribute, made, attribute, dtype, value)
        return made

    def close(self) -> None:
        """Free all descriptors and the handle, ignoring errors. Idempotent."""
        made = (
            (self.lt.matmul_desc_destroy, self._operations),
            (self.lt.matrix_layout_destroy, self._layouts),
            (self.lt.matmul_preference_destroy, self._preferences),
            (self.lt.destroy, [] if self.handle is None else [self.handle]),
        )
        for destroy, handles in made:
            for handle in handles:
                with suppress(self.lt.cuBLASLtError):
                    destroy(handle)
            handles.clear()
        self.handle = None

    def _set(self, function: Callable[..., Any], owner: int, attribute: Any, dtype: Any, value: int) -> None:
        """Set an attribute from memory of the type that the library reads."""
        memory = np.array([value], dtype)
        self.call(f"setting {attribute!r}", function, owner, int(attribute), memory.ctypes.data, memory.nbytes)
