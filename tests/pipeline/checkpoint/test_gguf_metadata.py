"""Metadata of GGUF files: what changes the numbers is followed or refused; Llama 3.1's rotary embedding both ways."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import CheckpointError, UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.gguf import gguf_config
from ingot.pipeline.checkpoint.gguf_file import GgufFile, GgufTensor
from ingot.pipeline.interchange.transcode import transcode
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.tiny_model import tiny_checkpoint
from tests.pipeline.checkpoint.test_gguf import file_with
from tests.pipeline.tiny_checkpoint import edit_json


@each_case(
    ("metadata", "message"),
    [
        ({"llama__expert_count": 8}, "llama.expert_count is 8, which Ingot does not follow: it must be absent or 0"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count is 8, .* it must be absent or 16"),
        ({"llama__attention__value_length": 32}, "llama.attention.value_length is 32, .* absent or 16"),
        ({"llama__attention__sliding_window": 512}, "llama.attention.sliding_window is 512, which Ingot does not"),
        ({"llama__attention__causal": False}, "llama.attention.causal is False, .* absent or True"),
        ({"llama__rope__scaling__factor": 4.0}, "llama.rope.scaling.factor is 4.0, .* absent or 1"),
        ({"llama__final_logit_softcapping": 30.0}, "llama.final_logit_softcapping is 30.0, which"),
    ],
)
def test_metadata_that_are_not_followed_are_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^m\.gguf: {message}"):
        gguf_config(file_with(**metadata))


def test_metadata_that_change_nothing_are_taken() -> None:
    harmless = {"vocab_size": 128, "rope__dimension_count": 16, "attention__value_length": 16, "expert_count": 0,
                "rope__scaling__type": "none", "tensor_data_layout": "Meta AI original pth"}  # fmt: skip
    assert gguf_config(file_with(**{f"llama__{key}": value for key, value in harmless.items()})) == gguf_config(
        file_with()
    )


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 512}  # fmt: skip


def test_llama_3_s_rotary_embedding_is_written_and_read(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    edit_json(source / "config.json", {"rope_scaling": LLAMA3, "max_position_embeddings": 4096})
    transcode(source, tmp_path / "out", "gguf")
    opened = Checkpoint.open(tmp_path / "out")
    assert opened.config["rope_scaling"] == LLAMA3
    (rope,) = {layer.rope for layer in read_config(opened).layers}
    (expected,) = {layer.rope for layer in read_config(Checkpoint.open(source)).layers}
    assert rope == expected
    import_checkpoint(opened)


def test_a_rotary_embedding_with_other_factors_is_not_written(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    edit_json(source / "config.json", {"rope_scaling": {**LLAMA3, "high_freq_factor": 32.0}})
    with pytest.raises(UsageError, match=r"gguf is written for Llama 3\.1's scaled rotary embedding; this model has"):
        transcode(source, tmp_path / "out", "gguf")


@each_case(
    ("factors", "shape", "message"),
    [
        ([8] * 8, (8,), r"scales the rotary frequencies by \[8.0, .* which are not the factors of Llama 3.1"),
        ([float("nan")] * 8, (8,), "which are not the factors of Llama 3.1"),
        ([float("inf")] * 8, (8,), "which are not the factors of Llama 3.1"),
        ([1] * 4, (4,), r"rope_freqs.weight is \[4\]; it must be floats \[8\], one a frequency"),
    ],
)
def test_other_rotary_factors_are_refused(
    factors: list[float], shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(np.array(factors, np.float32).tobytes())
    tensor = GgufTensor("rope_freqs.weight", 0, shape, 0, 4 * len(factors))
    file = file_with()
    with pytest.raises(CheckpointError, match=message):
        gguf_config(GgufFile(path, file.metadata, {**file.tensors, tensor.name: tensor}))
