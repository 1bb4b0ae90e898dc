"""The models of the GPU benchmark as rows of a table, and large models of which only the shapes exist.

Compiling kernels needs no weights:

checkpoint      config.json and a sparse model.safetensors: a header and a hole
quantization    placeholder codes where the pass quantize-weights would place real ones
"""

import json
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from benchmarks.gpu.programs.packing import write_hollow_tensors
from benchmarks.hybrids import HYBRIDS
from benchmarks.latents import LatentShape
from benchmarks.shapes import SHAPES, ModelShape
from benchmarks.synthetic import Shape, hf_config, tensor_shapes, weights_header
from ingot.passes.base import Pass
from ingot.passes.numerics.scheme import Scheme
from ingot.passes.quantization.quantize_kv_cache import QuantizeKVCache
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.quantization.weight_nodes import float_value
from ingot.passes.rewriting import add_initializer
from ingot.passes.weights import drop_if_unused
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe

INVARIANT, DEPENDENT, ADAPTERS = "-batch-invariant", "-dependent-launches", "-adapters"  # end names of programs
MORE_BUCKETS = "-more-buckets"
WeightForm = Literal["16-bit", "int4"]
KVForm = Literal["16-bit", "fp8", "int8", "int4"]


@dataclass(frozen=True)
class ProgramSpec:
    """A model's shape, how it is stored, and the steps that its programs are made for."""

    shape: Shape
    weights: WeightForm
    kv: KVForm = "16-bit"
    context_tokens: int = 32768
    decode_rows: tuple[int, ...] = (1, 8, 64)
    prefill_rows: tuple[int, ...] = (512, 4096)
    activations: str = "bfloat16"
    batch_invariant: bool = False
    dependent_launches: bool = False
    adapters: bool = False
    more_buckets: bool = False

    @property
    def name(self) -> str:
        """llama-3.1-8b-int4-kv-fp8"""
        end = f"{INVARIANT if self.batch_invariant else ''}{DEPENDENT if self.dependent_launches else ''}"
        end += f"{ADAPTERS if self.adapters else ''}{MORE_BUCKETS if self.more_buckets else ''}"
        return f"{self.shape.name}-{self.weights}-kv-{self.kv}{end}"


