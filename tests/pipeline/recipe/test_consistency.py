"""Contradictions between a recipe's target and its other keys, each reported at its place; sizes of GPU programs."""

from pathlib import Path
from re import DOTALL, findall

import pytest

from ingot.errors import RecipeError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.sections import GpuOptions
from tests.data_paths import ROOT
from tests.each_case import each_case

FLOAT32_KV = "passes=[{quantize-kv-cache: {precision: float32}}]"
FLOAT16_KV = "passes=[{quantize-kv-cache: {precision: float16}}]"
KV = "passes=[{quantize-kv-cache: {precision: fp8}}]"
GROUPED_KV = "passes=[{quantize-kv-cache: {precision: int4}}]"


@each_case(
    ("overrides", "message"),
    [
        (["target=cuda-sm91"], r"unknown target 'cuda-sm91'. Did you mean .*'cuda-sm90'"),
        (["gpu.sms=[90]"], r"gpu.sms is \[90\], but target cuda-sm90 builds for SM 90 only; remove it"),
        (["target=cpu", "gpu.sms=[90]"], "target cpu does not build for a GPU; remove it"),
        (["target=cuda-sm90", FLOAT32_KV], "cuda-sm90 does not read keys and values in float32; .*or build for cpu"),
        (["target=cuda-sm90", FLOAT16_KV], "cuda-sm90 does not read keys and values in float16; .*or build for cpu"),
        (
            ["target=cuda-sm90", GROUPED_KV],
            "reads int4 with one scale for a vector, not in groups of 32 .*group to 0, or",
        ),
        (["target=cuda-sm86", KV], "cuda-sm86 does not read keys and values in fp8; it reads int4, int8"),
        (
            ["target=cuda-sm86", "passes=[fp8]"],
            "fp8 produces 8-bit floats, which require SM 89 or newer, but target cuda-sm86 builds for SM 86; use 8-bit",
        ),
        (
            ["target=tensorrt", "gpu.sms=[80, 89]", "passes=[{quantize-activations: {dtype: float8}}]"],
            "quantize-activations produces 8-bit floats, .* but target tensorrt builds for SM 80",
        ),
        (
            ["serving.max_sequences=65"],
            "serving.max_sequences is 65, but the largest of gpu.decode_rows is 64; lower it, or raise that",
        ),
        (
            ["serving.max_sequences=3", "gpu.decode_rows=[1, 2]"],
            "serving.max_sequences is 3, but the largest of gpu.decode_rows is 2",
        ),
        (
            ["serving.max_batch_tokens=4097", "engine.max_batch_tokens=4096"],
            "serving.max_batch_tokens is 4097, but engine.max_batch_tokens is 4096; lower it, or raise that",
        ),
        (
            ["target=tensorrt", "gpu.sms=[89]", "gpu.batch_invariant=true"],
            "gpu.batch_invariant is true, but another engine computes the segments of target tensorrt",
        ),
        (["gpu.batch_invariant=true", "gpu.tiles=t.json"], "gpu.batch_invariant has one for all; remove one of them"),
        (
            ["target=cuda-sm89", "gpu.dependent_launches=true"],
            "gpu.dependent_launches is true, and target cuda-sm89 is for a GPU without them",
        ),
        (["target=tensorrt", "gpu.sms=[89]", "gpu.dependent_launches=true"], "another engine computes the segments"),
        (["gpu.batch_invariant=1"], "gpu.batch_invariant is 1; it must be true or false"),
        (["gpu.decode_rows=[4, 2]"], r"gpu.decode_rows: \[4, 2\] must be in ascending order without duplicates"),
        (["gpu.decode_rows=[]"], "gpu.decode_rows is .*; it must be a list of at least 1 value"),
        (["gpu.decode_rows=[0, 1]"], "it must be from 1 to 1048576"),
        (["gpu.activations=half"], "'half'; it must be 'checkpoint', 'float16', 'bfloat16' or 'float32'"),
    ],
)
def test_a_key_that_the_target_does_not_support_is_refused_at_its_place(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe("int4-cuda", overrides)
    assert "--set:" in str(caught.value)


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (
            "quantize-weights, gptq",
            "gptq has no weight left to round, because quantize-weights before it rounds all of them; remove "
            "quantize-weights if gptq is to round them, else gptq",
        ),
        ("gptq, clean-up, quantize-weights", "quantize-weights has no weight left to round, because gptq before it"),
        ("quantize-weights, quantize-weights", "remove one of them"),
        ("fp8, awq, gptq", "gptq has no weight left to round, because fp8 before it"),
        ("quantize-weights, smooth-quant", "smooth-quant has no weight left to round"),
    ],
)
def test_weights_that_would_be_rounded_twice_are_refused(passes: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("fp32-cpu", ["calibration={}", f"passes=[{passes}]"])
    assert len(caught.value.problems) == 1
    assert message in caught.value.problems[0].message


@each_case(
    "passes",
    [
        "{quantize-weights: {overrides: {'*.mlp.*': none}}}, gptq",
        "{quantize-weights: {overrides: {'*.mlp.*': 16}}}, awq, {quantize-weights: {lm_head: none}}",
        "{smooth-quant: {weights: none}}, gptq",
        "{fp8: {exclude: ['*.mlp.*']}}, quantize-weights",
        "awq, gptq, distill",
        "mixed-precision, gptq, quantize-activations",
    ],
)
def test_passes_that_round_different_weights_are_accepted(passes: str) -> None:
    load_recipe("fp32-cpu", ["calibration={}", f"passes=[{passes}]"])


TWO = "devices=[{cpu: 1GiB}, {cpu: 2GiB}]"
WITH_GPU = "devices=[{cuda: 1GiB}, {cpu: 2GiB}]"


@each_case(
    ("overrides", "message"),
    [
        ([TWO], "devices are given, but no place; set place, such as {gpu_layers: 4}, or remove them"),
        (["place={gpu_layers: 2}"], "place needs 2 devices or more, and devices has 0; list them there"),
        (["place={gpu_layers: 2}", "devices=[{cpu: 1GiB}]"], "place needs 2 devices or more, and devices has 1"),
        (
            [TWO, "place=best"],
            "place: 'best' is not a placement; it must be auto, {auto: ROWS}, {gpu_layers: N}, {host: exp",
        ),
        ([TWO, "place=7"], "place: 7 is not a placement; it must be auto, "),
        ([TWO, "place={gpu_layers: true}"], "gpu_layers is True; it must be a whole number from 0"),
        ([TWO, "place={auto: 0}"], "auto is 0; it must be a whole number of sequences from 1"),
        ([TWO, "place={auto: true}"], "auto is True; it must be a whole number of sequences from 1"),
        ([TWO, "place={auto: cpu:1}"], "auto is 'cpu:1'; it must be a whole number of sequences from 1"),
        ([TWO, "place={auto: 4, layers.1: 'cpu:1'}"], "has auto and other entries; it must be auto, "),
        ([TWO, "place={auto: 4}"], "place: auto predicts speeds, and devices.0 names no hardware"),
        ([TWO, "place=auto"], r"place: auto predicts speeds, and devices.0 names no hardware: \[\{cpu: 8GiB, hardware"),
        (
            ["devices=[{cpu: 1GiB, hardware: grace}, {cpu: 2GiB, hardware: epyc}]", "place=auto"],
            "devices.1: unknown hardware 'epyc'. Did you mean 'epyc-9654'",
        ),
        ([TWO, "place={gpu_layers: -1}"], "gpu_layers is -1; it must be a whole number from 0"),
        ([TWO, "place={gpu_layers: many}"], "gpu_layers is 'many'; it must be a whole number from 0"),
        ([TWO, "place={host: layers}"], "host is 'layers'; it must be experts"),
        ([TWO, "place={host: experts, layers.1: 'cpu:1'}"], "has host and other entries; it must be auto, {auto: R"),
        ([TWO, "place={layers.1: 1}"], "'layers.1' is 1; it must be a device, such as cpu:1"),
        ([TWO, "place={}"], "has 0 entries; it must be auto, {auto: ROWS}, {gpu_layers: N}, {host: experts}, or pat"),
        ([TWO, "place={layers.1: 'cpu:2'}"], "'layers.1': 'cpu:2' is not one of the devices; name one: cpu:0, cpu:1"),
        ([TWO, "place={layers.1: cpu}"], "'cpu' is the kind of several devices; name one: cpu:0, cpu:1"),
        ([TWO, "place={layers.1: gpu}"], "'gpu' is not one of the devices; name one: cpu:0, cpu:1"),
        (
            ["devices=[{cuda: 1GiB}, {cpu: 1GiB}]", "place={gpu_layers: 1}"],
            "target cpu builds no kernels for a GPU; set target to cuda-smXX",
        ),
        (["devices=[{cpu: 0}, {cpu: 1GiB}]", "place={gpu_layers: 1}"], r"devices\.0\.cpu is 0; it must be from 1"),
        (["devices=[{cpu: 1XB}, {cpu: 1GiB}]", "place={gpu_layers: 1}"], "1XB"),
        (
            [TWO, "place={gpu_layers: 1}", "cpu.engine=onnxruntime"],
            "place divides programs of .* set target to cpu or cuda-smXX, and cpu.engine to native",
        ),
        ([TWO, "place={gpu_layers: 1}", "target=ort-cuda", "gpu.sms=90"], "place divides programs of the native CPU"),
        (
            [TWO, "place={gpu_layers: 1}", "target=cuda-sm90"],
            "devices are cpu, cpu; a program for cuda-sm90 is divided among that GPU and the host: .{cuda: 16GiB}, ",
        ),
        (
            [WITH_GPU, "place={layers.1: 'cpu:1'}", "target=cuda-sm90"],
            "place: 'layers.1': 'cpu:1' is not one of the devices",
        ),
        ([WITH_GPU, "place=auto", "target=cuda-sm90"], "place: auto predicts speeds, and devices.0 names no hardware"),
        (
            ["stream_experts=64"],
            "stream_experts is 64, and no experts are on the host next to a GPU: set place, such as",
        ),
        (
            [TWO, "place={host: experts}", "stream_experts=1"],
            "stream_experts is 1, and no experts are on the host next",
        ),
        (
            [WITH_GPU, "place={host: experts}", "target=cuda-sm90", "gpu.batch_invariant=true", "stream_experts=64"],
            "stream_experts is 64, and the host's experts would have other bits in steps of fewer rows, which gpu",
        ),
        (
            ["stream_experts=-1"],
            "stream_experts: -1 is not a number of rows; it must be auto, or a whole number from 0",
        ),
        (["stream_experts=true"], "stream_experts: True is not a number of rows; it must be auto, or a whole number"),
        (["stream_experts=fast"], "stream_experts: 'fast' is not a number of rows; it must be auto, or a whole number"),
        (
            ["devices=[{cuda: 1GiB, cpu: 1GiB}, {cpu: 1GiB}]", "place={gpu_layers: 1}", "target=cuda-sm90"],
            "a device has one kind with its bytes: {cpu: 64GiB} or {cuda: 16GiB}",
        ),
    ],
)
def test_a_placement_that_contradicts_the_recipe_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("fp32-cpu", overrides)


def test_a_placement_on_two_devices_is_accepted() -> None:
    load_recipe("fp32-cpu", ["devices=[{hardware: grace, cpu: 1}, {cpu: 2GiB}]", "place={layers.1: 'cpu:0'}"])
    recipe = load_recipe("fp32-cpu", [TWO, "place={layers.0-3: 'cpu:1'}"])
    assert [device.memory for device in recipe.devices] == [1 << 30, 2 << 30]
    for place in ("{host: experts}", "{layers.0-3.mlp.experts: cpu}", "{gpu_layers: 2}"):
        recipe = load_recipe("fp32-cpu", [WITH_GPU, f"place={place}", "target=cuda-sm90"])
    assert [device.kind for device in recipe.devices] == ["cuda", "cpu"]
    assert "devices:\n- cuda: 1073741824\n- cpu: 2147483648\n" in recipe.resolved_yaml()


def test_a_missing_tile_table_is_named(tmp_path: Path) -> None:
    recipe = load_recipe("int4-cuda", [f"gpu.tiles={tmp_path / 'none.json'}"])
    with pytest.raises(Exception, match=r"gpu\.tiles .*none\.json' is not a file.*create one with `ingot tune`"):
        recipe.tile_table()


def test_the_last_ragged_program_fits_a_whole_step() -> None:
    assert GpuOptions().ragged_rows(512) == (32, 128, 512)
    assert GpuOptions().ragged_rows(20) == (20,)
    assert GpuOptions(prefill_rows=(16, 4096)).ragged_rows(1000) == (16, 1000)


@pytest.mark.parametrize("example", findall(r"```yaml\n(.*?)```", (ROOT / "docs/placement.md").read_text(), DOTALL))
def test_the_examples_of_placements_load(tmp_path: Path, example: str) -> None:
    (file := tmp_path / "example.yaml").write_text(example, encoding="utf-8")
    assert load_recipe(file).place is not None
