"""Float16 in C: every number has the bits that numpy gives it, by instructions (Arm, in an emulator) and without."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ingot.runtime.cpu import native

NATIVE = Path(native.__file__).parent
CHECK = Path(__file__).parent / "halves_check.c"
FLAGS = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-Wno-unused-function", "-Werror", f"-I{NATIVE}")
QUIET = 0x400000  # bit of a NaN


def expected() -> bytes:
    values = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    bits = values.view(np.uint32)
    bits[np.isnan(values)] |= QUIET
    return bits.tobytes()


@pytest.mark.parametrize(
    ("compilers", "options", "start"),
    [
        (("cc", "gcc", "clang"), (), ()),
        (("aarch64-linux-gnu-gcc",), ("-static",), ("qemu-aarch64", "-cpu", "cortex-a53")),
        (("aarch64-linux-gnu-gcc",), ("-static",), ("qemu-aarch64", "-cpu", "max")),
    ],
    ids=["here", "cortex-a53", "max"],
)
def test_every_number_has_the_bits_of_numpy(
    tmp_path: Path, compilers: tuple[str, ...], options: tuple[str, ...], start: tuple[str, ...]
) -> None:
    compiler = next(filter(shutil.which, compilers), None)
    if compiler is None or not all(map(shutil.which, start[:1])) or not (NATIVE / "kv_precision.h").exists():
        pytest.skip("needs the compiler, the emulator and the sources")
    program = tmp_path / "halves_check"
    done = subprocess.run([compiler, *FLAGS, *options, "-o", str(program), str(CHECK)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([*start, str(program)], capture_output=True, check=True).stdout == expected()
