"""Subject of a verification: an artifact, or in tests a simulated engine; and the required exactness of answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir

from ingot.artifact import Artifact, KVGeometry, ModelFacts, open_artifact
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.artifact.programs.draft_head import DRAFT_HEAD_FILE
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.stages import STAGES_FILE
from ingot.runtime.engine.engine import Engine
from ingot.runtime.options import EngineOptions
from ingot.runtime.speculation.loading import require_draft
from ingot.runtime.text.tokenizer import Tokenizer
from ingot.validation.verify.constraints import missing_constraints

# Largest difference of two computations of one logit on a GPU, as a share of the row's largest logit. Both round the
# same values to the activations' type, but may sum them in another order: 2^-11 and 2^-8 are half units of the types.
_GPU_BOUNDS = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}


@dataclass(frozen=True)
class Subject:
    """Subject of a verification. `load` makes a fresh engine, which the caller closes.

    max_batch_tokens  most tokens of a step, unless the options say otherwise
    raises_batch_tokens  whether the options can raise it
    logits_bound      0: logits must have equal bits; else the largest difference, as a share of the row's largest logit
    keeps_logits      whether to keep logits, one run for each entry: a device that samples takes another path without
    draft             folder of a draft artifact for speculation; None: the cells with one are not available
    has_head          whether the artifact has an MTP layer to draft by
    has_tiers         whether its engine moves blocks to host memory and disk
    has_slow_part     whether its engine's KV pool may have a slow part
    no_constraints    why its engine follows no constraints; "" where it does
    no_adapters       why its engine computes no LoRA adapters; "" where it does
    scratch           folder for files of the tiers, such as blocks on disk
    """

    name: str
    identity: str
    target: str
    engine: str
    model: ModelFacts
    kv: KVGeometry
    max_batch_tokens: int
    load: Callable[[EngineOptions], Engine]
    raises_batch_tokens: bool = False
    logits_bound: float = 0.0
    keeps_logits: tuple[bool, ...] = (True,)
    draft: Path | None = None
    has_head: bool = False
    has_tiers: bool = True
    has_slow_part: bool = True
    no_constraints: str = ""
    no_adapters: str = "this engine computes no adapters"
    scratch: Path = field(default_factory=lambda: Path(gettempdir()))


def open_subject(
    artifact: Artifact,
    num_threads: int | None = None,
    *,
    draft: Path | None = None,
    processes: Mapping[str, int | None] | None = None,
) -> Subject:
    """The subject of an open artifact. Its engine is loaded when the verification begins.

    processes   engine options that divide it among processes: stages, tensor_parallel, expert_parallel

    Raises ArtifactError for a draft that cannot be opened, UsageError for one that cannot draft for it.
    """
    if draft is not None:
        require_draft(open_artifact(draft), artifact)
    manifest, processes = artifact.manifest, processes or {}
    in_one_process = all((processes.get(name) or 1) == 1 for name in ("stages", "tensor_parallel"))
    on_cpu = manifest.on_cpu

    def load(options: EngineOptions) -> Engine:
        return Engine.load(artifact, **{**vars(options), "num_threads": num_threads, **processes})

    return Subject(
        name=manifest.name,
        identity=manifest.identity,
        target=manifest.target,
        engine=manifest.engine,
        model=manifest.model,
        kv=manifest.kv,
        max_batch_tokens=manifest.max_batch_tokens,
        load=load,
        raises_batch_tokens=on_cpu,
        logits_bound=0.0 if on_cpu else _gpu_bound(artifact),
        keeps_logits=(True,) if on_cpu else (False, True),
        draft=draft,
        has_head=in_one_process and artifact.has(DRAFT_HEAD_FILE),
        has_slow_part=(in_one_process and on_cpu) or (manifest.engine == "cuda" and not artifact.has(STAGES_FILE)),
        no_constraints=missing_constraints(Tokenizer.of_artifact(artifact), manifest.model.vocab_size),
        no_adapters=_missing_adapters(artifact),
    )


def _missing_adapters(artifact: Artifact) -> str:
    """Return why no adapters can be computed next to the artifact's weights, or ""."""
    if artifact.manifest.engine == "cuda":
        is_built = read_launches(artifact).adapters is not None
        return "" if is_built else "the artifact has no programs for adapters; build it with gpu.adapters: true"
    if artifact.manifest.engine != "native":
        return "this engine computes no adapters; the native CPU engine does, and programs with gpu.adapters: true"
    if not read_operations(artifact).projections:
        return "the artifact does not say which of its layers are which of the checkpoint's"
    return ""


def _gpu_bound(artifact: Artifact) -> float:
    """0 for a batch-invariant program: its logits must have equal bits, as on the CPU."""
    program = read_launches(artifact)
    return 0.0 if program.batch_invariant else _GPU_BOUNDS[program.activation_type]
