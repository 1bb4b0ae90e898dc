"""One scheme for all layers: the widest that is needed, or a refusal."""

import json
from pathlib import Path

from ingot.pipeline.interchange.export import export_checkpoint
from ingot.pipeline.interchange.transcode import transcode
from tests.pipeline.checkpoint.formats.tiny_model import assert_export_refused, quantize, recipe, tiny_checkpoint


def test_layers_of_two_schemes_share_the_wider_one(tmp_path: Path) -> None:
    mixed = quantize(
        symmetric=True, overrides={"*.down_proj": {"bits": 8}, "*.up_proj": {"block_size": 16}}, scale_dtype="float16"
    )
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), mixed)
    source = export_checkpoint(made, tmp_path / "mixed", "compressed-tensors")
    outcome = transcode(source, tmp_path / "out", "gptq")
    assert outcome.proof.equal
    assert {note.partition(":")[0] for note in outcome.notes} >= {"4 bits are stored in codes of 8"}
    quantization = json.loads((outcome.folder / "config.json").read_text())["quantization_config"]
    assert (quantization["bits"], quantization["group_size"], quantization["sym"]) == (8, 16, True)


def test_layers_of_two_schemes_are_refused_unless_widening_is_allowed(tmp_path: Path) -> None:
    message = "gptq has one scheme for all layers.*export to compressed-tensors"
    assert_export_refused(tmp_path, "gptq", message, overrides={"*.down_proj": {"bits": 8}})
