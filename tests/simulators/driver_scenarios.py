"""Scenarios of `driver.py` through cuda-bindings, with driver_shim.c as libcuda.so.1. Run by test_driver.py.

    LD_LIBRARY_PATH=FOLDER python -m tests.simulators.driver_scenarios LAUNCHES     -> one JSON object, by scenario

Each scenario runs in a forked process: a driver is initialized once, and a failure can lose its context.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from ingot.artifact import KVGeometry, open_artifact
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import CubinFacts, Kernel
from ingot.errors import EngineError
from ingot.runtime.cuda.driver.device import Device
from ingot.runtime.cuda.driver.driver import open_device
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.host_blocks import PinnedBlocks
from ingot.runtime.cuda.kv_pool import DevicePool
from ingot.runtime.cuda.loading import choose_sm
from ingot.runtime.options import EngineOptions
from ingot.runtime.slow_part import SlowPart
from tests.runtime.cuda.batches import Growing, token_ids
from tests.simulators.triton_interpreter import use_interpreter

SIZES = {"i32": 4, "fp32": 4, "i64": 8}
_LAUNCHER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, *[ctypes.c_uint] * 5, ctypes.POINTER(ctypes.c_void_p))

KERNEL = Kernel(
    name="scale_rows",
    constants={},
    types=("*fp32", "i32", "fp32"),
    aligned=(),
    num_warps=8,
    num_stages=1,
)


class Shim:
    """Functions of the shim."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.shim_log.restype = ctypes.c_char_p
        self._library.shim_used.restype = ctypes.c_int64
        self._kept: list[Any] = []

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self._library.shim_set(name.encode(), ctypes.c_int64(value))

    def launcher(self, function: Callable[..., None]) -> None:
        self._kept.append(_LAUNCHER(function))
        self._library.shim_launcher(self._kept[-1])

    @property
    def log(self) -> list[str]:
        return list(self._library.shim_log().decode().splitlines())

    @property
    def used_bytes(self) -> int:
        return int(self._library.shim_used())


def image(kernel: Kernel) -> bytes:
    """Make a compiled kernel in the shim's format: two pointers to scratch memory follow its own parameters."""
    sizes = [*(SIZES.get(kind, 8) for kind in kernel.types), 8, 8]
    return f"{kernel.name}\n{' '.join(map(str, sizes))}\n{kernel.model_dump_json()}\0".encode()


def load(device: Device, kernel: Kernel = KERNEL, shared_bytes: int = 1024, code: bytes | None = None) -> Any:
    device.activate()
    cubin = np.frombuffer(code or image(kernel), np.uint8)
    return device.load_kernel(cubin, kernel, CubinFacts(symbol=kernel.name, shared_bytes=shared_bytes))


def refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except EngineError as error:
        return str(error)
    return "no error"


def calls(shim: Shim) -> object:
    """Memory, copies, a launch, and its capture and replay."""
    seen: list[tuple[int, ...]] = []

    def launched(code: bytes, x: int, y: int, z: int, threads: int, shared: int, parameters: Any) -> None:
        pointer, *scratch = (ctypes.c_uint64.from_address(parameters[index]).value for index in (0, 3, 4))
        number = ctypes.c_int32.from_address(parameters[1]).value
        factor = ctypes.c_float.from_address(parameters[2]).value
        seen.append((x, y, z, threads, shared, pointer - address, number, int(factor * 8), *scratch))

    shim.launcher(launched)
    device = open_device()
    device.activate()
    stream = device.make_stream()
    address = device.allocate(4096, "a test")
    pinned = device.allocate_pinned(64, "a test")
    pinned[:] = np.arange(64)
    device.clear(address, 4096, stream)
    device.copy_rows_in(address, 256, pinned.reshape(4, 16), stream)
    device.copy(address + 2048, address + 256, 16, stream)
    found = device.allocate_pinned(32, "a test")
    device.copy_out(found, address + 2048, stream)
    queue = device.bind(
        load(device, shared_bytes=64 * 1024),
        (5, 6, 7),
        [("*fp32", address + 64), ("i32", -3), ("fp32", 0.25)],
        "a.node",
    )
    queue(stream)

    def twice(captured: Any) -> None:
        queue(captured)
        queue(captured)

    graph = device.capture(stream, twice)
    before, copied = len(seen), found.tolist()
    device.replay(graph, stream)
    device.synchronize("a test")
    facts = [device.name, device.sm, device.total_bytes - device.free_bytes()]
    device.close()
    device.close()
    log = shim.log
    del pinned, found
    return {
        "facts": facts,
        "copied": copied,
        "seen": seen,
        "before_replay": before,
        "log": log,
        "after": shim.log[len(log) :],
        "used": shim.used_bytes,
    }


