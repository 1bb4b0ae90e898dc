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
