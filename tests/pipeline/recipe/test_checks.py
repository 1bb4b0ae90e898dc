"""A recipe's target: cards, key-value precisions and sizes that it refuses, each at its place."""

from pathlib import Path

import pytest

from ingot.errors import RecipeError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import GpuOptions

KV = "passes=[{quantize-kv-cache: {precision: fp8}}]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target=cuda-sm91"], r"no target is named 'cuda-sm91'.*Did you mean 'cuda-sm90'"),
        (["gpu.sms=[90]"], r"gpu.sms is \[90\], and target cuda-sm90 builds for SM 90 alone; take it out"),
        (["target=cpu", "gpu.sms=[90]"], "target cpu builds for no card; take it out"),
        (["target=cpu", KV], "cpu does not read keys and values in fp8; it keeps them as 32-bit floats.*cuda-sm89"),
        (["target=cuda-sm86", KV], "cuda-sm86 does not read keys and values in fp8; it reads int4, int8"),
        (
            ["target=cuda-sm86", "passes=[fp8]"],
            "fp8 makes 8-bit floats, which need SM 89 or newer, and target cuda-sm86 builds for SM 86; take 8-bit",
        ),
        (
            ["target=tensorrt", "gpu.sms=[80, 89]", "passes=[{quantize-activations: {dtype: float8}}]"],
            "quantize-activations makes 8-bit floats, .* and target tensorrt builds for SM 80",
        ),
        (["gpu.decode_rows=[4, 2]"], r"gpu.decode_rows: \[4, 2\] must ascend, and name each value once"),
        (["gpu.decode_rows=[]"], "gpu.decode_rows is .*; it must be a list of at least 1 value"),
        (["gpu.decode_rows=[0, 1]"], "it must be 1 or more"),
        (["gpu.activations=half"], "'half'; it must be 'checkpoint', 'float16', 'bfloat16' or 'float32'"),
    ],
)
def test_what_a_target_cannot_do_is_refused_at_its_place(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe("int4-cuda", overrides)
    assert "--set:" in str(caught.value)


def test_a_table_of_tiles_that_is_not_there_is_named(tmp_path: Path) -> None:
    recipe = load_recipe("int4-cuda", [f"gpu.tiles={tmp_path / 'none.json'}"])
    with pytest.raises(Exception, match=r"gpu\.tiles .*none\.json' is no file.*make one with `ingot tune`"):
        recipe.tile_table()


def test_programs_for_other_steps_end_with_one_that_holds_a_whole_step() -> None:
    assert GpuOptions().ragged_rows(512) == (32, 128, 512)
    assert GpuOptions().ragged_rows(20) == (20,)
    assert GpuOptions(prefill_rows=(16, 4096)).ragged_rows(1000) == (16, 1000)
