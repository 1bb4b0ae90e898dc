"""Parameters of cubins are counted against those that a launch passes."""

import os
import struct
import subprocess
import sys
from collections.abc import Sequence

import pytest

from ingot.artifact.programs.cubin_parameters import parameter_sizes, require_parameters
from ingot.artifact.programs.launch_program import Kernel
from ingot.errors import ArtifactError
from tests.data_paths import ROOT

KERNEL = Kernel(name="scale", constants={}, types=("*fp16", "i32", "fp32"), aligned=(), num_warps=4, num_stages=1)
OWN, SCRATCH = (8, 4, 4), (8, 8)


def cubin(sizes: Sequence[int], symbol: str = "scale", kind: int = 0x17) -> bytes:
    """An ELF file of the sections that matter: names, and the kernel's attributes, its parameters in reverse."""
    attributes = struct.pack("<BBHI", 4, 0x37, 4, 0x82) + struct.pack("<BBH", 3, 0x1B, 255)
    for ordinal, size in reversed([*enumerate(sizes)]):
        attributes += struct.pack("<BBHIHHI", 4, kind, 12, 0, ordinal, 0, size << 18 | 0x1F000)
    names = b"\0.shstrtab\0.nv.info." + symbol.encode() + b"\0"
    sections = [(1, names), (11, attributes)]
    header_bytes, place, headers = 64, 64, b""
    for name, content in sections:
        headers += struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, place, len(content), 0, 0, 1, 0)
        place += len(content)
    start = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQI", 2, 190, 1, 0, 0, place, 0)
    start += struct.pack("<HHHHHH", header_bytes, 0, 0, 64, len(sections), 0)
    return start + b"".join(content for _, content in sections) + headers


@pytest.mark.parametrize("kind", [0x17, 0x45])
def test_a_kernel_that_takes_what_a_launch_passes_is_accepted(kind: int) -> None:
    code = cubin((*OWN, *SCRATCH), kind=kind)
    assert parameter_sizes(code, "scale") == (8, 4, 4, 8, 8)
    require_parameters(code, KERNEL, "scale")


@pytest.mark.parametrize("sizes", [(*OWN, *SCRATCH, 8), (*OWN, 8), (8, 4, *SCRATCH), (8, 8, 4, *SCRATCH)])
def test_a_kernel_of_more_fewer_or_other_parameters_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ArtifactError, match=f"scale takes {len(sizes)} parameters of .* and a launch passes 5 of"):
        require_parameters(cubin(sizes), KERNEL, "scale")


def test_a_cubin_without_the_kernel_or_cut_off_is_refused_and_other_code_is_left_to_the_driver() -> None:
    code = cubin((*OWN, *SCRATCH))
    with pytest.raises(ArtifactError, match="does not contain the kernel other"):
        require_parameters(code, KERNEL, "other")
    with pytest.raises(ArtifactError, match="the cubin of the kernel scale is damaged"):
        require_parameters(code[:-70], KERNEL, "scale")
    assert parameter_sizes(b"//\n.version 8.7\n", "scale") is None


def test_a_compiled_kernel_takes_its_arguments_and_two_pointers() -> None:
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    code = (
        "from ingot.artifact.programs.cubin_parameters import argument_bytes, parameter_sizes\n"
        "from ingot.pipeline.targets.cuda.cubins import compile_kernel\n"
        "from ingot.pipeline.targets.cuda.kernel_signatures import make_kernel\n"
        "kernel = make_kernel('gather_rows', {'T': 'bf16'}, {'COLUMNS': 172, 'BLOCK': 256})\n"
        "cubin = compile_kernel(kernel, 90)\n"
        "assert parameter_sizes(cubin.code, cubin.facts.symbol) == (*map(argument_bytes, kernel.types), 8, 8)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
