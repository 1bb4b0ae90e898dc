"""The formats that Ingot writes, in one table: export, transcode, import and the command line read their facts here.

To add a format: a module in writers/ with a `plan` function, its row below, a section of docs/formats.md. A format
that Ingot also reads has a class in ../checkpoint/formats/, and its line of METHODS in quantized_folder.py.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from ingot.errors import ConfigError, UsageError, unknown
from ingot.pipeline.interchange.folder import Contents, Source, WriteOptions
from ingot.pipeline.interchange.writers import awq, compressed_tensors, gguf, gptq, plain, qdq_onnx


@dataclass(frozen=True)
class Format:
    """A row of the table.

    plan            returns what the format would write; SchemeError says what the format cannot hold
    variant_of      the format that this row writes with one choice fixed; hints name that format instead
    dequantizes     writes quantized weights as floats, so that it holds every scheme, but no codes
    keeps_scales    has a place for scales of inputs and of the KV cache
    has_config      has a config.json, from which transformers and others load it
    needs_graph     holds a compiled graph, which only a recipe gives: no artifact or checkpoint
    """

    plan: Callable[[Source, WriteOptions], Contents]
    variant_of: str = ""
    dequantizes: bool = False
    keeps_scales: bool = False
    has_config: bool = True
    needs_graph: bool = False


FORMATS: Mapping[str, Format] = {
    "gptq": Format(gptq.plan),
    "gptq-v1": Format(partial(gptq.plan, version=1), variant_of="gptq"),
    "gptq-v2": Format(partial(gptq.plan, version=2), variant_of="gptq"),
    "awq": Format(awq.plan),
    "compressed-tensors": Format(compressed_tensors.plan, keeps_scales=True),
    "safetensors": Format(plain.plan, dequantizes=True),
    "gguf": Format(gguf.plan, has_config=False),
    "onnx": Format(qdq_onnx.plan, has_config=False, needs_graph=True),
}
CHECKPOINT_FORMATS = tuple(name for name, row in FORMATS.items() if not row.needs_graph)


def get_format(name: str, allowed: Collection[str] = FORMATS.keys()) -> Format:
    """Return the row of one of the allowed names; UsageError names them and the nearest."""
    if name not in allowed:
        raise UsageError(unknown("format", name, allowed, "formats"))
    return FORMATS[name]


def formats_that_hold(source: Source, options: WriteOptions, names: Collection[str]) -> list[str]:
    """Return those of the named formats that can be written with these options."""
    return [name for name in names if _holds(FORMATS[name], source, options)]


def _holds(row: Format, source: Source, options: WriteOptions) -> bool:
    try:
        row.plan(source, options)
    except (UsageError, ConfigError):  # a scheme without a place, or a model that GGUF has no architecture for
        return False
    return True
