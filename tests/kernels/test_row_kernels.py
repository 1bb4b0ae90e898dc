"""Norm, gather, gated activation, rotary embedding with the write to the pool, and sampling, in the interpreter."""

import numpy as np
import pytest
import torch

from ingot.kernels.elementwise import add_rows
from ingot.kernels.gated_activation import GELU_ERF, GELU_TANH, SILU, gated_activation
from ingot.kernels.gather import gather_quantized_rows, gather_rows
from ingot.kernels.norm import rms_norm
from ingot.kernels.rotary_kv_write import rotary_kv_write
from ingot.kernels.sampling import draw, greedy
from tests.kernels.reference import FLOAT, FP8, INT4, INT8, STEPS, Pool, numpy64, rope


def random(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


@pytest.mark.parametrize("columns", [1, 64, 172, 1000])
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm_adds_and_scales(columns: int, residual: bool) -> None:
    rng = np.random.default_rng(0)
    x, added, weight = random(rng, 5, columns), random(rng, 5, columns), random(rng, columns)
    out, total = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    rms_norm[(5,)](
        *(x, added if residual else None, weight, out, total if residual else None, columns, columns, columns, 1e-5),
        COLUMNS=columns,
        BLOCK=max(16, 1 << (columns - 1).bit_length()),
        HAS_RESIDUAL=residual,
    )
    h = numpy64(x) + (numpy64(added) if residual else 0)
    wanted = h / np.sqrt((h**2).mean(axis=1, keepdims=True) + 1e-5) * numpy64(weight)
    np.testing.assert_allclose(numpy64(out), wanted, rtol=2e-6, atol=2e-6)
    if residual:
        assert torch.equal(total, x + added)


def test_rows_are_gathered_and_padding_is_zero() -> None:
    rng = np.random.default_rng(1)
    table, indices = random(rng, 9, 100, dtype=torch.float16), torch.tensor([3, -1, 8, 3])
    out = torch.full((4, 100), torch.nan)
    gather_rows[(4, 2)](indices, table, out, 100, 100, COLUMNS=100, BLOCK=64)
    assert torch.equal(out[[0, 2, 3]], table[[3, 8, 3]].to(torch.float32))
    assert (out[1] == 0).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_quantized_rows_are_gathered_exactly(symmetric: bool) -> None:
    rng = np.random.default_rng(2)
    codes = torch.from_numpy(rng.integers(0, 128, (9, 100), np.int8 if symmetric else np.uint8))
    scales, zeros = random(rng, 9, 4), torch.from_numpy(rng.integers(0, 255, (9, 4), np.uint8))
    out, indices = torch.full((3, 100), torch.nan), torch.tensor([8, 0, -1])
    gather_quantized_rows[(3, 2)](
        *(indices, codes, scales, None if symmetric else zeros, out, 100, 4, 100),
        COLUMNS=100,
        BLOCK=64,
        GROUP=32,
        HAS_ZERO_POINTS=not symmetric,
    )
    group = torch.arange(100) // 32
    values = codes.to(torch.float32) - (0 if symmetric else zeros.to(torch.float32)[:, group])
    assert torch.equal(out[:2], (values * scales[:, group])[[8, 0]])
    assert (out[2] == 0).all()


def test_rows_are_added() -> None:
    rng = np.random.default_rng(8)
    left, right, out = random(rng, 3, 100), random(rng, 3, 100), torch.full((3, 100), torch.nan)
    add_rows[(3, 2)](left, right, out, 100, 100, 100, COLUMNS=100, BLOCK=64)
    assert torch.equal(out, left + right)


@pytest.mark.parametrize(("kind", "name"), [(SILU, "silu"), (GELU_ERF, "none"), (GELU_TANH, "tanh")])
def test_gated_activations_equal_torchs(kind: int, name: str) -> None:
    gate_up = random(np.random.default_rng(3), 3, 200) * 30
    out = torch.full((3, 100), torch.nan)
    gated_activation[(3, 2)](gate_up, out, 200, 100, COLUMNS=100, BLOCK=64, KIND=kind)
    gate, up = gate_up[:, :100].double(), gate_up[:, 100:].double()
    functions = torch.nn.functional
    active = functions.silu(gate) if name == "silu" else functions.gelu(gate, approximate=name)
    np.testing.assert_allclose(numpy64(out), numpy64(active * up), rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("kind", [FLOAT, FP8, INT8, INT4])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), [(4, 2, 32, 32), (7, 1, 80, 32), (2, 2, 8, 8)])