def dependent_launches(shim: Shim) -> object:
    """A kernel that waits for the launch before it, launched so and in the usual way; one that does not wait."""
    waiting = KERNEL.model_copy(update={"constants": {"DEPENDENT": True}})
    device = open_device()
    device.activate()
    stream, logs = device.make_stream(), []
    for kernel, allowed in ((waiting, "1"), (waiting, "0"), (KERNEL, "1")):
        os.environ["INGOT_DEPENDENT_LAUNCHES"] = allowed
        given = [("*fp32", 0), ("i32", 1), ("fp32", 1.0)]
        queue = device.bind(load(device, kernel), (2, 3, 4), given, "a.node")
        begin = len(shim.log)
        device.replay(device.capture(stream, queue), stream)
        logs.append([line for line in shim.log[begin:] if line.startswith("launch")])
    return logs


def no_gpu(shim: Shim) -> object:
    shim.set(devices=0)
    return refusal(open_device)


def old_driver(shim: Shim) -> object:
    shim.set(version=12040, major=12)
    return refusal(open_device)


def missing_function(shim: Shim) -> object:
    shim.set(missing_graphs=1)
    device = open_device()
    device.activate()
    return refusal(lambda: device.capture(device.make_stream(), lambda stream: None))


def full_gpu(shim: Shim) -> object:
    shim.set(total=3 * 2**20)
    device = open_device()
    device.activate()
    return refusal(lambda: device.allocate(4 * 2**20, "the arena"))


def refused_launch(shim: Shim) -> object:
    device = open_device()
    queue = device.bind(load(device), (1, 1, 1), [("*fp32", 0), ("i32", 1), ("fp32", 1.0)], "layers.3.norm")
    shim.set(fail_launch=701)
    stream = device.make_stream()
    said = refusal(lambda: queue(stream)), refusal(lambda: device.capture(stream, queue))
    shim.set(fail_launch=0)
    queue(stream)
    return said


def lost_context(shim: Shim) -> object:
    device = open_device()
    device.activate()
    event = device.make_event()
    shim.set(fail_wait=700)
    said = refusal(lambda: device.wait_on_host(event, "a step")), refusal(lambda: device.synchronize("the next"))
    device.close()
    return said


def bad_kernels(shim: Shim) -> object:
    device = open_device()
    shim.set(shared_optin=99 * 1024)
    return (
        refusal(lambda: load(device, code=b"no kernel at all\0")),
        refusal(lambda: load(device, shared_bytes=100 * 1024)),
        refusal(lambda: load(device, code=image(KERNEL).replace(b"scale_rows", b"other_rows", 1))),
    )


def other_gpu(shim: Shim) -> object:
    shim.set(major=8, minor=9)
    program = read_launches(open_artifact(sys.argv[1]))
    return refusal(lambda: choose_sm(program, open_device()))


def executor(shim: Shim) -> object:
    """The whole executor; kernels are interpreted from the parameters that the driver gets."""
    use_interpreter()
    from tests.simulators.interpreted_kernels import run_from_parameters

    shim.launcher(run_from_parameters)
    executor = CudaExecutor(open_artifact(sys.argv[1]), open_device(), EngineOptions(kv_blocks=8))
    sequences = Growing([token_ids(7)], [[3, 1]])
    logits = [executor.forward(sequences.step([count])).tolist() for count in (5, 1, 1)]
    copied: list[bytes] = []

    def elsewhere() -> None:
        executor.copy_block(1, 5)
        copied.extend(executor.read_block(block) for block in (1, 5))

    in_thread(elsewhere)  # an AsyncEngine is loaded by one thread and steps in another
    executor.close()
    moved = len(copied) == 2 and copied[0] == copied[1]
    return {"logits": logits, "log": shim.log, "used": shim.used_bytes, "moved": moved}


