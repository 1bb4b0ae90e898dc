"""Loading: every mistake at once, each at the file and line of its key; extends; --set."""

from pathlib import Path

import pytest

from ingot.errors import RecipeError, UsageError
from ingot.pipeline.recipe.load import load_recipe, require_paths
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.shipped import list_recipes
from tests.each_case import each_case
from tests.pipeline.recipe.recipe_files import problems, the_problem, written

MISSING_PATHS = """\
checkpoint: nowhere
chat_template: none.jinja
evaluation:
  text: gone.txt
calibration: {text: lost.jsonl}
gpu: {tiles: tiles.json}
passes: [gptq]
"""


def test_the_recipes_that_ship_load_and_have_a_description() -> None:
    shipped = dict(list_recipes())
    assert set(shipped) >= {"demo", "fp32-cpu", "int8-cpu", "int4-cpu"}
    assert all(shipped.values())
    assert load_recipe("demo").evaluation_text() is not None


@each_case(
    ("text", "nearest"),
    [
        ("nmae: x", "name"),
        ("engine: {blok_tokens: 1}", "block_tokens"),
        ("latency: {slo: {ttft: 1, tpot_seconds: 1, ttft_seconds: 1, tpot_second: 2}}", "tpot_seconds"),
        ("passes: [clean-upp]", "clean-up"),
        ("passes: [{quantize-weights: {bit: 4}}]", "bits"),
        ("gates: {size_rato: {max: 1}}", "size_ratio"),
        ("gates: {size_ratio: {max: 1, mx: 1}}", "max"),
        ("extends: int4-cp", "int4-cpu"),
    ],
)
def test_the_nearest_name_is_offered(tmp_path: Path, text: str, nearest: str) -> None:
    assert any(f"Did you mean {nearest!r}" in problem for problem in problems(written(tmp_path, text)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "mine.yaml:0: a recipe is a mapping of keys, this file is empty"),
        ("- a\n- b", "mine.yaml:0: a recipe is a mapping of keys, this file is a list"),
        ("just words", "mine.yaml:0: a recipe is a mapping of keys, this file is a str"),
        (b"#" * 200_001, "mine.yaml:0: it has more than 200,000 bytes; name a recipe"),
        (b"name: a\n# \xff", "mine.yaml:2: this is not UTF-8 text; save the file as UTF-8"),
    ],
)
def test_a_file_that_is_not_a_mapping_of_keys_is_refused(tmp_path: Path, text: str | bytes, problem: str) -> None:
    assert problems(written(tmp_path, text))[0].startswith(problem)


def test_the_error_for_a_missing_recipe_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown recipe 'demoo'. Did you mean 'demo'"):
        load_recipe("demoo")
    with pytest.raises(UsageError, match=r"recipe file '\./nope\.yaml' does not exist"):
        load_recipe("./nope.yaml")
    with pytest.raises(UsageError, match="is a folder"):
        load_recipe(tmp_path)


def test_extends_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    base = "name: b\noutput: o\ndescription: d\nseed: 3\nengine: {block_tokens: 32}\npasses: [clean-up, fold-constants]"
    written(tmp_path, base, "base.yaml")
    recipe = load_recipe(written(tmp_path, "extends: ./base.yaml\nengine: {max_batch_tokens: 64}\npasses: [clean-up]"))
    assert (recipe.name, recipe.output, recipe.description, recipe.seed) == ("mine", None, "", 3)
    assert (recipe.engine.block_tokens, recipe.engine.max_batch_tokens) == (32, 64)
    assert [entry.name for entry in recipe.passes] == ["clean-up"]


def test_extends_replaces_a_placement_as_a_whole(tmp_path: Path) -> None:
    written(tmp_path, "extends: fp32-cpu\ndevices: [{cpu: 1}, {cpu: 2}]\nplace: {gpu_layers: 1}", "base.yaml")
    recipe = load_recipe(written(tmp_path, "extends: ./base.yaml\nplace: {host: experts}"))
    assert recipe.place == {"host": "experts"}
    assert load_recipe(written(tmp_path, "extends: ./base.yaml")).place == {"gpu_layers": 1}


def test_null_removes_a_section_or_gate_of_the_extended_recipe(tmp_path: Path) -> None:
    written(tmp_path, "latency: {}\ngates: {ttft_ratio: {max: 1}, size_ratio: {max: 1}}", "base.yaml")
    recipe = load_recipe(written(tmp_path, "extends: ./base.yaml\nlatency: null\ngates: {ttft_ratio: null}"))
    assert recipe.latency is None
    assert set(recipe.gates) == {"size_ratio"}


def test_a_mistake_in_an_extended_recipe_is_reported_in_its_own_file(tmp_path: Path) -> None:
    written(tmp_path, "name: x\nseed: -1\nthreads: 0", "base.yaml")
    found = problems(written(tmp_path, "extends: base.yaml\n\nthreads: -2"))
    assert found == [
        "base.yaml:2: seed is -1; it must be from 0 to 9223372036854775807",
        "mine.yaml:3: threads is -2; it must be from 1 to 256",
    ]


