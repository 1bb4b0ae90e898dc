"""YAML with places: anchors and merge keys work; syntax errors, duplicate keys and tags are refused at their line."""

from pathlib import Path

from ingot.errors import Problem
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.yaml import Located, read_located
from tests.each_case import each_case
from tests.pipeline.recipe.recipe_files import problems, written


def test_aliases_that_expand_without_bound_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    found = problems(written(tmp_path, "\n".join(lines)))
    assert sum("more than 20,000 values, those of aliases included" in problem for problem in found) == 1
    assert any("aliases repeat without end" in problem for problem in problems(written(tmp_path, "name: &a [*a]")))


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


@each_case(
    ("text", "problem"),
    [
        ("seed: 1\nname: a\nseed: 2", "mine.yaml:3: duplicate key 'seed' (first in line 1); keep one"),
        ("engine:\n\tblock_tokens: 16", "mine.yaml:2: tab in the indentation; YAML requires spaces"),
        ("name: [a", "mine.yaml:1: invalid YAML: "),
        ("name: a\n---\nname: b", "mine.yaml:2: invalid YAML: "),
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
        ("a: &a [*a]", "mine.yaml:1: "),
    ],
)
def test_text_that_is_not_plain_yaml_is_refused_at_its_line(tmp_path: Path, text: str | bytes, problem: str) -> None:
    assert any(found.startswith(problem) for found in problems(written(tmp_path, text)))


TEXT = """\
a: 1
b:
  - x
  - c: {d: 2}
"""


def located(text: str) -> Located:
    found: list[Problem] = []
    value = read_located(text, "mine.yaml", Path("folder"), found)
    assert not found
    assert value is not None
    return value


def test_every_value_has_the_line_and_column_of_its_key_or_item() -> None:
    value = located(TEXT)
    assert [item.column for item in value.entries["b"].items] == [5, 5]
    assert value.at(("b", 1, "c", "d")).column == 9
    assert [entry.line for entry in value.entries.values()] == [1, 2]
    assert [item.line for item in value.entries["b"].items] == [3, 4]
    assert value.at(("b", 1, "c", "d")).line == 4
    assert value.at(("b", 1)).folder == Path("folder")
    assert value.plain() == {"a": 1, "b": ("x", {"c": {"d": 2}})}


def test_a_path_leads_to_the_innermost_value_that_exists() -> None:
    value = located(TEXT)
    assert value.at(("b", 7)) is value.entries["b"]
    assert value.at(("b", 1, "e", "f")).plain() == {"c": {"d": 2}}
    assert value.at(("a", "b")).problem("wrong") == Problem("mine.yaml", 1, "wrong", column=1)
