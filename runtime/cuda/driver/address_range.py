"""One range of addresses that is device memory first and host memory after it; kernels read both in place.

    reserve one range ─► create device memory, host memory ─► map them one after the other ─► allow access
                         (where the driver cannot map host memory: managed memory, with a preferred place for each part)

CUDA Driver API, Virtual Memory Management and Unified Addressing. Host memory is read over the link; no page moves.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ingot.errors import EngineError
from ingot.runtime.cuda.driver.calls import DriverCalls
from ingot.sizes import format_bytes, round_up

_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL: managed memory for every stream


@dataclass
class AddressRange:
    """A range from `address` on, `fast_bytes` of it in device memory; `close` unmaps and frees it."""

    address: int
    fast_bytes: int
    size: int
    is_mapped: bool
    _undo: ExitStack = field(repr=False)

    def close(self) -> None:
        """Free it; no queued work may use it. Never raises."""
        self._undo.close()


def reserve_range(call: DriverCalls, gpu: Any, fast_bytes: int, slow_bytes: int, what: str) -> AddressRange:
    """Reserve and fill a range; both sizes are rounded up to what the driver maps at a time.

    EngineError, which names `what` and the part, where the GPU or the host has too little memory.
    """
    driver = call.driver
    attributes = driver.CUdevice_attribute
    maps_host = attributes.CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    if call("querying the GPU", driver.cuDeviceGetAttribute, maps_host, gpu):
        return _mapped(call, gpu, fast_bytes, slow_bytes, what)
    in_place = attributes.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
    if call("querying the GPU", driver.cuDeviceGetAttribute, in_place, gpu):
        return _managed(call, gpu, fast_bytes, slow_bytes, what)
    raise EngineError(
        f"{what} has a slow part, and this GPU's driver neither maps host memory after the GPU's nor reads managed"
        " memory in place; leave kv_offload out"
    )


def _mapped(call: DriverCalls, gpu: Any, fast_bytes: int, slow_bytes: int, what: str) -> AddressRange:
    driver, kinds = call.driver, call.driver.CUmemLocationType
    node = call(
        "querying the GPU", driver.cuDeviceGetAttribute, driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, gpu
    )
    parts = [
        (_location(driver, kinds.CU_MEM_LOCATION_TYPE_DEVICE, int(gpu)), fast_bytes, "the GPU"),
        (_location(driver, kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA, max(0, int(node))), slow_bytes, "the host"),
    ]
    properties = [_properties(driver, place) for place, _, _ in parts]
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    step = max(int(call(what, driver.cuMemGetAllocationGranularity, one, least)) for one in properties)
    sizes = [round_up(size, step) for _, size, _ in parts]
    with ExitStack() as undo:
        address = int(call(what, driver.cuMemAddressReserve, sum(sizes), step, 0, 0))
        undo.callback(driver.cuMemAddressFree, address, sum(sizes))
        begin = address
        for made, size, (_, _, owner) in zip(properties, sizes, parts, strict=True):
            memory = _create(call, made, size, what, owner)
            undo.callback(driver.cuMemRelease, memory)
            call(what, driver.cuMemMap, begin, size, 0, memory, 0)
            undo.callback(driver.cuMemUnmap, begin, size)
            begin += size
        call(what, driver.cuMemSetAccess, address, sum(sizes), [_access(driver, parts[0][0])], 1)
        return AddressRange(address, sizes[0], sum(sizes), True, undo.pop_all())


def _managed(call: DriverCalls, gpu: Any, fast_bytes: int, slow_bytes: int, what: str) -> AddressRange:
    driver, kinds, advice = call.driver, call.driver.CUmemLocationType, call.driver.CUmem_advise
    size = fast_bytes + slow_bytes
    on_gpu = _location(driver, kinds.CU_MEM_LOCATION_TYPE_DEVICE, int(gpu))
    on_host = _location(driver, kinds.CU_MEM_LOCATION_TYPE_HOST, 0)
    with ExitStack() as undo:
        address = int(call(f"allocating {format_bytes(size)} for {what}", driver.cuMemAllocManaged, size, _GLOBAL))
        undo.callback(driver.cuMemFree, address)
        prefer, used_by = advice.CU_MEM_ADVISE_SET_PREFERRED_LOCATION, advice.CU_MEM_ADVISE_SET_ACCESSED_BY
        call(what, driver.cuMemAdvise, address, fast_bytes, prefer, on_gpu)
        call(what, driver.cuMemAdvise, address + fast_bytes, slow_bytes, prefer, on_host)
        call(what, driver.cuMemAdvise, address, size, used_by, on_gpu)
        return AddressRange(address, fast_bytes, size, False, undo.pop_all())


def _create(call: DriverCalls, properties: Any, size: int, what: str, owner: str) -> Any:
    status, memory = call.driver.cuMemCreate(size, properties, 0)
    if status == call.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise EngineError(
            f"{what} takes {format_bytes(size)} of {owner}'s memory, which has less free; ask for fewer KV blocks"
            " (kv_blocks or kv_bytes), or a smaller kv_offload"
        )
    if status:
        raise call.failure(f"allocating {format_bytes(size)} for {what}", status)
    return memory


def _location(driver: Any, kind: Any, number: int) -> Any:
    location = driver.CUmemLocation()
    location.type, location.id = kind, number
    return location


def _properties(driver: Any, location: Any) -> Any:
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location = location
    return made


def _access(driver: Any, location: Any) -> Any:
    made = driver.CUmemAccessDesc()
    made.location, made.flags = location, driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return made
