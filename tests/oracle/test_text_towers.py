"""Text models within multimodal ones: logits of transformers for text alone, as it stores them now and as it did."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.text_tower import TEXT_TOWERS
from ingot.pipeline.checkpoint.families.table import TOWERS
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.oracle.cases import LENGTHS, WINDOW
from tests.parity import compare
from tests.reference_runner import ReferenceRunner
from tests.simulators.launch_programs import error_of_program

torch: Any = pytest.importorskip("torch", reason="the oracle needs torch")
transformers: Any = pytest.importorskip("transformers", reason="the oracle needs transformers")

from tests.oracle.make_refusals import towers  # noqa: E402 (it imports transformers)

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

# One of each kind of name, and of each text model that is published within others alone.
CHECKED = (
    "gemma3",
    "glm_ocr",
    "glm4v",
    "glm4v_moe",
    "hyperclovax_vision_v2",
    "idefics3",
    "lfm2_vl",
    "mistral3",
    "paddleocr_vl",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "qwen3_omni_moe_thinker",
    "qwen3_vl",
    "qwen3_vl_moe",
)
_SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_TOWER_SIZES = _SIZES | {
    "num_hidden_layers": 1,
    "depth": 1,
    "num_heads": 4,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "image_size": 28,
    "patch_size": 14,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}}
_MORE: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8, "sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "glm4v_text": _SECTIONS,
    "glm_ocr_text": _SECTIONS,
    "paddleocr_vl_text": {**_SECTIONS, "head_dim": 8},
    "qwen2_5_omni_text": _SECTIONS,
    "qwen3_omni_moe_text": {**_SECTIONS, **_EXPERTS, "num_experts": 4, "head_dim": 8},
    "glm4v_moe_text": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 0]},
    },
    "qwen2_vl_text": _SECTIONS,
    "qwen2_5_vl_text": _SECTIONS,
    "qwen3_vl_text": {**_SECTIONS, "head_dim": 8},
    "qwen3_vl_moe_text": {**_SECTIONS, **_EXPERTS, "num_experts": 4, "head_dim": 8},
}


def tiny_model(model_type: str) -> Any:
    """A multimodal model with small towers, and weights that are not trivial."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type)
    for key in [key for key in config.sub_configs if key != "text_config"]:
        tower = getattr(config, key)
        for size, value in _TOWER_SIZES.items():
            if isinstance(getattr(tower, size, None), int):
                setattr(tower, size, value)
    text_type = towers()[model_type]
    config.text_config = transformers.AutoConfig.for_model(text_type, **_SIZES, **_TOKENS, **_MORE.get(text_type, {}))
    model = transformers.AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0, 0.1 if "embed_tokens" in name or "lm_head" in name else 0.2)
    return model


@each_case("model_type", CHECKED)
def test_the_text_models_logits_are_those_of_the_whole(model_type: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model, rng = tiny_model(model_type), np.random.default_rng(1)
    tokens = [rng.integers(4, _SIZES["vocab_size"], length).tolist() for length in LENGTHS]
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([prompt])).logits[0].numpy() for prompt in tokens]
    for spelling in ("old", "new"):
        folder = tmp_path / spelling
        model.save_pretrained(folder, save_original_format=spelling == "old")
        parity = compare(ReferenceRunner(import_checkpoint(Checkpoint.open(folder))).run_ragged(tokens), expected)
        assert parity.worst <= parity.limit, (model_type, spelling, parity)


@each_case("model_type", ["glm4v_moe", "qwen3_vl_moe"])
def test_text_models_with_experts_by_cuda_kernels(model_type: str, tmp_path: Path) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    assert error_of_program(tmp_path) <= 2e-5


@each_case("model_type", TEXT_TOWERS)
def test_the_text_model_without_model_type_is_that_of_transformers(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    assert TEXT_TOWERS[model_type] == config.text_config.model_type


def test_every_text_model_that_is_published_within_others_alone_is_checked() -> None:
    assert TOWERS.keys() <= {towers()[name] for name in CHECKED}