LLAMA_8B = ModelShape(
    name="llama-3.1-8b",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    tied_head=False,
)
TINYLLAMA = SHAPES["tinyllama-1.1b"]
EXPERTS_30B = ModelShape(
    name="experts-of-30b-2-layers",  # of the shape of Qwen3-30B-A3B's
    hidden_size=2048,
    num_layers=2,
    num_heads=16,
    num_kv_heads=4,
    intermediate_size=768,
    vocab_size=32000,
    tied_head=False,
    num_experts=128,
    chosen_experts=8,
)
DELTA_RULE = replace(
    HYBRIDS["qwen3.5-0.8b"], name="qwen3.5-0.8b-2-layers", num_layers=2, attention_layers=(1,)
)  # recurrent layers, heads of 256 dims
MAMBA = replace(HYBRIDS["granite-4.0-h-350m"], name="granite-4.0-h-350m-2-layers", num_layers=2, attention_layers=(1,))
LATENTS = LatentShape(
    name="latents-of-30b-2-layers",  # of the shape of GLM-4.7-Flash's
    hidden_size=2048,
    num_layers=2,
    num_heads=20,
    query_rank=768,
    latent_rank=512,
    plain_dim=192,
    rope_dim=64,
    value_dim=256,
    intermediate_size=10240,
    expert_size=1536,
    num_experts=64,
    chosen_experts=4,
    shared_experts=1,
    vocab_size=32000,
)
SPECS = (
    ProgramSpec(LLAMA_8B, "int4"),
    ProgramSpec(LLAMA_8B, "16-bit"),
    ProgramSpec(TINYLLAMA, "int4", context_tokens=4096),
    ProgramSpec(TINYLLAMA, "16-bit", context_tokens=4096),
    ProgramSpec(LLAMA_8B, "int4", "fp8"),
    ProgramSpec(LLAMA_8B, "int4", "int8"),
    ProgramSpec(LLAMA_8B, "int4", "int4"),
    ProgramSpec(LLAMA_8B, "int4", batch_invariant=True),
    ProgramSpec(LLAMA_8B, "16-bit", batch_invariant=True),
    ProgramSpec(LLAMA_8B, "int4", prefill_rows=(512,), dependent_launches=True),
    ProgramSpec(LLAMA_8B, "int4", decode_rows=(1, 2, 4, 16, 32), prefill_rows=(512,), more_buckets=True),
    ProgramSpec(EXPERTS_30B, "int4", context_tokens=4096, prefill_rows=(512,)),
    ProgramSpec(EXPERTS_30B, "16-bit", context_tokens=4096, prefill_rows=(512,)),
    ProgramSpec(DELTA_RULE, "int4", context_tokens=4096, prefill_rows=(512,)),
    ProgramSpec(DELTA_RULE, "int4", context_tokens=4096, prefill_rows=(512,), batch_invariant=True),
    ProgramSpec(MAMBA, "16-bit", context_tokens=4096, prefill_rows=(512,)),
    ProgramSpec(LATENTS, "int4", context_tokens=4096, prefill_rows=(512,)),
    ProgramSpec(LATENTS, "16-bit", context_tokens=4096, prefill_rows=(512,)),
    ProgramSpec(LATENTS, "16-bit", "fp8", context_tokens=4096, prefill_rows=(512,)),
    ProgramSpec(LATENTS, "int4", context_tokens=4096, prefill_rows=(512,), batch_invariant=True),
)
_DRY_FORMS: tuple[tuple[WeightForm, KVForm], ...] = (("16-bit", "int8"), ("int4", "16-bit"))
_TINY = ModelShape(
    name="tiny",
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=96,
    vocab_size=400,
    tied_head=False,
)
_TINY_EXPERTS = replace(_TINY, name="tiny-experts", num_experts=4, chosen_experts=2)
_TINY_SIZES: dict[str, Any] = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
_TINY_SIZES |= {"intermediate_size": 96, "vocab_size": 400}
_TINY_DELTA_RULE = replace(DELTA_RULE, name="tiny-delta-rule", state=(2, 16, 16), **_TINY_SIZES)
_TINY_MAMBA = replace(MAMBA, name="tiny-mamba", state=(4, 16, 16), **_TINY_SIZES)
_TINY_LATENTS = LatentShape("tiny-latents", 64, 2, 3, 32, 32, 16, 8, 16, 96, 32, 4, 2, 1, 400)
DRY_SPECS = (
    *(ProgramSpec(_TINY, weights, kv, 32, (1, 2), (4,), "float16") for weights, kv in _DRY_FORMS),
    ProgramSpec(_TINY, "int4", "16-bit", 32, (1, 2), (4,), "float16", batch_invariant=True),
    ProgramSpec(_TINY, "int4", "16-bit", 32, (1, 2), (4,), "float16", dependent_launches=True),
    ProgramSpec(_TINY_EXPERTS, "int4", "16-bit", 32, (1, 2), (4,), "float16"),
    ProgramSpec(_TINY_EXPERTS, "16-bit", "16-bit", 32, (1, 2), (4,), "float16"),
    ProgramSpec(_TINY_DELTA_RULE, "int4", "16-bit", 32, (1, 2), (32,), "float16"),  # enough rows for chunks
    ProgramSpec(_TINY_MAMBA, "16-bit", "16-bit", 32, (1, 2), (32,), "float16"),
    *(ProgramSpec(_TINY_LATENTS, weights, kv, 32, (1, 2), (4,), "float16") for weights, kv in _DRY_FORMS),
)


RECIPES: dict[WeightForm, str] = {"16-bit": "fp16-cuda", "int4": "int4-cuda"}
_SCALE = 1e-3  # scale of every group: a normal float16, as in a trained model


