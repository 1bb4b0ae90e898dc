"""Windows and rotation per layer, from the keys that each family uses for them."""

from pathlib import Path
from typing import Any

import pytest

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.config import read_config
from tests.pipeline.tiny_checkpoint import ABSENT, copy_fixture

FULL, SLIDING = "full_attention", "sliding_attention"


def windows(folder: Path, name: str, **changes: Any) -> list[int]:
    config = read_config(Checkpoint.open(copy_fixture(folder, name, **changes)))
    return [layer.window for layer in config.layers]


def refusal(folder: Path, name: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        windows(folder, name, **changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {}, [0, 0, 0]),
        ("llama", {"sliding_window": None, "layer_types": [FULL] * 3}, [0, 0, 0]),
        ("mistral", {}, [8, 8, 8]),
        ("mistral", {"sliding_window": None}, [0, 0, 0]),
        ("mistral", {"sliding_window": ABSENT}, [4096, 4096, 4096]),
        ("phi3", {"sliding_window": 5}, [5, 5, 5]),
        ("phi3", {"sliding_window": ABSENT}, [0, 0, 0]),
        (
            "qwen2",
            {"layer_types": None, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8},
            [0, 0, 8],
        ),
        ("qwen2", {"layer_types": None, "use_sliding_window": False, "max_window_layers": 0}, [0, 0, 0]),
        ("qwen2", {"layer_types": None, "use_sliding_window": True, "max_window_layers": ABSENT}, [0, 0, 0]),
        ("qwen3-layer-types", {}, [8, 0, 8]),
        ("gemma2", {"layer_types": ABSENT}, [8, 0, 8]),
        ("gemma2", {"layer_types": [FULL, SLIDING, FULL]}, [0, 8, 0]),
        ("gemma2", {"layer_types": ABSENT, "sliding_window": ABSENT}, [4096, 0, 4096]),
        ("gemma3_text", {"layer_types": ABSENT}, [8, 8, 8, 8, 8, 0]),
        ("gemma3_text", {"layer_types": ABSENT, "sliding_window_pattern": 2}, [8, 0, 8, 0, 8, 0]),
        ("gemma3_text", {"layer_types": [FULL] * 6, "sliding_window": None}, [0] * 6),
        ("smollm3-windows", {}, [0, 8, 0]),
        ("smollm3-windows", {"use_sliding_window": False}, [0, 0, 0]),
        ("olmo2", {}, [0, 0, 0]),
    ],
)
def test_windows_follow_the_familys_keys(
    tmp_path: Path, name: str, changes: dict[str, Any], expected: list[int]
) -> None:
    assert windows(tmp_path, name, **changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"no_rope_layers": [1, 0, 0, 1]}, [True, False, False, True]),
        ({"no_rope_layers": [1, 0, 0, 1, 1, 1]}, [True, False, False, True]),
        ({"no_rope_layers": None}, [True, True, True, False]),
        ({"no_rope_layers": ABSENT, "no_rope_layer_interval": 2}, [True, False, True, False]),
    ],
)
def test_smollm3_leaves_some_layers_unrotated(tmp_path: Path, changes: dict[str, Any], expected: list[bool]) -> None:
    config = read_config(Checkpoint.open(copy_fixture(tmp_path, "smollm3", **changes)))
    assert [layer.rope is not None for layer in config.layers] == expected


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"sliding_window": 8}, "sliding_window is 8; it must be absent or null"),
        ("llama", {"layer_types": [SLIDING] * 3}, "layer_types is"),
        ("mistral", {"layer_types": [SLIDING, FULL, SLIDING]}, "this model_type gives all layers the same window"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; it must be a whole number from 1 up"),
        ("gemma2", {"sliding_window": None}, "some layers are sliding_attention, but sliding_window is None"),
        ("gemma2", {"layer_types": [SLIDING] * 2}, "a list of 3 times 'full_attention' or 'sliding_attention'"),
        ("gemma2", {"layer_types": [SLIDING, FULL, "chunked_attention"]}, "chunked_attention"),
        ("gemma3_text", {"layer_types": ABSENT, "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("qwen3-layer-types", {"use_sliding_window": False}, "and use_sliding_window is False"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "a list of at least 4 times 0 or 1"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "a list of at least 4 times 0 or 1"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    assert message in refusal(tmp_path, name, **changes)
