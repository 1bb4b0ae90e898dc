"""The installed distribution: its version, its source, and the command that adds an extra to it."""

import json
import shlex
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

# `ingot` is another project on the index, and was the name of older installations of this one.
DISTRIBUTION = "ingot-llm"
_SCRIPT = "ingot.__main__:main"


def _installed() -> Distribution | None:
    """Return the metadata of this package; None for a source tree that was never installed."""
    for name in (DISTRIBUTION, "ingot"):
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        if any(entry.value == _SCRIPT for entry in found.entry_points):
            return found
    return None


_found = _installed()
__version__ = _found.version if _found else "0.0.0"


def project_source() -> str | None:
    """Return the URL of Ingot's source; None if Ingot is not installed."""
    urls = (_found.metadata.get_all("Project-URL") if _found else None) or []
    return dict(url.split(", ", 1) for url in urls).get("Source")


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation, from where it came: a clone, a wheel or the index."""
    is_own = shutil.which("pip") == str(Path(sys.executable).with_name("pip"))
    pip = ["pip"] if is_own else [sys.executable, "-m", "pip"]
    return shlex.join([*pip, "install", *_requirement(extra)])


def _requirement(extra: str) -> list[str]:
    """Return the arguments of `pip install`; the origin is recorded as PEP 610 describes."""
    named = f"{DISTRIBUTION}[{extra}]"
    origin = json.loads((_found.read_text("direct_url.json") if _found else None) or "{}")
    url, version_control = str(origin.get("url", "")), origin.get("vcs_info")
    if version_control:
        return [f"{named} @ {version_control['vcs']}+{url}@{version_control['commit_id']}"]
    path = Path(unquote(urlsplit(url).path))
    if not url.startswith("file:") or not path.exists():
        return [named]
    if origin.get("dir_info", {}).get("editable"):
        return ["-e", f"{path}[{extra}]"]
    return [f"{named} @ {url}"]
