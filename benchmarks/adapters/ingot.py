"""Ingot: the recipe int4-cpu with the block size of the table of peers, through Engine.step."""

import hashlib
from importlib.metadata import version
from pathlib import Path

import ingot
from benchmarks.adapters.base import PeerFacts, Setup, Tokens, serve
from benchmarks.adapters.onnx_bytes import weight_bytes
from ingot.artifact import Artifact, open_artifact
from ingot.builder import build
from ingot.pipeline.compile import tool_versions
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.targets.table import get_target
from ingot.runtime.cpu.executor import OnnxRuntimeExecutor
from ingot.runtime.engine import Engine
from ingot.runtime.outputs import require_success
from ingot.runtime.sampling import SamplingParams

MAX_BATCH_TOKENS = 512  # the engine's default: longer prompts are cut into chunks


class Ingot:
    """One engine without a tokenizer and without a prefix cache: every prompt is computed."""

    def __init__(self, setup: Setup) -> None:
        self._artifact = build_int4(setup.checkpoint, setup.work_folder, int(setup.options["block_size"]))
        blocks_each = -(-setup.max_tokens // self._artifact.manifest.kv.block_tokens) + 1
        executor = OnnxRuntimeExecutor(
            self._artifact,
            num_blocks=setup.max_batch * blocks_each,
            max_batch_tokens=MAX_BATCH_TOKENS,
            num_threads=setup.threads,
        )
        self._engine = Engine(executor, max_sequences=setup.max_batch, prefix_cache=False)
        self._requests: list[int] = []

    def facts(self) -> PeerFacts:
        """Sizes come from the segments' ONNX files."""
        versions = {"ingot": ingot.__version__, "onnxruntime": version("onnxruntime")}
        segments = sorted((self._artifact.path / "program").glob("*.onnx"))
        notes = f"int4-cpu: asymmetric with a clip search, head int8, KV cache {self._artifact.manifest.kv.dtype}"
        return PeerFacts(versions, weight_bytes(segments), notes)

    def start(self, prompts: Tokens, new_tokens: int) -> None:
        """Step until every sequence has a token; a prompt longer than a step goes through in chunks."""
        for request in self._requests:
            self._engine.abort(request)
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        self._requests = [self._engine.add(prompt, params) for prompt in prompts]
        waiting = set(self._requests)
        while waiting:
            outputs = require_success(self._engine.step())
            waiting -= {output.request_id for output in outputs if output.token_ids}

    def step(self) -> None:
        """One token for every sequence."""
        require_success(self._engine.step())


def build_int4(checkpoint: Path, work_folder: Path, block_size: int) -> Artifact:
    """The artifact in `work_folder`, built if it does not exist for this recipe; without evidence."""
    overrides = (f"checkpoint={checkpoint}", f"passes.quantize-weights.block_size={block_size}")
    recipe = load_recipe("int4-cpu", overrides)
    program = f"{recipe.resolved_yaml()}{get_target(recipe.target).lowering}{tool_versions()}"
    key = hashlib.sha256(program.encode()).hexdigest()[:12]
    folder = work_folder / "ingot" / f"int4-block{block_size}-{key}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        build("int4-cpu", overrides, output=folder)
    return open_artifact(folder, verify=False)


if __name__ == "__main__":
    serve(Ingot)
