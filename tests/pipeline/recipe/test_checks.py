"""Every mistake in the values of a recipe is reported at the line of its key, with what is allowed."""

from pathlib import Path

import pytest

from tests.pipeline.recipe.recipe_files import problems, written


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
        "mine.yaml:2: unknown key 'targt'. Did you mean 'target'?",
        "mine.yaml:4: engine.max_batch_tokens is 'many'; it must be a whole number",
        "mine.yaml:6: unknown key 'block_size' in engine. Did you mean 'block_tokens'?",
        "mine.yaml:8: passes: unknown pass 'fold-constant'. Did",
        "mine.yaml:10: passes: quantize-weights: bits is 5; allowed: 2 or 3 or 4 or 8",
        "mine.yaml:11: passes: quantize-weights: unknown option 'blok_size'",
        "mine.yaml:12: passes: {clean-up: 3} is not a pass; write NAME or NAME: {option: value, ...}",
        "mine.yaml:13: latency.rounds is 1; it must be 2 or more",
        "mine.yaml:13: latency.slo.tpot_seconds is missing",
        "mine.yaml:15: gates: unknown metric 'kl_meen'. Did",
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
    ("text", "problem"),
    [
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
    ],
)
def test_each_kind_of_mistake_has_its_message(tmp_path: Path, text: str | bytes, problem: str) -> None:
    assert problems(written(tmp_path, text))[0].startswith(problem)
