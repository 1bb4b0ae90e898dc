"""Settings of a quantization_config are read strictly, and refused by key, value and what is allowed."""

from typing import Any

import pytest

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.formats.awq import AwqMethod
from ingot.pipeline.checkpoint.formats.compressed_tensors import CompressedTensors
from ingot.pipeline.checkpoint.formats.gptq import GptqMethod
from ingot.pipeline.checkpoint.formats.quant_method import QuantMethod
from tests.each_case import each_case

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4}}


@each_case(
    ("method", "config", "message"),
    [
        (AwqMethod, {"bits": 4}, "group_size is missing, and has no default"),
        (AwqMethod, {"bits": "4", "group_size": 64}, "bits is '4'; it must be 4"),
        (AwqMethod, {"bits": 4, "group_size": "64"}, "group_size is '64'; it must be a valid integer"),
        (
            AwqMethod,
            {"bits": 4, "group_size": -2},
            "group_size is -2; it must be a number from 1, or -1 for whole rows",
        ),
        (GptqMethod, {"bits": 4, "group_size": 64, "format": "gtpq"}, "gptq, gptq_v2. Did you mean 'gptq'?"),
        (
            GptqMethod,
            {"bits": 4, "group_size": 64, "is_marlin_format": True},
            "is_marlin_format is True; Marlin's layout",
        ),
        (
            CompressedTensors,
            {"config_groups": {"g": {**GROUP, "format": "int-quantized"}}},
            "config_groups.g: num_bits is 4; int-quantized is read with 8 bits",
        ),
        (CompressedTensors, {"config_groups": {"g": GROUP}}, "config_groups.g.format is None; Ingot reads"),
    ],
)
def test_a_wrong_setting_is_refused_by_key(method: type[QuantMethod], config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        method.read(config, "config.json")
    assert str(caught.value).startswith("config.json: ")
    assert message in str(caught.value)
