"""Every checkpoint that a package wrote builds, and the artifact keeps the codes that the engine supports."""

from pathlib import Path

import numpy as np
import onnx_ir as ir

from ingot.artifact import Artifact, SegmentStep
from ingot.passes.model_facts import DEQUANTIZED
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.transcode import transcode
from ingot.pipeline.model.importer import import_checkpoint
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.whole_fixture import FIXTURES, LAYER, MODULES, VOCABULARY, whole_checkpoint
from tests.pipeline.interchange.test_export import dequantized, in_ir
from tests.pipeline.targets.program_chain import ProgramChain

TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, 12)
MINIMA = "its minima are not whole multiples of its scales"
KEY_VALUE = (f"{LAYER}self_attn.k_proj", f"{LAYER}self_attn.v_proj")
WEIGHTS = tuple(f"{LAYER}{module}" for module in MODULES)
# fixture -> layers that become floats, and why; all others stay codes
FLOATS: dict[str, tuple[tuple[str, ...], str]] = {
    "autogptq-w4-sym-descact": (WEIGHTS, "its groups are in activation order"),
    "gguf-Q4_1": (WEIGHTS, MINIMA),
    "gguf-llamacpp-Q4_K_M": (WEIGHTS, MINIMA),
    "gguf-llamacpp-Q3_K_M": (tuple(name for name in WEIGHTS if name != KEY_VALUE[0]), MINIMA),  # k is Q3_K, without
    "llmcompressor-fp8": (WEIGHTS, "its codes are floats (fp8)"),
    "llmcompressor-fp8-dynamic": (WEIGHTS, "its codes are floats (fp8)"),
    "llmcompressor-fp8-kv": (WEIGHTS, "its codes are floats (fp8)"),
}


def engine_nodes(artifact: Artifact) -> list[str]:
    """Op types of all nodes of the program."""
    steps = [step for step in artifact.manifest.program.steps if isinstance(step, SegmentStep)]
    return [node.op_type for step in steps for node in ir.load(artifact.file(step.file)).graph]


@each_case("name", FIXTURES)
def test_the_ir_holds_the_codes_or_records_the_reason(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(whole_checkpoint(name, tmp_path / "model"))
    model = import_checkpoint(checkpoint)
    layers, reason = FLOATS.get(name, ((), ""))
    reasons = DEQUANTIZED.find(model) or {}
    assert set(reasons) == {f"{layer}.weight" for layer in layers}
    assert all(text.startswith(reason) for text in reasons.values())
    expected, found = dequantized(checkpoint), in_ir(model)
    for weight in (f"{layer}.weight" for layer in WEIGHTS):
        assert np.array_equal(found[weight], expected[weight]), weight


@each_case("name", FIXTURES)
def test_a_build_computes_with_the_codes(name: str, tmp_path: Path, build_unmeasured: BuildArtifact) -> None:
    source = whole_checkpoint(name, tmp_path / "model")
    plain = transcode(source, tmp_path / "plain", "safetensors").folder
    built, floats = (build_unmeasured("fp32-cpu", each, "cpu.engine=onnxruntime") for each in (source, plain))
    in_codes = len(WEIGHTS) - len(FLOATS.get(name, ((), ""))[0])
    assert engine_nodes(built).count("MatMulNBits") == in_codes
    here, there = (
        ProgramChain(artifact.manifest.program, artifact.path).logits(TOKENS) for artifact in (built, floats)
    )
    # The engine's kernel rounds activations to 8 bits; wrong codes would leave nothing alike.
    assert np.linalg.norm(here - there) < 0.05 * np.linalg.norm(there)