def host_blocks(shim: Shim) -> object:
    """Blocks to host memory and back, polled by another thread; the calls of the driver that it takes."""
    device = open_device()
    device.activate()
    pool = DevicePool(device, device.make_stream(), KVGeometry(num_layers=1, num_kv_heads=1, head_dim=4), 8)
    shim.set(pinned=4096)
    refused = refusal(lambda: PinnedBlocks(device, None, pool, 100))
    host = PinnedBlocks(device, device.make_stream(), pool, 4)
    pool.write_block(3, bytes([7]) * pool.geometry.block_bytes)
    begin = len(shim.log)
    shim.set(not_ready=2)
    saves = [host.save(block, slot) for slot, block in enumerate((3, 5, 6))]
    polls: list[list[bool]] = []

    def poll() -> None:
        polls.extend([save.done for save in saves] for _ in range(3))

    in_thread(poll)
    log = shim.log[begin:]
    seconds = [save.seconds for save in saves]
    restored = host.restore(0, 1)
    moved = restored.done and pool.read_block(1) == pool.read_block(3) == host.view(0).tobytes()
    failing = host.restore(1, 2)
    shim.set(fail_query=700)
    failed = [failing.done, str(failing.error), refusal(host.check)]
    host.close()
    device.close()
    return {"refused": refused, "polls": polls, "log": log, "seconds": seconds, "moved": moved, "failed": failed}


def slow_part(shim: Shim) -> object:
    """A KV pool of device and host memory in one range: blocks of both parts, and what closing frees."""
    kv = KVGeometry(num_layers=1, num_kv_heads=8, head_dim=128, block_tokens=64)  # blocks of 512 KiB

    def moved(fast: int, slow: int) -> list[bool]:
        device = open_device()
        device.activate()
        pool = DevicePool(device, device.make_stream(), kv, fast, SlowPart(slow))
        blocks = (0, fast - 1, fast, fast + slow - 1)
        for block in blocks:
            pool.write_block(block, bytes([block + 1]) * kv.block_bytes)
        pool.copy_block(fast, 1)
        found = [pool.read_block(block) == bytes([block + 1]) * kv.block_bytes for block in blocks]
        found.append(pool.read_block(1) == pool.read_block(fast))
        device.close()
        return found

    names = ("reserve", "create", "map ", "release ", "unmap", "free", "managed", "advise")

    def logged(begin: int) -> list[str]:
        return [line for line in shim.log[begin:] if line.startswith(names)]

    mapped, log, used = moved(5, 3), logged(0), shim.used_bytes
    shim.set(pinned=1 << 20)
    full = refusal(lambda: moved(5, 8))
    used += shim.used_bytes
    shim.set(maps_host=0, pinned=1 << 30)
    begin = len(shim.log)
    managed, advised = moved(5, 3), logged(begin)
    shim.set(managed=0)
    return {
        "mapped": mapped,
        "log": log,
        "used": used,
        "full": full,
        "managed": managed,
        "advised": advised,
        "refused": refusal(lambda: moved(5, 3)),
    }


def in_thread(work: Callable[[], None]) -> None:
    thread = Thread(target=work)
    thread.start()
    thread.join()


SCENARIOS: Sequence[Callable[[Shim], object]] = (
    calls,
    dependent_launches,
    no_gpu,
    old_driver,
    missing_function,
    full_gpu,
    refused_launch,
    lost_context,
    bad_kernels,
    other_gpu,
    executor,
    host_blocks,
    slow_part,
)


def run_forked(scenario: Callable[[Shim], object]) -> object:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writer, "w") as stream:
            json.dump(scenario(Shim()), stream)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"{scenario.__name__} ended with {status}"
    return json.loads(text)


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    print(json.dumps({scenario.__name__: run_forked(scenario) for scenario in SCENARIOS}))
