"""Facts about the machine and the software of a measurement, without host name, user or paths: evidence is shared."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ingot.runtime.executors import DeviceFacts
from ingot.settings import num_threads

_CPU_FLAGS = frozenset(
    (
        *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
        *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
        *("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
    )
)
_PACKAGES = ("ingot", "numpy", "onnx", "onnx-ir", "onnxruntime", "safetensors", "tokenizers", "cuda-bindings")


def environment(threads: int | None = None, device: DeviceFacts | None = None) -> dict[str, Any]:
    """CPU, memory, GPU if one was used, system, Python, packages and engine threads, as plain data."""
    gpu = {"name": device.name, "sm": device.sm, "memory_bytes": device.total_bytes} if device else None
    return {
        "gpu": gpu,
        "cpu": cpu_facts(_read("/proc/cpuinfo")),
        "cores_available": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cores_total": os.cpu_count(),
        "memory_bytes": memory_bytes(_read("/proc/meminfo")),
        "os": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "threads": threads or num_threads(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def cpu_facts(cpuinfo: str) -> dict[str, Any]:
    """The model, and the instruction sets that matrix kernels use, from the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    model = fields.get("model name") or fields.get("CPU part") or platform.processor() or "unknown"
    return {"model": model, "flags": sorted(_CPU_FLAGS.intersection(flags))}


def memory_bytes(meminfo: str) -> int | None:
    """MemTotal from the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: str) -> str:
    """Text of a system file; empty if it does not exist."""
    file = Path(path)
    return file.read_text(errors="replace") if file.is_file() else ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
