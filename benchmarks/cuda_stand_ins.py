"""CUDA's libraries as onnxruntime's CUDA provider imports them, compiled on the spot from functions that do nothing.

The runtime is cuda_stand_in.c; of every other function the name is enough. Needs gcc and nm. A process that has the
folder in LD_LIBRARY_PATH loads the provider without a card, a driver or CUDA.
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

RUNTIME = "libcudart.so"
SOURCE = Path(__file__).with_name("cuda_stand_in.c")
_LIBRARY = re.compile(r"lib(cu\w+)\.so\.\d+")
_DRIVER = "libcuda.so.1"
_HANDLES = ("cublasCreate_v2", "cublasLtCreate")  # whose result is looked at
_DEFINED = re.compile(r"^(?:Status|Pointer \*|const char \*|void) ?(\w+)\(", re.MULTILINE)


def compile_stand_ins(provider: Path, folder: Path) -> None:
    """Write the libraries that the provider's shared object needs into the folder."""
    functions = _imported(provider)
    for library in _needed(provider):
        text = _source(library, functions.get(library, []))
        _compile(text, folder / library, versioned=library in functions and library != _DRIVER)


def _needed(provider: Path) -> list[str]:
    shown = _output("readelf", "-d", str(provider))
    return [match.group() for line in shown.splitlines() if "NEEDED" in line and (match := _LIBRARY.search(line))]


def _imported(provider: Path) -> dict[str, list[str]]:
    """Functions by the library whose version they ask for; those without a version are the driver's."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in _output("nm", "-D", "--undefined-only", str(provider)).splitlines():
        name, _, version = line.split()[-1].partition("@")
        if _LIBRARY.fullmatch(version.lstrip("@")):
            found[version.lstrip("@")].append(name)
        elif not version and re.match(r"cu[A-Z]", name):
            found[_DRIVER].append(name)
    return dict(found)


def _source(library: str, names: list[str]) -> str:
    text = SOURCE.read_text(encoding="utf-8") if library.startswith(RUNTIME) else "#include <stdlib.h>\n"
    defined = set(_DEFINED.findall(text))
    lines = []
    for name in names:
        if name in _HANDLES:
            lines.append(f"int {name}(void **handle) {{ return *handle = malloc(8), 0; }}")
        elif name not in defined:
            lines.append(f"int {name}() {{ return 0; }}")
    return text + "\n".join(lines) + "\n"


def _compile(text: str, file: Path, *, versioned: bool) -> None:
    source = file.with_suffix(".c")
    source.write_text(text, encoding="utf-8")
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(file), str(source), f"-Wl,-soname,{file.name}"]
    if versioned:
        versions = file.with_suffix(".map")
        versions.write_text(f"{file.name} {{ global: *; }};\n", encoding="utf-8")
        command.append(f"-Wl,--version-script={versions}")
    subprocess.run(command, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
