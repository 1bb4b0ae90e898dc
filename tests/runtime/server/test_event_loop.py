"""The event loop's process: its threads share what malloc keeps."""

import platform
import subprocess
import sys

import pytest

_COUNT_ARENAS = """
import ctypes, re, sys, threading
from ingot.runtime.server.event_loop import event_loop

if sys.argv[1] == "server":
    event_loop().close()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
barrier = threading.Barrier(4)


def allocate():
    libc.malloc(4096)
    barrier.wait()


threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone has arenas")
def test_threads_allocate_from_one_arena(tmp_path_factory: pytest.TempPathFactory) -> None:
    def arenas(kind: str) -> int:
        report = tmp_path_factory.mktemp(kind) / "malloc.xml"
        subprocess.run([sys.executable, "-c", _COUNT_ARENAS, kind, str(report)], check=True)
        return report.read_text().count("<heap nr=")

    assert arenas("server") == 1 < arenas("other")


_FREE_BETWEEN_OTHERS = """
import asyncio, ctypes, resource
from ingot.runtime.server import event_loop

event_loop._TRIM_SECONDS = 0.01
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p


def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()


def allocate(size):
    block = ctypes.c_void_p(libc.malloc(size))
    ctypes.memset(block, 1, size)
    return block


for block in [(allocate(64 << 10), allocate(16 << 10))[0] for _ in range(500)]:
    libc.free(block)  # what was allocated after each stays


async def watch():
    before, trimming = resident(), asyncio.create_task(event_loop.return_free_memory())
    for _ in range(6000):
        await asyncio.sleep(0.01)
        if before - resident() > 20 << 20:
            break
    trimming.cancel()
    print(before - resident())


asyncio.run(watch())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone keeps pages between others")
def test_free_memory_between_what_stays_returns_to_the_system() -> None:
    script = [sys.executable, "-c", _FREE_BETWEEN_OTHERS]
    freed = int(subprocess.run(script, check=True, capture_output=True, text=True).stdout)
    assert freed > 20 << 20, "of 31 MiB"


_FREE_LISTS = """
import asyncio, sys
from ingot.runtime.server import event_loop

event_loop._TRIM_SECONDS = 0.01


async def watch():
    tuples = [tuple(range(size)) for size in range(1, 20) for _ in range(1000)]
    del tuples  # CPython keeps their places, for tuples of the same sizes
    before, returning = sys.getallocatedblocks(), asyncio.create_task(event_loop.return_free_memory())
    for _ in range(6000):
        await asyncio.sleep(0.01)
        if before - sys.getallocatedblocks() > 15000:
            break
    returning.cancel()
    print(before - sys.getallocatedblocks())


asyncio.run(watch())
"""


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="CPython alone has free lists")
def test_places_of_freed_objects_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", _FREE_LISTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 15000
