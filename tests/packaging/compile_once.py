"""A C compiler that compiles nothing twice: `python compile_once.py CC ARGUMENTS...`, as CC of the build hook.

Tests of packages build the same library several times, and each build takes most of a minute. An object is kept in
XDG_CACHE_HOME or ~/.cache, in ingot/test-objects, under a digest of all that it depends on: the source after the
preprocessor (so the headers, the macros and the platform's headers), the arguments, and the compiler: its size, and
what it reports with -v (its version, target and defaults). Other commands, such as linking, run unchanged.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

KEPT = 100
"""Objects that the folder keeps: those used last."""


def as_cc(compiler: Sequence[str] = ()) -> dict[str, str]:
    """CC for the build hook: this compiler, by default the one that the hook would choose. Empty without a compiler."""
    default = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    words = list(compiler) or ([default] if default else [])
    return {"CC": shlex.join([sys.executable, __file__, *words])} if words else {}


def main(command: list[str]) -> int:
    """Run the compiler's command, or copy the object that it would make."""
    if "-c" not in command:
        return _run(command)
    target, source = command[command.index("-o") + 1], Path(command[-1])
    key = _key(command, source)
    if key is None:
        return _run(command)  # which says what is wrong
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ingot", "test-objects", f"{key}.o")
    if kept.is_file():
        shutil.copyfile(kept, target)
        kept.touch()
        return 0
    code = _run(command)
    if code == 0:
        _keep(Path(target), kept)
    return code


def _run(command: list[str]) -> int:
    """The command's exit code; 127, as in a shell, where there is no such program."""
    try:
        return subprocess.run(command).returncode
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127


def _key(command: list[str], source: Path) -> str | None:
    """Digest of all that decides the object's bytes. None where the compiler refuses the source."""
    at = command.index("-o")
    arguments = [word for word in (*command[:at], *command[at + 2 : -1]) if word != "-c"]
    without_macros = [word for word in arguments if not word.startswith(("-D", "-U"))]  # the text has what they change
    try:
        compiler = subprocess.run([*without_macros, "-E", "-v", "-x", "c", os.devnull], capture_output=True, text=True)
        text = subprocess.run([*arguments, "-E", "-P", str(source)], capture_output=True)
    except OSError:
        return None
    if compiler.returncode or text.returncode:
        return None
    words = [*without_macros, *compiler.stderr.split()]
    # Folders are another thing in every checkout; of the program that compiles, its size.
    sizes = [
        str(os.stat(path).st_size)
        for word in words
        if os.access(path := word.strip('"'), os.X_OK) and os.path.isfile(path)
    ]
    parts = [word for word in words if "/" not in word] + sizes
    return hashlib.sha256(" ".join(parts).encode() + text.stdout).hexdigest()[:40]


def _keep(made: Path, kept: Path) -> None:
    """Put an object into the folder at once, as other compilers read it, and remove the oldest."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as staged:
        staged.write(made.read_bytes())
    Path(staged.name).replace(kept)
    oldest_first = sorted(kept.parent.glob("*.o"), key=lambda file: file.stat().st_mtime)
    for file in oldest_first[:-KEPT]:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
