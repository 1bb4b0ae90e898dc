import zipfile
from pathlib import Path

from benchmarks.gpu.programs.packing import WEIGHTS_TABLE
from benchmarks.gpu.times.steps import program_files


def test_programs_are_the_files_without_weights_the_largest_model_first(tmp_path: Path) -> None:
    names = {
        "check-llama-quantize-kv-cache-int8-0": "program/weights.safetensors",
        "demo-int4-kv-int4": "program/weights.safetensors",
        "tinyllama-1.1b-int4-kv-16-bit": WEIGHTS_TABLE,
        "llama-3.1-8b-int4-kv-int4": WEIGHTS_TABLE,
        "llama-3.1-8b-16-bit-kv-16-bit": WEIGHTS_TABLE,
        "llama-3.1-8b-int4-kv-16-bit": WEIGHTS_TABLE,
        "llama-3.1-8b-int4-kv-16-bit-batch-invariant": WEIGHTS_TABLE,
        "llama-3.1-8b-int4-kv-16-bit-more-buckets": WEIGHTS_TABLE,
    }
    for name, held in names.items():
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr(held, b"")
    usual = [
        "llama-3.1-8b-int4-kv-16-bit",
        "llama-3.1-8b-16-bit-kv-16-bit",
        "llama-3.1-8b-int4-kv-int4",
        "tinyllama-1.1b-int4-kv-16-bit",
    ]
    assert [file.stem for file in program_files(tmp_path)] == usual
    invariant = [file.stem for file in program_files(tmp_path, invariant=True)]
    assert sorted(invariant) == sorted([*usual, *(f"{usual[0]}-{end}" for end in ("batch-invariant", "more-buckets"))])