def test_recipes_that_extend_each_other_are_refused_with_the_chain(tmp_path: Path) -> None:
    written(tmp_path, "extends: ./mine.yaml", "other.yaml")
    problem = the_problem(tmp_path, "name: x\nextends: ./other.yaml")
    assert problem.startswith("other.yaml:1: recipes extend each other in a circle: ")
    assert problem.index("mine.yaml") < problem.index("other.yaml -> ") < problem.rindex("mine.yaml")


@pytest.mark.parametrize(
    ("extends", "message"),
    [("3", "extends is 3; it must be a recipe's name or a path"), ("./no.yaml", "extends: recipe file './no.yaml'")],
)
def test_an_invalid_extends_is_reported_together_with_other_mistakes(
    tmp_path: Path, extends: str, message: str
) -> None:
    found = problems(written(tmp_path, f"seed: -1\nextends: {extends}"))
    assert [problem.split(":")[1] for problem in found] == ["1", "2"]
    assert message in found[1]


def test_overrides_change_keys_sections_and_options_of_passes(tmp_path: Path) -> None:
    source = written(tmp_path, "extends: int4-cpu\nseed: 1")
    recipe = load_recipe(
        source,
        [
            "seed=7",
            "checkpoint=~/m",
            "passes.quantize-weights.bits=8",
            "passes.quantize-weights={block_size: 64}",
            "latency.rounds=3",
            "gates.size_ratio={max: 0.5}",
            "gates.size_ratio.max=0.6",
            "description='a = b'",
        ],
    )
    quantize = next(entry for entry in recipe.passes if entry.name == "quantize-weights")
    assert quantize.options == {"bits": 8, "block_size": 64, "scale_dtype": "float16"}
    assert (recipe.seed, recipe.gates["size_ratio"].limit, recipe.description) == (7, 0.6, "a = b")
    assert recipe.latency is not None
    assert recipe.latency.rounds == 3


@each_case(
    ("override", "problem"),
    [
        ("sed=3", "--set:sed:0: unknown key 'sed'"),
        ("engine.blok=3", "--set:engine.blok:0: unknown key 'blok' in engine"),
        ("engine.block_tokens=x", "--set:engine.block_tokens:0: engine.block_tokens is 'x'; it must be a whole number"),
        ("seed.x=3", "--set:seed.x:0: seed is a single value and has no keys of its own"),
        ("passes.quantize-weight.bits=8", "--set:passes.quantize-weight.bits:0: the recipe runs no pass"),
        ("passes.quantize-weights.bits=7", "--set:passes.quantize-weights.bits:0: passes: quantize-weights: bits is 7"),
        ("passes.quantize-weights.bit=8", "--set:passes.quantize-weights.bit:0: passes: quantize-weights: unknown"),
        ("passes.clean-up=3", "--set:passes.clean-up:0: passes: {clean-up: 3} is not a pass"),
        ("seed=[1", "--set:seed:0: invalid YAML"),
        ("seed", "--set:0: 'seed' is not KEY=VALUE"),
        ("=3", "--set:0: '=3' is not KEY=VALUE"),
        ("engine..x=3", "--set:0: 'engine..x=3' is not KEY=VALUE"),
        ("extends=demo", "--set:extends:0: extends cannot be changed"),
        ("seed=", "--set:seed:0: seed is null; it must be a whole number"),
    ],
)
def test_a_mistake_in_an_override_is_reported_under_its_key(tmp_path: Path, override: str, problem: str) -> None:
    assert the_problem(tmp_path, "extends: int4-cpu\nseed: 1", override).startswith(problem)


def test_a_pass_that_runs_twice_cannot_be_addressed_by_name(tmp_path: Path) -> None:
    text = "passes: [fold-constants, clean-up, fold-constants]"
    assert "2 times" in the_problem(tmp_path, text, "passes.fold-constants.max_bytes=1")


def test_overrides_are_checked_together_with_the_file(tmp_path: Path) -> None:
    found = problems(written(tmp_path, "sed: 1"), "thread=2", "threads=0")
    places = [problem.split(" ")[0] for problem in found]
    assert places[0] == "mine.yaml:1:", "the file comes first"
    assert set(places[1:]) == {"--set:thread:0:", "--set:threads:0:"}


def test_an_override_can_correct_a_mistake_in_the_file(tmp_path: Path) -> None:
    assert load_recipe(written(tmp_path, "seed: -1"), ["seed=2"]).seed == 2


def test_assigned_bits_that_no_later_pass_applies_are_refused(tmp_path: Path) -> None:
    text = "checkpoint: model\ncalibration: {text: t.txt}\npasses: [clean-up, mixed-precision]\n"
    assert the_problem(tmp_path, text) == (
        "mine.yaml:3: passes: mixed-precision assigns bits that no later pass applies; "
        "add gptq or quantize-weights after it"
    )
    written(tmp_path, text.replace("mixed-precision", "mixed-precision, gptq"))
    assert [entry.name for entry in load_recipe(tmp_path / "mine.yaml").passes][1:] == ["mixed-precision", "gptq"]


