"""Changes of a kernel's source that the emulator of its barriers, or a comparison with float64, must find."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from triton.runtime.errors import InterpreterError

from tests.simulators import gluon_emulator


@dataclass(frozen=True)
class Fault:
    """A change of the kernel's source, and what the emulator says of it.

    None: results differ from float64, or a load leaves its tensor.
    """

    old: str
    new: str
    message: str | None


def require_found(
    fault: Fault,
    kernel: ModuleType,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    solve: Callable[[ModuleType], object],
) -> None:
    """Solve a problem, which is compared with float64, by the kernel's module with the fault, and expect its error."""
    module = _changed(fault, kernel, folder, monkeypatch)
    gluon_emulator.seed(0)
    with pytest.raises((InterpreterError, AssertionError)) as error:
        solve(module)
    is_emulators = "EmulationError" in repr(error.value)
    assert is_emulators == (fault.message is not None), error.value
    assert fault.message is None or fault.message in str(error.value)


def _changed(fault: Fault, kernel: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    assert kernel.__file__ is not None
    source = Path(kernel.__file__).read_text("utf-8")
    assert source.count(fault.old) == 1, fault
    file = folder / f"faulty_{Path(kernel.__file__).name}"
    file.write_text(source.replace(fault.old, fault.new), "utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)  # Triton reads the source by it
    spec.loader.exec_module(module)
    gluon_emulator.install(module)
    return module
