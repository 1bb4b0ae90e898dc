"""Worked numbers that engineers quote: each with its formula and unit, and the copied figure where that is wrong."""

import pytest

from ingot.artifact import KVGeometry
from ingot.planning import formulas
from ingot.planning.hardware import find_hardware

GB = 10**9
# The quoted figures round the A100's 2,039 GB/s.
A100 = find_hardware("a100").model_copy(update={"bandwidth": 2.0e12})
H100 = find_hardware("h100")


def kv_bytes(layers: int, heads: int, tokens: int, head_dim: int = 128) -> int:
    """Bytes of fp16 KV of one sequence: 2 x layers x heads x dims x 2 bytes x tokens, by the engine's own geometry."""
    kv = KVGeometry(num_layers=layers, num_kv_heads=heads, head_dim=head_dim, dtype="float16")
    assert tokens % kv.block_tokens == 0
    return tokens // kv.block_tokens * kv.block_bytes


def test_the_floor_of_a_decode_step_is_one_read_of_the_weights() -> None:
    # weights [bytes] / bandwidth [bytes/s] = [s]
    floor = formulas.read_seconds(formulas.weight_bytes(70e9, 16), A100.bandwidth)
    assert floor * 1e3 == pytest.approx(70, abs=0.5)
    assert formulas.tokens_per_second(floor) == pytest.approx(14.3, abs=0.05)
    assert formulas.read_seconds(formulas.weight_bytes(7e9, 16), A100.bandwidth) * 1e3 == pytest.approx(7, abs=0.05)


def test_int4_weights_of_70b_on_an_h100() -> None:
    floor = formulas.read_seconds(formulas.weight_bytes(70e9, 4), H100.bandwidth)
    assert floor * 1e3 == pytest.approx(10.4, abs=0.05)
    assert formulas.tokens_per_second(floor) == pytest.approx(95.7, abs=0.05)
    assert formulas.tokens_per_second(floor, batch=32) == pytest.approx(3063, abs=1)


def test_kv_of_llama_3_70b() -> None:
    # 2 x 80 layers x 8 KV heads x 128 dims x 2 bytes x tokens
    assert kv_bytes(80, 8, 4096) == 1_342_177_280
    copied = 1.07 * GB
    assert kv_bytes(80, 8, 4096) > 1.25 * copied
    assert kv_bytes(80, 8, 128 * 1024) / GB == pytest.approx(42.9, abs=0.05)


@pytest.mark.parametrize(
    ("layers", "heads", "tokens", "gigabytes", "copied"),
    [(32, 8, 4096, 0.54, 0.25), (32, 32, 2048, 1.07, None), (126, 8, 4096, 2.1, 6.4)],
    ids=["Llama-3-8B", "Llama-2-7B", "Llama-3.1-405B"],
)
def test_kv_of_other_models(layers: int, heads: int, tokens: int, gigabytes: float, copied: float | None) -> None:
    found = kv_bytes(layers, heads, tokens) / GB
    assert found == pytest.approx(gigabytes, rel=0.01)
    assert copied is None or found != pytest.approx(copied, rel=0.5)


def test_sequences_of_llama_2_7b_in_63_gb() -> None:
    # 63 GB / 1.0737 GB = 58.67: quoted as 59, of which 58 whole ones fit
    assert round(63 * GB / kv_bytes(32, 32, 2048)) == 59
    assert formulas.users_per_node(1, 63 * GB, 0, kv_bytes(32, 32, 2048)) == 58


def test_intensity_thresholds() -> None:
    # flops [1/s] / bandwidth [bytes/s] = operations a byte
    assert A100.intensity("fp16") == pytest.approx(156, abs=0.5)
    assert H100.intensity("fp16") == pytest.approx(295, abs=0.5)
    assert find_hardware("a100").intensity("fp16") == pytest.approx(153, abs=0.5)


