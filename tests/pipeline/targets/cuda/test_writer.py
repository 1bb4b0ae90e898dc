"""An artifact for a GPU, built without one: its files, their consistency, and equal bytes in a second build."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.shapes import ModelShape
from benchmarks.synthetic import write_checkpoint
from safetensors import safe_open
from safetensors.numpy import load_file

from ingot.artifact import Artifact
from ingot.artifact.programs.launch_program import (
    BufferArgument,
    CudaProgram,
    Launch,
    WeightArgument,
    cubins_file,
    read_cuda_program,
)
from ingot.cli.main import run
from ingot.errors import ArtifactError, BuildError
from ingot.pipeline.targets.cuda.cubins import compile_kernels
from ingot.pipeline.targets.cuda.kernel_signatures import make_kernel
from ingot.pipeline.targets.cuda.tiles import MatmulShape, Tile, TileTable
from tests.conftest import BuildArtifact
from tests.data_paths import ROOT

LLAMA = ROOT / "tests" / "fixtures" / "checkpoints" / "llama"
SMALL = ("engine.max_batch_tokens=32", "gpu.decode_rows=[1]", "passes.quantize-weights.block_size=32")

pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install '.[cuda]'")


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("int4-cuda", LLAMA, *SMALL)


@pytest.fixture(scope="module")
def program(artifact: Artifact) -> CudaProgram:
    assert artifact.manifest.program.launches is not None
    return read_cuda_program(artifact.file(artifact.manifest.program.launches))


def launches(program: CudaProgram) -> Iterator[Launch]:
    for bucket in program.programs:
        for step in (*bucket.launches, *(step for sampler in bucket.samplers.values() for step in sampler)):
            assert isinstance(step, Launch)
            yield step


@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_of_common_widths_have_the_kernel_for_prompts(
    build_unmeasured: BuildArtifact, tmp_path: Path, head_dim: int
) -> None:
    """Newer Triton may lack what that kernel calls, which no other kernel does."""
    shape = ModelShape(f"heads-{head_dim}", 2 * head_dim, 1, 2, 1, 2 * head_dim, 512, tied_head=True)
    built = build_unmeasured("int4-cuda", write_checkpoint(shape, tmp_path / shape.name), *SMALL)
    assert built.manifest.program.launches is not None
    program = read_cuda_program(built.file(built.manifest.program.launches))
    assert "prefill_attention" in {kernel.name for kernel in program.kernels.values()}


def test_the_manifest_names_target_launches_and_compiler(artifact: Artifact) -> None:
    manifest = artifact.manifest
    assert (manifest.engine, manifest.target, manifest.program.launches) == (
        "cuda",
        "cuda-sm90",
        "program/launches.json",
    )
    assert manifest.kv.dtype == "float16"
    assert "triton" in manifest.versions
    names = {name for name in manifest.files if name.startswith("program/")}
    assert names == {"program/launches.json", "program/weights.safetensors", cubins_file(90)}


def test_every_launch_has_its_cubin_and_weights(artifact: Artifact, program: CudaProgram) -> None:
    cubins = load_file(artifact.file(cubins_file(90)))
    assert cubins.keys() == program.kernels.keys() == program.cubins[90].keys()
    assert all(code.tobytes().startswith(b"\x7fELF") for code in cubins.values())
    with safe_open(artifact.file("program/weights.safetensors"), "np") as file:
        weights = set(file.keys())
    used = set()
    for launch in launches(program):
        kernel = program.kernels[launch.kernel]
        assert len(kernel.types) == len(launch.arguments)
        used.add(launch.kernel)
        for argument, type_ in zip(launch.arguments, kernel.types, strict=True):
            assert type_ == f"*{argument.type}" if isinstance(argument, BufferArgument | WeightArgument) else type_
            assert not isinstance(argument, WeightArgument) or argument.name in weights
    assert used == set(program.kernels)


def test_the_recipe_decides_the_buckets(program: CudaProgram) -> None:
    assert [bucket.name for bucket in program.programs] == ["decode-1", "ragged-32"]
    for bucket in program.programs:
        assert bucket.sequences == bucket.logits_rows == 1
        assert set(bucket.samplers) == {"greedy", "draw"}
        head = {
            program.kernels[step.kernel].name
            for step in bucket.launches[bucket.head_start :]
            if isinstance(step, Launch)
        }
        assert "rms_norm" in head  # of the wanted rows, with the last residual addition


def test_a_second_build_has_the_same_identity(
    artifact: Artifact, build_unmeasured: BuildArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))  # an empty cache
    second = build_unmeasured("int4-cuda", LLAMA, *SMALL, "threads=1").manifest
    of_the_recipe = {name: second.files[name] for name in ("recipe.yaml", "evidence/inputs.json")}
    assert second.files == {**artifact.manifest.files, **of_the_recipe}


def test_a_tile_that_no_block_of_the_gpu_has_memory_for_is_refused_before_anything_is_sealed(
    build_unmeasured: BuildArtifact, program: CudaProgram, tmp_path: Path
) -> None:
    matmul = next(kernel for kernel in program.kernels.values() if kernel.constants.get("AHEAD") == 3)
    n, columns = int(matmul.constants["N"]), int(matmul.constants["COLUMNS"])
    shape = MatmulShape(kernel="matmul_nbits", rows=1, n=n, columns=columns, bits=4, group=32)
    table = TileTable(sm=90, choices={shape.key: Tile(rows=8, columns=1024, num_stages=16, direct=True)})
    (tmp_path / "tiles.json").write_text(table.model_dump_json())
    with pytest.raises(BuildError, match=r"matmul_int4 for SM 90 needs \d+ bytes of shared memory, of which a block"):
        build_unmeasured("int4-cuda", LLAMA, *SMALL, f"gpu.tiles={tmp_path / 'tiles.json'}")


def test_a_table_of_tiles_decides_and_is_named_in_the_program(
    build_unmeasured: BuildArtifact, program: CudaProgram, tmp_path: Path
) -> None:
    matmul = next(kernel for kernel in program.kernels.values() if kernel.name == "matmul_int4")
    n, columns = int(matmul.constants["N"]), int(matmul.constants["COLUMNS"])
    shape = MatmulShape(kernel="matmul_nbits", rows=1, n=n, columns=columns, bits=4, group=32)
    choices = {shape.key: Tile(rows=16, columns=32, num_warps=2)}
    table = TileTable(sm=90, device="a GPU", choices=choices)
    (tmp_path / "tiles.json").write_text(table.model_dump_json())
    tuned = build_unmeasured("int4-cuda", LLAMA, *SMALL, f"gpu.tiles={tmp_path / 'tiles.json'}")
    found = read_cuda_program(tuned.file("program/launches.json"))
    assert found.tuned_on == "a GPU"
    matmuls = [kernel for kernel in found.kernels.values() if kernel.name == "matmul_nbits" and kernel.num_warps == 2]
    assert [(kernel.constants["TILE"], kernel.constants["N"]) for kernel in matmuls] == [(32, n)]


def test_a_table_of_another_sm_is_refused(build_unmeasured: BuildArtifact, tmp_path: Path) -> None:
    (tmp_path / "tiles.json").write_text(TileTable(sm=80, device="NVIDIA A100").model_dump_json())
    with pytest.raises(
        Exception, match=r"was measured on NVIDIA A100 \(SM 80\), and this builds for SM 90; run `ingot tune`"
    ):
        build_unmeasured("int4-cuda", LLAMA, *SMALL, f"gpu.tiles={tmp_path / 'tiles.json'}")


def test_a_kernel_that_does_not_compile_is_named_in_the_error() -> None:
    wrong = make_kernel("gather_rows", {"T": "fp16"}, {"COLUMNS": 64, "BLOCK": 100})  # not a power of two
    right = {
        f"right {at}": make_kernel("gather_rows", {"T": "fp16"}, {"COLUMNS": 64 + at, "BLOCK": 64}) for at in range(3)
    }
    with pytest.raises(BuildError, match="gather_rows does not compile for SM 90"):
        compile_kernels({"wrong": wrong, **right}, 90, workers=2)


def test_inspect_lists_buckets_kernels_and_launches(artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(artifact.path), "--program", "--bucket", "decode-1"]) == 0
    shown = capsys.readouterr().out
    for words in ("ragged-32", "safe tiles", "matmul_int4-", "layers.1.mlp.down_proj", "greedy", "@0"):
        assert words in shown
    assert run(["inspect", str(artifact.path), "--bucket", "decode-3"]) == 2
    assert "unknown bucket 'decode-3'. Did you mean 'decode-1'?" in capsys.readouterr().err


def test_an_invalid_launches_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "launches.json"
    file.write_text(json.dumps({"sms": []}))
    with pytest.raises(ArtifactError, match=r"launches\.json: sms: .*; build the artifact again"):
        read_cuda_program(file)
