"""Two references for the logits of one sequence: a written program, segment by segment, and the whole IR at once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray
from safetensors import safe_open

from ingot.artifact import AttentionStep, Program, SegmentStep
from tests.reference_runner import ReferenceRunner
from tests.sessions import plain_session

FloatArray = NDArray[np.float32]
Tokens = NDArray[np.int64]


class ProgramChain:
    """Holds the sessions of a program; `logits` runs it, with attention in numpy and without a cache."""

    def __init__(self, program: Program, folder: Path) -> None:
        self._program = program
        self._folder = folder
        files = [step.file for step in program.steps if step.kind == "segment"]
        self._sessions: dict[str, onnxruntime.InferenceSession] = {
            file: plain_session(str(folder / file)) for file in files
        }

    def logits(self, tokens: Tokens) -> FloatArray:
        """Logits [T, vocab] of every position."""
        rows = np.arange(len(tokens))
        values: dict[str, Any] = {"input_ids": tokens, "position_ids": rows, "logits_indices": rows}
        for step in self._program.steps:
            if isinstance(step, AttentionStep):
                values[step.output] = causal_attention(step, *self._operands(step, values))
            else:
                assert isinstance(step, SegmentStep), f"{step.kind} is not computed here"
                feeds = {name: values[name] for name in step.inputs}
                results = self._sessions[step.file].run(list(step.outputs), feeds)
                values.update(zip(step.outputs, results, strict=True))
        return np.asarray(values["logits"])

    def _operands(self, step: AttentionStep, values: dict[str, Any]) -> Iterator[FloatArray]:
        """Query, key and value of a step: their columns, turned where the step says so."""
        assert step.key is not None
        assert step.value is not None
        places = ((step.query, step.query_column, step.num_heads), (step.key, step.key_column, step.num_kv_heads))
        for name, column, heads in places:
            yield self._turned(step, values[name][:, column : column + heads * step.head_dim])
        yield values[step.value][:, step.value_column : step.value_column + step.num_kv_heads * step.head_dim]

    def _turned(self, step: AttentionStep, x: FloatArray) -> FloatArray:
        """Rotary embedding of tokens from position 0 on, x [T, heads * D], by a rotation matrix for each pair."""
        if step.rotary is None:
            return x
        with safe_open(self._folder / step.rotary.file, "numpy") as tensors:
            cos, sin = (tensors.get_tensor(name)[: len(x)] for name in (step.rotary.cos, step.rotary.sin))
        heads = x.reshape(len(x), -1, step.head_dim).copy()
        pairs = heads[..., : step.rotary.rotary_dim].reshape(*heads.shape[:2], 2, -1)  # [T, heads, halves, pairs]
        rotation = np.stack((np.stack((cos, -sin)), np.stack((sin, cos))))  # [2, 2, T, pairs]
        heads[..., : step.rotary.rotary_dim] = np.einsum("xytp,thyp->thxp", rotation, pairs).reshape(
            *heads.shape[:2], -1
        )
        return heads.reshape(x.shape)


def causal_attention(step: AttentionStep, query: FloatArray, key: FloatArray, value: FloatArray) -> FloatArray:
    """One sequence that starts at position 0: query [T, H * D], key and value [T, KV * D] -> [T, H * D]."""
    tokens, group = len(query), step.num_heads // step.num_kv_heads
    q = query.reshape(tokens, step.num_kv_heads, group, step.head_dim)
    k, v = (x.reshape(tokens, step.num_kv_heads, step.head_dim) for x in (key, value))
    scores = np.einsum("tkgd,skd->kgts", q, k) * step.scale
    if step.softcap:
        scores = step.softcap * np.tanh(scores / step.softcap)
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    visible = (distance >= 0) & ((distance < step.window) if step.window else True)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("kgts,skd->tkgd", weights, v).reshape(tokens, step.num_heads * step.head_dim)
    return np.asarray(attended, np.float32)


def reference_logits(model: ir.Model, tokens: Tokens) -> FloatArray:
    """Logits [T, vocab] of one sequence by the IR, with only attention lowered; changes the model."""
    return ReferenceRunner(model).run_ragged([tokens.tolist()], [(len(tokens),)])[0]
