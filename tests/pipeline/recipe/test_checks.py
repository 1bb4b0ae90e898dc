"""Every mistake in the values of a recipe is reported at the line of its key, with what is allowed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ingot.errors import RecipeError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.planning.service_levels import find_service_level
from tests.each_case import each_case
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
latency: {rounds: 1, slo: {}}
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
        "mine.yaml:13: latency.rounds is 1; it must be from 2 to 10000",
        "mine.yaml:13: latency.slo: latency slo has no limit; give ttft_seconds, tpot_seconds or e2e_seconds",
        "mine.yaml:15: gates: unknown metric 'kl_meen'. Did",
        "mine.yaml:16: gates: for ttft_ratio, lower is better; write max instead of min",
        "mine.yaml:17: gates.size_ratio: a gate has exactly one limit",
        "mine.yaml:17: gates: for size_ratio, lower is better; write max instead of min",
        "mine.yaml:18: gates: perplexity requires the section `evaluation`, which the recipe does not have; add it, or",
        "mine.yaml:18: gates.perplexity.max is inf; it must be a finite number",
        "mine.yaml:19: seed is -1; it must be from 0 to 9223372036854775807",
        "mine.yaml:20: threads is true; it must be a whole number from 1 to 256",
    ]
    assert len(found) == len(expected)
    for problem, start in zip(found, expected, strict=True):
        assert problem.startswith(start)


@each_case(
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
        (
            "memory: null\ngates: {peak_memory_ratio: {max: 1}}",
            "mine.yaml:2: gates: peak_memory_ratio requires the section `memory`, which the recipe does not have",
        ),
        ("gates: {verify: {max: 2}}", "mine.yaml:1: gates: verify: max is 2; it must be from 0 to 0"),
        ("verify: null\ngates: {verify: true}", "mine.yaml:2: gates: verify requires the section `verify`"),
        ("gates: {verify: 3}", "mine.yaml:1: gates.verify is 3; it must be a mapping of keys"),
        ("gates: {kl_mean: {max: 1}}", "mine.yaml:1: gates: kl_mean requires the section `evaluation`"),
    ],
)
def test_each_kind_of_mistake_has_its_message(tmp_path: Path, text: str | bytes, problem: str) -> None:
    assert problems(written(tmp_path, text))[0].startswith(problem)


def test_every_mistake_has_its_column(tmp_path: Path) -> None:
    text = "passes:\n  - fold-constants: {max_byte: 3}\nlatency: {rounds: 3, request: 4}\n"
    with pytest.raises(RecipeError) as caught:
        load_recipe(written(tmp_path, text))
    assert [(problem.line, problem.column) for problem in caught.value.problems] == [(2, 22), (3, 22)]
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("2 problems in ")
    assert first.endswith("mine.yaml:")
    assert [line.partition("mine.yaml")[2].split(" ")[0] for line in rest] == [":2:22:", ":3:22:"]


@pytest.mark.parametrize(
    ("number", "value"), [("1e4", 10_000), ("1.5e3", 1500), ("3_000", 3000), ("2048.0", 2048), ("+1E+4", 10_000)]
)
def test_a_whole_number_may_be_written_with_an_exponent_or_underscores(tmp_path: Path, number: str, value: int) -> None:
    recipe = load_recipe(written(tmp_path, f"evaluation: {{text: t.txt, tokens: {number}, window_tokens: 16}}"))
    assert recipe.evaluation is not None
    assert recipe.evaluation.tokens == value
    assert type(recipe.evaluation.tokens) is int
    assert load_recipe("fp32-cpu", [f"seed={number}"]).seed == value


@pytest.mark.parametrize("number", ["1e-3", "1.5", "'1e4'", "1e400", ".nan"])
def test_a_number_that_is_not_whole_is_refused_where_one_is_expected(tmp_path: Path, number: str) -> None:
    found = problems(written(tmp_path, f"seed: {number}"))
    assert len(found) == 1
    assert "; it must be a whole number from 0 to" in found[0]


OUT_OF_RANGE = [
    ("context_tokens: 1e9", "context_tokens is 1000000000; it must be from 1 to 16777216"),
    ("engine: {max_batch_tokens: 1e9}", "engine.max_batch_tokens is 1000000000; it must be from 1 to 1048576"),
    ("engine: {block_tokens: 1000000000}", "engine.block_tokens is 1000000000; it must be from 1 to 1024"),
    ("gpu: {decode_rows: [1, 1e9]}", "gpu.decode_rows.1 is 1000000000; it must be from 1 to 1048576"),
    ("gpu: {prefill_rows: [0]}", "gpu.prefill_rows.0 is 0; it must be from 1 to 1048576"),
    ("evaluation: {text: t, tokens: 1e12}", "evaluation.tokens is 1000000000000; it must be from 2 to 1000000000"),
    ("evaluation: {text: t, window_tokens: 0}", "evaluation.window_tokens is 0; it must be from 1 to 16777216"),
    ("evaluation: {text: t, layer_kl_tokens: -1}", "evaluation.layer_kl_tokens is -1; it must be from 0 to 1000000000"),
    ("calibration: {sequences: 1e9}", "calibration.sequences is 1000000000; it must be from 1 to 1000000"),
    ("calibration: {sequence_tokens: 1e9}", "calibration.sequence_tokens is 1000000000; it must be from 2 to 16777216"),
    ("calibration: {seed: 1e20}", "calibration.seed is 100000000000000000000; it must be from 0 to"),
    ("generate: {prompt: a, max_tokens: 1e9}", "generate.max_tokens is 1000000000; it must be from 1 to 16777216"),
    ("generate: {prompt: a, temperature: 1e9}", "generate.temperature is 1000000000; it must be from 0 to 100"),
    ("generate: {prompt: a, temperature: .nan}", "generate.temperature is nan; it must be a finite number from 0"),
    ("latency: {concurrency: [1, 1e9]}", "latency.concurrency.1 is 1000000000; it must be from 1 to 4096"),
    ("latency: {requests: 1e9}", "latency.requests is 1000000000; it must be from 1 to 100000"),
    ("latency: {max_seconds: 0}", "latency.max_seconds is 0; it must be above 0, up to 86400"),
    ("latency: {slo: {ttft_seconds: -1, tpot_seconds: 1}}", "latency.slo.ttft_seconds is -1; it must be above 0, up"),
    ("latency: {slo: {ttft_seconds: .inf, tpot_seconds: 1}}", "latency.slo.ttft_seconds is inf; it must be a finite"),
    ("memory: {probes: 1}", "memory.probes is 1; it must be from 2 to 100"),
    ("memory: {output_tokens: 1e9}", "memory.output_tokens is 1000000000; it must be from 1 to 16777216"),
    ("threads: 1000000000", "threads is 1000000000; it must be from 1 to 256"),
    ("seed: -1", "seed is -1; it must be from 0 to 9223372036854775807"),
    ("name: " + "a" * 200, "name is 'aaa"),
]


@each_case(("text", "problem"), OUT_OF_RANGE)
def test_a_number_out_of_range_is_refused_with_the_range(tmp_path: Path, text: str, problem: str) -> None:
    assert any(found.startswith(f"mine.yaml:1: {problem}") for found in problems(written(tmp_path, text)))


def numbers(model: type[BaseModel]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every numeric key of the schema with its JSON Schema."""
    schema = model.model_json_schema(mode="validation")
    for owner in (schema, *schema.get("$defs", {}).values()):
        for key, facts in owner["properties"].items():
            variants = [facts, *facts.get("anyOf", ())]
            for variant in (*variants, *(variant.get("items", {}) for variant in variants)):
                if variant.get("type") in ("integer", "number"):
                    yield f"{owner['title']}.{key}", variant


