"""write_program: what is on disk, and the whole way from a checkpoint to logits."""

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from ingot.errors import BuildError
from ingot.passes.manager import PassManager
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.segments.onnx_files import INLINE_BYTES, write_program
from ingot.pipeline.targets.table import TARGETS
from ingot.progress import progress_to
from tests.data_paths import DEMO_MODEL
from tests.passes.tiny_decoder import TinyDecoder
from tests.pipeline.targets.program_chain import FloatArray, ProgramChain, Tokens, reference_logits

QUANTIZE = {"bits": 4, "block_size": 32, "lm_head": 4, "embedding": 4}
FUSIONS = ("fold-constants", "pack-projections", "fuse-residual-norm", "fuse-gated-activation")


def lowered(model: ir.Model, **quantize: object) -> ir.Model:
    """The model as the target cpu wants it."""
    passes = [make_pass("quantize-weights", quantize)] if quantize else []
    PassManager([*passes, *map(make_pass, TARGETS["cpu"].lowering)]).run(model)
    return model


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*.*"))}


def test_two_writes_of_the_same_model_are_equal_byte_for_byte(tmp_path: Path) -> None:
    for name in "ab":
        write_program(lowered(TinyDecoder().model, **QUANTIZE), tmp_path / name)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert len(digests(tmp_path / "a")) == 4


def test_one_model_can_be_written_twice(tmp_path: Path) -> None:
    model = lowered(TinyDecoder().model, **QUANTIZE)
    for name in "ab":
        write_program(model, tmp_path / name)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


@pytest.mark.parametrize("quantize", [QUANTIZE, {}])
def test_large_weights_are_stored_once_and_outside_of_the_segments(tmp_path: Path, quantize: dict[str, object]) -> None:
    write_program(lowered(TinyDecoder(tied=True).model, **quantize), tmp_path)
    stored = load_file(tmp_path / "program" / "weights.safetensors")
    contents = [array.tobytes() for name, array in stored.items() if not name.startswith("padding")]
    assert len(set(contents)) == len(contents)
    assert sum(name.startswith("model.embed_tokens.weight.q") for name in stored) == bool(quantize)
    for file in (tmp_path / "program").glob("*.onnx"):
        graph = onnx.load(file, load_external_data=False).graph
        assert all(len(tensor.raw_data) <= INLINE_BYTES for tensor in graph.initializer)


def test_table_and_head_point_to_the_same_bytes_with_two_shapes(tmp_path: Path) -> None:
    write_program(lowered(TinyDecoder(tied=True).model, **QUANTIZE), tmp_path)
    found = {}
    for number in (0, 2):
        graph = onnx.load(tmp_path / "program" / f"segment-00{number}.onnx", load_external_data=False).graph
        for tensor in graph.initializer:
            if tensor.name.startswith("model.embed_tokens.weight.q"):
                place = {entry.key: entry.value for entry in tensor.external_data}
                found[tensor.name] = (tuple(tensor.dims), place["location"], place["offset"], place["length"])
    rows, blocks = found["model.embed_tokens.weight.q.rows"], found["model.embed_tokens.weight.q"]
    assert (rows[0], blocks[0]) == ((96, 32), (96, 2, 16))
    assert rows[1:] == blocks[1:]
    assert rows[1] == "weights.safetensors"


def test_the_same_place_of_the_checkpoint_under_two_names_is_stored_once(tmp_path: Path) -> None:
    content = np.arange(2 * 16 * 64, dtype=np.float32).tobytes()
    (tmp_path / "checkpoint.bin").write_bytes(content)
    model = TinyDecoder(layers=1, weight_dtype=np.float32).model
    for name in ("layers.0.k_proj.weight", "layers.0.v_proj.weight"):
        model.graph.initializers[name].const_value = ir.ExternalTensor(
            "checkpoint.bin", 0, len(content), ir.DataType.FLOAT, shape=ir.Shape([32, 64]), name=name, base_dir=tmp_path
        )
    write_program(lowered(model), tmp_path)
    stored = load_file(tmp_path / "program" / "weights.safetensors")
    assert "layers.0.k_proj.weight" in stored
    assert "layers.0.v_proj.weight" not in stored
    assert stored["layers.0.k_proj.weight"].tobytes() == content


def test_progress_counts_the_bytes_of_the_weights(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with progress_to(lambda *event: seen.append(event)):
        write_program(lowered(TinyDecoder().model), tmp_path)
    size = (tmp_path / "program" / "weights.safetensors").stat().st_size
    assert seen[-1] == ("writing weights", size, size)


@pytest.mark.parametrize(("file", "what"), [("weights.safetensors", "the weights"), ("segment-001.onnx", "a segment")])
def test_a_full_disk_is_a_build_error(tmp_path: Path, file: str, what: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / file).symlink_to("/dev/full")
    with pytest.raises(BuildError, match=f"no disk space for {what}"):
        write_program(lowered(TinyDecoder().model), tmp_path)


def demo() -> ir.Model:
    return import_checkpoint(Checkpoint.open(DEMO_MODEL), check_weights=False)


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    """The first 128 tokens of the demo model's held-out text."""
    text = (DEMO_MODEL / "heldout.txt").read_text(encoding="utf-8")[:3000]
    ids = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(text).ids
    return np.array(ids[:128], np.int64)


@pytest.fixture(scope="module")
def expected(tokens: Tokens) -> FloatArray:
    return reference_logits(demo(), tokens)


def test_the_demo_models_program_gives_the_logits_of_the_whole_graph(
    tmp_path: Path, tokens: Tokens, expected: FloatArray
) -> None:
    model = demo()
    PassManager([make_pass(name) for name in FUSIONS]).run(model)
    program, _ = write_program(lowered(model), tmp_path)
    logits = ProgramChain(program, tmp_path).logits(tokens)
    assert np.abs(logits - expected).max() < 1e-4


# Relative error of the logits, ||l - l'|| / ||l||. Level 0 has the weights' rounding alone; level 4 adds that of the
# activations to int8, which with 8-bit weights is the larger part. Limits are about 1.7 times what was measured.
@pytest.mark.parametrize(
    ("bits", "accuracy_level", "limit"),
    [
        (8, 0, 0.010),  # measured 0.0058
        (8, 4, 0.020),  # measured 0.0114
        (4, 0, 0.080),  # measured 0.0457
        (4, 4, 0.080),  # measured 0.0459
    ],
)
def test_the_demo_models_quantized_program_stays_near(
    tmp_path: Path, tokens: Tokens, expected: FloatArray, bits: int, accuracy_level: int, limit: float
) -> None:
    model = demo()
    passes = [make_pass(name) for name in FUSIONS]
    passes.append(make_pass("quantize-weights", {"bits": bits}))
    passes.append(make_pass("lower-onnxruntime-cpu", {"accuracy_level": accuracy_level}))
    PassManager(passes).run(model)
    program, _ = write_program(lowered(model), tmp_path)
    logits = ProgramChain(program, tmp_path).logits(tokens)
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert error < limit
    assert len(QUANTIZATION_FACTS.of(model).weights) == 6 * 4 + 1
