"""The tests' cases of every kernel, compiled, on a GPU, against numpy in float64.

The cases launch Triton functions, which the tests interpret. Here a launch is caught instead: without a GPU the kernels
to compile are recorded (`write_kernel_cases`), on a GPU the tensors are copied there, the cubin runs and the tensors
are copied back (`kernel_cases`). Cases in float32 also run in bfloat16, which the interpreter does not support.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.kernels.torch_types import TORCH_TYPES

from benchmarks.gpu.device import Bench
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.programs.packing import PackedKernels, pack_kernels
from benchmarks.gpu.proofs.load import SMOKE_KERNEL
from ingot.artifact.programs.launch_program import Kernel
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.runtime.cuda.driver.device import Device, Given, LoadedKernel

FILE = "kernel-cases.zip"
_NAMES = {dtype: name for name, dtype in TORCH_TYPES.items()}
_ACTIVATIONS = ("T", "X", "KV", "C", "W")  # signature letters of arguments that a bfloat16 case narrows
_MATMULS = ("matmul", "matmul_int4", "matmul_int4_wide", "matmul_nbits", "decode_attention", "ragged_attention",
            "prefill_attention")  # fmt: skip
_DRY_KERNELS = ("rms_norm", "gather_rows", "gated_activation", "matmul")  # of a dry run: a case of each
_SECONDS_A_CASE, _DRY_SECONDS = 20.0, 3.0
# Over the largest value. GPUs multiply float32 with 11 bits (tf32); their exp and sin differ in the last bits;
# bfloat16 has 8 bits, and references are computed from unrounded inputs.
_TF32, _FUNCTIONS, _BF16 = 2e-3, 1e-5, 2.5e-2
Run = Callable[[Kernel, tuple[int, int, int], list[Any]], None]


def write_kernel_cases(file: Path, sm: int) -> None:
    """Compile the kernels of the cases for an SM into a file."""
    from ingot.pipeline.targets.cuda.cubins import compile_kernels

    cases = [case for case in _cases() if runs_on(case, sm)]
    needed = kernels_of(cases, narrow=False) | kernels_of(filter(is_wide, cases), narrow=True)
    needed["launch"] = SMOKE_KERNEL
    pack_kernels(needed, compile_kernels(needed, sm), file)


def kernels_of(cases: Iterable[Any], *, narrow: bool) -> dict[str, Kernel]:
    """Kernels that the cases launch, by key; nothing is computed."""
    needed: dict[str, Kernel] = {}

    def note(kernel: Kernel, grid: tuple[int, int, int], values: list[Any]) -> None:
        needed[_key(kernel)] = kernel

    with np.errstate(all="ignore"), caught(note, narrow):
        for case in cases:
            case.run()
    return needed


def kernel_cases(bench: Bench) -> list[Task]:
    """Every case in its own precision, and those in float32 in bfloat16."""
    cases = dry_cases() if bench.machine.is_dry else _cases()
    runner = CaseRunner(bench.machine.open, bench.programs / FILE)
    seconds = _DRY_SECONDS if bench.machine.is_dry else _SECONDS_A_CASE
    return [
        Task(f"{number} {case}{' as bfloat16' * narrow}", partial(_measured, runner, case, narrow), seconds)
        for number, case in enumerate(cases)
        for narrow in ((False, True) if is_wide(case) and not bench.machine.is_dry else (False,))
    ]


def _measured(runner: "CaseRunner", case: Any, narrow: bool) -> Iterator[Record]:
    with caught(runner.run, narrow):
        yield _record(case, precision_of(case, narrow), limit_on_gpu(case, narrow))


@contextmanager
def caught(run: Run, narrow: bool) -> Iterator[None]:
    """Redirect launches of Triton functions to `run`; with `narrow`, float32 tensors that allow it become bfloat16."""
    from triton.runtime.interpreter import InterpretedFunction

    def catch(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        named = dict(zip(self.arg_names, args, strict=False)) | given
        launch(self.fn.__name__, named, grid, run, narrow)

    usual = InterpretedFunction.run
    InterpretedFunction.run = catch
    try:
        yield
    finally:
        InterpretedFunction.run = usual


def launch(name: str, named: Mapping[str, Any], grid: Any, run: Run, narrow: bool) -> None:
    """One launch by its arguments' names; narrowed tensors are widened again afterwards, in place."""
    listed = SIGNATURES[name].arguments
    narrowed: dict[int, torch.Tensor] = {}
    held = {key: named[key] for key in listed}
    if narrow:
        held = {key: _narrowed(value, listed[key], narrowed) for key, value in held.items()}
    constants = {key: _constant(value, narrow) for key, value in named.items() if key not in listed}
    kernel = Kernel(
        name=name,
        constants=constants,
        types=tuple(_type(held[key], kind) for key, kind in listed.items()),
        aligned=tuple(place for place, value in enumerate(held.values()) if isinstance(value, int) and value % 16 == 0),
        num_warps=int(constants.get("WARPS", 4)) + SIGNATURES[name].worker_warps,
        num_stages=3,
    )
    x, y, z = (*grid, 1, 1)[:3]
    run(kernel, (x, y, z), list(held.values()))
    for key in listed:
        if held[key] is not named[key]:
            whole(named[key]).copy_(whole(held[key]))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole memory of a view, flat: kernels step beyond a view by its strides."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((size,), (1,), 0)