def recipe_of(spec: ProgramSpec, checkpoint: Path, tiles: Path | None) -> Recipe:
    """The shipped recipe of the form of weights, for the spec's steps."""
    rows = [f"gpu.decode_rows={list(spec.decode_rows)}", f"gpu.prefill_rows={list(spec.prefill_rows)}"]
    sizes = [f"engine.max_batch_tokens={spec.prefill_rows[-1]}", f"gpu.activations={spec.activations}"]
    table = [] if tiles is None else [f"gpu.tiles={tiles}"]
    invariant = ["gpu.batch_invariant=true"] if spec.batch_invariant else []
    dependent = ["gpu.dependent_launches=true"] if spec.dependent_launches else []
    adapters = ["gpu.adapters=true"] if spec.adapters else []
    options = [f"checkpoint={checkpoint}", *rows, *sizes, *table, *invariant, *dependent, *adapters]
    return load_recipe(RECIPES[spec.weights], options)


def passes_of(spec: ProgramSpec, recipe: Recipe) -> list[Pass]:
    """The recipe's passes, with placeholders for quantized weights, and the KV cache's precision."""
    made = [shape_only(pass_) for pass_ in recipe.make_passes()]
    return made if spec.kv == "16-bit" else [*made, QuantizeKVCache(spec.kv, group=0)]


def write_hollow_checkpoint(shape: Shape, context_tokens: int, folder: Path) -> Path:
    """A sparse checkpoint: as long as the real one, but on disk only its header."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = weights_header(tensor_shapes(shape))
    write_hollow_tensors(folder / "model.safetensors", entries)
    config = {**hf_config(shape), "max_position_embeddings": context_tokens}
    (folder / "config.json").write_text(json.dumps(config) + "\n", "utf-8")
    return folder


def shape_only(pass_: Pass) -> Pass:
    """The pass, or for quantize-weights one that reads no weight."""
    if not isinstance(pass_, QuantizeWeights):
        return pass_
    return ShapeOnlyQuantization(**{one.name: getattr(pass_, one.name) for one in fields(pass_)})


@dataclass(frozen=True)
class ShapeOnlyQuantization(QuantizeWeights):
    """Places what quantize-weights would place, with zero codes and one scale for all groups."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace one weight after the other."""
        groups = self.plan(model)
        for (weight, scheme), sites in groups.items():
            operands = {site.operand for site in sites}
            made = _insert(model.graph, weight, scheme, sites[0].node)
            for site in sites:
                site.node.replace_input_with(site.index, made)
                if site.role == "embedding":
                    site.node.outputs[0].dtype = ir.DataType.FLOAT
            for operand in operands:
                drop_if_unused(model.graph, operand)
        return ir.passes.PassResult(model, modified=bool(groups))


def _insert(graph: ir.Graph, weight: ir.Value, scheme: Scheme, before: ir.Node) -> ir.Value:
    assert weight.shape is not None
    rows, columns = (int(size) for size in weight.shape.numpy())
    word = "INT" if scheme.symmetric else "UINT"
    bits = 4 if scheme.bits <= 4 else 8
    groups = (rows, -(-columns // scheme.block_size)) if scheme.block_size else (rows,)
    tensors = [
        _lazy(f"{weight.name}.q", ir.DataType[f"{word}{bits}"], (rows, columns), 0),
        _lazy(f"{weight.name}.scale", ir.DataType.FLOAT, groups, _SCALE),
    ]
    if not scheme.symmetric:
        tensors.append(_lazy(f"{weight.name}.zero_point", ir.DataType[f"UINT{bits}"], groups, 1 << (bits - 1)))
    node = ir.node(
        "DequantizeLinear",
        [add_initializer(graph, tensor) for tensor in tensors],
        attributes={"axis": 1, "block_size": scheme.block_size} if scheme.block_size else {"axis": 0},
        name=f"{(weight.name or '').removesuffix('.weight')}.dequantize",
        outputs=[float_value(f"{weight.name}.dequantized", (rows, columns))],
    )
    graph.insert_before(before, node)
    return node.outputs[0]


def _lazy(name: str, dtype: ir.DataType, shape: tuple[int, ...], value: float) -> ir.LazyTensor:
    return ir.LazyTensor(partial(_filled, dtype, shape, value), dtype, ir.Shape(shape), name=name)


def _filled(dtype: ir.DataType, shape: tuple[int, ...], value: float) -> ir.TensorProtocol:
    values: NDArray[np.generic] = np.zeros(shape, dtype.numpy()) if not value else np.full(shape, value, dtype.numpy())
    return ir.Tensor(values, dtype=dtype)
