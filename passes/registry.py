"""Passes by name: Ingot's own in a table, third parties' by the entry-point group `ingot.passes`.

To add a pass: its file, its test, one line of PASSES, one section of docs/passes.md. Another distribution names its
class in its pyproject.toml:

    [project.entry-points."ingot.passes"]
    my-pass = "my_package.my_pass:MyPass"
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata
from importlib.metadata import EntryPoint

from ingot.errors import UsageError, near_or_all, shown, unknown
from ingot.options import convert_option, options_of
from ingot.passes.base import Pass

ENTRY_POINT_GROUP = "ingot.passes"

PASSES: dict[str, str] = {
    "attention-reference": "ingot.passes.lowering.attention_reference:AttentionReference",
    "awq": "ingot.passes.quantization.awq:Awq",
    "clean-up": "ingot.passes.fusion.clean_up:CleanUp",
    "deinterleave-rotary": "ingot.passes.lowering.deinterleave_rotary:DeinterleaveRotary",
    "distill": "ingot.passes.quantization.distill:Distill",
    "expand-experts": "ingot.passes.lowering.expand_experts:ExpandExperts",
    "fold-constants": "ingot.passes.fusion.fold_constants:FoldConstants",
    "fp8": "ingot.passes.quantization.fp8:Fp8",
    "fuse-gated-activation": "ingot.passes.fusion.fuse_gated_activation:FuseGatedActivation",
    "fuse-residual-norm": "ingot.passes.fusion.fuse_residual_norm:FuseResidualNorm",
    "fuse-rotary-attention": "ingot.passes.lowering.fuse_rotary_attention:FuseRotaryAttention",
    "gptq": "ingot.passes.quantization.gptq:Gptq",
    "lower-onnxruntime-cpu": "ingot.passes.lowering.lower_onnxruntime_cpu:LowerOnnxruntimeCpu",
    "mixed-precision": "ingot.passes.quantization.mixed_precision:MixedPrecision",
    "pack-projections": "ingot.passes.fusion.pack_projections:PackProjections",
    "partition-at-attention": "ingot.passes.lowering.partition_at_attention:PartitionAtAttention",
    "prune-structure": "ingot.passes.pruning.prune_structure:PruneStructure",
    "prune-weights": "ingot.passes.pruning.prune_weights:PruneWeights",
    "quantize-activations": "ingot.passes.quantization.quantize_activations:QuantizeActivations",
    "quantize-kv-cache": "ingot.passes.quantization.quantize_kv_cache:QuantizeKVCache",
    "quantize-weights": "ingot.passes.quantization.quantize_weights:QuantizeWeights",
    "rotate": "ingot.passes.rotation.rotate:RotateWeights",
    "smooth-quant": "ingot.passes.quantization.smooth_quant:SmoothQuant",
}


@cache
def entry_points(group: str) -> metadata.EntryPoints:
    """Read the metadata of all installed distributions, once per process."""
    return metadata.entry_points(group=group)


def pass_names() -> list[str]:
    """Names of all passes, third parties' included, sorted. UsageError when a name is taken twice."""
    return sorted({*PASSES, *_third_party_passes()})


def third_party_modules() -> list[str]:
    """Top-level modules of the passes of other distributions, sorted."""
    return sorted({point.module.partition(".")[0] for point in _third_party_passes().values()})


def load_pass_class(name: str) -> type[Pass]:
    """Import the pass of that name; an unknown name is a UsageError with the nearest one."""
    places = {**PASSES, **{other: point.value for other, point in _third_party_passes().items()}}
    if name not in places:
        raise UsageError(unknown("pass", name, places, "passes"))
    module, _, attribute = places[name].partition(":")
    found = getattr(import_module(module), attribute)
    if not (isinstance(found, type) and issubclass(found, Pass) and found.name == name):
        raise UsageError(f"{places[name]} is registered as pass {name!r} but is not a Pass class of that name")
    return found


def make_pass(name: str, options: Mapping[str, object] | None = None) -> Pass:
    """Make a pass with the given options, the others at their defaults.

    UsageError names an unknown option and the nearest known one, or the option, its value and what is allowed.
    """
    pass_class = load_pass_class(name)
    known = options_of(pass_class)
    converted: dict[str, object] = {}
    for option, value in (options or {}).items():
        if option not in known:
            allowed = near_or_all(option, known, "options") if known else "; it has no options."
            raise UsageError(f"{name}: unknown option {shown(option)}{allowed}")
        converted[option] = convert_option(name, option, value, known[option].annotation)
    return pass_class(**converted)


def _third_party_passes() -> dict[str, EntryPoint]:
    """Entry points of other distributions by pass name; UsageError for a name that is taken."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        taken = PASSES.get(point.name) or (found[point.name].value if point.name in found else None)
        if taken is not None and taken != point.value:
            raise UsageError(
                f"{point.value} registers a pass named {point.name!r}, which is {taken}; "
                f"rename it in its entry point group {ENTRY_POINT_GROUP}, or uninstall its distribution"
            )
        found[point.name] = point
    return found
