"""Products of a launch program by cuBLASLt: chosen once, queued many times.

cuBLASLt goes by columns. Rows that lie one behind the other are columns to it, and y = x @ W^T is y^T = W @ x^T:

    A   [columns, n]      W, read transposed
    B   [columns, rows]   x, a column every x_stride elements
    D   [n, rows]         y, a column every out_stride elements; the bias is a column, added to each

Factors are as they are stored, sums float32. A sum may be shared out only where its parts are kept in float32 and added
by a kernel of their own: nothing is added up in the order in which it gets done. The algorithm is what cuBLASLt's
heuristic says first. It is asked once a shape, and told nothing of addresses but that they are multiples of 16 bytes:
all layers get the same one, and so does every load with the same library on the same card.

A call allocates nothing, which makes it fit for capture into a CUDA graph: all share one workspace, for one follows the
other on the stream. What a kernel needs when it first runs it gets when the loader tries the program's products.

What the bindings of cuBLASLt make: operations, layouts, preferences. All of it is given back at once.

nvmath-python is imported here, when a program that holds products of cuBLASLt is loaded, and by no other module.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.launch_program import LibraryProduct
from ingot.errors import EngineError
from ingot.runtime.cuda.device import Device, Queue, Stream

WITHOUT = "or build without cublaslt in the table of tiles (gpu.tiles)"
_INSTALL = "pip install 'ingot[cublas]'"

# Triton's names of types -> cudaDataType.
_TYPES = {"fp32": "CUDA_R_32F", "fp16": "CUDA_R_16F", "bf16": "CUDA_R_16BF"}


@dataclass
class CublasLtLibrary:
    """A handle of the library, and what was made with it. EngineError when the library refuses something."""

    lt: Any  # nvmath.bindings.cublasLt
    blas: Any  # nvmath.bindings.cublas
    types: Any  # nvmath.CudaDataType
    handle: int | None = None
    _operations: list[int] = field(default_factory=list)
    _layouts: list[int] = field(default_factory=list)
    _preferences: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, load: Callable[[str], Any] = import_module) -> "CublasLtLibrary":
        """On the active device. EngineError where the bindings or the library are missing, or do not take the card."""
        try:
            lt, blas = load("nvmath.bindings.cublasLt"), load("nvmath.bindings.cublas")
            library = cls(lt, blas, load("nvmath").CudaDataType)
        except ImportError as error:
            raise EngineError(
                f"the bindings of cuBLASLt cannot be imported ({error}): {_INSTALL}, {WITHOUT}"
            ) from error
        try:
            lt.get_version()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]  # a list of folders follows
            raise EngineError(f"cuBLASLt cannot be loaded ({reason}): {_INSTALL}, {WITHOUT}") from error
        library.handle = library.call("starting", lt.create)
        return library

    @property
    def version(self) -> int:
        """Of the library: 10000 * major + 100 * minor + patch."""
        return int(self.lt.get_version())

    def call(self, what: str, function: Callable[..., Any], *given: Any) -> Any:
        """Call the library. EngineError names `what`."""
        try:
            return function(*given)
        except self.lt.cuBLASLtError as error:
            raise EngineError(f"cuBLASLt: {what}: {error}") from error

    def operation(self, bias: int | None) -> int:
        """D = alpha * A^T @ B, sums and alpha float32; and a column at the address `bias` added to each."""
        compute, scale = int(self.blas.ComputeType.COMPUTE_32F), int(self.types.CUDA_R_32F)
        made = int(self.call("describing a product", self.lt.matmul_desc_create, compute, scale))
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
        """A matrix [rows, columns] of Triton's type, a column every `stride` elements."""
        kind = int(getattr(self.types, _TYPES[type_]))
        made = int(self.call("describing a matrix", self.lt.matrix_layout_create, kind, rows, columns, stride))
        self._layouts.append(made)
        return made

    def preference(self, workspace_bytes: int, aligned_bytes: int) -> int:
        """Algorithms for so large a workspace, for operands so aligned, whose sums have one order."""
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
        """Give everything back. Idempotent; on a card that is lost nothing is left to give."""
        given = (
            (self.lt.matmul_desc_destroy, self._operations),
            (self.lt.matrix_layout_destroy, self._layouts),
            (self.lt.matmul_preference_destroy, self._preferences),
            (self.lt.destroy, [] if self.handle is None else [self.handle]),
        )
        for destroy, things in given:
            for thing in things:
                with suppress(self.lt.cuBLASLtError):
                    destroy(thing)
            things.clear()
        self.handle = None

    def _set(self, function: Callable[..., Any], owner: int, attribute: Any, dtype: Any, value: int) -> None:
        """Set an attribute from memory of the type that the library reads."""
        memory = np.array([value], dtype)
        self.call(f"setting {attribute!r}", function, owner, int(attribute), memory.ctypes.data, memory.nbytes)


