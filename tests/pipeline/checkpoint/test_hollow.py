"""A config.json alone gives the tensors and the model of the whole checkpoint."""

import json
from pathlib import Path

import pytest

from ingot.errors import CheckpointError, IngotError
from ingot.passes.model_facts import KV, MODEL
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.hollow import hollow_checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.data_paths import FIXTURES

FAMILIES = ["llama", "gemma2", "deepseek_v2", "qwen3_next", "gpt2", "gemma3n_text", "nemotron_h", "mixtral"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_imported_model_has_the_facts_of_the_whole_checkpoint(family: str) -> None:
    folder = FIXTURES / "checkpoints" / family
    whole = import_checkpoint(Checkpoint.open(folder), check_weights=False)
    with hollow_checkpoint(folder / "config.json") as checkpoint:
        model = import_checkpoint(checkpoint, check_weights=False)
        assert KV.of(model) == KV.of(whole)
        assert MODEL.of(model).num_parameters == MODEL.of(whole).num_parameters
        assert MODEL.of(model).context_tokens == MODEL.of(whole).context_tokens


def test_no_byte_of_a_tensor_is_on_the_disk() -> None:
    with hollow_checkpoint(FIXTURES / "checkpoints" / "llama" / "config.json") as checkpoint:
        (file,) = checkpoint.weight_files
        assert file.stat().st_size > 10_000
        assert file.stat().st_blocks == 0
    assert not file.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; a plan reads up to 1024"),
        ({"hidden_size": 2**30, "vocab_size": 2**30}, "a model of .* bytes; a plan reads up to"),
        ({"model_type": "llamma"}, "model_type is 'llamma', which Ingot does not import"),
        ({"num_attention_heads": "four"}, "num_attention_heads"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"model_type": None}, "model_type is None"),
    ],
)
def test_a_config_that_no_model_has_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    values = json.loads((FIXTURES / "checkpoints" / "llama" / "config.json").read_text())
    kept = {key: value for key, value in {**values, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(IngotError, match=message):
        with hollow_checkpoint(tmp_path / "config.json"):
            pass


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        with hollow_checkpoint(tmp_path / "config.json"):
            pass
