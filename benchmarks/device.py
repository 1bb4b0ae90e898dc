"""The machine of a measurement."""

import os
import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# Vendor and family -> (first model, last model, microarchitecture). Virtual machines call each of AMD's `AMD EPYC`.
_MICROARCHITECTURES: dict[tuple[str, int], tuple[tuple[int, int, str], ...]] = {
    ("AuthenticAMD", 23): ((0, 47, "Zen"), (48, 255, "Zen 2")),
    ("AuthenticAMD", 25): (
        (0, 15, "Zen 3"),
        (16, 31, "Zen 4"),
        (32, 95, "Zen 3"),
        (96, 127, "Zen 4"),
        (160, 175, "Zen 4c"),
    ),
    ("AuthenticAMD", 26): ((0, 255, "Zen 5"),),
    ("GenuineIntel", 6): (
        (85, 85, "Skylake or Cascade Lake"),
        (106, 106, "Ice Lake"),
        (108, 108, "Ice Lake"),
        (143, 143, "Sapphire Rapids"),
        (173, 174, "Granite Rapids"),
        (207, 207, "Emerald Rapids"),
    ),
}


def device_facts() -> dict[str, object]:
    """Processor, cores this process may use, memory in bytes, operating system."""
    return {
        "processor": processor_name(),
        "cores": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """Model name and microarchitecture, such as `AMD EPYC (Zen 4)`."""
    text = _CPUINFO.read_text("utf-8") if _CPUINFO.is_file() else ""
    return processor_in(text) or platform.processor() or platform.machine()


def processor_in(cpuinfo: str) -> str | None:
    """The processor that the text of /proc/cpuinfo describes; None where it has no model name, as on Arm.

    A family that the table lacks is named by its numbers, so that results of two processors never share a file.
    """
    fields = dict(re.findall(r"^([^\t:]+)\t*: *(.*)$", cpuinfo.partition("\n\n")[0], re.MULTILINE))
    name = fields.get("model name", "").strip()
    family, model = fields.get("cpu family", ""), fields.get("model", "")
    if not name or not (family.isdecimal() and model.isdecimal()):
        return name or None
    rows = _MICROARCHITECTURES.get((fields.get("vendor_id", ""), int(family)), ())
    known = next((known for first, last, known in rows if first <= int(model) <= last), None)
    return f"{name} ({known or f'family {family}, model {model}'})"


def file_stem(processor: str) -> str:
    """A processor's name as that of a file: `AMD EPYC (Zen 4)` is amd-epyc-zen-4."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", processor.lower())).strip("-")
