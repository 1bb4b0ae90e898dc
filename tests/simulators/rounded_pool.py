"""A device that rounds a float KV pool as a quantized pool would."""

from collections.abc import Callable, Sequence

import torch

from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.runtime.cuda.driver.device import Bytes, Given
from tests.simulators.interpreted_device import FakeKernel, FakeStream, InterpretedDevice

_WRITES = ("rotary_kv_write", "latent_kv_write")


class RoundedPool(InterpretedDevice):
    """A device whose float KV pool is rounded, after each write, to the values that another precision can store."""

    def __init__(self, precision: str, head_dim: int) -> None:
        super().__init__()
        self.precision, self.head_dim = precision, head_dim

    def bind(
        self, kernel: FakeKernel, grid: tuple[int, int, int], arguments: Sequence[Given], node: str
    ) -> Callable[[FakeStream], None]:
        queue = super().bind(kernel, grid, arguments, node)
        if kernel.name not in _WRITES:
            return queue
        _, address = arguments[SIGNATURES[kernel.name].index("pool")]

        def write_and_round(stream: FakeStream) -> None:
            queue(stream)
            self.queue(stream, lambda: self.round(self.allocation(int(address))))

        return write_and_round

    def round(self, pool: Bytes) -> None:
        """Round every vector of the pool in place."""
        vectors = torch.from_numpy(pool).view(torch.float32).reshape(-1, self.head_dim)
        largest = vectors.abs().max(dim=1, keepdim=True).values
        limit = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[self.precision]
        scale = (largest / limit).to(torch.float16).to(torch.float32)
        scale[scale == 0] = 1.0
        codes = (vectors / scale).clamp(-limit, limit)
        rounded = codes.to(torch.float8_e4m3fn) if self.precision == "fp8" else codes.round()
        vectors.copy_(rounded.to(torch.float32) * scale)
