"""A tiny Llama as a CPU launch program, lowered by hand, with random packed weights; and an artifact of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ingot.artifact import Artifact, ArtifactWriter, KVGeometry, ModelFacts, Program, open_artifact
from ingot.artifact.programs.cpu_program import (
    OPERATIONS_FILE,
    WEIGHTS_FILE,
    Attend,
    Buffer,
    Combine,
    CpuProgram,
    Embed,
    Linear,
    Normalize,
    Operation,
)
from ingot.artifact.programs.operation_row import (
    LANES,
    Matrix,
    Norm,
    View,
)
from ingot.sizes import round_up
from tests.runtime.cpu.native.kernel_cases import FLOAT_TYPES

HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCAB = 96, 6, 2, 16, 200, 331
CONTEXT, BLOCK_TOKENS, LAYERS = 640, 16, 2
FLOAT8_LEVELS = 64.0
KV_COLUMNS = KV_HEADS * DIM


def tiny_program(**changes: Any) -> CpuProgram:
    """Two layers with weights of several forms: int4 in blocks, int8 per row, floats; and every kind of operation."""
    columns = {"x": HIDDEN, "qkv": HIDDEN + 2 * KV_COLUMNS, "attended": HIDDEN, "act": FFN, "last": HIDDEN}
    buffers, offset = {}, 0
    for name, width in columns.items():
        buffers[name] = Buffer(columns=width, offset=offset, rows="logits" if name == "last" else "tokens")
        offset += round_up(width, 16)
    buffers["logits"] = Buffer(columns=VOCAB, offset=-1, rows="logits")
    matrices = {
        "table": Matrix(n=VOCAB, k=HIDDEN, form="int8", block=32, scale_bytes=2),
        "head": Matrix(n=VOCAB, k=HIDDEN, form="int8", block=96, per_row=True, scale_bytes=4),
    }
    operations: list[Operation] = [Embed(node="embed", table="table", output=View(buffer="x"))]
    for layer in range(LAYERS):
        matrices |= {
            f"qkv{layer}": Matrix(n=columns["qkv"], k=HIDDEN, form="int4", block=32, scale_bytes=2, has_zeros=True),
            f"o{layer}": Matrix(n=HIDDEN, k=HIDDEN, form="float16"),
            f"gate_up{layer}": Matrix(n=2 * FFN, k=HIDDEN, form="int4", block=48, scale_bytes=2, pairs=True),
            f"down{layer}": Matrix(n=HIDDEN, k=FFN, form="int8", block=64, scale_bytes=4),
        }
        operations += _layer(layer)
    head_start = len(operations)
    last = View(buffer="last")
    operations += [
        Normalize(
            node="final", input=View(buffer="x"), output=last, norm=_norm("final"), columns=HIDDEN, rows="logits"
        ),
        Linear(
            node="head", matrix="head", input=last, output=View(buffer="logits"), rounding="token", rows="logits"
        ),
        Combine(node="cap", function="copy", a=View(buffer="logits"), output=View(buffer="logits"), columns=VOCAB,
                rows="logits", cap=30.0),
    ]  # fmt: skip
    fields: dict[str, Any] = {
        "kv": KVGeometry(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, block_tokens=BLOCK_TOKENS),
        "vocab_size": VOCAB,
        "context_tokens": CONTEXT,
        "arena_floats": offset,
        "buffers": buffers,
        "matrices": matrices,
        "operations": tuple(operations),
        "head_start": head_start,
    }
    return CpuProgram(**fields | changes)


def gathered_early() -> CpuProgram:
    """The tiny program, computing rows of logits alone after the last attention, as lowering makes it."""
    program = tiny_program()
    logits = {"rows": "logits"}
    x, last, act = View(buffer="x"), View(buffer="last"), View(buffer="last_act")
    head_start = program.head_start - 3
    output, gate_up, down, norm, *rest = (one.model_copy(update=logits) for one in program.operations[head_start:])
    operations = [
        *program.operations[:head_start],
        output.model_copy(update={"output": last, "store": "store"}),
        Combine(node="residual", function="add", a=last, b=x, output=last, columns=HIDDEN, rows="logits"),
        gate_up.model_copy(update={"input": last, "output": act}),
        down.model_copy(update={"input": act, "output": last}),
        norm.model_copy(update={"input": last}),
        *rest,
    ]
    buffers = program.buffers | {"last_act": Buffer(columns=FFN, offset=program.arena_floats, rows="logits")}
    return tiny_program(
        operations=tuple(operations),
        buffers=buffers,
        arena_floats=program.arena_floats + round_up(FFN, 16),
        head_start=head_start,
    )


def _norm(name: str) -> Norm:
    return Norm(weight=f"{name}.norm", epsilon=1e-5)


def _layer(layer: int) -> list[Operation]:
    x, attended, act = View(buffer="x"), View(buffer="attended"), View(buffer="act")
    query, key, value = (View(buffer="qkv", column=at) for at in (0, HIDDEN, HIDDEN + KV_COLUMNS))
    return [
        Linear(node=f"qkv{layer}", matrix=f"qkv{layer}", input=x, output=query, norm=_norm(f"first{layer}"),
               rounding="block", bias=f"qkv{layer}.bias"),
        Attend(node=f"attend{layer}", layer=layer, query=query, key=key, value=value, output=attended, num_heads=HEADS,
               num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5, cos="cos", sin="sin", rotary_dim=DIM),
        Linear(node=f"o{layer}", matrix=f"o{layer}", input=attended, output=x, store="add"),
        Linear(node=f"gate_up{layer}", matrix=f"gate_up{layer}", input=x, output=act, norm=_norm(f"second{layer}"),
               rounding="block", store="gate", activation="silu"),
        Linear(node=f"down{layer}", matrix=f"down{layer}", input=act, output=x, rounding="block", store="add"),
    ]  # fmt: skip


def random_tiles(matrix: Matrix, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Tiles [num_tiles, tile_bytes] of random codes, with scales that keep a row's length."""
    tiles = rng.integers(0, 256, (matrix.num_tiles, matrix.tile_bytes), np.uint8)
    if not matrix.is_integer:
        values = rng.standard_normal((matrix.num_tiles, matrix.k * LANES)) / np.sqrt(matrix.k)
        if matrix.form == "float8":
            values *= FLOAT8_LEVELS
            tiles[:, : LANES * 4] = np.full(LANES, 1 / FLOAT8_LEVELS, np.float32).view(np.uint8)
        tiles[:, matrix.codes_offset :] = values.astype(FLOAT_TYPES[matrix.form]).view(np.uint8)
        return tiles
    levels = 2 ** int(matrix.form.removeprefix("int"))
    count = matrix.scale_blocks * LANES
    scales = rng.uniform(0.5, 1.5, (matrix.num_tiles, count)) / (levels * 0.29 * np.sqrt(matrix.k))
    dtype = np.float16 if matrix.scale_bytes == 2 else np.float32
    tiles[:, : count * matrix.scale_bytes] = scales.astype(dtype).view(np.uint8)
    if matrix.has_zeros:
        zeros = rng.integers(levels // 2 - 2, levels // 2 + 3, (matrix.num_tiles, count), np.uint8)
        tiles[:, count * matrix.scale_bytes : count * (matrix.scale_bytes + 1)] = zeros
    return tiles


def random_tensors(program: CpuProgram, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Everything that program/weights.safetensors holds."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, NDArray[Any]] = {name: random_tiles(m, rng) for name, m in program.matrices.items()}
    for name in program.tensors():
        columns = HIDDEN + 2 * KV_COLUMNS if name.startswith("qkv") else HIDDEN
        tensors[name] = rng.uniform(0.5, 1.5, columns).astype(np.float32)
    angles = np.outer(np.arange(CONTEXT), 0.8 ** np.arange(DIM // 2))
    return tensors | {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


def write_weights(file: Path, tensors: Mapping[str, NDArray[Any]]) -> Path:
    """Write the tensors to a safetensors file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), file)
    return file


def write_artifact(
    folder: Path, program: CpuProgram | None = None, tensors: Mapping[str, NDArray[Any]] | None = None
) -> Artifact:
    """Seal an artifact of the native engine."""
    program = program or tiny_program()
    model = ModelFacts(
        family="llama",
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        context_tokens=CONTEXT,
        num_parameters=1,
    )
    with ArtifactWriter(folder) as writer:
        write_weights(writer.path / WEIGHTS_FILE, tensors or random_tensors(program))
        (writer.path / OPERATIONS_FILE).write_text(program.model_dump_json())
        writer.describe(
            name="tiny",
            model=model,
            kv=program.kv,
            target="cpu",
            engine="native",
            program=Program(launches=OPERATIONS_FILE),
            versions={},
        )
        writer.seal()
    return open_artifact(folder)
