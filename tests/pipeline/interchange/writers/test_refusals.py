"""An export that a format cannot hold is refused with a setting that fits."""

from pathlib import Path
from typing import Any

import pytest

from ingot.errors import UsageError
from tests.pipeline.checkpoint.formats.tiny_model import exported


@pytest.mark.parametrize(
    ("format_name", "options", "message"),
    [
        ("gptq", {"embedding": 8}, "gptq keeps model.embed_tokens.weight in floats.*embedding=none"),
        ("gptq", {"overrides": {"*.down_proj": 8}}, "gptq has one scheme for all layers.*export to compressed-tensors"),
        ("gptq", {"overrides": {"*.down_proj": "none"}}, "gptq quantizes every linear layer, but .*down_proj is in"),
        ("awq", {"bits": 8}, "awq holds only 4 bits, but .* 8 bits asymmetric in blocks of 32; set bits to 4"),
        ("gguf", {"bits": 8}, "gguf holds 4 and 8 bits symmetric .* set block_size: 32 and symmetric: true"),
        ("gguf", {"block_size": 16}, "4 bits asymmetric in blocks of 16; set block_size: 32"),
        ("gguf", {}, "Q4_1 stores -zero_point \\* scale as float16.*symmetric: true"),
        ("compressed-tensors", {"embedding": 4}, "keeps model.embed_tokens.weight in floats"),
        ("ggml", {}, "no format is named 'ggml'"),
    ],
)
def test_a_refused_export_names_a_setting_that_fits(
    tmp_path: Path, format_name: str, options: dict[str, Any], message: str
) -> None:
    bits = {name: {"bits": value} if value == 8 else value for name, value in options.pop("overrides", {}).items()}
    with pytest.raises(UsageError, match=message):
        exported(tmp_path, format_name, overrides=bits, **options)
    assert not (tmp_path / "out").exists()