def test_one_matmul_of_8192_by_8192_in_fp16() -> None:
    size = formulas.weight_bytes(8192 * 8192, 16)
    assert size / 1e6 == pytest.approx(134.2, abs=0.05)
    seconds = formulas.read_seconds(size, H100.bandwidth)
    assert seconds * 1e6 == pytest.approx(40.1, abs=0.05)
    copied = 128e6 / H100.bandwidth  # mebibytes taken for megabytes
    assert copied * 1e6 == pytest.approx(38.2, abs=0.05)
    assert formulas.matmul_intensity(1, 8192, 8192, 16) == pytest.approx(1, abs=0.001)
    assert formulas.matmul_intensity(512, 8192, 8192, 16) > H100.intensity("fp16")


def test_tokens_and_speedup_of_speculation() -> None:
    # tau = (1 - a^(g + 1)) / (1 - a); speedup = tau T / (T + g t)
    assert formulas.accepted_tokens(0.8, 5) == pytest.approx(3.69, abs=0.005)
    assert formulas.accepted_tokens(0.8, 8) == pytest.approx(4.33, abs=0.005)
    assert formulas.accepted_tokens(0.8, 8) != pytest.approx(4.46, abs=0.05)
    found = formulas.speculative_speedup(0.8, 8, step_seconds=0.070, draft_seconds=0.004)
    assert found == pytest.approx(2.97, abs=0.005)
    assert found != pytest.approx(3.06, abs=0.05)
    assert formulas.accepted_tokens(1.0, 4) == 5


def test_moving_half_a_context_of_kv() -> None:
    size = kv_bytes(80, 8, 2048)
    assert size / 1e6 == pytest.approx(671, abs=0.5)
    both_directions_of_nvlink = 2 * H100.peer_link
    for bandwidth, milliseconds in ((both_directions_of_nvlink, 0.7), (50e9, 13.4), (H100.host_link, 10.5)):
        assert formulas.read_seconds(size, bandwidth) * 1e3 == pytest.approx(milliseconds, abs=0.06)


def test_more_requests_that_miss_are_worth_less_than_fewer_that_meet() -> None:
    assert formulas.goodput(1000, 0.4) == 600 < formulas.goodput(700, 0)


def test_itl_counts_tokens_and_tpot_counts_requests() -> None:
    # 10 intervals of 30 ms and 990 of 50 ms
    requests = [[0.030] * 10, [0.050] * 990]
    assert formulas.mean_itl(requests) * 1e3 == pytest.approx(49.8)
    assert formulas.mean_tpot(requests) * 1e3 == pytest.approx(40)


def test_money() -> None:
    # $/h / (3,600 s x tokens/s) x 1,000 = $ for 1,000 tokens
    assert formulas.cost_per_thousand(3, 1000) == pytest.approx(0.00083, abs=0.000005)
    assert formulas.api_cost_per_month(100e6, 0.001) == pytest.approx(3000)
    assert formulas.cost_per_month(2) == pytest.approx(1460)


def test_a_thousand_users_of_70b_in_fp16() -> None:
    # (8 x 80 GB - 140 GB) / 1.34 GB; the exact KV, 1.342 GB, leaves room for one less
    weights = formulas.weight_bytes(70e9, 16)
    assert formulas.users_per_node(8, 80 * GB, weights, 1.34 * GB) == 373
    users = formulas.users_per_node(8, 80 * GB, weights, kv_bytes(80, 8, 4096))
    assert users == 372
    nodes = -(-1000 // users)
    assert (nodes, nodes * 8) == (3, 24)
    assert nodes * 8 * 2.5 * 24 == 1440  # $2.50 an hour for each GPU


def test_weights_after_quantizing_and_pruning() -> None:
    assert formulas.weight_bytes(7e9, 16) / GB == 14
    assert formulas.weight_bytes(7e9, 4) / GB == 3.5
    assert formulas.compression(0.5, 4) == 8
