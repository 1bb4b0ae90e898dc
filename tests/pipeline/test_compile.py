"""compile_recipe: the files that it writes, and the progress that it reports."""

from pathlib import Path

from ingot.pipeline.compile import compile_recipe
from ingot.pipeline.recipe.load import load_recipe
from ingot.progress import progress_to
from tests.data_paths import DEMO_MODEL, FIXTURES


def test_every_long_stage_reports_its_progress(tmp_path: Path) -> None:
    reported: dict[str, list[tuple[int, int]]] = {}
    recipe = load_recipe("int4-cpu", [f"checkpoint={FIXTURES / 'checkpoints/llama'}"])
    with progress_to(lambda name, done, total: reported.setdefault(name, []).append((done, total))):
        compile_recipe(recipe, tmp_path)
    assert list(reported) == ["checking weights", "quantize-weights", "writing weights"]
    for steps in reported.values():
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1][0] == steps[-1][1]


def test_program_tokenizer_and_recipe_are_written(tmp_path: Path) -> None:
    recipe = load_recipe("int8-cpu", [f"checkpoint={DEMO_MODEL}", "engine.block_tokens=32"])
    compiled = compile_recipe(recipe, tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["program", "recipe.yaml", "tokenizer"]
    assert (tmp_path / "tokenizer/tokenizer.json").read_bytes() == (DEMO_MODEL / "tokenizer.json").read_bytes()
    assert (tmp_path / "recipe.yaml").read_text() == recipe.resolved_yaml()
    assert compiled.written.kv.block_tokens == 32
    lowering = list(compiled.target.lowering)
    assert [record.name for record in compiled.passes][-len(lowering) :] == lowering
