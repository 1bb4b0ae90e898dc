"""Cubins, compiled without a GPU for every SM."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.errors import BuildError, UsageError
from ingot.pipeline.targets.cuda import cubins
from ingot.pipeline.targets.cuda.cubins import compile_kernel, require_whole_fragments
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES, make_kernel
from ingot.pipeline.targets.table import SMS
from tests.data_paths import ROOT

SCRIPT = Path(__file__).with_name("compile_all.py")


@pytest.mark.parametrize("sm", SMS)
def test_every_kernel_compiles_for_every_sm_that_can_run_it(sm: int) -> None:
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(sm)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["kernel"] for row in rows} == set(SIGNATURES)
    for row in rows:
        only = SIGNATURES[row["kernel"]].sm
        if row["float8"] and sm < 89:
            assert "8-bit floats need SM 89 or newer" in row["error"]
        elif only not in (None, sm):
            assert row["error"] == f"{row['kernel']} uses instructions of SM {only} alone, this is SM {sm}"
        else:
            assert row["error"] is None
            assert row["code_starts_with_elf"]
            assert row["shared_bytes"] <= (227 if only else 99) * 1024  # of a block; SMs 86, 89 and 120 have least


def test_an_unknown_sm_and_types_that_it_lacks_are_refused() -> None:
    request = make_kernel("gather_rows", {"T": "fp16"}, {})
    with pytest.raises(UsageError, match="kernels cannot be compiled for SM 75; allowed: 80, 86, 89, 90, 120"):
        compile_kernel(request, 75)
    with pytest.raises(BuildError, match="rotary_kv_write: 8-bit floats need SM 89 or newer, this is SM 80"):
        compile_kernel(make_kernel("rotary_kv_write", {"T": "fp16", "X": "fp16", "KV": "fp8e4nv"}, {}), 80)


def test_a_kernel_that_does_not_compile_is_refused_with_the_reason_of_the_innermost_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        try:
            raise RuntimeError("the call has been removed; use another one")
        except RuntimeError as reason:
            raise ValueError("at 3:4: copied(target)") from reason

    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    monkeypatch.setattr(cubins, "_source", refuse)
    kernel = make_kernel("rotary_kv_write", {"T": "fp16", "X": "fp16", "KV": "fp16"}, {})
    with pytest.raises(BuildError, match=r"for SM 80 with Triton [\d.]+: RuntimeError: the call has been removed; use"):
        compile_kernel(kernel, 80)


def test_a_matmul_shorter_than_its_operands_fragments_is_refused() -> None:
    left = "tensor<16x{}xf16, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {}}}>>"
    right = "tensor<{}x64xf16, #ttg.dot_op<{{opIdx = 1, parent = #mma, kWidth = {}}}>>"
    code = f"tt.dot %1, %2, %3 : {left} * {right} -> tensor<16x64xf32, #mma>"
    for inner, width in ((16, 2), (16, 4), (32, 8)):
        require_whole_fragments("decode_attention", code.format(inner, width, inner, width))
    for widths in ((8, 4), (4, 8)):
        with pytest.raises(BuildError, match=r"decode_attention multiplies along 16 .* of that operand have 32"):
            require_whole_fragments("decode_attention", code.format(16, widths[0], 16, widths[1]))


def test_attention_over_keys_of_4_bits_multiplies_whole_fragments_in_a_tile_of_16_tokens() -> None:
    script = (
        "from ingot.pipeline.targets.cuda.cubins import compile_by_triton\n"
        "from tests.pipeline.targets.cuda.compile_all import pool_requests\n"
        "requests = pool_requests(3, {**dict.fromkeys(('T', 'X', 'OUT'), 'bf16'), 'KV': 'u8'})\n"
        "kernel = next(one for one in requests if one.name == 'fixed_split_attention')\n"
        "for tile in (32, 16):\n"
        "    changed = {**kernel.constants, 'TILE': tile, 'DTYPE': 'bf16'}\n"
        "    compile_by_triton(kernel.model_copy(update={'constants': changed}), 80)\n"
        "    print(tile)\n"
    )
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    # Compiling refuses others (`require_whole_fragments`). Triton before 3.9 makes these as codes are kept apart.
    assert done.stdout == "32\n16\n", done.stderr


def test_a_cubin_depends_neither_on_the_place_nor_on_the_date_of_the_source(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install --group oracle")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "examples"))
    os.utime(tmp_path / "src" / "ingot" / "kernels" / "gather.py", (0, 0))
    code = (
        "from ingot.pipeline.targets.cuda.cubins import compile_kernel\n"
        "from ingot.pipeline.targets.cuda.kernel_signatures import make_kernel\n"
        "import hashlib, ingot\n"
        "types = dict.fromkeys(('T', 'X', 'OUT'), 'bf16')\n"
        "kernel = make_kernel('gather_rows', types, {'COLUMNS': 172, 'BLOCK': 256})\n"
        "print(ingot.__file__, hashlib.sha256(compile_kernel(kernel, 80).code).hexdigest())"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    digests: list[str] = []
    for place in (ROOT / "src", tmp_path / "src"):
        changes = {"PYTHONPATH": str(place), "TRITON_CACHE_DIR": str(tmp_path / f"cache{len(digests)}")}
        shown = subprocess.check_output([sys.executable, "-c", code], env={**environment, **changes}, text=True)
        file, digest = shown.split()
        assert Path(file).is_relative_to(place)
        digests.append(digest)
    assert digests[0] == digests[1]
