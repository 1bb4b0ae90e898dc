"""Import plus attention-reference in plain onnxruntime against transformers' logits, on ragged paged batches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.data_paths import shared_data
from tests.each_case import each_case
from tests.oracle.all_cases import ALL_CASES
from tests.oracle.cases import CASES
from tests.parity import CHECKPOINTS, DIGESTS, LOGITS, compare, load_logits, measure
from tests.reference_runner import ReferenceRunner
from tests.tolerances import within

VISIBLE = 1e-3  # a wrong feature must differ by far more than the tolerance, or the fixture proves nothing


@each_case("case", ALL_CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(case: Any, record_property: Any) -> None:
    parity = measure(case)
    record_property("worst_difference", parity.worst)
    assert parity.worst <= parity.limit


def test_every_fixture_is_the_one_that_was_made() -> None:
    digests = json.loads((CHECKPOINTS / DIGESTS).read_text())
    assert digests == {case.name: Checkpoint.open(CHECKPOINTS / case.name).digest for case in ALL_CASES}


@pytest.mark.parametrize("name", ["stories260K", "babyllama-105"])
def test_real_models_equal_their_golden_logits(name: str) -> None:
    with np.load(shared_data(f"golden/logits/{name}.npz")) as golden:
        tokens, expected = golden["input_ids"].tolist(), golden["logits_fp32"]
    model = import_checkpoint(Checkpoint.open(shared_data(f"models/{name}")))
    prompts = [tokens[:11], tokens, tokens[:40]]
    parity = compare(ReferenceRunner(model).run_ragged(prompts), [expected[: len(prompt)] for prompt in prompts])
    assert within("golden.float32", parity.worst)


def _difference(name: str, model: ir.Model) -> float:
    tokens, expected = load_logits(CHECKPOINTS / name / LOGITS)
    return compare(ReferenceRunner(model).run_ragged(tokens), expected).worst


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("mistral", "window", 0),
        ("mistral", "window", 9),
        ("gemma2-tight-softcaps", "softcap", 0.0),
        ("gemma3_text-scaled-global-rope", "scale", 0.25),
        ("granite", "scale", 8**-0.5),
    ],
)
def test_the_fixtures_show_a_wrong_attribute(name: str, attribute: str, value: float) -> None:
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / name))
    for node in model.graph:
        if node.op_type == "PagedAttention":
            node.attributes[attribute] = ir.convenience.convert_attribute(attribute, value)
    assert _difference(name, model) > VISIBLE


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "qwen2-max-window-layers", "qwen3-layer-types"])
def test_the_fixtures_show_windows_on_the_wrong_layers(name: str) -> None:
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / name))
    for node in model.graph:
        if node.op_type == "PagedAttention":
            node.attributes["window"] = ir.AttrInt64("window", 8 - node.attributes["window"].as_int())
    assert _difference(name, model) > VISIBLE


@pytest.mark.parametrize(
    "name", ["llama-rope-llama3", "llama-rope-linear", "llama-rope-yarn", "qwen2-rope-yarn", "phi3-longrope-long"]
)
def test_the_fixtures_show_a_rope_without_its_scaling(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    checkpoint = Checkpoint.open(CHECKPOINTS / name)
    rope = {"rope_type": "default", "rope_theta": checkpoint.config["rope_parameters"]["rope_theta"]}
    partial = checkpoint.config["rope_parameters"].get("partial_rotary_factor", 1.0)
    changed = {**checkpoint.config, "rope_parameters": {**rope, "partial_rotary_factor": partial}}
    plain = Checkpoint(checkpoint.path, changed, checkpoint.generation_config, checkpoint.tensors)
    assert _difference(name, import_checkpoint(plain, case.context_tokens)) > VISIBLE
