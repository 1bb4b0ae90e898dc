"""What the bits of keys and values depend on besides the artifact, for the keys of blocks that outlive a process.

onnxruntime chooses matmul kernels by the CPU's instruction sets, and attention without fused multiply-add rounds twice,
so blocks stored on one kind of CPU are not used on another. The number of threads changes no bit.
"""

import platform
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnxruntime  # type: ignore[import-untyped]

from ingot.runtime.code_version import code_version
from ingot.runtime.cpu.native.attention import attention_backend
from ingot.runtime.cpu.native.library import library_file

_CPUINFO = Path("/proc/cpuinfo")
_NATIVE = Path(__file__).parent / "native"
_SHOWN = 16  # hexadecimal digits of a digest


@cache
def kernel_version() -> str:
    """Versions of onnxruntime, of the attention kernel and of the code that calls them, and the CPU's features."""
    libraries = f"onnxruntime {onnxruntime.__version__}, attention {_attention()}"
    return f"{libraries}, {code_version(_NATIVE.parent)}, {platform.machine()} {_cpu_features()}"


def _attention() -> str:
    backend, library = attention_backend(), library_file(_NATIVE)
    if backend == "numpy" or library is None:
        return f"numpy {np.__version__}"
    return f"{backend} {_digest(library.read_bytes())}"


def _cpu_features() -> str:
    """Digest of the features that Linux lists for the first CPU; the processor's name elsewhere."""
    if not _CPUINFO.is_file():
        return platform.processor()
    lines = (line.partition(":") for line in _CPUINFO.read_text().splitlines())
    features = next((value for name, _, value in lines if name.strip() in ("flags", "Features")), "")
    return _digest(" ".join(sorted(features.split())).encode())


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:_SHOWN]
