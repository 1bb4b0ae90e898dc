"""The decoder families: one row each, by config.json's model_type. Adding a family is adding a row to a kind's table.

Each row is checked against transformers 5.23: logits, and the defaults, which are in defaults.json.
"""

from collections.abc import Mapping
from types import MappingProxyType

from ingot.pipeline.checkpoint.families.family import Family
from ingot.pipeline.checkpoint.families.hybrids import HYBRIDS
from ingot.pipeline.checkpoint.families.latent import LATENT
from ingot.pipeline.checkpoint.families.layer_norm import LAYER_NORM
from ingot.pipeline.checkpoint.families.mixtures import MIXTURES
from ingot.pipeline.checkpoint.families.rms_norm import RMS_NORM
from ingot.pipeline.checkpoint.families.towers import TOWERS
from ingot.pipeline.checkpoint.families.unequal import UNEQUAL

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {**RMS_NORM, **LAYER_NORM, **MIXTURES, **LATENT, **TOWERS, **HYBRIDS, **UNEQUAL}
)
