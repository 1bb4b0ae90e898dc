"""The parameters of a compiled kernel, read from its cubin, against those that a launch passes.

A launch passes a kernel's arguments in order, then two pointers to scratch memory, global and profiling, which Triton
appends. A compiler that appends more, or leaves one out, makes a kernel that reads beyond what is passed: nothing in
the driver's launch finds that.

A cubin is an ELF file (machine 190). Its section .nv.info.SYMBOL holds attributes: format, kind, size, content. Kind
0x17 (0x45 in newer compilers) describes one parameter: 4 bytes of index, its ordinal, its offset, and flags with the
size in bytes from bit 18 on. (The layout is not documented by NVIDIA; it is that of cuobjdump -elf.)
"""

import struct
from collections.abc import Iterator

from ingot.artifact.programs.launch_program import ELEMENT_BYTES, Kernel
from ingot.errors import ArtifactError

_MAGIC, _MACHINE = b"\x7fELF\x02\x01", 190  # 64 bits, little-endian; EM_CUDA
_SECTION = struct.Struct("<IIQQQQIIQQ")
_HAS_CONTENT = 4
_PARAMETER = (0x17, 0x45)
_POINTER_BYTES, _SCRATCH = 8, 2


def require_parameters(code: bytes, kernel: Kernel, symbol: str) -> None:
    """Raise ArtifactError unless the cubin takes what a launch passes; other code than a cubin is not checked."""
    found = parameter_sizes(code, symbol)
    if found is None:
        return
    passed = (*map(argument_bytes, kernel.types), *[_POINTER_BYTES] * _SCRATCH)
    if found != passed:
        raise ArtifactError(
            f"the compiled kernel {symbol} takes {len(found)} parameters of {list(found)} bytes, and a launch passes "
            f"{len(passed)} of {list(passed)}: the kernel's {len(kernel.types)} arguments and {_SCRATCH} pointers to "
            "scratch memory; build with another version of Triton"
        )


def argument_bytes(kind: str) -> int:
    """Size of an argument by its Triton type."""
    return _POINTER_BYTES if kind.startswith("*") else ELEMENT_BYTES[kind]


def parameter_sizes(code: bytes, symbol: str) -> tuple[int, ...] | None:
    """Sizes in bytes of a kernel's parameters in order; None for other code than a cubin.

    ArtifactError for a cubin without the kernel, or one that is cut off.
    """
    if not code.startswith(_MAGIC) or int.from_bytes(code[18:20], "little") != _MACHINE:
        return None
    try:
        content = dict(_sections(code)).get(f".nv.info.{symbol}")
        if content is None:
            raise ArtifactError(f"the cubin does not contain the kernel {symbol}; build the artifact again")
        return tuple(size for _, size in sorted(_parameters(content)))
    except (struct.error, ValueError) as error:
        raise ArtifactError(
            f"the cubin of the kernel {symbol} is damaged ({error}); build the artifact again"
        ) from error


def _sections(code: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each section."""
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<HHH", code, 58)
    headers = [_SECTION.unpack_from(code, start + number * size) for number in range(count)]
    for header in headers:
        name = headers[names][4] + header[0]
        yield code[name : code.index(b"\0", name)].decode(), code[header[4] : header[4] + header[5]]


def _parameters(content: bytes) -> Iterator[tuple[int, int]]:
    """Ordinal and size of each parameter."""
    place = 0
    while place < len(content):
        form, kind, size = struct.unpack_from("<BBH", content, place)
        place += 4
        if form == _HAS_CONTENT:
            if kind in _PARAMETER:
                _, ordinal, _, flags = struct.unpack_from("<IHHI", content, place)
                yield ordinal, flags >> 18
            place += size
