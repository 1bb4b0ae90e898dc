"""Facts recorded on a model: read back in their types, kept by clones, and shown as text."""

import pytest

from ingot.artifact import KVGeometry
from ingot.errors import PassError
from ingot.passes.calibration import CALIBRATION_FACTS, CalibrationFacts
from ingot.passes.model_facts import CHECKPOINT, DEQUANTIZED, KV, Fact, WeightFacts, pass_facts, record_weights
from ingot.passes.printing import model_to_text
from ingot.passes.pruned_facts import STRUCTURE_FACTS, StructureFacts
from tests.passes.tiny_decoder import TinyDecoder

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=8)
DATA = CalibrationFacts("text.txt", "0" * 64, text_tokens=9, sequences=2, sequence_tokens=4, seed=0, missing_tokens=1)


def test_a_value_is_read_back_in_its_type_from_a_clone_too() -> None:
    model = TinyDecoder().model
    structure = StructureFacts((0, 2), (0.5,), 4, 2, 8, (), ({"name": "a", "kept": 3},))
    KV.record(model, GEOMETRY)
    STRUCTURE_FACTS.record(model, structure)
    CALIBRATION_FACTS.record(model, DATA)
    CHECKPOINT.record(model, "tiny")
    for one in (model, model.clone()):
        assert (KV.of(one), STRUCTURE_FACTS.of(one), CALIBRATION_FACTS.of(one)) == (GEOMETRY, structure, DATA)
        assert CHECKPOINT.of(one) == "tiny"


def test_the_printed_model_shows_facts_as_text() -> None:
    model = TinyDecoder().model
    CHECKPOINT.record(model, "tiny")
    CALIBRATION_FACTS.record(model, DATA)
    text = model_to_text(model)
    assert "ingot.checkpoint tiny\n" in text
    assert '"missing_tokens": 1, "evaluation_overlap": null, "tokens": 7}\n' in text


def test_rows_of_weights_are_added_up() -> None:
    model, fact = TinyDecoder().model, Fact("ingot.quantization", WeightFacts)
    record_weights(model, fact, [{"name": "a"}])
    record_weights(model, fact, [{"name": "b"}])
    assert fact.of(model).weights == [{"name": "a"}, {"name": "b"}]


def test_facts_of_every_pass_are_found_under_its_name() -> None:
    model = TinyDecoder().model
    model.metadata_props.update({"ingot.awq": "[1]", "ingot.distill": '{"steps": 3}', "ingot.kv": "{}"})
    assert pass_facts(model, ["awq", "distill", "gptq"]) == {"awq": [1], "distill": {"steps": 3}}


def test_a_missing_fact_is_none_or_an_error_that_names_it() -> None:
    model = TinyDecoder().model
    assert DEQUANTIZED.find(model) is None
    assert not DEQUANTIZED.is_in(model)
    with pytest.raises(PassError, match=r"the model has no fact 'ingot\.dequantized'"):
        DEQUANTIZED.of(model)