def test_every_number_of_the_schema_has_two_bounds() -> None:
    lower, upper = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
    keys = [key for key, facts in numbers(Recipe) if not (lower & facts.keys() and upper & facts.keys())]
    checked_elsewhere = {"GpuOptions.sms", "GateLimit.max", "GateLimit.min"}  # by the target, and by the metric
    assert set(keys) <= checked_elsewhere, keys


@each_case(
    ("gate", "problem"),
    [
        ("top1_agreement: {min: 95}", "min is 95; it must be from 0 to 1. Did you mean 0.95? It is a share, not a"),
        ("top1_agreement: {min: -1}", "min is -1; it must be from 0 to 1."),
        (
            "size_ratio: {max: -1}",
            "max is -1; it must be from 0.001 to 1000. It is a ratio to the baseline: 1 is equal",
        ),
        ("size_ratio: {max: 0}", "max is 0; it must be from 0.001 to 1000."),
        ("perplexity: {max: 0.9}", "max is 0.9; it must be from 1 to 1000000."),
        ("kl_mean: {max: -0.1}", "max is -0.1; it must be from 0 to 100."),
        ("ttft_ratio@1: {max: 1e9}", "max is 1000000000.0; it must be from 0.001 to 1000."),
        ("throughput_ratio: {min: -2}", "min is -2; it must be from 0.001 to 1000."),
    ],
)
def test_a_limit_that_cannot_decide_is_refused(tmp_path: Path, gate: str, problem: str) -> None:
    text = f"evaluation: {{text: t}}\nlatency: {{}}\ngates:\n  {gate}\n"
    found = problems(written(tmp_path, text))
    metric = gate.partition(":")[0]
    assert len(found) == 1
    assert found[0].startswith(f"mine.yaml:4: gates: {metric}: {problem}")


