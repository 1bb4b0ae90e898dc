"""Where a step's small inputs lie, so that one copy brings them all to the device."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ingot.artifact.launch_program import ELEMENT_BYTES, EXTERNAL, LaunchProgram
from ingot.runtime.batch import ForwardBatch, Int32Array, Int64Array, TokenDraws
from ingot.runtime.cuda.device import Bytes

_ALIGNMENT = 16  # bytes
_DTYPES: dict[str, DTypeLike] = {"i64": np.int64, "i32": np.int32, "fp32": np.float32}


@dataclass(frozen=True)
class InputLayout:
    """Offsets in bytes of a program's inputs, those of `TokenDraws` last; `bytes` with them, `drawless` without."""

    program: LaunchProgram
    offsets: dict[str, int]
    drawless: int
    bytes: int

    @classmethod
    def of(cls, program: LaunchProgram) -> "InputLayout":
        """Lay the inputs of a program end to end."""
        offsets, end, drawless = {}, 0, 0
        for name, count in _counts(program).items():
            if name == "temperatures":
                drawless = end
            offsets[name] = end
            end += _rounded(count * ELEMENT_BYTES[EXTERNAL[name] or ""])
        return cls(program, offsets, drawless, end)

    def fill(
        self,
        staging: Bytes,
        batch: ForwardBatch,
        slots: Int64Array,
        carried: Int32Array | None,
        draws: TokenDraws | None,
        tile_queries: int,
    ) -> int:
        """Write a batch, padded to the program's size; return how many bytes of `staging` are to be copied.

        slots    [T] place of each token in the pool: block * block_tokens + token in the block
        carried  [T], see `PipelinedExecutor.submit`; None for none
        """
        self._put(staging, "input_ids", batch.input_ids, 0)
        self._put(staging, "position_ids", batch.position_ids, 0)
        self._put(staging, "slots", slots, -1)
        self._put(staging, "carried", () if carried is None else carried, -1)
        self._put(staging, "logits_indices", batch.logits_indices[: self.program.logits_rows], -1)
        self._put(staging, "lengths", batch.context_lens, 0)
        if self.program.attention == "ragged":
            self._put(staging, "query_starts", batch.query_starts, batch.num_tokens)
            sequences, starts = _tiles(batch.query_starts, tile_queries)
            self._put(staging, "tile_sequences", sequences, -1)
            self._put(staging, "tile_starts", starts, 0)
        if draws is None or draws.greedy:
            return self.drawless
        self._put(staging, "temperatures", draws.temperatures, 0)
        self._put(staging, "top_ks", draws.top_ks, 0)
        self._put(staging, "top_ps", draws.top_ps, 1)
        self._put(staging, "uniforms", draws.uniforms, 0)
        return self.bytes

    def put_indices(self, staging: Bytes, indices: Int64Array) -> None:
        """Write at most logits_rows rows of wanted logits, padded, to the beginning of `staging`."""
        _fill(staging[: self.program.logits_rows * ELEMENT_BYTES["i64"]].view(np.int64), indices, -1)

    def _put(self, staging: Bytes, name: str, values: NDArray[np.generic] | tuple[()], padding: int) -> None:
        kind = EXTERNAL[name] or ""
        begin = self.offsets[name]
        size = _counts(self.program)[name] * ELEMENT_BYTES[kind]
        _fill(staging[begin : begin + size].view(_DTYPES[kind]), values, padding)


def _fill(array: NDArray[Any], values: NDArray[np.generic] | tuple[()], padding: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = padding


def _counts(program: LaunchProgram) -> dict[str, int]:
    """Elements of each input."""
    ragged = {
        "query_starts": program.sequences + 1,
        "tile_sequences": program.tiles,
        "tile_starts": program.tiles,
    }
    return {
        **dict.fromkeys(("input_ids", "position_ids", "slots", "carried"), program.rows),
        "logits_indices": program.logits_rows,
        "lengths": program.sequences,
        **(ragged if program.attention == "ragged" else {}),
        **dict.fromkeys(("temperatures", "top_ks", "top_ps", "uniforms"), program.logits_rows),
    }


def token_slots(batch: ForwardBatch, block_tokens: int) -> Int64Array:
    """Place of each token [T] in the pool."""
    sequences = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
    blocks = batch.block_tables[sequences, batch.position_ids // block_tokens].astype(np.int64)
    return blocks * block_tokens + batch.position_ids % block_tokens


def _tiles(query_starts: Int32Array, tile_queries: int) -> tuple[Int64Array, Int64Array]:
    """The sequence of each tile, and its first query within it."""
    counts = -(-np.diff(query_starts).astype(np.int64) // tile_queries)
    sequences = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return sequences, (np.arange(len(sequences)) - first) * tile_queries


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