def test_a_calibrated_pass_without_calibration_data_is_refused(tmp_path: Path) -> None:
    problem = the_problem(tmp_path, "passes: [gptq]\n")
    assert problem.startswith("mine.yaml:1: passes: gptq requires the section `calibration`")


def missing(recipe: Recipe) -> list[str]:
    """The missing paths as "line:column: message"."""
    with pytest.raises(RecipeError) as caught:
        require_paths(recipe)
    return [f"{problem.line}:{problem.column}: {problem.message}" for problem in caught.value.problems]


def test_every_missing_path_is_reported_at_once_with_its_place(tmp_path: Path) -> None:
    found = missing(load_recipe(written(tmp_path, MISSING_PATHS)))
    starts = [
        "1:1: checkpoint 'nowhere' is not a folder or GGUF file (looked for ",
        "2:1: chat_template 'none.jinja' is not a file (looked for ",
        "4:3: evaluation.text 'gone.txt' is not a file (looked for ",
        "5:15: calibration.text 'lost.jsonl' is not a file or folder (looked for ",
        "6:7: gpu.tiles 'tiles.json' is not a file (looked for ",
    ]
    assert len(found) == len(starts)
    for problem, start in zip(found, starts, strict=True):
        assert problem.startswith(start)


def test_a_text_in_a_missing_checkpoint_is_not_reported_too(tmp_path: Path) -> None:
    found = missing(load_recipe(written(tmp_path, "checkpoint: nowhere\nevaluation: {text: 'checkpoint:held.txt'}")))
    assert len(found) == 1


def test_a_missing_text_of_an_existing_checkpoint_is_reported(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    found = missing(load_recipe(written(tmp_path, "checkpoint: model\nevaluation: {text: 'checkpoint:held.txt'}")))
    assert [problem.split(" is not")[0] for problem in found] == ["2:14: evaluation.text 'checkpoint:held.txt'"]


def test_paths_that_a_recipe_needs_and_does_not_name_are_reported(tmp_path: Path) -> None:
    file = written(tmp_path, "extends: int4-gptq-cpu\n")
    with pytest.raises(RecipeError, match="2 problems in ") as caught:
        require_paths(load_recipe(file))
    checkpoint, text = caught.value.problems
    assert (checkpoint.line, Path(checkpoint.file).name) == (0, "mine.yaml")
    assert checkpoint.message.startswith("names no checkpoint; set it with --set checkpoint=")
    assert text.message.startswith("names no calibration text; set it with --set calibration.text=")


def test_a_path_given_on_the_command_line_is_reported_there(tmp_path: Path) -> None:
    recipe = load_recipe(
        written(tmp_path, MISSING_PATHS), ["checkpoint=elsewhere", "evaluation=null", "calibration.text=t.txt"]
    )
    with pytest.raises(RecipeError) as caught:
        require_paths(recipe)
    assert [problem.file for problem in caught.value.problems if "mine" not in problem.file] == [
        "--set:checkpoint",
        "--set:calibration.text",
    ]


def test_paths_that_exist_pass_and_an_unneeded_text_is_not_required(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "held.txt").write_text("text")
    text = "checkpoint: model\nevaluation: {text: 'checkpoint:held.txt'}\ncalibration: {}\n"
    require_paths(load_recipe(written(tmp_path, text)))


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000, "a\\0b"])
def test_a_name_that_no_file_can_have_is_missing(tmp_path: Path, name: str) -> None:
    text = f'checkpoint: "{name}"\nevaluation: {{text: "{name}"}}\nchat_template: "{name}"'
    found = missing(load_recipe(written(tmp_path, text)))
    assert len(found) == 3
    assert all(len(problem) < 1000 for problem in found)


def test_a_recipe_made_in_python_names_itself() -> None:
    with pytest.raises(RecipeError) as caught:
        require_paths(Recipe(name="mine"))
    assert caught.value.problems[0].file == "recipe mine"


def test_a_number_alone_is_the_limit_of_a_gate_or_the_only_concurrency() -> None:
    overrides = ["latency.concurrency=4", "gates.kl_mean=0.02", "gates.top1_agreement=0.8", "gates.tpot_ratio@1=null"]
    recipe = load_recipe("demo", overrides)
    assert recipe.latency is not None
    assert recipe.latency.concurrency == (4,)
    assert (recipe.gates["kl_mean"].max, recipe.gates["top1_agreement"].min) == (0.02, 0.8)
    with pytest.raises(RecipeError, match=r"gates\.kl_mean is true; it must be a mapping"):
        load_recipe("demo", ["gates.kl_mean=true"])
    with pytest.raises(RecipeError, match="unknown metric 'kl_maen'"):
        load_recipe("demo", ["gates.kl_maen=0.02"])
