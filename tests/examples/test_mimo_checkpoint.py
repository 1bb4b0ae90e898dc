"""A checkpoint in MiMo's form: the model's weights are kept bit for bit, and unfit models are refused."""

# mypy: disable-error-code="no-untyped-call"
# torch leaves some of its methods without annotations.

import json
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="examples train with torch: pip install --group oracle")
pytest.importorskip("transformers")

from examples.mimo_checkpoint import load_checkpoint, refuse_unfit, write_checkpoint  # noqa: E402
from examples.mtp_layer import make_layer, run_base, unroll  # noqa: E402
from examples.stdlib_corpus import Corpus, Module  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from tests.data_paths import DEMO_MODEL, ROOT  # noqa: E402
from tests.examples.tiny_llama import write_tiny_llama  # noqa: E402

CORPUS = Corpus((Module("abc.py", "import abc\n" * 40),), ())
LAYER_NAMES = {
    *(f"{name}_layernorm.weight" for name in ("token", "hidden", "input", "post_attention", "final")),
    "input_proj.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"self_attn.{name}_proj.bias" for name in "qkv"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


def assert_holds(folder: Path, base: Path) -> None:
    """The folder has the tensors of `base`, zeros for the biases that it lacks, and one MTP layer; all in float16."""
    found, expected = load_file(folder / "model.safetensors"), load_file(base / "model.safetensors")
    prefix = "model.mtp_layers.0."
    assert {name.removeprefix(prefix) for name in found if name.startswith(prefix)} == LAYER_NAMES
    assert {tensor.dtype for tensor in found.values()} == {torch.float16}
    for name, tensor in found.items():
        if not name.startswith(prefix):
            assert torch.equal(tensor, expected.pop(name)) if name in expected else not tensor.any()
    assert not expected


def test_the_model_keeps_its_weights_and_logits_bit_for_bit(tmp_path: Path) -> None:
    base = write_tiny_llama(tmp_path / "base", CORPUS)
    tokens = torch.randint(0, 320, (2, 20))
    layer = make_layer(base, tokens).half().float()
    write_checkpoint(tmp_path / "base", layer, tmp_path / "out")
    assert_holds(tmp_path / "out", tmp_path / "base")
    model, loaded = load_checkpoint(tmp_path / "out")
    assert torch.equal(model(tokens).logits, base(tokens).logits)
    states = run_base(base, tokens)
    assert torch.equal(unroll(loaded, run_base(model, tokens), 2)[1], unroll(layer, states, 2)[1])


def test_the_configuration_has_the_keys_of_mimo(tmp_path: Path) -> None:
    base = write_tiny_llama(tmp_path / "base", CORPUS, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    write_checkpoint(tmp_path / "base", make_layer(base, torch.randint(0, 320, (2, 20))), tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text("utf-8"))
    assert (config["model_type"], config["architectures"]) == ("mimo", ["MiMoForCausalLM"])
    assert (config["num_nextn_predict_layers"], config["rope_theta"], config["num_hidden_layers"]) == (1, 5000.0, 2)


def test_the_committed_model_is_the_demo_model_with_a_layer() -> None:
    assert_holds(ROOT / "examples/models/stdlib-mimo-6m", DEMO_MODEL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_bias": True}, "has biases .* name a Llama without them"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type linear; only"),
    ],
)
def test_a_model_that_the_form_cannot_hold_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_tiny_llama(tmp_path / "base", CORPUS, **settings)
    with pytest.raises(ValueError, match=message):
        refuse_unfit(tmp_path / "base")


def test_a_folder_without_weights_is_refused_by_the_names_of_its_missing_files(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "base", CORPUS)
    (tmp_path / "base/model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model\.safetensors; name the folder"):
        refuse_unfit(tmp_path / "base")


def test_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="is a qwen3_next; name the folder of a Llama"):
        refuse_unfit(ROOT / "examples/models/stdlib-hybrid-4m")
