"""Chains get the case's options for those passes that have them."""

import json

import pytest
from benchmarks.quantizers.cases import CHAINS, MODELS, Setting, make_chain

from ingot.passes.quantization.gptq import Gptq
from tests.data_paths import shared_data
from tests.each_case import each_case


def test_bits_blocks_and_what_stays_reach_the_pass_that_rounds() -> None:
    *_, last = make_chain("AWQ + GPTQ", Setting(3, 64, True, keep=("down_proj",)))
    assert isinstance(last, Gptq)
    assert (last.bits, last.block_size, last.symmetric) == (3, 64, True)
    assert (last.lm_head, last.embedding) == ("none", "none")
    assert dict(last.overrides) == {"*down_proj*": "none"}


@each_case("name", CHAINS)
def test_every_chain_can_be_built_for_every_width(name: str) -> None:
    for bits in (2, 3, 4, 8):
        assert make_chain(name, Setting(bits, 32, False))


@pytest.mark.parametrize("name", MODELS)
def test_the_group_sizes_divide_every_width_that_is_quantized(name: str) -> None:
    shared_data(f"models/{name}")
    model = MODELS[name]
    config = json.loads((model.checkpoint / "config.json").read_text("utf-8"))
    widths = {"q_proj": config["hidden_size"], "o_proj": config["num_attention_heads"] * config["head_dim"]}
    widths["down_proj"] = config["intermediate_size"]
    for group_size in model.group_sizes:
        divides = {layer: width % group_size == 0 for layer, width in widths.items()}
        assert [layer for layer, fits in divides.items() if not fits] == list(model.keep)
