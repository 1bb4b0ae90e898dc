"""The table of targets: one row of facts per target. To add a target, write its row, its lowering and its writer."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from ingot.artifact import EngineKind
from ingot.artifact.kv_geometry import KVType
from ingot.errors import UsageError, one_of, unknown

FLOAT8_FROM = 89  # the first SM with 8-bit floats


@dataclass(frozen=True)
class Target:
    """Facts of a target.

    lowering    names of the passes that end every compile for it
    writer      function that writes the lowered IR into the artifact: module:function, a `ProgramWriter`
    kv_types    types that quantize-kv-cache can store keys and values in; without it they have the engine's own
    kv_groups   whether its int4 may have a scale and a minimum for each group of dims, instead of a vector's one scale
    sms         SMs of the GPUs that it builds for; empty: no GPU, or the SMs that gpu.sms chooses
    sm_choice   SMs that gpu.sms may choose
    has_experts whether it computes mixtures of experts
    has_states  whether it computes recurrent layers, and keeps their side state
    has_latents whether it computes latent attention
    has_heads   whether it drafts with the MTP layer of a checkpoint
    stages_on   kinds of devices that its program can be divided among (`place`)
    has_tiles   whether Ingot's kernels compute all matmuls, so that `ingot tune` can measure their tiles
    extra       extra of Ingot's package with the `packages` that the writer imports; each entry lists alternatives
    """

    name: str
    engine: EngineKind
    summary: str
    lowering: tuple[str, ...]
    writer: str
    kv_types: tuple[KVType, ...] = ()
    kv_groups: bool = False
    sms: tuple[int, ...] = ()
    sm_choice: tuple[int, ...] = ()
    has_experts: bool = False
    has_states: bool = False
    has_latents: bool = False
    has_heads: bool = False
    stages_on: tuple[str, ...] = ()
    has_tiles: bool = False
    extra: str = ""
    packages: tuple[tuple[str, ...], ...] = ()


_GPUS = {
    80: "A100, A30",
    86: "A10, A40, RTX 30",
    89: "L4, L40, RTX 40",
    90: "H100, H200",
    120: "RTX 50, RTX PRO 6000",
}


def _cuda(sm: int, gpus: str) -> Target:
    return Target(
        name=f"cuda-sm{sm}",
        engine="cuda",
        summary=f"Kernels compiled ahead of time for SM {sm} ({gpus}), launched by Ingot's own program.",
        lowering=("fuse-residual-norm", "deinterleave-rotary", "fuse-rotary-attention", "clean-up"),
        writer="ingot.pipeline.targets.cuda.writer:write_cuda_program",
        kv_types=("fp8", "int8", "int4") if sm >= FLOAT8_FROM else ("int8", "int4"),
        sms=(sm,),
        has_experts=True,
        has_states=True,
        has_latents=True,
        stages_on=("cuda", "cpu"),
        has_tiles=True,
        extra="cuda",
        packages=(("triton",),),
    )


_CPU = Target(
    name="cpu",
    engine="onnxruntime",
    summary="Segments run by onnxruntime on the CPU, attention by Ingot's own kernel.",
    lowering=(
        "deinterleave-rotary",
        "fuse-rotary-attention",
        "expand-experts",
        "lower-onnxruntime-cpu",
        "clean-up",
        "partition-at-attention",
    ),
    writer="ingot.pipeline.targets.writers:write_segments",
    kv_types=("float32", "float16", "bfloat16", "fp8", "int8", "int4", "k8v4"),
    kv_groups=True,
    has_experts=True,
    has_states=True,
    has_latents=True,
)
_ROWS = (
    _CPU,
    *(_cuda(sm, gpus) for sm, gpus in _GPUS.items()),
    Target(
        name="tensorrt",
        engine="tensorrt",
        summary="Segments as TensorRT plans for RTX GPUs (gpu.sms), attention by Ingot's own kernels.",
        lowering=("deinterleave-rotary", "fuse-rotary-attention", "clean-up"),
        writer="ingot.pipeline.targets.tensorrt.writer:write_tensorrt_program",
        kv_types=("fp8", "int8", "int4"),
        sm_choice=(80, 86, 89, 120),
        extra="tensorrt",
        packages=(("triton",), ("tensorrt_rtx", "tensorrt")),
    ),
    Target(
        name="ort-cuda",
        engine="onnxruntime-cuda",
        summary="Segments run by onnxruntime's CUDA provider on the GPUs of gpu.sms, attention by Ingot's kernels.",
        lowering=("deinterleave-rotary", "fuse-rotary-attention", "clean-up"),
        writer="ingot.pipeline.targets.ort_cuda.writer:write_ort_cuda_program",
        kv_types=("fp8", "int8", "int4"),
        sm_choice=tuple(_GPUS),
        extra="cuda",
        packages=(("triton",),),
    ),
)
SMS = tuple(_GPUS)
TARGETS: dict[str, Target] = {row.name: row for row in _ROWS}
NATIVE = replace(
    _CPU,
    engine="native",
    summary="A launch program that Ingot's own kernels run on the CPU.",
    lowering=("fold-constants", "deinterleave-rotary", "fuse-rotary-attention", "clean-up"),
    writer="ingot.pipeline.targets.cpu.writer:write_cpu_program",
    has_heads=True,
    stages_on=("cpu",),
)
"""The target cpu with `cpu.engine: native`."""


def get_target(name: str) -> Target:
    """Return the target of that name. UsageError with the nearest name if it is unknown."""
    if name not in TARGETS:
        raise UsageError(unknown("target", name, TARGETS, "targets"))
    return TARGETS[name]


def require_experts(target: Target, model_type: str) -> None:
    """Raise UsageError for a mixture of experts where the target has no kernels for one."""
    if not target.has_experts:
        able = one_of(row.name for row in _ROWS if row.has_experts)
        raise UsageError(
            f"target {target.name} does not compute a mixture of experts, which model_type {model_type} is: "
            f"build for {able}"
        )


def require_latents(target: Target, model_type: str) -> None:
    """Raise UsageError for latent attention where the target has no kernels for it."""
    if not target.has_latents:
        able = one_of(row.name for row in _ROWS if row.has_latents)
        raise UsageError(
            f"target {target.name} does not compute latent attention, which model_type {model_type} has: "
            f"build for {able}"
        )


def require_states(target: Target, ops: Collection[str]) -> None:
    """Raise UsageError for recurrent ops, of which `ops` are the names, where the target has no kernels for them."""
    if ops and not target.has_states:
        able = one_of(row.name for row in _ROWS if row.has_states)
        raise UsageError(
            f"target {target.name} does not compute recurrent layers, and the model has {', '.join(sorted(set(ops)))}:"
            f" build for {able}"
        )


def require_kv_type(target: Target, kv_type: KVType, int4_group: int) -> None:
    """Raise UsageError for keys and values in a precision, or groups, that the target's kernels do not read."""
    if kv_type not in target.kv_types:
        able = [row.name for row in _ROWS if kv_type in row.kv_types]
        allowed = f"it reads {one_of(target.kv_types)}" if target.kv_types else "it stores them as 32-bit floats"
        raise UsageError(
            f"target {target.name} does not read keys and values in {kv_type}; {allowed}: leave quantize-kv-cache out, "
            f"or build for {one_of(able)}"
        )
    if int4_group and not target.kv_groups:
        able = [row.name for row in _ROWS if row.kv_groups]
        raise UsageError(
            f"target {target.name} reads {kv_type} with one scale for a vector, not in groups of {int4_group} dims: "
            f"set passes.quantize-kv-cache.group to 0, or build for {one_of(able)}"
        )
