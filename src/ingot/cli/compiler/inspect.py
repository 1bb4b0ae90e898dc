"""`ingot inspect`: shows what an artifact is, what it holds and how its gates were decided."""

from collections import Counter
from collections.abc import Iterator

from ingot.artifact import Artifact, AttentionStep, KVGeometry, SegmentStep, open_artifact
from ingot.artifact.calibration_record import read_calibration
from ingot.artifact.programs.cpu_program import WEIGHTS_FILE, CpuProgram, Operation
from ingot.artifact.programs.cpu_program_checks import read_draft_programs, read_operations
from ingot.artifact.programs.draft_head import DRAFT_HEAD_FILE
from ingot.artifact.programs.expert_choices import WINDOWS, even_reach, reached, read_expert_choices
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import (
    Argument,
    BufferArgument,
    CudaProgram,
    HostCopy,
    Launch,
    LaunchProgram,
    LibraryMatmul,
    SegmentCall,
    Step,
    WeightArgument,
    WeightCopy,
)
from ingot.artifact.programs.operation_row import Matrix, View
from ingot.artifact.programs.plan_facts import PLANS_FILE, PlanFacts, PlanProfile, ProgramPlans
from ingot.artifact.programs.stage_checks import read_stages
from ingot.artifact.programs.stages import (
    DEVICE_WEIGHTS_FILE,
    STAGES_FILE,
    STREAMED_WEIGHTS_FILE,
    CutProgram,
    DeviceProgram,
)
from ingot.artifact.serving import ServingOptions
from ingot.cli.evidence import print_gates, print_warning_of
from ingot.cli.terminal.console import print_json
from ingot.cli.terminal.tables import print_facts, print_table
from ingot.cores import cores_in_words
from ingot.errors import UsageError, unknown
from ingot.runtime.cpu.weight_pages import weights_in_words
from ingot.sizes import format_bytes
from ingot.validation.evidence_json import sealed_summary, sealed_verification
from ingot.validation.prediction import sealed_prediction

_EXPERT_ROWS = 16
"""Rows of a step whose distinct experts are shown, next to those of one row."""


