"""Weight sites, and the names by which patterns match them."""

import pytest

from ingot.passes.manager import PassManager
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.weights import weight_sites
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.parity import CHECKPOINTS
from tests.passes.tiny_decoder import TinyDecoder

EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_only_has_the_name_of_its_path(tied: bool) -> None:
    names = {site.role: site.names for site in weight_sites(TinyDecoder(tied=tied).model)}
    assert names["embedding"] == ("embed_tokens", EMBEDDING, "model.embed_tokens")
    assert names["head"] == (("lm_head",) if tied else ("lm_head", "lm_head.weight"))


@pytest.mark.parametrize(
    ("pattern", "quantized", "left"), [(EMBEDDING, "embed_tokens", "lm_head"), ("lm_head", "lm_head", "embed_tokens")]
)
def test_an_override_can_quantize_one_of_two_tied_weights(pattern: str, quantized: str, left: str) -> None:
    model = TinyDecoder(tied=True).model
    PassManager([QuantizeWeights(lm_head="none", embedding="none", overrides={pattern: {"bits": 4}})]).run(model)
    found = {site.node.name: site.is_quantized for site in weight_sites(model)}
    assert found[quantized]
    assert not found[left]


def test_coefficients_of_residual_streams_are_routers() -> None:
    sites = weight_sites(import_checkpoint(Checkpoint.open(CHECKPOINTS / "gemma3n_text")))
    routers = {site.names[0].rpartition(".")[2] for site in sites if site.role == "router"}
    assert {"prediction_coefs", "correction_coefs"} < routers
    assert not routers & {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "per_layer_projection"}
