"""The KV pool on the device: how many blocks it gets, and the refusal when none fits."""

import logging

import pytest

from ingot.artifact import KVGeometry, ModelFacts
from ingot.errors import EngineError, UsageError
from ingot.runtime.cuda.kv_pool import device_pool_size
from tests.runtime.cuda.conftest import MakeExecutor
from tests.simulators.interpreted_device import InterpretedDevice

KV = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=32, block_tokens=16)
MODEL = ModelFacts(family="llama", num_layers=2, hidden_size=64, vocab_size=128, context_tokens=64, num_parameters=1000)
GIB = 2**30


def test_the_pool_takes_free_memory_except_the_reserve_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    device = InterpretedDevice(GIB)
    many = device_pool_size(MODEL, KV, device, kv_blocks=None, kv_bytes=None, max_sequences=2**20, graph_nodes=1000)
    assert 0.6 * GIB < many.num_blocks * KV.block_bytes < 0.75 * GIB
    assert "1.1 GB free of 1.1 GB" in caplog.text
    few = device_pool_size(MODEL, KV, device, kv_blocks=None, kv_bytes=None, max_sequences=3, graph_nodes=1000)
    assert few.num_blocks == 3 * 4
    given = device_pool_size(
        MODEL, KV, device, max_sequences=3, kv_blocks=None, kv_bytes=5 * KV.block_bytes, graph_nodes=0
    )
    assert given.num_blocks == 5


def test_a_gpu_without_memory_for_a_block_is_refused_with_its_free_memory() -> None:
    with pytest.raises(EngineError, match=r"no KV block of .* fits on an interpreter: 104.9 MB free of 104.9 MB, 2"):
        device_pool_size(
            MODEL, KV, InterpretedDevice(100 * 2**20), kv_blocks=None, kv_bytes=None, max_sequences=1, graph_nodes=0
        )


def test_a_pool_that_does_not_fit_is_refused_and_the_device_closed(make_executor: MakeExecutor) -> None:
    device = InterpretedDevice(2**20)
    with pytest.raises(
        EngineError, match=r"a KV pool of 4000 blocks \(16000 tokens\) takes .* ask for fewer KV blocks"
    ):
        make_executor(device, kv_blocks=4000)
    assert device.closed
    with pytest.raises(UsageError, match="give one of them"):
        make_executor(kv_bytes=5)
