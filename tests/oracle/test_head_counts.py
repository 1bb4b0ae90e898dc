"""Families of which transformers loads no model whose heads do not divide hidden_size are those that say so."""

from typing import Any

import pytest

from ingot.pipeline.checkpoint.families.table import FAMILIES

transformers: Any = pytest.importorskip("transformers", reason="the oracle needs transformers")

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

# falcon's heads have the size that their number gives; mimo is read by its own code.
_OTHERS = ("falcon", "mimo")


def test_heads_must_divide_the_width_where_the_family_says_so() -> None:
    configurations = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    for name, family in FAMILIES.items():
        if name in _OTHERS:
            continue
        sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 16}
        configurations[name](**sizes, num_attention_heads=4, num_key_value_heads=4)
        refusal = ""
        try:
            configurations[name](**sizes, num_attention_heads=3, num_key_value_heads=3)
        except Exception as error:  # noqa: BLE001 (each package of configurations has its own)
            refusal = str(error)
        if family.heads_divide_width:
            assert "multiple" in refusal or "divis" in refusal, name
        else:
            assert not refusal or family.fixed_head_dim, f"{name}: {refusal}"