@pytest.mark.parametrize("gate", ["top1_agreement: {min: 1}", "kl_mean: {max: 0}", "size_ratio: {max: 1.5}"])
def test_a_limit_within_the_metrics_range_is_accepted(tmp_path: Path, gate: str) -> None:
    load_recipe(written(tmp_path, f"evaluation: {{text: t}}\ngates: {{{gate}}}"))


def test_a_gate_on_generations_requires_some(tmp_path: Path) -> None:
    gate = "gates: {greedy_agreement: {min: 0.9}}"
    for generations in ("", ", generations: 0"):
        found = problems(written(tmp_path, f"evaluation: {{text: t{generations}}}\n{gate}"))
        assert len(found) == 1
        assert "greedy_agreement requires evaluation.generations of 2 or more; set it, or remove the gate" in found[0]
    load_recipe(written(tmp_path, f"evaluation: {{text: t, generations: 4}}\n{gate}"))
    load_recipe(written(tmp_path, f"evaluation: {{text: t}}\npasses: [quantize-kv-cache]\n{gate}"))


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_float16_keys_and_values_start_no_generations(tmp_path: Path, precision: str) -> None:
    text = f"""
evaluation: {{text: t}}
passes: [quantize-kv-cache: {{precision: {precision}}}]
gates: {{greedy_agreement: {{min: 0.9}}}}
"""
    (found,) = problems(written(tmp_path, text))
    assert "greedy_agreement requires evaluation.generations of 2 or more; set it, or remove the gate" in found
    load_recipe(written(tmp_path, text.replace("text: t", "text: t, generations: 4")))


@pytest.mark.parametrize("key", ["seed", "generate.temperature", "gates.size_ratio.max", "passes.gptq.damping"])
def test_an_integer_of_thousands_of_digits_is_refused(key: str) -> None:
    assert len(problems("int4-gptq-cpu", "generate.prompt=a", f"{key}=0x{'f' * 5000}")[0]) < 400


def test_very_many_passes_are_refused(tmp_path: Path) -> None:
    text = "passes:\n" + "  - clean-up\n" * 10_000
    assert problems(written(tmp_path, text)) == [
        "mine.yaml:1: passes has 10,000 passes; it may have up to 100",
    ]