_LOG = logging.getLogger(__name__)
WORKSPACE_BYTES = 32 * 2**20  # what cuBLAS takes on the largest cards (cuBLAS: cublasSetWorkspace)
_ALIGNED_BYTES = 16  # what every operand of a launch program is a multiple of


@dataclass(frozen=True)
class _Shape:
    """What the choice of an algorithm depends on."""

    rows: int
    n: int
    columns: int
    x_stride: int
    out_stride: int
    x_type: str
    out_type: str
    has_bias: bool

    @classmethod
    def of(cls, product: LibraryProduct) -> "_Shape":
        sizes = (product.rows, product.n, product.columns, product.x_stride, product.out_stride)
        return cls(*sizes, product.x.type, product.out.type, product.bias is not None)

    def __str__(self) -> str:
        bias = " with a bias" if self.has_bias else ""
        return f"{self.rows} x {self.n} x {self.columns} (rows, n, columns) of {self.x_type} to {self.out_type}{bias}"


@dataclass(frozen=True)
class _Plan:
    """How products of one shape are computed: layouts of A, B and D, and the heuristic's answer [1]."""

    a: int
    b: int
    d: int
    found: NDArray[Any]


class CublasLt:
    """Products on one stream of a device, which is active. Implements `programs.ProductBinder`.

    EngineError where the bindings or the library are missing, where the device has no room for the workspace, where
    the library has no algorithm for a product, and, naming its node, where it refuses one.
    """

    def __init__(self, device: Device, stream: Stream, load: Callable[[str], Any] = import_module) -> None:
        self._library = CublasLtLibrary.open(load)
        self._device, self._stream = device, stream
        self._workspace = device.allocate(WORKSPACE_BYTES, "the workspace of cuBLASLt")
        self._preference = self._library.preference(WORKSPACE_BYTES, _ALIGNED_BYTES)
        self._plans: dict[_Shape, _Plan] = {}
        self._bound: dict[object, Queue] = {}
        _LOG.info("cuBLASLt %d", self._library.version)

    def __call__(self, product: LibraryProduct, addresses: Mapping[str, int]) -> Queue:
        """Bind a product to the addresses of x, weight and out, and of the bias where it has one."""
        assert product.weight.type == product.x.type
        assert not any(address % _ALIGNED_BYTES for address in addresses.values()), addresses
        key = (_Shape.of(product), product.alpha, *sorted(addresses.items()))
        if key not in self._bound:
            self._bound[key] = self._bind(product, addresses)
        return self._bound[key]

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if self._library.handle is not None:
            self._library.close()
            self._bound.clear()
            self._plans.clear()
            with suppress(EngineError):  # a card that is lost takes nothing back
                self._device.free(self._workspace)

    def _bind(self, product: LibraryProduct, addresses: Mapping[str, int]) -> Queue:
        library, shape = self._library, _Shape.of(product)
        operation = library.operation(addresses.get("bias"))
        if shape not in self._plans:
            self._plans[shape] = self._plan(shape, operation, product.node)
        plan, out = self._plans[shape], addresses["out"]
        factors = np.array([product.alpha, 0.0], np.float32)  # of the product, and of what lies in D before
        alpha, beta = (factors[index:].ctypes.data for index in range(2))
        algorithm = plan.found["algo"].ctypes.data
        left, right = (addresses["weight"], plan.a), (addresses["x"], plan.b)
        operands = (alpha, *left, *right, beta, out, plan.d, out, plan.d)
        given = (library.handle, operation, *operands, algorithm, self._workspace, WORKSPACE_BYTES)

        def queue(stream: Stream, kept: object = (factors, plan)) -> None:
            assert library.handle is not None, "cuBLASLt is closed"
            assert stream is self._stream, "the workspace is for one stream"
            library.call(f"queueing {product.node!r}", library.lt.matmul, *given, int(stream))

        return queue

    def _plan(self, shape: _Shape, operation: int, node: str) -> _Plan:
        """Layouts, and the first algorithm that the heuristic has for them."""
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
        _LOG.debug("cuBLASLt: %s: %d bytes of workspace", shape, found["workspace_size"][0])
        return _Plan(a, b, d, found)

    def _no_algorithm(self, shape: _Shape, node: str, reason: str) -> EngineError:
        return EngineError(
            f"{node!r}: cuBLASLt {self._library.version} has no algorithm for {shape} on {self._device.name} "
            f"({reason}); run `ingot tune` with this version and build with its table, {WITHOUT}"
        )
