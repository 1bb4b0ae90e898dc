"""The kernels for AMX make the bits of all others: their instructions are emulated where the CPU has none."""

import importlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.runtime.cpu.native import library
from tests.packaging import compile_once
from tests.runtime.cpu.native import test_bfloat16_attention, test_matmul_kernels, under_amx

EMULATOR = Path(__file__).parents[3] / "simulators" / "amx.c"
STRICT = ("-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The emulator and the library that it serves."""
    pytest.importorskip("hatchling", reason="needs the dev group (pip install --group dev)")
    build = importlib.import_module("hatch_build")
    folder, native = tmp_path_factory.mktemp("amx"), Path(library.__file__).parent
    found = library.native_library()
    if found is None or found.paged_attention_use_isa(b"avx512-bf16") != 0:
        pytest.skip("needs the native library, and a CPU with AVX512-BF16, as each CPU with AMX has it")
    emulator, target = folder / "amx.so", folder / library.LIBRARY
    compiler = compile_once.as_cc()
    if not compiler:
        pytest.skip("needs a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", compiler["CC"])
        problem = build.compile_library(native, target, (*build.FLAGS, "-O1", "-DEMULATED_AMX"))
    assert problem is None, problem
    subprocess.run([*shlex.split(compiler["CC"]), *STRICT, "-o", str(emulator), str(EMULATOR)], check=True)
    return str(emulator), str(target)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [test_bfloat16_attention, test_matmul_kernels])
def test_kernels_for_amx_make_the_same_bits(compiled: tuple[str, str], cases: object) -> None:
    file = str(getattr(cases, "__file__", ""))
    done = subprocess.run(
        [sys.executable, "-m", under_amx.__name__, *compiled, file], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
