import pytest

pytest.importorskip("torch", reason="the peer is torch: pip install --group oracle")

from benchmarks.gpu.programs.models import LLAMA_8B, SPECS, TINYLLAMA
from benchmarks.gpu.times.torch_peer import peer_specs


def test_torch_computes_each_dense_model_once_in_each_form_of_weights() -> None:
    assert [(spec.shape, spec.weights) for spec in peer_specs(SPECS)] == [
        (LLAMA_8B, "int4"),
        (LLAMA_8B, "16-bit"),
        (TINYLLAMA, "int4"),
        (TINYLLAMA, "16-bit"),
    ]
