"""An artifact's program as tables: the steps of segments, or the launches for a card."""

from collections import Counter

from ingot.artifact import Artifact, AttentionStep
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
from ingot.cli.console import human_bytes, print_table
from ingot.cli.plan_tables import print_plans
from ingot.errors import UsageError, did_you_mean, one_of


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
            human_bytes(bucket.arena_bytes),
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
        rows.append((key, constants, warps, human_bytes(shared), str(uses[key])))
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
