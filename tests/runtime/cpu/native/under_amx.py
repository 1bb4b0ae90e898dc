"""pytest with the library's kernels for AMX, whose instructions are emulated: the process that test_amx.py starts.

    python -m tests.runtime.cpu.native.under_amx EMULATOR LIBRARY PYTEST-ARGUMENT...

EMULATOR is tests/simulators/amx.c, compiled; LIBRARY is Ingot's, compiled with EMULATED_AMX, and so takes AMX to be
there.
"""

import ctypes
import sys
from pathlib import Path

import pytest

from ingot.runtime.cpu.native import library


def main(emulator: str, compiled: str, *arguments: str) -> int:
    """Run pytest's arguments; its exit code, or 3 where the library does not choose AMX."""
    ctypes.CDLL(emulator)
    library.library_file = lambda folder: Path(compiled)
    found = library.native_library()
    from tests.runtime.cpu.native.kernel_cases import SETS  # the set in use, by the library

    if found is None or found.paged_attention_isa() != b"amx-bf16" or SETS[0] != "amx-int8":
        return 3
    return int(pytest.main([*arguments, "-p", "no:faulthandler"]))  # whose handler of SIGILL would be another


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
