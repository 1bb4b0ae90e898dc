"""The JSON Schema of recipes: the committed file is current, recipes that ship satisfy it, and mistakes do not."""

import json
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

from ingot.artifact.metrics import METRICS
from ingot.options import options_of
from ingot.passes.registry import PASSES, load_pass_class
from ingot.pipeline.recipe.json_schema import recipe_json_schema, schema_text
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.yaml import read_located
from tests.data_paths import ROOT
from tests.each_case import each_case

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
HEADER = "# yaml-language-server: $schema=recipe.schema.json"
SCHEMA = recipe_json_schema()
VALIDATOR = Draft7Validator(SCHEMA)


def parsed(text: str) -> Any:
    """The YAML as Ingot reads it, with lists for tuples."""
    located = read_located(text, "mine.yaml", Path(), [])
    assert located is not None
    return json.loads(json.dumps(located.plain()))


def mistakes(text: str) -> list[str]:
    """What the schema refuses, as places in the recipe."""
    return [".".join(map(str, error.absolute_path)) for error in VALIDATOR.iter_errors(parsed(text))]


def test_the_committed_schema_is_current() -> None:
    committed = json.loads((ROOT / "recipes" / "recipe.schema.json").read_text(encoding="utf-8"))
    advice = "run: python -m ingot.pipeline.recipe.json_schema > recipes/recipe.schema.json"
    assert committed == json.loads(schema_text()), advice


def test_the_schema_is_a_schema() -> None:
    Draft7Validator.check_schema(SCHEMA)


@each_case("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_that_ships_names_the_schema_and_satisfies_it(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.splitlines()[0] == HEADER
    assert mistakes(text) == []


@each_case("file", RECIPES, ids=lambda file: file.stem)
def test_every_resolved_recipe_satisfies_it(file: Path) -> None:
    resolved = yaml.safe_load(load_recipe(file).resolved_yaml())
    assert list(VALIDATOR.iter_errors(resolved)) == []


@each_case(
    "text",
    [
        "extends: ./base.yaml\nevaluation: {tokens: 3e4}\nlatency: null\ngates: {ttft_ratio: null, kl_mean: {max: 0}}",
        "gates: {ttft_ratio@8: {max: 1.1, advisory: true}}",
        "passes: [clean-up, {gptq: null}, {quantize-weights: {bits: 4, overrides: {a: none}}}]",
        "passes: [{smooth-quant: {alpha: auto}}, {prune-structure: {ffn: 0.5, layers: 12}}]",
        "passes: null\ngates: null\nmemory: null",
        "gates: {verify: true}",
        "verify: {quick: false}\ngates: {verify: {max: 0, advisory: true}}",
        "gpu: {sms: [90], prefill_rows: null}",
        "checkpoint: ~/model\nchat_template: mine.jinja\nthreads: null",
    ],
)
def test_recipes_as_one_writes_them_satisfy_it(text: str) -> None:
    assert mistakes(text) == []


@each_case(
    ("text", "place"),
    [
        ("chekpoint: a", ""),
        ("checkpoint: 3", "checkpoint"),
        ("target: cqu", "target"),
        ("engine: {blok_tokens: 3}", "engine"),
        ("engine: {block_tokens: 1e9}", "engine.block_tokens"),
        ("engine: null", "engine"),
        ("threads: 0", "threads"),
        ("threads: many", "threads"),
        ("seed: 1.5", "seed"),
        ("evaluation: {tokens: -1}", "evaluation"),
        ("passes: clean-up", "passes"),
        ("passes: [cleanup]", "passes.0"),
        ("passes: [{gptq: {bits: 5}}]", "passes.0"),
        ("passes: [{gptq: {dampin: 0.1}}]", "passes.0"),
        ("passes: [{gptq: {damping: 2}}]", "passes.0"),
        ("passes: [{gptq: {}, awq: {}}]", "passes.0"),
        ("passes: [{clean-up: {fast: true}}]", "passes.0"),
        ("gates: {kl_meen: {max: 1}}", "gates"),
        ("gates: {ttft_ratio: {min: 1}}", "gates.ttft_ratio"),
        ("gates: {top1_agreement: {min: 95}}", "gates.top1_agreement.min"),
        ("gates: {size_ratio: {max: -1}}", "gates.size_ratio.max"),
        ("gates: {kl_mean@4: {max: 1}}", "gates"),
        ("gates: {ttft_ratio@0: {max: 1}}", "gates"),
        ("latency: {concurrency: []}", "latency"),
        ("name: a b", "name"),
    ],
)
def test_typical_mistakes_are_refused_at_their_place(text: str, place: str) -> None:
    assert place in mistakes(text)


@each_case("name", PASSES)
def test_every_option_of_every_pass_is_described(name: str) -> None:
    assert all(option.doc.text for option in options_of(load_pass_class(name)).values())
    options = SCHEMA["properties"]["passes"]["items"]["anyOf"][-1]["properties"][name]["properties"]
    assert all(option["description"] for option in options.values())


def test_every_key_and_every_metric_is_in_the_schema_with_its_description() -> None:
    assert list(SCHEMA["properties"]) == ["extends", *Recipe.model_fields]
    assert all(facts["description"] for facts in SCHEMA["properties"].values())
    assert list(SCHEMA["properties"]["gates"]["properties"]) == list(METRICS)
