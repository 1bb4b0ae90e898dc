"""Layer norms with biases, and activations of 8 bits with static scales, from build to `ingot verify`, on both engines.

The reference is the IR of the build in 64-bit floats. The checkpoints of families with layer norms are random and have
no text, so a pass of the tests makes layer norms of a trained model's norms.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.manifest import CPU_ENGINES
from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, CpuProgram, Linear, read_cpu_program
from ingot.builder import Observers, build
from ingot.errors import ArtifactError
from ingot.passes.manager import PassRecord
from ingot.passes.quantization.activation_nodes import activation_scheme
from ingot.runtime import Engine, SamplingParams
from ingot.runtime.text.tokenizer import Tokenizer
from ingot.validation.verify import VerifyOptions, open_subject, verify
from tests.conftest import UNMEASURED
from tests.each_case import each_case
from tests.parity import compare, engine_logits
from tests.passes.example_passes import install
from tests.passes.layer_norms import ENTRY_POINT
from tests.simulators.float64_ir import float64_logits
from tests.tolerances import within

NORMS = {"rms": "", "layer": "layer-norms, "}
ROUNDINGS = {
    "none": "",
    "dynamic": "{smooth-quant: {activations: dynamic, lm_head: none, embedding: none}}, ",
    "static": "{smooth-quant: {activations: static, scale_dtype: float16, lm_head: none, embedding: none}}, ",
}
ROUNDED = [name for name in ROUNDINGS if name != "none"]
CALIBRATION = ("calibration={text: 'checkpoint:heldout.txt', sequences: 16, sequence_tokens: 64}",)
CELLS = ("chunked-prefill+batch-mates", "prefix-hit+preemption", "host-restore+disk-restore")
STEP_TOKENS = 7
Logits = list[NDArray[np.float32]]


@dataclass(frozen=True)
class Built:
    """A sealed artifact, and the IR before the target's passes."""

    artifact: Artifact
    model: ir.Model


