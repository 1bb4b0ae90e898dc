"""Choice of the attention backend: the C kernel where it was built, else numpy. Chosen and logged once per process.

INGOT_ATTENTION=numpy forces numpy, for comparisons or when a fault of the kernel is suspected.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Protocol

from ingot import settings
from ingot.artifact import AttentionStep
from ingot.errors import EngineError
from ingot.runtime.batch import FloatArray, ForwardBatch
from ingot.runtime.cpu.attention_operands import Operands, Rotation
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.binding import NativeAttention, isa_in_use, native_library
from ingot.runtime.cpu.native.numpy_attention import NumpyAttention

logger = logging.getLogger(__name__)


class Attention(Protocol):
    """Attention over one KV pool: `begin` once per step, then each bound call once."""

    def begin(self, batch: ForwardBatch) -> None:
        """Set the step's sequences."""
        ...

    def bind(
        self, step: AttentionStep, operands: Operands, output: FloatArray, rotation: Rotation | None = None
    ) -> Callable[[], None]:
        """Return the call that writes key and value into the pool, attends, and fills `output` [rows, heads * dim].

        `rotation` is applied to queries and keys; its tables must cover all positions of a batch.
        """
        ...


@cache
def attention_backend() -> str:
    """Return this process's backend: "native-avx512", "native-avx2", "native-baseline" or "numpy".

    INGOT_ATTENTION decides, else whether the kernel was built. EngineError when it requires a missing kernel.
    """
    asked = settings.attention()
    if asked == "numpy":
        logger.info("attention: numpy, set by INGOT_ATTENTION")
        return "numpy"
    if native_library() is None:
        if asked == "native":
            raise EngineError("INGOT_ATTENTION is native, but its kernel was not built; install with a C compiler")
        logger.warning("attention: numpy, several times slower; install with a C compiler to build the kernel")
        return "numpy"
    backend = f"native-{isa_in_use()}"
    logger.info("attention: %s", backend)
    return backend


def make_attention(pool: KVPool, num_threads: int) -> Attention:
    """Make the attention over `pool` with the backend in use."""
    if attention_backend() == "numpy":
        return NumpyAttention(pool)
    return NativeAttention(pool, num_threads)