@each_case(
    "text",
    [
        "{long}: 3",
        "name: {long}",
        "target: {long}",
        "extends: {long}",
        "extends: ./{long}.yaml",
        "passes: [{long}]",
        "passes: [{{{long}: {{a: 1}}}}]",
        "passes: [{{quantize-weights: {{{long}: 4}}}}]",
        "passes: [{{quantize-weights: {{bits: {long}}}}}]",
        "passes: [{{quantize-weights: {{overrides: {{{long}: 5}}}}}}]",
        "passes: [{{quantize-weights: {{overrides: {{a: {{{long}: 5}}}}}}}}]",
        "gates: {{{long}: {{max: 1}}}}",
        "gates: {{size_ratio: {{{long}: 1}}}}",
        "gates: {{size_ratio@{long}: {{max: 1}}}}",
        "latency: {{}}\ngates:\n  ? ttft_ratio@{long}\n  : {{max: 1}}",
        "gates:\n  ? {long}\n  : {{max: 1}}",
        "engine:\n  ? {long}\n  : 1",
        "calibration: {{}}\npasses: [{{mixed-precision: {{bits: [16{many}]}}}}, gptq]",
        "gpu: {{sms: [1{many}]}}",
        "latency: {{concurrency: [1{many}]}}\ngates: {{ttft_ratio@7: {{max: 1}}}}",
        "engine: {long}",
        "engine: {{max_batch_tokens: [{long}, {long}]}}",
        "{long}: 1\n{long}: 2",
        "? {long} : 1",
        "a: !{long} 3",
        "a: *{long}",
    ],
)
def test_a_long_name_is_not_repeated_whole(tmp_path: Path, text: str) -> None:
    found = problems(written(tmp_path, text.format(long="x" * 5000, many=", 16" * 5000)))
    assert found
    assert all(len(problem) < 1000 for problem in found), max(found, key=len)


def test_a_long_override_is_not_repeated_whole() -> None:
    long = "x" * 5000
    for override in (long, f"{long}=3", f"passes.{long}.bits=3", f"engine.{long}=1", f"seed.{long}=1", f"name={long}"):
        assert all(len(problem) < 1000 for problem in problems("int4-cpu", override))


def test_a_gate_on_verify_is_a_word_and_needs_no_section(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, "gates: {verify: true}"))
    assert recipe.gates["verify"].max == 0
    assert recipe.verify is not None
    assert recipe.verify.quick
    assert load_recipe(written(tmp_path, recipe.resolved_yaml().partition("\n")[2])).gates == recipe.gates
    without = load_recipe(written(tmp_path, "gates: {verify: true}"), ["gates.verify=false"])
    assert (without.gates, without.verify, without.is_measured) == ({}, None, False)


def test_a_service_level_is_a_word_of_the_gate_or_of_the_load(tmp_path: Path) -> None:
    level, limits = find_service_level("chat"), {"ttft": 0.5, "tpot": 0.05}
    recipe = load_recipe(written(tmp_path, "latency: {}\ngates: {slo: chat, slo@4: chat}"))
    assert {key: gate.min for key, gate in recipe.gates.items()} == dict.fromkeys(("slo", "slo@4"), level.percentile)
    assert recipe.latency is not None
    assert recipe.latency.slo is not None
    assert recipe.latency.slo.limits == level.bounds == limits
    again = load_recipe(written(tmp_path, recipe.resolved_yaml().partition("\n")[2]))
    assert (again.gates, again.latency) == (recipe.gates, recipe.latency)
    alone = load_recipe(written(tmp_path, "latency: {slo: batch}"))
    assert alone.latency is not None
    assert alone.latency.slo is not None
    assert (alone.latency.slo.limits, alone.gates) == ({"e2e": 600.0}, {})


