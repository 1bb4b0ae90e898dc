"""Ingot, end to end through `Engine`: scheduler, paged KV cache, sampler; no tokenizer's work, no prefix cache.

Options: recipe, engine (the recipe's `cpu.engine`), attention (`cpu.attention`) and block_size, where they are not the
recipe's own; activations ("dynamic" or "static") of a recipe with smooth-quant.
"""

from importlib.metadata import version
from pathlib import Path

from benchmarks.adapters.base import PreparedModel, Setup, Tokens, run
from benchmarks.paths import ROOT
from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, layers_of, read_cpu_program
from ingot.runtime.asking.outputs import require_success
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine

MAX_BATCH_TOKENS = 512  # the engine's default: longer prompts are cut into chunks
_NOTES = {  # recipe -> how its weights are stored
    "int4-cpu": "asymmetric with a clip search, head int8",
    "int4-kv8-cpu": "asymmetric with a clip search, head int8",
    "w8a8-cpu": "int8 per channel, symmetric, head int8 in blocks of 64, not smoothed",
    "fp32-cpu": "floats: native keeps the checkpoint's 16 bits, onnxruntime widens them to 32",
}


def prepare(setup: Setup) -> PreparedModel:
    """Build the artifact, without evidence, unless `work_folder` has it."""
    # the compiler is imported here alone, so that it takes no memory where the engine runs
    from benchmarks.hybrids import ALL_SHAPES
    from benchmarks.kv.synthetic_artifacts import synthetic_artifact

    artifact = synthetic_artifact(
        ALL_SHAPES[setup.shape],
        str(setup.options["recipe"]),
        context_tokens=setup.context_tokens,
        folder=setup.work_folder,
        overrides=recipe_overrides(setup),
    )
    return describe(artifact)


def describe(artifact: Artifact) -> PreparedModel:
    """Facts about an artifact: its versions, and the bytes that a decode step reads."""
    import ingot

    manifest = artifact.manifest
    versions = {"ingot": ingot.__version__, "onnxruntime": version("onnxruntime")}
    notes = f"{manifest.name}: {_NOTES.get(manifest.name, 'weights as the recipe says')}, KV cache {manifest.kv.dtype}"
    token_bytes = manifest.kv.block_bytes // manifest.kv.block_tokens
    return PreparedModel(artifact.path, versions, weight_bytes(artifact.path / "program"), token_bytes, notes)


def weight_bytes(program: Path) -> int:
    """Bytes of the matrices that a step multiplies by, of a native program or of onnxruntime's segments."""
    from benchmarks.adapters import onnx_bytes

    if not (program / Path(OPERATIONS_FILE).name).is_file():
        return onnx_bytes.weight_bytes(sorted(program.glob("*.onnx")))
    found = read_cpu_program(program / Path(OPERATIONS_FILE).name)
    used = {layer.matrix for operation in found.operations for layer in layers_of(operation)}
    return sum(found.matrices[name].num_bytes for name in used)


def recipe_overrides(setup: Setup) -> tuple[str, ...]:
    """--set of the options."""
    engine, block_size = setup.options["engine"], setup.options.get("block_size", 0)
    overrides = [f"checkpoint={setup.checkpoint}", f"cpu.engine={engine}"]
    if "attention" in setup.options:
        overrides.append(f"cpu.attention={setup.options['attention']}")
    if block_size:
        overrides.append(f"passes.quantize-weights.block_size={block_size}")
    if "activations" in setup.options:
        overrides += _eight_bit_overrides(str(setup.options["activations"]))
    return tuple(overrides)


def _eight_bit_overrides(activations: str) -> list[str]:
    """Of smooth-quant. Nothing is smoothed and few tokens calibrate a static scale: neither changes the operations."""
    overrides = ["passes.smooth-quant.alpha=none", f"passes.smooth-quant.activations={activations}"]
    if activations == "static":
        text = ROOT / "docs" / "passes.md"
        overrides.append(f"calibration={{text: {text}, sequences: 4, sequence_tokens: 128}}")
    return overrides


class Ingot:
    """One engine without a prefix cache: every prompt is computed."""

    def __init__(self, setup: Setup, model: Path) -> None:
        artifact = open_artifact(model)
        block_tokens = artifact.manifest.kv.block_tokens
        # blocks of the tokens, and for each sequence one that is partly filled and one that it may get in advance
        blocks = -(-setup.pool_tokens // block_tokens) + 2 * setup.max_batch
        self._engine = Engine.load(
            artifact,
            kv_blocks=blocks,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_sequences=setup.max_batch,
            num_threads=setup.threads,
            prefix_cache=False,
        )
        self._requests: list[int] = []

    def start(self, prompts: Tokens, max_tokens: int) -> None:
        """Step until every sequence has a token; a prompt longer than a step goes through in chunks."""
        for request in self._requests:
            self._engine.abort(request)
        params = SamplingParams(max_tokens=max_tokens - prompts.shape[1], ignore_eos=True)
        self._requests = [self._engine.add(prompt, params) for prompt in prompts]
        waiting = set(self._requests)
        while waiting:
            outputs = require_success(self._engine.step())
            waiting -= {output.request_id for output in outputs if output.token_ids}

    def step(self) -> None:
        """One token for every sequence."""
        require_success(self._engine.step())


if __name__ == "__main__":
    run(prepare, Ingot)
