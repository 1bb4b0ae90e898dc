"""Build hook that compiles the C sources of the CPU engine to one plain shared library, loaded by ctypes.

It needs nothing of Python, so that one wheel (py3-none-PLATFORM) serves every version. CC, CFLAGS and LDFLAGS are used
as in make; the default compiler is cc, gcc or clang. Without a compiler that works, the wheel holds no library
(py3-none-any), and the engine attends in numpy. An editable install compiles into the source tree.

INGOT_WHEEL_PLATFORM (`make wheel` sets it) is the platform of a wheel to publish, such as manylinux_2_28_aarch64: CC
must compile for it, and a failure ends the build.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "ingot/runtime/cpu/native"
LIBRARY = "ingot_cpu.so"
# After CFLAGS, as no flag of the environment may change a bit of the results.
FLAGS = ("-O3", "-std=gnu11", "-fno-fast-math", "-fno-math-errno", "-ffp-contract=off", "-fPIC")
LINK = ("-shared", "-s")
LIBRARIES = ("-lm", "-lpthread")


class NativeLibraryHook(BuildHookInterface[Any]):
    """Adds the compiled library to the wheel and names the platform in its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files of the wheel are collected."""
        folder = Path(self.root, "src", FOLDER)
        if not folder.is_dir():
            raise SystemExit(
                f"{folder} is missing: check out src/ingot's symbolic links (git config core.symlinks true)"
            )
        self._temporary = tempfile.TemporaryDirectory(prefix="ingot-build-")
        library = Path(self._temporary.name, LIBRARY)
        platform = os.environ.get("INGOT_WHEEL_PLATFORM")
        problem = compile_library(folder, library)
        if problem is not None and platform is not None:
            raise SystemExit(f"INGOT_WHEEL_PLATFORM is {platform}, but the library was not built: {problem}")
        if version == "editable":
            replace_library(folder / LIBRARY, library)
        elif library.exists():
            build_data["force_include"][str(library)] = f"{FOLDER}/{LIBRARY}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform or _this_platform()}"
        if problem is not None:
            self.app.display_warning(f"attention will be computed in numpy, several times slower: {problem}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        self._temporary.cleanup()


def compile_library(folder: Path, target: Path, flags: Sequence[str] = FLAGS, link: Sequence[str] = LINK) -> str | None:
    """Compile the C sources in `folder` to the shared library `target`. Returns what went wrong, or None."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        return "no C compiler was found (cc, gcc, clang, or CC in the environment)"
    try:
        start, given, libraries = map(
            shlex.split, (compiler, os.environ.get("CFLAGS", ""), os.environ.get("LDFLAGS", ""))
        )
    except ValueError as error:
        return f"CC, CFLAGS or LDFLAGS in the environment: {error}"
    digest = f'-DSOURCE_DIGEST="{source_digest(folder)}"'
    sources = sorted(folder.glob("*.c"))
    with tempfile.TemporaryDirectory(prefix="ingot-build-") as objects:
        made = [str(Path(objects, f"{source.stem}.o")) for source in sources]
        commands = [
            [*start, *given, *flags, digest, "-c", "-o", object_file, str(source)]
            for source, object_file in zip(sources, made, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            problem = next(filter(None, pool.map(_run, commands)), None)
        # With the flags of compiling: a linker told to make fast mathematics sets the processor to flush subnormals.
        return problem or _run([*start, *given, *flags, *link, "-o", str(target), *made, *libraries, *LIBRARIES])


def _run(command: list[str]) -> str | None:
    """Run a compiler. Returns what went wrong, or None."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return f"{shlex.join(command[:1])}: {error.strerror}"
    except subprocess.CalledProcessError as error:
        return f"{shlex.join(command)} failed:\n{error.stderr.strip()}"
    return None


def source_digest(folder: Path) -> str:
    """Digest of the C sources in a folder, which the library holds: the binding refuses one that has another."""
    sources = sorted([*folder.glob("*.c"), *folder.glob("*.h")])
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def replace_library(target: Path, built: Path) -> None:
    """Put the new library in place at once, as processes may have the old one mapped; without one, remove the old."""
    if not built.exists():
        target.unlink(missing_ok=True)
        return
    staged = target.with_suffix(".so.new")
    shutil.copy(built, staged)
    staged.replace(target)


def _this_platform() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
