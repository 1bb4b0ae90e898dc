"""Refusals of several formats name a setting or a format that fits."""

from pathlib import Path
from typing import Any

import pytest

from ingot.errors import UsageError
from ingot.pipeline.interchange.transcode import transcode
from tests.pipeline.checkpoint.formats.tiny_model import assert_export_refused, tiny_checkpoint


@pytest.mark.parametrize(
    ("format_name", "options", "message"),
    [
        ("gptq", {"embedding": 8}, "gptq keeps model.embed_tokens.weight in floats.*embedding=none"),
        ("compressed-tensors", {"embedding": 4}, "keeps model.embed_tokens.weight in floats"),
    ],
)
def test_a_quantized_table_is_refused_by_formats_that_keep_it_in_floats(
    format_name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert_export_refused(tmp_path, format_name, message, **options)


def test_quantized_formats_refuse_a_model_without_a_quantized_layer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing is quantized.*exactly: gguf, safetensors"):
        transcode(tiny_checkpoint(tmp_path / "model"), tmp_path / "out", "awq")