def inspect_command(
    artifact: str,
    show_program: bool,
    bucket: str | None,
    show_files: bool,
    show_memory: bool,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Show what ARTIFACT holds and how its gates were decided. Digests are checked first."""
    opened = open_artifact(artifact, verify=not no_verify)
    if as_json:
        print_json(opened.manifest.model_dump(mode="json"))
        return
    _print_facts(opened, verified=not no_verify)
    _print_experts(opened)
    if opened.manifest.gates:
        print_gates(opened.manifest.gates)
    print_warning_of(opened.manifest)
    if show_program:
        _print_program(opened)
    if bucket:
        _print_bucket(opened, bucket)
    if show_files:
        rows = [(n, format_bytes(e.bytes), e.sha256) for n, e in sorted(opened.manifest.files.items())]
        print_table("Files", ("file", "size", "SHA-256"), rows)
    if show_memory:
        print_facts(_memory(opened))


def _memory(artifact: Artifact) -> dict[str, str]:
    """The pages that loading would find. Raises UsageError for an artifact that is not for a CPU."""
    if not artifact.manifest.on_cpu:
        raise UsageError(f"{artifact.path}: target {artifact.manifest.target} has its weights in a GPU's memory")
    return weights_in_words(artifact.file(WEIGHTS_FILE))


def kv_in_words(kv: KVGeometry) -> str:
    """KV heads of the layers; equal layers are counted."""
    state = [f"{format_bytes(kv.state_bytes)} of side state"] if kv.state_bytes else []
    if kv.unequal is None:
        return ", ".join([f"{kv.num_kv_heads} KV heads of {kv.head_dim}", *state])
    shapes = Counter((layer.num_kv_heads, layer.key_dim, layer.source != n) for n, layer in enumerate(kv.layers))
    kinds = [
        f"{count} with {heads} KV heads of {dim}{' shared with an earlier layer' if shared else ''}"
        for (heads, dim, shared), count in shapes.items()
    ]
    return ", ".join([*kinds, *state])


def _state_in_words(kv: KVGeometry) -> str:
    """Bytes of a sequence's side state, and the layers that keep it by kind."""
    kinds = Counter(part.kind for part in kv.state)
    layers = [f"{count} of kind {kind}" for kind, count in kinds.items()]
    return ", ".join([f"{format_bytes(kv.state_bytes)} for each sequence", *layers])


def _print_facts(artifact: Artifact, verified: bool) -> None:
    manifest = artifact.manifest
    model, kv = manifest.model, manifest.kv
    rows = {
        "name": manifest.name,
        "identity": manifest.identity + (" (verified)" if verified else " (not verified)"),
        "model": f"{model.family}, {model.num_parameters:,} parameters, {model.num_layers} layers, {kv_in_words(kv)}",
        "context": f"{model.context_tokens:,} tokens, vocabulary {model.vocab_size:,}",
        "target": f"{manifest.target}, run by {manifest.engine}",
        "KV block": f"{kv.block_tokens} tokens, {kv.type_in_words}, {format_bytes(kv.block_bytes)}",
        **({"side state": _state_in_words(kv)} if kv.state_bytes else {}),
        **({"drafts": _draft_head(artifact)} if artifact.has(DRAFT_HEAD_FILE) else {}),
        **({"placed on": _stages_in_words(artifact)} if artifact.has(STAGES_FILE) else {}),
        **({"served with": _serving(manifest.serving)} if manifest.serving else {}),
        "size": f"{format_bytes(artifact.total_bytes)} in {len(manifest.files)} files",
        "built with": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    calibration = read_calibration(artifact)
    if calibration:
        rows["calibrated"] = f"on {calibration}"
    rows |= _measurement(artifact)
    prediction = sealed_prediction(artifact)
    if prediction is not None and prediction.sentence:
        rows["predicted"] = prediction.sentence
    verification = sealed_verification(artifact)
    if verification is not None:
        counts = f"{verification.num_checked} cells, {len(verification.failures)} not proved equal"
        rows["verified"] = (
            f"{verification.verdict}: {counts}, logits {verification.logits} ({verification.verified_at})"
        )
    if artifact.has("evidence/report.html"):
        rows["report"] = str(artifact.path / "evidence/report.html")
    print_facts(rows)


def _print_experts(artifact: Artifact) -> None:
    """Print how often experts are chosen, layer by layer, and how many of them rows reach, if it was counted."""
    choices = read_expert_choices(artifact)
    if choices is None:
        return
    rows, at = [], WINDOWS.index(_EXPERT_ROWS)
    for node, layer in choices.layers.items():
        counted = [f"{means[at]:.2f}" if at < len(means) else "-" for means in (layer.concurrent, layer.consecutive)]
        even = len(layer.counts) * reached(even_reach(len(layer.counts), layer.chosen), _EXPERT_ROWS)
        shares = f"{max(layer.shares):.1%}", f"{layer.busiest_quarter:.1%}"
        of = f"{layer.chosen} of {len(layer.counts)}"
        rows.append((node.rpartition(".")[0], of, *shares, f"{layer.chosen}", *counted, f"{even:.2f}"))
    ends = (f"{_EXPERT_ROWS} {words}" for words in ("reach", "in a row", "if equally likely"))
    header = ("layer", "chosen", "busiest", "busiest quarter", "1 row reaches", *ends)
    print_table(f"Experts chosen on {choices}", header, rows, left=1)


def _draft_head(artifact: Artifact) -> str:
    """The MTP layer by its own operations and weights; table and head of the vocabulary are the model's."""
    heads = read_draft_programs(artifact)
    own = sum(matrix.num_bytes for name, matrix in heads.head.matrices.items() if name not in heads.model.matrices)
    return (
        f"by its MTP layer (--speculate mtp): {len(heads.head.operations)} operations, {format_bytes(own)} of weights"
    )


def _stages_in_words(artifact: Artifact) -> str:
    """The devices, each with its part of the model."""
    cut = read_stages(artifact)
    parts = (
        f"{device.name}: {len(device.program.operations)} operations, {_weights_in_words(artifact, device)},"
        f" {format_bytes(device.program.kv.block_bytes)} of a KV block"
        for device in cut.devices
    )
    return f"{'; '.join(parts)}; in {len(cut.runs)} stages"


def _weights_in_words(artifact: Artifact, device: DeviceProgram) -> str:
    """Bytes of the device's weights; of the host with experts that it has in the GPU's form, too."""
    files = artifact.manifest.files
    size = files[DEVICE_WEIGHTS_FILE].bytes if device.is_gpu else device.weight_bytes
    streamed = files.get(STREAMED_WEIGHTS_FILE)
    if device.is_gpu or streamed is None:
        return f"{format_bytes(size)} of weights"
    return f"{format_bytes(size)} of weights and {format_bytes(streamed.bytes)} of the same experts for the GPU, pinned"


def _serving(serving: ServingOptions) -> str:
    """The defaults of `Engine.load`, sizes in words."""
    return ", ".join(f"{name} {_served(name, value)}" for name, value in serving.given().items()) or "no defaults"


def _served(name: str, value: int | str | tuple[int, ...]) -> str:
    if isinstance(value, tuple):
        return cores_in_words(value)
    return format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)


def _measurement(artifact: Artifact) -> dict[str, str]:
    """Sources of the artifact, time of its measurement and load of the machine; empty if it was not measured."""
    summary = sealed_summary(artifact)
    if summary is None:
        return {}
    origin, load = summary.origin, summary.load
    busy = f"{', on a BUSY MACHINE' if load.is_busy else ''}: {load}" if load else ""
    return {
        **({"built from": f"{origin.checkpoint} by recipe {origin.recipe}"} if origin else {}),
        **({"measured": f"{summary.measured_at}{busy}"} if summary.measured_at else {}),
    }


def _print_program(artifact: Artifact) -> None:
    """Print all steps or operations, or the buckets and kernels of a launch program for a GPU."""
    if artifact.manifest.engine == "native":
        _print_operations(read_operations(artifact))
        if artifact.has(DRAFT_HEAD_FILE):
            _print_operations(read_draft_programs(artifact).head, "Draft head")
        if artifact.has(STAGES_FILE):
            _print_stages(read_stages(artifact))
    elif artifact.manifest.program.launches:
        program = _launches(artifact)
        _print_buckets(program)
        _print_kernels(program)
        _print_plans(artifact)
        if artifact.has(STAGES_FILE):
            _print_stages(read_stages(artifact))
    else:
        _print_steps(artifact)


def _print_bucket(artifact: Artifact, name: str) -> None:
    """Print every launch of one bucket. Raises UsageError if the artifact has no such bucket."""
    if artifact.manifest.on_cpu:
        raise UsageError(
            f"{artifact.path}: target {artifact.manifest.target} has no buckets; --program lists its steps"
        )
    program = _launches(artifact)
    found = next((bucket for bucket in program.programs if bucket.name == name), None)
    if found is None:
        names = [bucket.name for bucket in program.programs]
        raise UsageError(unknown("bucket", name, names, "buckets"))
    rows = [(str(number), *_row(program, found, step)) for number, step in enumerate(found.launches)]
    rows += [(name, *_row(program, found, step)) for name, steps in found.samplers.items() for step in steps]
    print_table(f"Launches of {name}", ("step", "runs", "for", "grid", "reads and writes"), rows, left=5)


def _launches(artifact: Artifact) -> CudaProgram:
    return read_launches(artifact)


def _print_buckets(program: CudaProgram) -> None:
    rows = [
        (
            bucket.name,
            str(bucket.sequences),
            str(bucket.logits_rows),
            str(len(bucket.launches)),
            format_bytes(bucket.arena_bytes),
        )
        for bucket in program.programs
    ]
    sms = ", ".join(map(str, program.sms))
    tuned = f", tiles tuned on {program.tuned_on}" if program.tuned_on else ", safe tiles"
    if program.batch_invariant:
        tuned = ", batch-invariant: one tile per weight"
    if program.dependent:
        tuned += ", dependent launches"
    if program.adapters:
        tuned += ", LoRA adapters"
    captured = {one.is_capturable for one in program.programs}
    graphs = "" if captured == {True} else ", large prompts uncaptured" if True in captured else ", launched one by one"
    title = f"Launch program for SM {sms}, {program.activation_type}, keys and values {program.kv.dtype}{tuned}{graphs}"
    print_table(title, ("bucket", "sequences", "logits", "launches", "arena"), rows)


def _print_kernels(program: CudaProgram) -> None:
    uses = Counter(step.kernel for bucket in program.programs for step in bucket.launches if isinstance(step, Launch))
    rows = []
    for key, kernel in sorted(program.kernels.items()):
        shared = max(facts[key].shared_bytes for facts in program.cubins.values())
        constants = " ".join(f"{name}={value}" for name, value in kernel.constants.items())
        warps = f"{kernel.num_warps} x {kernel.num_stages}"
        rows.append((key, constants, warps, format_bytes(shared), str(uses[key])))
    matmuls = Counter(step.library for bucket in program.programs for step in bucket.library_matmuls)
    rows += [(library, "matmuls of unquantized weights", "", "", str(count)) for library, count in matmuls.items()]
    print_table("Kernels", ("kernel", "constants", "warps x stages", "shared", "launches"), rows, left=2)


def _row(program: CudaProgram, bucket: LaunchProgram, step: Step) -> tuple[str, str, str, str]:
    if isinstance(step, SegmentCall):
        given = [*step.inputs.values(), *step.outputs.values()]
        how = f"profile {step.profile}" if step.engine == "tensorrt" else step.engine
        return step.file, step.node, how, _shown(bucket, given)
    if isinstance(step, LibraryMatmul):
        return (
            step.library,
            step.node,
            f"{step.rows} x {step.n} x {step.columns}",
            _shown(bucket, [*step.operands.values()]),
        )
    if isinstance(step, HostCopy):
        words = f"{step.direction}, stage {step.stage}"
        return "host", step.node, words, _shown(bucket, [value.rows for value in step.values])
    if isinstance(step, WeightCopy):
        return "weights", step.node, f"{step.action}, stage {step.stage}", _shown(bucket, [step.weights])
    grid = " x ".join(map(str, step.grid))
    return step.kernel, step.node, grid, _shown(bucket, step.arguments)


def _shown(bucket: LaunchProgram, arguments: "tuple[Argument, ...] | list[BufferArgument | WeightArgument]") -> str:
    """The pointers by name, a buffer of the arena with its offset."""
    words = []
    for argument in arguments:
        if isinstance(argument, BufferArgument):
            place = bucket.places.get(argument.name)
            words.append(argument.name + (f"@{place.offset}" if place else ""))
        elif isinstance(argument, WeightArgument):
            words.append(argument.name)
    return ", ".join(words)


def _print_steps(artifact: Artifact) -> None:
    rows = []
    for number, step in enumerate(artifact.manifest.program.steps):
        if isinstance(step, AttentionStep):
            what = f"layer {step.layer}: {step.num_heads} x {step.head_dim} heads over {step.num_kv_heads}"
            window = f", window {step.window}" if step.window else ""
            sinks = ", sinks" if step.sinks is not None else ""
            rows.append((str(number), "attention", what + window + sinks, step.output))
        elif not isinstance(step, SegmentStep):
            rows.append((str(number), step.kind, f"layer {step.layer}: {', '.join(step.inputs)}", step.output))
        else:
            rows.append((str(number), step.file, ", ".join(step.inputs), ", ".join(step.outputs)))
    print_table("Program", ("step", "runs", "from", "makes"), rows, left=4)


def _print_plans(artifact: Artifact) -> None:
    """Print the artifact's TensorRT plans, if it has any."""
    if PLANS_FILE not in artifact.manifest.files:
        return
    plans = ProgramPlans.model_validate_json(artifact.file(PLANS_FILE).read_bytes()).plans
    first = plans[0]
    title = f"Plans of {first.library} {first.version} for SM {', '.join(map(str, first.sms))}"
    rows = [
        (plan.file, str(plan.segments), format_bytes(plan.bytes), format_bytes(plan.weight_bytes), _rows(plan))
        for plan in plans
    ]
    print_table(title, ("plan", "segments", "size", "weights in it", "rows"), rows, left=1)
    header = ("plan", "rows", "launches")
    print_table("Operators, identical plans once", header, _operators(plans), left=3)


def _rows(plan: PlanFacts) -> str:
    return ", ".join(map(_range, plan.profiles))


def _range(profile: PlanProfile) -> str:
    least, most = profile.least_rows, profile.most_rows
    return str(least) if least == most else f"{least}-{most}"


def _operators(plans: tuple[PlanFacts, ...]) -> list[tuple[str, str, str]]:
    """Rows (plan, numbers of rows, operators): profiles with the same operators share a row, equal plans a group."""
    seen: set[str] = set()
    rows = []
    for plan in plans:
        by_operators: dict[str, list[str]] = {}
        for profile in plan.profiles:
            by_operators.setdefault(_counted(profile), []).append(_range(profile))
        group = repr(by_operators)
        if group not in seen:
            seen.add(group)
            rows += [(plan.file, ", ".join(ranges), operators) for operators, ranges in by_operators.items()]
    return rows


def _counted(profile: PlanProfile) -> str:
    counted = (f"{count} {name}" if count > 1 else name for name, count in profile.operators.items())
    return ", ".join(counted) or "not shown by the plan"


def _print_operations(program: CpuProgram, name: str = "CPU launch program") -> None:
    """Print the operations in order, then the matrices by form."""
    title = f"{name}, {format_bytes(4 * program.arena_floats)} of arena for each token of a step"
    rows = [
        (str(number), operation.kind, operation.node, ", ".join(_operation_facts(program, operation)), _flow(operation))
        for number, operation in enumerate(program.operations)
    ]
    print_table(title, ("step", "operation", "for", "how", "reads and writes"), rows, left=5)
    print_table("Matrices", ("form", "matrices", "elements", "size"), _forms(program), left=1)


def _print_stages(cut: CutProgram) -> None:
    """Print the stages in order, with what is copied to each before it begins."""
    rows, begin = [], 0
    for number, run in enumerate(cut.runs):
        end = begin + len(run.operations)
        first, last = (cut.whole.operations[at].node for at in (begin, end - 1))
        copied = ", ".join(f"{one.buffer} from {cut.devices[one.source].name}" for one in run.crossings)
        rows.append((str(number), cut.devices[run.device].name, f"{begin}-{end - 1}", f"{first} .. {last}", copied))
        begin = end
    print_table("Stages", ("stage", "device", "steps", "for", "copies"), rows, left=5)


def _operation_facts(program: CpuProgram, operation: Operation) -> Iterator[str]:
    yield from operation.facts(program.matrices)
    if operation.computed_rows == "logits":
        yield "rows of logits"


def _flow(operation: Operation) -> str:
    *reads, written = map(_place, operation.views)
    return f"{', '.join(reads)} -> {written}".strip()


def _place(view: View) -> str:
    return view.buffer + (f"[{view.column}:]" if view.column else "")


def _forms(program: CpuProgram) -> list[tuple[str, str, str, str]]:
    """Rows (form, matrices, elements, bytes)."""
    groups: dict[str, list[Matrix]] = {}
    for matrix in program.matrices.values():
        groups.setdefault(str(matrix), []).append(matrix)
    return [
        (
            form,
            str(len(found)),
            f"{sum(matrix.n * matrix.k for matrix in found):,}",
            format_bytes(sum(matrix.num_bytes for matrix in found)),
        )
        for form, found in sorted(groups.items())
    ]