def test_rotary_embedding_and_the_pools_vectors(kind: int, heads: int, kv_heads: int, dim: int, rotary: int) -> None:
    rng = np.random.default_rng(5)
    tokens, block_tokens, slots = 6, 4, torch.tensor([0, 3, 7, -1, 19, 10])
    qkv, positions = random(rng, tokens, (heads + 2 * kv_heads) * dim), torch.arange(tokens) + 3
    cos, sin = random(rng, 20, rotary // 2), random(rng, 20, rotary // 2)
    pool = Pool.empty(5, kv_heads, block_tokens, dim, kind)
    q = torch.full((tokens, heads * dim), torch.nan)
    rotary_kv_write[(tokens, heads + kv_heads)](
        *(qkv, positions, slots, cos, sin, q, pool.codes, pool.scales, qkv.shape[1], heads * dim),
        **pool.strides,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_DIM=max(16, 1 << (dim - 1).bit_length()),
        ROTARY=rotary,
        BLOCK_TOKENS=block_tokens,
        KIND=kind,
    )
    vectors = numpy64(qkv).reshape(tokens, -1, dim)
    turned = rope(vectors, positions.numpy(), numpy64(cos), numpy64(sin))
    np.testing.assert_allclose(numpy64(q).reshape(tokens, heads, dim), turned[:, :heads], atol=3e-6)
    stored = pool.vectors()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        wanted = np.stack([turned[token, heads : heads + kv_heads], vectors[token, heads + kv_heads :]])
        found = stored[slot // block_tokens, :, :, slot % block_tokens]
        largest = np.abs(wanted).max(axis=-1, keepdims=True)
        assert (np.abs(found - wanted) <= STEPS[kind] * largest).all()
    written = {slot for slot in slots.tolist() if slot >= 0}
    untouched = [slot for slot in range(20) if slot not in written]
    assert not stored.transpose(0, 3, 1, 2, 4).reshape(20, -1)[untouched].any()


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = random(np.random.default_rng(6), 3, 300)
    logits[1, [50, 250]] = 9.0
    logits[2] = -3.0
    tokens = torch.zeros(3, dtype=torch.int64)
    greedy[(3,)](logits, tokens, 300, VOCABULARY=300, BLOCK=64)
    assert tokens.tolist() == [int(logits[0].argmax()), 50, 0]


def drawn(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, uniforms: list[float]) -> list[int]:
    rows = len(uniforms)
    tokens = torch.zeros(rows, dtype=torch.int64)
    options = [torch.full((rows,), value) for value in (temperature, top_k, top_p)]
    draw[(rows,)](
        *(logits.expand(rows, -1).contiguous(), options[0], options[1].to(torch.int32), options[2]),
        *(torch.tensor(uniforms), tokens, logits.shape[-1]),
        VOCABULARY=logits.shape[-1],
        BLOCK=64,
    )
    return tokens.tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (0.9, 20, 0.8), (0.0, 0, 1.0)]
)
def test_draws_are_where_the_running_sum_of_kept_shares_passes(temperature: float, top_k: int, top_p: float) -> None:
    logits = random(np.random.default_rng(7), 1, 150) * 2
    uniforms = [0.0, 0.35, 0.999]
    shares = torch.softmax(logits[0].double() / (temperature or 1.0), 0)
    order = torch.argsort(-logits[0])
    kept = order[: 1 if temperature == 0 else top_k or None]
    mass = shares[kept].cumsum(0)
    kept = kept[: int((mass < top_p * mass[-1]).sum()) + 1]
    chosen = torch.where(torch.isin(torch.arange(150), kept), shares, 0.0)
    sums = chosen.cumsum(0)
    wanted = [int((sums <= u * sums[-1]).sum()) for u in (uniforms if temperature else [0.0] * len(uniforms))]
    assert drawn(logits, temperature, top_k, top_p, uniforms) == wanted