BuildAll = Callable[[str, str, str], Built]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, two_layers: Path) -> Iterator[BuildAll]:
    """built(norm, rounding, engine), made once."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch, ENTRY_POINT)

        @cache
        def make(norm: str, rounding: str, engine: str) -> Built:
            seen: dict[str, ir.Model] = {}

            def observe(model: ir.Model, record: PassRecord) -> None:
                if record.name == "clean-up":
                    seen.setdefault("last of the recipe", model.clone())

            steps = f"{NORMS[norm]}pack-projections, fuse-gated-activation, {ROUNDINGS[rounding]}clean-up"
            settings = (f"checkpoint={two_layers}", *UNMEASURED, *CALIBRATION, f"cpu.engine={engine}")
            folder = tmp_path_factory.mktemp(f"{norm}-{rounding}-{engine}") / "artifact"
            build("fp32-cpu", (*settings, f"passes=[fold-constants, {steps}]"), folder, Observers(observe))
            return Built(open_artifact(folder), seen["last of the recipe"])

        yield make


@pytest.fixture(scope="module")
def prompts(two_layers: Path) -> list[list[int]]:
    """Three prompts of unequal lengths, of the text that calibrates."""
    text = (two_layers / "heldout.txt").read_text(encoding="utf-8")[20_000:21_000]
    ids = Tokenizer.load(two_layers).encode(text)
    return [ids[:40], ids[40:57], ids[57:120]]


def logits_of(built: Built, prompts: list[list[int]]) -> Logits:
    return engine_logits(built.artifact, prompts, STEP_TOKENS)


def reference(model: ir.Model, prompts: list[list[int]]) -> Logits:
    """Logits in 64-bit floats, rounded to 32 at the end."""
    return [float64_logits(model, prompt).astype(np.float32) for prompt in prompts]


def program_of(built: Built) -> CpuProgram:
    return read_cpu_program(built.artifact.file(OPERATIONS_FILE))


def relative_error(measured: Logits, expected: Logits) -> float:
    ours, theirs = np.concatenate(measured), np.concatenate(expected)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("norm", NORMS)
def test_floats_have_the_logits_of_64_bits(built: BuildAll, prompts: list[list[int]], norm: str, engine: str) -> None:
    made = built(norm, "none", engine)
    parity = compare(logits_of(made, prompts), reference(made.model, prompts))
    assert within("parity.float32", parity.worst, scale=max(1.0, parity.largest / 4))


@each_case("engine", CPU_ENGINES)
@each_case("rounding", ROUNDED)
@each_case("norm", NORMS)
def test_rounded_activations_have_the_logits_of_64_bits(
    built: BuildAll, prompts: list[list[int]], norm: str, rounding: str, engine: str
) -> None:
    """To the limit that values at the border of two codes set."""
    made = built(norm, rounding, engine)
    expected = reference(made.model, prompts)
    assert within("w8a8.logits", relative_error(logits_of(made, prompts), expected), f"{norm}, {rounding}, {engine}")
    lost = relative_error(expected, reference(built(norm, "none", engine).model, prompts))
    assert lost > 1e-3, "nothing was rounded"
    assert within("quantized.int8", lost)


@each_case("rounding", ROUNDINGS)
@each_case("norm", NORMS)
def test_the_native_engine_has_the_logits_of_onnxruntime(
    built: BuildAll, prompts: list[list[int]], norm: str, rounding: str
) -> None:
    native, other = (logits_of(built(norm, rounding, engine), prompts) for engine in ("native", "onnxruntime"))
    if rounding == "none":
        parity = compare(native, other)
        assert within("parity.float32", parity.worst, scale=max(1.0, parity.largest / 4))
    else:
        assert within("w8a8.logits", relative_error(native, other), f"{norm}, {rounding}")


@pytest.mark.parametrize("norm", NORMS)
def test_the_program_has_the_norms_and_the_scales_of_the_model(built: BuildAll, norm: str) -> None:
    made = built(norm, "static", "native")
    linear = [operation for operation in program_of(made).operations if isinstance(operation, Linear)]
    static = {operation.node: operation.static_scale for operation in linear if operation.rounding == "static"}
    schemes = {node.name: activation_scheme(node) for node in made.model.graph if node.op_type == "Gemm"}
    expected = {name: scheme.scale for name, scheme in schemes.items() if scheme is not None}
    assert len(expected) == 8
    assert static == pytest.approx(expected)
    norms = [operation.norm for operation in linear if operation.norm is not None]
    assert len(norms) == 5
    assert {(each.kind, each.bias is None) for each in norms} == {
        ("layer", False) if norm == "layer" else ("rms", True)
    }


@pytest.mark.parametrize("rounding", ROUNDED)
def test_tokens_that_are_decoded_have_the_bits_of_a_prompt(
    built: BuildAll, prompts: list[list[int]], rounding: str
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with Engine.load(built("layer", rounding, "native").artifact, kv_blocks=32, max_batch_tokens=STEP_TOKENS) as engine:
        for prompt, done in zip(prompts, engine.generate(prompts, params, keep_logits=True), strict=True):
            assert done.logits is not None
            whole = engine.prompt_logits([*prompt, *done.token_ids[:-1]])
            assert np.array_equal(whole[len(prompt) - 1 :].view(np.int32), done.logits.view(np.int32))


@pytest.mark.parametrize("rounding", ROUNDED)
def test_verify_finds_nothing(built: BuildAll, rounding: str) -> None:
    subject = open_subject(built("layer", rounding, "native").artifact)
    result = verify(subject, VerifyOptions(quick=True, only=CELLS, seed=3))
    assert result.failures == ()
    assert result.logits == "bit-equal"


def test_a_changed_scale_breaks_the_seal(built: BuildAll, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(built("layer", "static", "native").artifact.path, folder)
    file = folder / OPERATIONS_FILE
    content = json.loads(file.read_text())
    operation = next(one for one in content["operations"] if one.get("static_scale"))
    operation["static_scale"] *= 2
    file.chmod(0o644)
    file.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=r"operations\.json"):
        open_artifact(folder)
