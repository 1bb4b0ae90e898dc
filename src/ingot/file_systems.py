"""File systems: the kind of the one that a path is on."""

from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")


def file_system(path: Path) -> str:
    """The kind of a path's file system, such as ext4; words for it where the system does not say."""
    path, found = path.resolve(), (0, "its file system")
    try:
        mounts = _MOUNTS.read_text("utf-8", errors="replace")
    except OSError:
        return found[1]
    for line in mounts.splitlines():
        place, _, kind = line.partition(" - ")
        folder = place.split()[4]
        if path.is_relative_to(folder):
            found = max(found, (len(folder), kind.split()[0]), key=lambda each: each[0])
    return found[1]
