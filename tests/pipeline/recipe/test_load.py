"""Loading: every mistake at once, each at the file and line of its key; extends; --set."""

from pathlib import Path

import pytest

from ingot.errors import RecipeError, UsageError
from ingot.pipeline.recipe.load import list_recipes, load_recipe


def written(folder: Path, text: str | bytes, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def problems(source: str | Path, *overrides: str) -> list[str]:
    """The recipe's problems as "file's name:line: message"."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, overrides)
    return [f"{Path(p.file).name if '/' in p.file else p.file}:{p.line}: {p.message}" for p in caught.value.problems]


def the_problem(folder: Path, text: str | bytes, *overrides: str) -> str:
    found = problems(written(folder, text), *overrides)
    assert len(found) == 1, found
    return found[0]


def test_the_recipes_that_ship_load_and_have_a_description() -> None:
    shipped = dict(list_recipes())
    assert set(shipped) >= {"demo", "fp32-cpu", "int8-cpu", "int4-cpu"}
    assert all(shipped.values())
    assert load_recipe("demo").evaluation_text() is not None


def test_all_mistakes_are_reported_at_once_each_at_the_line_of_its_key(tmp_path: Path) -> None:
    text = """\
checkpoint: 7
targt: cpu
engine:
  max_batch_tokens: many

  block_size: 16
passes:
  - fold-constant
  - quantize-weights:
      bits: 5
      blok_size: 32
  - clean-up: 3
latency: {rounds: 1, slo: {ttft_seconds: 1}}
gates:
  kl_meen: {max: 1}
  ttft_ratio: {min: 1}
  size_ratio: {max: 1, min: 1}
  perplexity: {max: .inf}
seed: -1
threads: true
"""
    found = problems(written(tmp_path, text))
    expected = [
        "mine.yaml:1: checkpoint is 7; it must be a path",
        "mine.yaml:2: unknown key 'targt'; keys: ",
        "mine.yaml:4: engine.max_batch_tokens is 'many'; it must be a whole number",
        "mine.yaml:6: unknown key 'block_size' in engine; keys: block_tokens, max_batch_tokens.",
        "mine.yaml:8: passes: no pass is named 'fold-constant'",
        "mine.yaml:10: passes: quantize-weights: bits is 5; allowed: 2 or 3 or 4 or 8",
        "mine.yaml:11: passes: quantize-weights: unknown option 'blok_size'",
        "mine.yaml:12: passes: {clean-up: 3} is not a pass; write NAME or NAME: {option: value, ...}",
        "mine.yaml:13: latency.rounds is 1; it must be 2 or more",
        "mine.yaml:13: latency.slo.tpot_seconds is missing",
        "mine.yaml:15: gates: unknown metric 'kl_meen'; metrics: ",
        "mine.yaml:16: gates: for ttft_ratio, lower is better; write max instead of min",
        "mine.yaml:17: gates: for size_ratio, lower is better; write max instead of min",
        "mine.yaml:17: gates.size_ratio: a gate has exactly one limit",
        "mine.yaml:18: gates: perplexity requires the section `evaluation`, which the recipe does not have; add it, or",
        "mine.yaml:18: gates.perplexity.max is inf; it must be a finite number",
        "mine.yaml:19: seed is -1; it must be 0 or more",
        "mine.yaml:20: threads is true; it must be a whole number",
    ]
    assert len(found) == len(expected)
    for problem, start in zip(found, expected, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize(
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
    assert any(f"Did you mean {nearest!r}?" in problem for problem in problems(written(tmp_path, text)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed: 1\nname: a\nseed: 2", "mine.yaml:3: duplicate key 'seed' (first in line 1); keep one"),
        ("engine:\n\tblock_tokens: 16", "mine.yaml:2: tab in the indentation; YAML requires spaces"),
        ("name: [a", "mine.yaml:1: invalid YAML: "),
        ("name: a\n---\nname: b", "mine.yaml:2: invalid YAML: "),
        ("", "mine.yaml:0: a recipe is a mapping of keys, this file is empty"),
        ("- a\n- b", "mine.yaml:0: a recipe is a mapping of keys, this file is a list"),
        ("just words", "mine.yaml:0: a recipe is a mapping of keys, this file is a str"),
        (b"name: a\n# \xff", "mine.yaml:2: this is not UTF-8 text; save the file as UTF-8"),
        ("name: \x00", "mine.yaml:0: invalid YAML: "),
        ("1: a", "mine.yaml:1: the key '1' is not a string; put it in quotes"),
        ("[a]: b", "mine.yaml:1: a key must be a string"),
        (
            "name: !!python/object/apply:os.getcwd []",
            "mine.yaml:1: the tag 'tag:yaml.org,2002:python/object/apply:os.getcwd' is not allowed",
        ),
        ("name: !!python/name:os.getcwd ''", "mine.yaml:1: invalid YAML: could not determine a constructor"),
        ("description: 2026-13-01", "mine.yaml:0: invalid recipe: month must be in 1..12"),
        ("seed: " + "[" * 5000, "mine.yaml:0: invalid recipe: values are nested too deeply"),
        ("name: a b", "mine.yaml:1: name is 'a b'; it must be made of letters"),
        ("name: ../up", "mine.yaml:1: name is '../up'; it must be made of letters"),
        ("target: cqu", "mine.yaml:1: unknown target 'cqu'"),
        ("passes: clean-up", "mine.yaml:1: passes is 'clean-up'; it must be a list of passes"),
        ("engine: 3", "mine.yaml:1: engine is 3; it must be a mapping of keys"),
        ("gates: [a]", "mine.yaml:1: gates is ['a']; it must be a mapping of keys"),
        ("context_tokens: 1.5", "mine.yaml:1: context_tokens is 1.5; it must be a whole number"),
        ("description: 2026-01-01", "mine.yaml:1: description is datetime.date(2026, 1, 1); it must be a string"),
        ("latency: {concurrency: [1, 1]}", "mine.yaml:1: latency.concurrency: concurrency [1, 1] repeats a level"),
        ("latency: {concurrency: []}", "mine.yaml:1: latency.concurrency is []; it must be a list of at least 1"),
        (
            "evaluation: {text: t, tokens: 600, window_tokens: 512}",
            "mine.yaml:1: evaluation: tokens is 600; it must be at least two windows (1024)",
        ),
        (
            "latency: {}\ngates:\n  ttft_ratio@3: {max: 1}",
            "mine.yaml:3: gates: ttft_ratio@3: latency is not measured at",
        ),
        ("gates: {size_ratio@1: {max: 1}}", "mine.yaml:1: gates: size_ratio is not measured per concurrency"),
        ("gates: {kl_mean: {max: 1}}", "mine.yaml:1: gates: kl_mean requires the section `evaluation`"),
        ("a: &a [*a]", "mine.yaml:1: "),
    ],
)
def test_each_kind_of_mistake_has_its_message(tmp_path: Path, text: str | bytes, problem: str) -> None:
    assert problems(written(tmp_path, text))[0].startswith(problem)


def test_aliases_that_expand_without_bound_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert any("aliases repeat" in problem for problem in problems(written(tmp_path, "\n".join(lines))))


def test_anchors_aliases_and_merge_keys_work(tmp_path: Path) -> None:
    text = "latency: &load {rounds: 3, requests: 2}\nengine: &e\n  block_tokens: 32\n"
    assert load_recipe(written(tmp_path, text)).engine.block_tokens == 32
    merged = "latency:\n  <<: {rounds: 3, requests: 2}\n  rounds: 4\n"
    latency = load_recipe(written(tmp_path, merged)).latency
    assert latency is not None
    assert (latency.rounds, latency.requests) == (4, 2)


def test_small_numbers_may_be_written_with_an_exponent(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, "gates: {size_ratio: {max: 5e-1}}"))
    assert recipe.gates["size_ratio"].limit == 0.5


def test_the_error_for_a_missing_recipe_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no recipe is named 'demoo'; recipes that ship: .*Did you mean 'demo'"):
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


def test_null_removes_a_section_or_gate_of_the_extended_recipe(tmp_path: Path) -> None:
    written(tmp_path, "latency: {}\ngates: {ttft_ratio: {max: 1}, size_ratio: {max: 1}}", "base.yaml")
    recipe = load_recipe(written(tmp_path, "extends: ./base.yaml\nlatency: null\ngates: {ttft_ratio: null}"))
    assert recipe.latency is None
    assert set(recipe.gates) == {"size_ratio"}


def test_a_mistake_in_an_extended_recipe_is_reported_in_its_own_file(tmp_path: Path) -> None:
    written(tmp_path, "name: x\nseed: -1\nthreads: 0", "base.yaml")
    found = problems(written(tmp_path, "extends: base.yaml\n\nthreads: -2"))
    assert found == [
        "base.yaml:2: seed is -1; it must be 0 or more",
        "mine.yaml:3: threads is -2; it must be 1 or more",
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
    assert quantize.options == {"bits": 8, "block_size": 64}
    assert (recipe.seed, recipe.gates["size_ratio"].limit, recipe.description) == (7, 0.6, "a = b")
    assert recipe.latency is not None
    assert recipe.latency.rounds == 3


@pytest.mark.parametrize(
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
    text = "checkpoint: model\ncalibration: {text: t.txt}\npasses: [quantize-weights, mixed-precision]\n"
    assert the_problem(tmp_path, text) == (
        "mine.yaml:3: passes: mixed-precision assigns bits that no later pass applies; "
        "add gptq or quantize-weights after it"
    )
    written(tmp_path, text.replace("mixed-precision", "mixed-precision, gptq"))
    assert [entry.name for entry in load_recipe(tmp_path / "mine.yaml").passes][1:] == ["mixed-precision", "gptq"]


def test_a_calibrated_pass_without_calibration_data_is_refused(tmp_path: Path) -> None:
    problem = the_problem(tmp_path, "passes: [gptq]\n")
    assert problem.startswith("mine.yaml:1: passes: gptq requires the section `calibration`")
