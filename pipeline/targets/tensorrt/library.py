"""The TensorRT module that builds plans: tensorrt_rtx, which needs no GPU, or tensorrt if only that is installed.

Both have the same names for everything used here. Only TensorRT-RTX has compute capabilities: its plans run on all
listed SMs; a plan of `tensorrt` is for the GPU that it is built on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from ingot.errors import BuildError
from ingot.version import install_command

LibraryName = Literal["tensorrt-rtx", "tensorrt"]
MODULES: dict[LibraryName, str] = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}


@dataclass(frozen=True)
class Library:
    """A module with its name and version."""

    module: Any
    name: LibraryName
    version: str

    @property
    def is_rtx(self) -> bool:
        """Whether plans are built for listed SMs, on a machine with or without a GPU."""
        return hasattr(self.module, "ComputeCapability")

    @property
    def sms(self) -> tuple[int, ...]:
        """SMs that plans can be built for; empty if that is only the GPU of this machine."""
        if not self.is_rtx:
            return ()
        names = (name for name in self.module.ComputeCapability.__members__ if name.startswith("SM"))
        return tuple(sorted(int(name.removeprefix("SM")) for name in names))


def load_library(load: Callable[[str], Any] = import_module) -> Library:
    """Import TensorRT-RTX, or else TensorRT. BuildError names the extra if neither is installed."""
    for name, module in MODULES.items():
        try:
            loaded = load(module)
        except ImportError:
            continue
        return Library(loaded, name, str(loaded.__version__))
    raise BuildError(f"building for TensorRT needs its Python package: {install_command('tensorrt')}")