def _narrowed(value: Any, kind: str, known: dict[int, torch.Tensor]) -> Any:
    """Copy tensors; views of one memory stay views of one memory."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or kind[1:] not in _ACTIVATIONS:
        return value
    flat = known.setdefault(value.untyped_storage().data_ptr(), whole(value).to(torch.bfloat16))
    return flat.as_strided(value.size(), value.stride(), value.storage_offset())


def _type(value: Any, kind: str) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_NAMES[value.dtype]}"
    return "*fp32" if value is None and kind[1:].isupper() else kind


def _constant(value: Any, narrow: bool) -> Any:
    """Types by Triton's names; a GPU never widens matmuls."""
    if hasattr(value, "name") and not isinstance(value, int | float | str):
        return "bf16" if narrow and value.name == "fp32" else value.name
    return value.value if hasattr(value, "value") else value


def _key(kernel: Kernel) -> str:
    text = json.dumps(kernel.model_dump(), sort_keys=True)
    return f"{kernel.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class CaseRunner:
    """Runs caught launches on a device, with the file's cubins, each loaded when it is first needed."""

    def __init__(self, open_device: Callable[[], Device], file: Path) -> None:
        self._open, self._packed = open_device, PackedKernels(file)
        self._kernels: dict[str, LoadedKernel] = {}

    @cached_property
    def _device(self) -> Device:
        device = self._open()
        device.activate()
        return device

    @cached_property
    def _stream(self) -> Any:
        return self._device.make_stream()

    def _loaded(self, key: str) -> LoadedKernel:
        if key not in self._kernels:
            kernel, facts = self._packed.kernels[key]
            self._kernels[key] = self._device.load_kernel(self._packed.code(key), kernel, facts)
        return self._kernels[key]

    def run(self, kernel: Kernel, grid: tuple[int, int, int], values: list[Any]) -> None:
        """Copy memory to the device, run the kernel, copy memory back."""
        device, stream = self._device, self._stream
        memory = {_memory(value): whole(value) for value in values if isinstance(value, torch.Tensor)}
        places = {number: self._placed(flat) for number, flat in memory.items()}
        given: list[Given] = []
        for kind, value in zip(kernel.types, values, strict=True):
            if isinstance(value, torch.Tensor):
                value = places[_memory(value)][0] + value.storage_offset() * value.itemsize
            given.append((kind, value or 0))
        device.bind(self._loaded(_key(kernel)), grid, given, kernel.name)(stream)
        for number, (place, pinned) in places.items():
            device.copy_out(pinned, place, stream)
            device.synchronize(kernel.name)
            memory[number].view(torch.uint8).copy_(torch.from_numpy(pinned.copy())[: memory[number].nbytes])
            device.free(place)

    def _placed(self, flat: torch.Tensor) -> tuple[int, Any]:
        raw = flat.view(torch.uint8).numpy()
        pinned = self._device.allocate_pinned(max(1, raw.size), "a tensor")
        pinned[: raw.size] = raw
        place = self._device.allocate(pinned.size, "a tensor")
        self._device.copy_in(place, pinned, self._stream)
        return place, pinned


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _cases() -> list[Any]:
    from tests.kernels.all_cases import all_cases

    return list(all_cases())


def dry_cases() -> list[Any]:
    """The cases of a dry run."""
    first = {case.kernel: case for case in reversed(_cases())}
    return [first[kernel] for kernel in _DRY_KERNELS]


def runs_on(case: Any, sm: int) -> bool:
    """Whether the SM has the instructions of a case's kernel."""
    return SIGNATURES[case.kernel].sm in (None, sm)


def is_wide(case: Any) -> bool:
    """Whether a case computes in float32, and so in bfloat16 too."""
    return "float32" in case.precision


def precision_of(case: Any, narrow: bool) -> str:
    """The type that it computes in on a GPU."""
    return str(case.precision).replace("float32", "bfloat16") if narrow else str(case.precision)


def limit_on_gpu(case: Any, narrow: bool) -> float:
    """The largest error, over the largest value, that rounding on a GPU explains."""
    if narrow:
        return max(float(case.limit), _BF16)
    if case.kernel in _MATMULS and is_wide(case):
        return max(float(case.limit), _TF32)
    return max(2 * float(case.limit), _FUNCTIONS)


def _record(case: Any, precision: str, limit: float) -> Record:
    absolute, relative = case.errors()
    facts: Record = {"figure": "case", "kernel": case.kernel, "shape": case.shape, "precision": precision}
    return {**facts, "absolute": absolute, "error": relative, "limit": limit, "within": bool(relative <= limit)}
