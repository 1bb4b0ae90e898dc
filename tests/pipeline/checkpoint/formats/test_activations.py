"""Schemes of a layer's inputs: as text, as compressed-tensors stores them, and as a node's metadata records them."""

import json
from typing import Literal

import numpy as np
import pytest

from ingot.pipeline.checkpoint.formats.activations import (
    KEY,
    InputActivations,
    InputScheme,
    activations_of_node,
)

DYNAMIC = InputScheme(8, "float", dynamic=True, strategy="token")
STATIC = InputScheme(8, "int", dynamic=False, strategy="tensor", symmetric=False, scale=0.5, zero_point=-3)


def test_a_scheme_reads_as_text() -> None:
    assert (DYNAMIC.words, STATIC.words) == ("fp8 dynamic per token", "int8 static per tensor")


def test_only_a_static_scheme_stores_its_scale_and_zero_point() -> None:
    assert DYNAMIC.tensors() == {}
    found = STATIC.tensors()
    assert (found["input_scale"].dtype, found["input_scale"].tolist()) == (np.dtype(np.float32), [0.5])
    assert (found["input_zero_point"].dtype, found["input_zero_point"].tolist()) == (np.dtype(np.int8), [-3])


@pytest.mark.parametrize("scheme", [DYNAMIC, InputScheme(8, "int", dynamic=False, strategy="tensor")])
def test_a_config_is_read_back_as_the_scheme(scheme: InputScheme) -> None:
    assert InputActivations.model_validate(scheme.config()).scheme == scheme


@pytest.mark.parametrize(("dynamic", "strategy"), [(True, "token"), ("local", "token"), (False, "tensor")])
def test_without_a_strategy_dynamic_scales_are_per_token(dynamic: bool | Literal["local"], strategy: str) -> None:
    scheme = InputActivations(num_bits=8, type="int", dynamic=dynamic).scheme
    assert (scheme.dynamic, scheme.strategy) == (bool(dynamic), strategy)


def test_a_node_without_a_record_has_no_scheme_and_other_keys_are_ignored() -> None:
    record = {"bits": 8, "kind": "int", "dynamic": True, "strategy": "token", "range": "mse"}
    found = activations_of_node({KEY: json.dumps(record)})
    assert found == InputScheme(8, "int", dynamic=True, strategy="token")
    assert activations_of_node({"other": "1"}) is None
