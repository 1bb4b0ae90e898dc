"""What the bindings of cuBLASLt make: operations, layouts, preferences. All of it is given back at once.

nvmath-python is imported here, when a program that holds products of cuBLASLt is loaded, and by no other module.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from ingot.errors import EngineError

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
