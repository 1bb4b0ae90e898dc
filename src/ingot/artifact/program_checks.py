"""Checks of a manifest's program: every value is described and made before it is read, and every file is listed.

A manifest whose digests are right was not damaged, but it may have been written by another program than Ingot.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from ingot.artifact.kv_geometry import KVGeometry
from ingot.artifact.manifest import AttentionStep, Manifest, SegmentStep, Step, ValueFacts
from ingot.errors import ArtifactError, did_you_mean, shown

LOGITS = "logits"
_WINDOWS_SINCE = 3  # the first schema version whose KV geometry has windows
PROGRAM_INPUTS = {
    "input_ids": ValueFacts(dtype="int64", rows="tokens", columns=0),
    "position_ids": ValueFacts(dtype="int64", rows="tokens", columns=0),
    "logits_indices": ValueFacts(dtype="int64", rows="logits", columns=0),
}


def check_program(manifest: Manifest) -> None:
    """Raise ArtifactError for a program that cannot run: unknown, missing or twice-made values, unlisted files."""
    program = manifest.program
    if program.launches is not None:
        _check_file(program.launches, "program.launches", manifest.files)
    if (program.launches is not None) != (manifest.engine != "onnxruntime"):
        has = "has" if program.launches else "has no"
        raise ArtifactError(
            f"the program {has} launches, but the engine is {manifest.engine}; build the artifact again"
        )
    if not program.steps:
        return
    for name, facts in PROGRAM_INPUTS.items():
        if program.values.get(name) != facts:
            raise ArtifactError(f"the program's input {name!r} is not described as {_words(facts)}")
    made = set(PROGRAM_INPUTS)
    for number, step in enumerate(program.steps):
        _check_step(f"step {number} of the program", step, manifest, made)
    logits = ValueFacts(dtype="float32", rows="logits", columns=manifest.model.vocab_size)
    if LOGITS not in made or program.values[LOGITS] != logits:
        raise ArtifactError(f"the program does not make {LOGITS!r} as {_words(logits)}")
    _check_layers(manifest)


def inputs_of(step: Step) -> Sequence[str]:
    """Names of the values that a step reads, each once."""
    return tuple(dict.fromkeys(step.inputs))


def outputs_of(step: Step) -> Sequence[str]:
    """Names of the values that a step writes."""
    return step.outputs if isinstance(step, SegmentStep) else (step.output,)


def _check_step(place: str, step: Step, manifest: Manifest, made: set[str]) -> None:
    """Check one step, and add what it makes to `made`."""
    for file in _files_of(step):
        _check_file(file, place, manifest.files)
    for name in inputs_of(step):
        if name not in made:
            raise ArtifactError(
                f"{place} reads {shown(name)}, which no step before it makes.{did_you_mean(name, made)}"
            )
    for name in outputs_of(step):
        if name not in manifest.program.values:
            raise ArtifactError(f"{place} makes {shown(name)}, whose type and shape the manifest does not give")
        if name in made:
            raise ArtifactError(f"{place} makes {shown(name)}, which exists already")
        made.add(name)


def _files_of(step: Step) -> list[str]:
    """Files that a step reads."""
    match step:
        case SegmentStep():
            return [step.file]
        case AttentionStep():
            return [read.file for read in (step.rotary, step.sinks) if read is not None]
        case _:
            return [tensor.file for tensor in step.tensors]


def _check_file(name: str, place: str, files: Collection[str]) -> None:
    if name not in files:
        raise ArtifactError(f"{place} needs the file {shown(name)}, which the manifest does not list")


def _check_layers(manifest: Manifest) -> None:
    """Every layer of the KV pool belongs to one attention step, which has its window."""
    steps = [step for step in manifest.program.steps if isinstance(step, AttentionStep)]
    for layer, count in Counter(step.layer for step in steps).items():
        if layer >= manifest.kv.num_layers:
            raise ArtifactError(f"attention of layer {layer}: the KV pool has {manifest.kv.num_layers} layers")
        if count > 1:
            raise ArtifactError(f"attention of layer {layer} is computed by {count} steps")
    if manifest.schema_version < _WINDOWS_SINCE:
        return
    for step in steps:
        _check_sharing(step, manifest.kv)
        window = manifest.kv.layers[step.layer].window
        if step.window != window:
            raise ArtifactError(
                f"attention of layer {step.layer} has a window of {step.window} tokens; the KV geometry has {window}"
            )


def _check_sharing(step: AttentionStep, kv: KVGeometry) -> None:
    """A layer has keys and values of its own, or shares another's: one of both."""
    source = kv.layers[step.layer].source
    given = [name for name in ("key", "value") if getattr(step, name) is not None]
    if source != step.layer and given:
        raise ArtifactError(f"attention of layer {step.layer} has a {given[0]}, but it shares those of layer {source}")
    wanted = ["key"] if kv.layers[step.layer].value_dim == 0 else ["key", "value"]
    if wanted == ["key"] and given == ["key", "value"]:
        raise ArtifactError(f"attention of layer {step.layer} has a value, but values are a part of the keys there")
    if source == step.layer and given != wanted:
        raise ArtifactError(f"attention of layer {step.layer} lacks its key or value, and shares no other layer's")


def _words(facts: ValueFacts) -> str:
    return f"{facts.dtype} [{facts.rows}{f', {facts.columns}' if facts.columns else ''}]"
