"""Default lengths are fitted to the model's context, set ones refused; blocks wider than rows cause a warning."""

import logging
import re
from pathlib import Path

import pytest

from ingot.errors import RecipeError
from ingot.pipeline.compile import open_source
from ingot.pipeline.recipe.fit import fit_to_model, warn_of_padding
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.progress import NOTES
from tests.data_paths import DEMO_MODEL, FIXTURES
from tests.pipeline.recipe.recipe_files import written

TINY = f"checkpoint={FIXTURES / 'checkpoints' / 'llama'}"  # rows of 32 and 48 columns
MEASURED = "evaluation: {text: t.txt}\nlatency: {}\ncalibration: {text: c.txt}\npasses: [gptq]\n"


def refused(recipe: Recipe, context_tokens: int, bos_tokens: int = 0) -> list[str]:
    """The refused lengths as "line:column: message"."""
    with pytest.raises(RecipeError) as caught:
        fit_to_model(recipe, context_tokens, bos_tokens)
    return [f"{problem.line}:{problem.column}: {problem.message}" for problem in caught.value.problems]


def test_lengths_that_fit_stay_as_they_are(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, MEASURED))
    assert fit_to_model(recipe, 512) is recipe
    assert fit_to_model(recipe, 513, bos_tokens=1) is recipe


def test_defaults_become_shorter_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = load_recipe(written(tmp_path, MEASURED))
    with caplog.at_level(logging.INFO, NOTES):
        fitted = fit_to_model(recipe, 96, bos_tokens=1)
    assert fitted.evaluation is not None
    assert fitted.calibration is not None
    assert fitted.latency is not None
    assert fitted.memory == recipe.memory, "80 tokens fit"
    assert (fitted.evaluation.window_tokens, fitted.calibration.sequence_tokens) == (95, 96)
    assert (fitted.latency.prompt_tokens, fitted.latency.output_tokens) == (64, 32)
    assert (
        "evaluation.window_tokens is 95 instead of the default 512: the model's context holds 96 tokens, 1"
        in caplog.text
    )
    assert "latency.output_tokens is 32 instead of the default 64" in caplog.text
    assert "window_tokens: 95\n" in fitted.resolved_yaml()


def test_a_fitted_recipe_is_loaded_again_from_its_text(tmp_path: Path) -> None:
    fitted = fit_to_model(load_recipe(written(tmp_path, MEASURED)), 40)
    sealed = load_recipe(written(tmp_path, fitted.resolved_yaml(), "sealed.yaml"))
    assert fit_to_model(sealed, 40) is sealed


def test_every_set_length_beyond_the_context_is_refused_at_its_key(tmp_path: Path) -> None:
    text = """\
evaluation: {text: t.txt, window_tokens: 4096, tokens: 100000}
engine:
  block_tokens: 1024
calibration:
  text: c.txt
  sequence_tokens: 600
latency: {prompt_tokens: 512, output_tokens: 128}
memory: {output_tokens: 1e4}
passes: [gptq]
"""
    assert refused(load_recipe(written(tmp_path, text)), 512, bos_tokens=1) == [
        "1:27: evaluation.window_tokens is 4096, and the model's context holds 512 tokens, 1 of them the tokenizer's "
        "BOS: set it to 511 or less",
        "3:3: engine.block_tokens: a block of 1024 tokens is longer than the model's context, 512; set it to that or "
        "less",
        "6:3: calibration.sequence_tokens is 600, and the model's context holds 512 tokens: set it to 512 or less",
        "7:11: latency.prompt_tokens + latency.output_tokens is 640, and the model's context holds 512 tokens: set "
        "them to 512 or less together",
        "8:10: memory.prompt_tokens + memory.output_tokens is 10064, and the model's context holds 512 tokens: set "
        "them to 512 or less together",
    ]


def test_a_default_next_to_a_set_length_takes_the_rest(tmp_path: Path) -> None:
    fitted = fit_to_model(load_recipe(written(tmp_path, "latency: {prompt_tokens: 200}")), 220)
    assert fitted.latency is not None
    assert (fitted.latency.prompt_tokens, fitted.latency.output_tokens) == (200, 20)
    assert len(refused(load_recipe(written(tmp_path, "latency: {prompt_tokens: 219}")), 220)) == 1


def test_a_context_too_short_for_anything_is_refused(tmp_path: Path) -> None:
    found = refused(load_recipe(written(tmp_path, "latency: {}\nmemory: null")), 2)
    assert found == [
        "1:1: latency.prompt_tokens + latency.output_tokens is 192, and the model's context holds 2 tokens: set them "
        "to 2 or less together"
    ]


def test_default_blocks_may_be_longer_than_a_tiny_context(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, "engine: {block_tokens: 16}\nmemory: null"))
    assert fit_to_model(recipe, 8) is recipe


def test_calibration_without_a_calibrated_pass_does_not_matter(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, "calibration: {sequence_tokens: 4096}"))
    assert fit_to_model(recipe, 512) is recipe


def warnings(caplog: pytest.LogCaptureFixture, *overrides: str) -> list[str]:
    recipe = load_recipe("fp32-cpu", overrides)
    with caplog.at_level(logging.WARNING, "ingot.pipeline"):
        warn_of_padding(recipe, open_source(recipe).copy())
    return [record.message for record in caplog.records if record.name == "ingot.pipeline"]


def test_blocks_wider_than_rows_cause_a_warning_with_the_bits(caplog: pytest.LogCaptureFixture) -> None:
    [found] = warnings(caplog, TINY, "passes=[{quantize-weights: {block_size: 128, lm_head: none, embedding: none}}]")
    assert re.fullmatch(
        r"quantize-weights: the rows of '.*q_proj' \(and of \d+ more weights\) have 32 columns, which do not fill "
        r"blocks of 128: padded, they take 1\d\.\d\d bits a weight, in blocks of 32 .*; set block_size: 32, or .*",
        found,
    )


def test_the_bits_are_those_that_the_artifact_stores(caplog: pytest.LogCaptureFixture) -> None:
    passes = "passes=[{quantize-weights: {block_size: 128, overrides: {'*.mlp.down_proj': none}, lm_head: none}}]"
    [found] = warnings(caplog, TINY, passes)
    # 128 codes of 4 bits, a float32 scale and 4 bits of zero point (a whole byte per row) for 32 weights; the table
    # of 8 bits has twice the codes.
    assert float(re.search(r"they take ([\d.]+) bits", found)[1]) > (64 + 4 + 1) * 8 / 32  # type: ignore[index]


def test_blocks_that_fill_the_rows_and_whole_rows_cause_none(caplog: pytest.LogCaptureFixture) -> None:
    for block in ("16", "channel"):
        assert warnings(caplog, TINY, f"passes=[{{quantize-weights: {{block_size: {block}}}}}]") == []
    assert warnings(caplog, f"checkpoint={DEMO_MODEL}", "passes=[quantize-weights]") == []
