"""The page cache of large files: empty it after a write, and read files into it in huge pages.

A file that was just written is cached in pages of 4 KiB, or a few of them together, and stays so as long as it is
cached. What is read from the disk through a mapping with advice for huge pages is cached in huge ones, where the file
system allows that (ext4, xfs). Programs that map the file then find them.
"""

import mmap
import os
from contextlib import suppress
from pathlib import Path

LEAST_BYTES = 16 << 20  # the second-level TLB of a processor has pages of 4 KiB for smaller files
HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
POPULATE_READ = 22  # Linux 5.14


def drop_from_cache(file: Path, begin: int = 0, size: int = 0) -> str | None:
    """Write a file to the disk and have the system forget its cached pages, those of other programs' mappings excepted.

    size   bytes from `begin`; 0: up to the end

    Returns the reason where the system refuses; nothing is lost then, or else.
    """
    if not hasattr(os, "posix_fadvise"):
        return "the system has no posix_fadvise"
    try:
        handle = os.open(file, os.O_RDONLY)
    except OSError as error:
        return error.strerror
    try:
        with suppress(OSError):  # a file system that is read-only has nothing to write
            os.fsync(handle)
        os.posix_fadvise(handle, begin, size, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        return error.strerror
    finally:
        os.close(handle)
    return None


def read_in_huge_pages(handle: int, begin: int, size: int) -> None:
    """Read up to `size` bytes of an open file into the page cache, in huge pages where they are not cached yet.

    begin   a multiple of 4096

    No effect for a small file, and where the system does not do so: the next to read the file does it as always.
    """
    whole = os.fstat(handle).st_size
    if whole < LEAST_BYTES or begin >= whole:
        return
    with (
        suppress(OSError, ValueError, AttributeError),
        mmap.mmap(handle, min(size, whole - begin), mmap.MAP_SHARED, mmap.PROT_READ, offset=begin) as window,
    ):
        window.madvise(HUGEPAGE)
        window.madvise(POPULATE_READ)