@each_case(
    ("text", "problem"),
    [
        ("latency: {}\ngates: {slo: chatt}", "mine.yaml:2: unknown service level 'chatt'. Did you mean 'chat'?"),
        ("latency: {slo: cod}", "mine.yaml:1: unknown service level 'cod'. Did you mean 'code'?"),
        (
            "gates: {slo: code}",
            "mine.yaml:1: gates: slo is code, and the recipe measures no latency; add the section latency with the "
            "load, as in latency: {prompt_tokens: 2048, output_tokens: 64}, or remove the gate with null",
        ),
        ("latency: null\ngates: {slo: code}", "mine.yaml:2: gates: slo is code, and the recipe measures no latency"),
        (
            "latency: {slo: {ttft_seconds: 1}}\ngates: {slo: chat}",
            "mine.yaml:2: gates: slo is chat, and latency.slo is another objective; there is one for all gates: remove",
        ),
        ("latency: {slo: code}\ngates: {slo: chat}", "mine.yaml:2: gates: slo is chat, and latency.slo is another"),
        ("latency: {}\ngates: {slo@1: chat, slo: code}", "mine.yaml:2: gates: slo is chat, and latency.slo is another"),
        ("latency: {}\ngates: {slo: {min: 0.9}}", "mine.yaml:2: gates: slo requires latency.slo, the limits that"),
        ("latency: {slo: chat}\ngates: {slo: {min: 99}}", "mine.yaml:2: gates: slo: min is 99; it must be from 0 to 1"),
    ],
)
def test_a_service_level_that_decides_nothing_is_refused_once(tmp_path: Path, text: str, problem: str) -> None:
    (found,) = problems(written(tmp_path, text))
    assert found.startswith(problem)


def test_serving_is_checked_key_by_key(tmp_path: Path) -> None:
    text = """\
serving:
  kv_host_bytes: 4GX
  kv_disk_bytes: -1
  kv_policy: lro
  max_seqs: 4
  kv_bytes: 0
  max_sequences: true
  max_batch_tokens: 1e9
"""
    assert problems(written(tmp_path, text)) == [
        "mine.yaml:2: serving.kv_host_bytes: '4GX' is not a size; write a number of bytes, or one with a unit: "
        "kB, MB, GB, TB, KiB, MiB, GiB, TiB",
        "mine.yaml:3: serving.kv_disk_bytes is -1; it must be from 0 to 1125899906842624",
        "mine.yaml:4: serving.kv_policy is 'lro'; it must be 'lru-uses', 'lru' or 'arc'",
        "mine.yaml:5: unknown key 'max_seqs' in serving. Did you mean 'max_sequences'?",
        "mine.yaml:6: serving.kv_bytes: it is 0; it must be a number of bytes from 1 to 1125899906842624, a size such "
        "as 2GiB, or a share of the free memory such as 70%, up to 95%",
        "mine.yaml:7: serving.max_sequences is true; it must be a whole number from 1 to 1048576",
        "mine.yaml:8: serving.max_batch_tokens is 1000000000; it must be from 1 to 1048576",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cpu: {engine: native}\nserving: {cpu_affinity: 0-x}",
            "2: serving.cpu_affinity: '0-x' names no cores; write numbers from 0 to 8191, such as",
        ),
        (
            "serving: {cpu_affinity: 0-3}",
            "1: serving.cpu_affinity pins the threads of the native engine, and cpu.engine is ",
        ),
        (
            "cpu: {engine: auto}\nserving: {cpu_affinity: [0]}",
            "2: serving.cpu_affinity pins the threads of the native engine, and cpu.engine is auto; set cpu.engine",
        ),
        (
            "target: cuda-sm90\nserving: {cpu_affinity: 1}",
            "2: serving.cpu_affinity pins threads on a CPU, and target cuda-sm90",
        ),
    ],
)
def test_cores_are_for_the_native_engine(tmp_path: Path, text: str, message: str) -> None:
    (problem,) = problems(written(tmp_path, text))
    assert problem.startswith(f"mine.yaml:{message}")


def test_cores_of_the_native_engine_are_served(tmp_path: Path) -> None:
    text = "cpu: {engine: native}\nserving: {cpu_affinity: '0-2,5'}"
    serving = load_recipe(written(tmp_path, text)).serving
    assert serving is not None
    assert serving.given() == {"cpu_affinity": (0, 1, 2, 5)}


def test_sizes_may_be_numbers_or_have_units(tmp_path: Path) -> None:
    serving = load_recipe(
        written(tmp_path, "serving: {kv_host_bytes: 1.5 GiB, kv_disk_bytes: 5e10, kv_bytes: 7}")
    ).serving
    assert serving is not None
    assert serving.given() == {"kv_bytes": 7, "kv_host_bytes": 3 << 29, "kv_disk_bytes": 50_000_000_000}
