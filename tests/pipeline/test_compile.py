"""compile_recipe: what it leaves in the folder, and what it tells on the way."""

from pathlib import Path

from ingot.pipeline.compile import compile_recipe
from ingot.pipeline.recipe.load import load_recipe
from tests.data_paths import DEMO_MODEL, FIXTURES


def test_every_long_part_of_the_work_tells_how_far_it_is(tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    recipe = load_recipe("int4-cpu", [f"checkpoint={FIXTURES / 'checkpoints/llama'}"])
    compile_recipe(recipe, tmp_path, progress=lambda name, done, total: told.setdefault(name, []).append((done, total)))
    assert list(told) == ["checking weights", "quantize-weights", "writing weights"]
    for steps in told.values():
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1][0] == steps[-1][1]


def test_program_tokenizer_and_recipe_are_written(tmp_path: Path) -> None:
    recipe = load_recipe("int8-cpu", [f"checkpoint={DEMO_MODEL}", "engine.block_tokens=32"])
    compiled = compile_recipe(recipe, tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["program", "recipe.yaml", "tokenizer"]
    assert (tmp_path / "tokenizer/tokenizer.json").read_bytes() == (DEMO_MODEL / "tokenizer.json").read_bytes()
    assert (tmp_path / "recipe.yaml").read_text() == recipe.resolved_yaml()
    assert compiled.kv.block_tokens == 32
    lowering = list(compiled.target.lowering)
    assert [record.name for record in compiled.passes][-len(lowering) :] == lowering
