"""The decoder families that are imported: a row of facts for each model_type.

defaults.json has the values of the keys that a config.json may omit; tests/oracle/make_defaults.py writes it.
refused.json names the features that keep transformers' other model types from being imported, around.json the text
models within others.

Code that reads config.json or builds a graph is not here.
"""

from ingot.pipeline.checkpoint.families.family import Family, NormPlace, RotatedLayers, WindowRule
from ingot.pipeline.checkpoint.families.table import FAMILIES, missing_feature, text_model_of

__all__ = ["FAMILIES", "Family", "NormPlace", "RotatedLayers", "WindowRule", "missing_feature", "text_model_of"]
