"""An artifact's program as tables: the steps of segments, or the launches for a card.

An artifact's TensorRT plans as tables: what each holds, and what it launches in every profile.

What mixed-precision chose, printed when it has: each weight's scheme, what it costs, and what it could have had.

The evidence as `build` and `validate` print it: baseline against candidate, then the gates.

The table of gate verdicts, as `build`, `validate` and `inspect` print it.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from ingot.artifact import Artifact, AttentionStep, GateOutcome
from ingot.artifact.launch_program import (
    Argument,
    BufferArgument,
    CudaProgram,
    Launch,
    LaunchProgram,
    LibraryProduct,
    SegmentCall,
    Step,
    WeightArgument,
    read_cuda_program,
)
from ingot.artifact.plan_facts import PLANS_FILE, PlanFacts, PlanProfile, ProgramPlans
from ingot.cli.console import print_note, print_table, stdout
from ingot.errors import UsageError, did_you_mean, one_of
from ingot.passes.manager import PassRecord
from ingot.passes.quantization.bit_assignment import assignment_table
from ingot.passes.quantization.mixed_precision import MIXED_KEY, MixedPrecision
from ingot.sizes import format_bytes
from ingot.validation.report.formatting import interval, key_title, metric_value, quantity
from ingot.validation.result import Evidence


def print_gates(gates: Sequence[GateOutcome]) -> None:
    """Print gates with measured value, 95 % interval, limit and verdict."""
    rows = [
        (
            gate.name,
            f"{gate.measured:.4g}",
            f"{gate.low:.4g} .. {gate.high:.4g}",
            f"{'≤' if gate.bound == 'max' else '≥'} {gate.limit:g}",
            gate.verdict,
        )
        for gate in gates
    ]
    print_table("Gates", ("gate", "measured", "95 % interval", "limit", "verdict"), rows)


def print_evidence(evidence: Evidence, report: Path | None) -> None:
    """Print every metric of both sides with its 95 % interval, the gates, and where the report lies."""
    rows = [
        (
            key_title(key),
            quantity(measured.baseline, measured.unit),
            quantity(measured.candidate, measured.unit),
            metric_value(measured.metric, measured.estimate.value),
            interval(measured),
        )
        for key, measured in evidence.measured.items()
    ]
    names = (evidence.baseline.name, evidence.candidate.name)
    print_table("Evidence", ("metric", *names, "compared", "95 % interval"), rows)
    if evidence.gates:
        print_gates(evidence.gates)
    if report:
        stdout().print(f"report {report}", markup=False)


def print_plans(artifact: Artifact) -> None:
    """Nothing where the artifact has no plans."""
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
    print_table("Operators, of plans that launch the same as one", header, _operators(plans), left=3)


def _rows(plan: PlanFacts) -> str:
    return ", ".join(map(_range, plan.profiles))


def _range(profile: PlanProfile) -> str:
    least, most = profile.least_rows, profile.most_rows
    return str(least) if least == most else f"{least}-{most}"


def _operators(plans: tuple[PlanFacts, ...]) -> list[tuple[str, str, str]]:
    """Profiles that launch the same stand in one row, plans whose profiles all do in one group."""
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


def print_program(artifact: Artifact) -> None:
    """All steps; for a card its buckets and kernels."""
    if artifact.manifest.program.launches:
        program = _launches(artifact)
        _print_buckets(program)
        _print_kernels(program)
        print_plans(artifact)
    else:
        _print_steps(artifact)


def print_bucket(artifact: Artifact, name: str) -> None:
    """Every launch of one bucket. UsageError where the artifact has no such bucket."""
    if not artifact.manifest.program.launches:
        raise UsageError(
            f"{artifact.path}: target {artifact.manifest.target} has no buckets; --program lists its steps"
        )
    program = _launches(artifact)
    found = next((bucket for bucket in program.programs if bucket.name == name), None)
    if found is None:
        names = [bucket.name for bucket in program.programs]
        raise UsageError(f"there is no bucket {name!r}; buckets: {one_of(names)}.{did_you_mean(name, names)}")
    rows = [(str(number), *_row(program, found, step)) for number, step in enumerate(found.launches)]
    rows += [(tail, *_row(program, found, step)) for tail, steps in found.tails.items() for step in steps]
    print_table(f"Launches of {name}", ("step", "runs", "for", "grid", "reads and writes"), rows, left=5)


def _launches(artifact: Artifact) -> CudaProgram:
    assert artifact.manifest.program.launches is not None
    return read_cuda_program(artifact.file(artifact.manifest.program.launches))


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
    graphs = "" if all(one.is_capturable for one in program.programs) else ", launched one by one"
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
    products = Counter(step.library for bucket in program.programs for step in bucket.library_products)
    rows += [(library, "products of plain weights", "", "", str(count)) for library, count in products.items()]
    print_table("Kernels", ("kernel", "constants", "warps x stages", "shared", "launches"), rows, left=2)


def _row(program: CudaProgram, bucket: LaunchProgram, step: Step) -> tuple[str, str, str, str]:
    if isinstance(step, SegmentCall):
        given = [*step.inputs.values(), *step.outputs.values()]
        how = f"profile {step.profile}" if step.engine == "tensorrt" else step.engine
        return step.file, step.node, how, _shown(bucket, given)
    if isinstance(step, LibraryProduct):
        return (
            step.library,
            step.node,
            f"{step.rows} x {step.n} x {step.columns}",
            _shown(bucket, [*step.operands.values()]),
        )
    grid = " x ".join(map(str, step.grid))
    return step.kernel, step.node, grid, _shown(bucket, step.arguments)


def _shown(bucket: LaunchProgram, arguments: "tuple[Argument, ...] | list[BufferArgument | WeightArgument]") -> str:
    """Pointers by name, a buffer of the arena with its place."""
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
            rows.append((str(number), "attention", what + window, step.output))
        else:
            rows.append((str(number), step.file, ", ".join(step.inputs), ", ".join(step.outputs)))
    print_table("Program", ("step", "runs", "from", "makes"), rows, left=4)


def print_assignment(model: ir.Model, record: PassRecord) -> None:
    """A table behind the pass mixed-precision; nothing behind any other."""
    if record.name == MixedPrecision.name:
        header, *rows = assignment_table(json.loads(model.metadata_props[MIXED_KEY]))
        print_table("Mixed precision: KL in nats per token, of each weight alone", header, rows)


def note_prediction(facts: Mapping[str, str], evidence: Evidence | None) -> None:
    """The predicted KL beside the measured one, where there are both."""
    measured = None if evidence is None else evidence.measured.get("kl_mean")
    if MIXED_KEY not in facts or measured is None:
        return
    predicted = json.loads(facts[MIXED_KEY])["predicted_kl"]
    print_note(
        f"mixed-precision predicted a KL of {predicted:.4g} of its weights on the calibration text; the whole artifact "
        f"has {measured.estimate.value:.4g} on the evaluation text"
    )
