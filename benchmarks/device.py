"""The machine of a measurement."""

import os
import platform
from pathlib import Path


def device_facts() -> dict[str, object]:
    """Processor, cores this process may use, memory in bytes, operating system."""
    return {
        "processor": _processor_name(),
        "cores": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.processor() or platform.machine()
    for line in cpuinfo.read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
