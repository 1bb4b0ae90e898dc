"""KL of each weight quantized alone, measured by real builds."""

import json
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.builder.layer_kl import KlOptions, layer_kl
from ingot.errors import DataError
from ingot.passes.weights import weight_sites
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import ModelSource, import_checkpoint
from ingot.runtime import Tokenizer
from ingot.validation.evidence import sealed_quantization
from ingot.validation.quantization import Quantization
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL, FIXTURES

TEXT = DEMO_MODEL / "heldout.txt"


EVALUATED = "evaluation={text: checkpoint:heldout.txt, tokens: 512, window_tokens: 128, layer_kl_tokens: 256}"


@pytest.fixture(scope="module")
def evaluated(build_unmeasured: BuildArtifact, two_layers: Path, memory_of_this_process: None) -> Artifact:
    """Two layers of the demo model in 4 bits, head and table in 8."""
    return build_unmeasured("int4-cpu", two_layers, EVALUATED, "generate=null")


@pytest.fixture(scope="module")
def found(evaluated: Artifact) -> Quantization:
    return sealed_quantization(evaluated)


def test_every_weight_has_its_kl_and_its_figures(found: Quantization) -> None:
    assert len(found.weights) == 1 + 2 * 4  # the tied table, and four packed layers of each of two
    for weight in found.weights:
        assert weight.kl is not None
        assert weight.kl > 0
        assert weight.relative_error is not None
        assert weight.scale_min is not None
        assert weight.scale_max is not None
        assert weight.scale_min <= weight.scale_max
    assert found.kl is not None
    assert (found.kl.tokens, found.kl.window_tokens) == (256, 128)


def test_eight_bits_cost_less_than_four(found: Quantization) -> None:
    by_name = {weight.name: weight.kl or 0.0 for weight in found.weights}
    assert by_name.pop("embed_tokens") < np.median(list(by_name.values()))


def _mean_kl(artifact: Artifact) -> float:
    accuracy = json.loads(artifact.file("evidence/accuracy.json").read_bytes())
    return float(sum(item["kl"] for item in accuracy["items"])) / int(accuracy["predicted_tokens"])


def test_single_weights_add_up_to_about_the_whole(found: Quantization, evaluated: Artifact, two_layers: Path) -> None:
    total = sum(weight.kl or 0.0 for weight in found.weights)
    assert 0.5 < total / _mean_kl(evaluated) < 2
    names = {site.node.name for site in weight_sites(import_checkpoint(Checkpoint.open(two_layers)))}
    assert {weight.name for weight in found.weights if "self_attn.o" in weight.name} <= names


def test_a_text_with_tokens_that_the_model_lacks_is_refused_by_name(two_layers: Path) -> None:
    model = ModelSource.open(FIXTURES / "checkpoints" / "llama").copy()
    options = KlOptions(TEXT, window_tokens=16, text_tokens=64, tokens=64)
    with pytest.raises(
        DataError, match=r"heldout\.txt: the tokenizer makes token \d+ of it, but .* vocabulary has 128"
    ):
        layer_kl(model, {}, lambda: Tokenizer.load(two_layers), options)
