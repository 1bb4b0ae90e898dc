"""Runs a whole model in plain onnxruntime: the pass attention-reference, then ragged batches over a paged cache."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.lowering.attention_reference import AttentionReference
from tests.sessions import Level, plain_session

FloatArray = NDArray[np.float32]
BLOCK_TOKENS = 4

# Tokens that each of three sequences feeds in a step; the last row repeats. Chunked prefill together with decode,
# a sequence that waits, chunks that end inside a block and at its end, and that cross a window of 8.
SCHEDULE = ((5, 8, 0), (1, 13, 4), (1, 1, 9), (3, 1, 1), (1, 5, 7), (1, 1, 1))


def run_ragged(
    step: Callable[[dict[int, Sequence[int]]], dict[int, FloatArray]],
    sequences: Sequence[Sequence[int]],
    schedule: Sequence[Sequence[int]] = SCHEDULE,
) -> list[FloatArray]:
    """Feed all sequences by the schedule; return the logits of each, [length, vocab]."""
    rows: list[list[FloatArray]] = [[] for _ in sequences]
    done, turn = [0] * len(sequences), 0
    while any(count < len(sequence) for count, sequence in zip(done, sequences, strict=True)):
        chunks = schedule[min(turn, len(schedule) - 1)]
        batch = {s: tokens[done[s] : done[s] + chunks[s]] for s, tokens in enumerate(sequences)}
        for s, logits in step({s: tokens for s, tokens in batch.items() if len(tokens)}).items():
            rows[s].append(logits)
            done[s] += len(logits)
        turn += 1
    return [np.concatenate(parts) for parts in rows]


class ReferenceRunner:
    """One model and the caches of its sequences, which live in randomly scattered blocks.

    The model is changed in place: its attention is expanded and its weights are read into memory.
    """

    def __init__(self, model: ir.Model, num_slots: int = 512, seed: int = 0) -> None:
        AttentionReference()(model)
        # Operators as they are: above this level onnxruntime multiplies by 8 bits, and converts weights without VNNI.
        self.session = plain_session(ir.external_data.load_to_model(model), Level.ORT_ENABLE_BASIC)
        shapes = {value.name: value.shape[1] for value in self.session.get_inputs() if "_cache." in value.name}
        self.caches = {name: np.zeros((num_slots, columns), np.float32) for name, columns in shapes.items()}
        self.free_blocks = np.random.default_rng(seed).permutation(num_slots // BLOCK_TOKENS).tolist()
        self.slots: dict[int, list[int]] = {}

    def step(self, batch: dict[int, Sequence[int]]) -> dict[int, FloatArray]:
        """Feed the tokens of each sequence after those it has; return logits of all of them, [tokens, vocab] each."""
        starts = {sequence: len(self.slots.setdefault(sequence, [])) for sequence in batch}
        for sequence, tokens in batch.items():
            self._extend(sequence, len(tokens))
        positions = {s: range(starts[s], starts[s] + len(tokens)) for s, tokens in batch.items()}
        flat = [(s, position) for s in batch for position in positions[s]]
        seen = [(s, position) for s in batch for position in range(starts[s] + len(batch[s]))]
        logits = self._forward(
            input_ids=[token for tokens in batch.values() for token in tokens],
            position_ids=[position for _, position in flat],
            logits_indices=list(range(len(flat))),
            slot_mapping=[self.slots[s][position] for s, position in flat],
            query_sequences=[s for s, _ in flat],
            kv_slots=[self.slots[s][position] for s, position in seen],
            kv_sequences=[s for s, _ in seen],
            kv_positions=[position for _, position in seen],
        )
        ends = np.cumsum([len(tokens) for tokens in batch.values()])
        return dict(zip(batch, np.split(logits, ends[:-1]), strict=True))

    def run_ragged(
        self, sequences: Sequence[Sequence[int]], schedule: Sequence[Sequence[int]] = SCHEDULE
    ) -> list[FloatArray]:
        """Feed all sequences by the schedule; return the logits of each, [length, vocab]."""
        return run_ragged(self.step, sequences, schedule)

    def _extend(self, sequence: int, tokens: int) -> None:
        slots, end = self.slots[sequence], len(self.slots[sequence]) + tokens
        while len(slots) < end:
            begins = len(slots) % BLOCK_TOKENS == 0
            slots.append(self.free_blocks.pop() * BLOCK_TOKENS if begins else slots[-1] + 1)

    def _forward(self, **inputs: list[int]) -> FloatArray:
        feeds = {name: np.array(values, np.int64) for name, values in inputs.items()}
        names = [value.name for value in self.session.get_outputs()]
        results = dict(zip(names, self.session.run(names, {**feeds, **self.caches}), strict=True))
        self.caches = {name: results[name.replace("_cache.", "_cache_out.")] for name in self.caches}
        logits: FloatArray = results["logits"]
        return logits
