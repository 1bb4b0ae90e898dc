"""Attention: the choice of a backend; both are correct, and independent of batch, chunks, blocks and threads."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.artifact import AttentionStep, KVGeometry
from ingot.artifact.kv_geometry import KVType
from ingot.errors import EngineError, UsageError
from ingot.runtime.cpu.attention_operands import AttentionOperands
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native import attention
from ingot.runtime.cpu.native.attention import (
    NativeAttention,
    attention_backend,
    isa_in_use,
    make_attention,
    use_isa,
)
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.numpy_attention import NumpyAttention
from ingot.runtime.forward_batch import ForwardBatch
from tests.each_case import each_case
from tests.runtime.cpu.native.attention_cases import (
    PRECISIONS,
    ROUNDED,
    SHAPES,
    TOLERANCE,
    Backend,
    Case,
    expected,
    native_attention,
    rotated,
    run_alone,
    run_plan,
    run_shuffled,
    tables,
)


@pytest.fixture
def backend_not_chosen() -> Iterator[None]:
    attention_backend.cache_clear()
    yield
    attention_backend.cache_clear()


@pytest.mark.usefixtures("backend_not_chosen")
def test_numpy_is_used_when_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_ATTENTION", "numpy")
    assert attention_backend() == "numpy"
    assert isinstance(make_attention(Case().pool(), 1), NumpyAttention)


@pytest.mark.skipif(native_library() is None, reason="the kernel was not built")
@pytest.mark.usefixtures("backend_not_chosen")
def test_the_kernel_is_used_when_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_ATTENTION", "native")
    assert attention_backend().startswith("native-")


@pytest.mark.usefixtures("backend_not_chosen")
def test_without_a_kernel_numpy_is_used_and_asking_for_native_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("INGOT_ATTENTION", raising=False)
    monkeypatch.setattr(attention, "native_library", lambda: None)
    assert attention_backend() == "numpy"
    attention_backend.cache_clear()
    monkeypatch.setenv("INGOT_ATTENTION", "native")
    with pytest.raises(EngineError, match="INGOT_ATTENTION is native, but its kernel was not built"):
        attention_backend()


@pytest.mark.usefixtures("backend_not_chosen")
def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_ATTENTION", "cuda")
    with pytest.raises(UsageError, match="INGOT_ATTENTION is 'cuda'; it must be native or numpy"):
        attention_backend()


@pytest.fixture(params=["numpy", "native"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return native_attention(1) if request.param == "native" else NumpyAttention


@pytest.fixture
def first_isa() -> Iterator[str]:
    native_attention(1)
    before = isa_in_use()
    yield before
    use_isa(before)


@each_case("case", SHAPES + ROUNDED, ids=str)
def test_attention_equals_its_definition_in_float64(case: Case, backend: Backend) -> None:
    outputs = run_alone(case, backend(case.pool()))
    for sequence, output in zip(case.sequences, outputs, strict=True):
        np.testing.assert_allclose(output, expected(case, sequence), atol=TOLERANCE, rtol=0)


@each_case("case", SHAPES + ROUNDED, ids=str)
@each_case("seed", [1, 2])
def test_batch_mates_chunks_and_blocks_do_not_change_a_bit(case: Case, backend: Backend, seed: int) -> None:
    alone = run_alone(case, backend(case.pool()))
    mixed = run_shuffled(case, backend(case.pool()), seed)
    for a, b in zip(alone, mixed, strict=True):
        assert a.tobytes() == b.tobytes()


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.integers(1, 3), group=st.integers(1, 9), dim=st.sampled_from([8, 16, 20, 32, 64, 80]),
    block_tokens=st.sampled_from([1, 7, 16, 64]), window=st.sampled_from([0, 0, 5, 64, 65]),
    softcap=st.sampled_from([0.0, 5.0]), lengths=st.lists(st.integers(1, 140), min_size=1, max_size=4),
    seed=st.integers(0, 99), quarters=st.sampled_from([0, 2, 4]), packed=st.booleans(), has_sinks=st.booleans(),
    precision=st.sampled_from([("float32", 0), *PRECISIONS]),
)  # fmt: skip
def test_any_shape_gives_the_same_bits_however_it_is_run(
    kv_heads: int,
    group: int,
    dim: int,
    block_tokens: int,
    window: int,
    softcap: float,
    lengths: list[int],
    seed: int,
    quarters: int,
    packed: bool,
    has_sinks: bool,
    precision: tuple[KVType, int],
) -> None:
    rotary_dim = dim * quarters // 4
    shape = (kv_heads * group, kv_heads, dim, block_tokens, softcap, window)
    case = Case(*shape, tuple(lengths), seed, rotary_dim, packed, *precision, has_sinks)
    alone = run_alone(case, native_attention(1)(case.pool()))
    mixed = run_shuffled(case, native_attention(2)(case.pool()), seed)
    assert [a.tobytes() for a in alone] == [b.tobytes() for b in mixed]
    for sequence, output in zip(case.sequences, alone, strict=True):
        np.testing.assert_allclose(output, expected(case, sequence), atol=2 * TOLERANCE, rtol=0)


@each_case(("dtype", "int4_group"), [("float32", 0), *PRECISIONS])
def test_block_size_does_not_change_a_bit(dtype: KVType, int4_group: int) -> None:
    results = [
        run_alone(case, native_attention(1)(case.pool()))
        for case in (Case(block_tokens=n, dtype=dtype, int4_group=int4_group) for n in (1, 5, 16, 64, 100))
    ]
    assert len({b"".join(x.tobytes() for x in outputs) for outputs in results}) == 1


@each_case(("dtype", "int4_group"), [("float32", 0), *PRECISIONS])
def test_threads_do_not_change_a_bit(dtype: KVType, int4_group: int) -> None:
    case = Case(
        heads=8, kv_heads=4, dim=64, lengths=(300, 1, 200), dtype=dtype, int4_group=int4_group
    )  # large enough to be shared
    results = [run_alone(case, native_attention(threads)(case.pool())) for threads in (1, 2, 3, 8)]
    assert len({b"".join(x.tobytes() for x in outputs) for outputs in results}) == 1


LONG = Case(heads=8, kv_heads=2, dim=64, lengths=(1, 1100, 513, 512))  # splits of 512 tokens, one of them of one token


@pytest.mark.parametrize(
    "case",
    [
        LONG,
        replace(LONG, dtype="int8", rotary_dim=64),
        replace(LONG, dtype="int4", int4_group=32),
        replace(LONG, window=600, has_sinks=True),
    ],
    ids=str,
)
def test_splits_of_a_long_context_give_the_same_bits_on_any_number_of_threads(case: Case) -> None:
    plan = [[(s, n - 1) for s, n in enumerate(case.lengths) if n > 1], [(s, 1) for s in range(len(case.lengths))]]
    alone = run_alone(case, native_attention(1)(case.pool()))
    for threads in (1, 2, 3, 16):  # the second step has one row per sequence: threads share its contexts
        outputs = run_plan(case, native_attention(threads)(case.pool()), plan, tables(case, threads))
        assert [x.tobytes() for x in outputs] == [x.tobytes() for x in alone]
    for sequence, output in zip(case.sequences, alone, strict=True):
        np.testing.assert_allclose(output, expected(case, sequence), atol=2 * TOLERANCE, rtol=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_in_a_shared_context_reaches_the_output(bad: float) -> None:
    case = replace(LONG, lengths=(1400,))
    case.sequences[0].value[700, 0] = bad
    plan = [[(0, 1399)], [(0, 1)]]
    output = run_plan(case, native_attention(4)(case.pool()), plan, tables(case))[0]
    assert not np.isfinite(output[-1].reshape(8, 64)[:4, 0]).any()
    assert np.isfinite(output[-1].reshape(8, 64)[4:]).all()


@each_case(("dtype", "int4_group"), [("float32", 0), *PRECISIONS])
def test_avx2_and_avx512_agree_to_the_last_bit(first_isa: str, dtype: KVType, int4_group: int) -> None:
    case = Case(
        heads=7,
        kv_heads=1,
        dim=80,
        softcap=4.0,
        window=90,
        lengths=(600, 7),
        dtype=dtype,
        int4_group=int4_group,
        has_sinks=True,
    )
    results = [run_alone(case, native_attention(1)(case.pool())) for isa in ("avx512", "avx2") if use_isa(isa)]
    if len(results) < 2:
        pytest.skip("this CPU has one of them or neither")
    assert [x.tobytes() for x in results[0]] == [x.tobytes() for x in results[1]]


def test_the_baseline_is_right_and_keeps_its_own_bits(first_isa: str) -> None:
    assert use_isa("baseline")
    for case in SHAPES + ROUNDED:
        alone = run_alone(case, native_attention(1)(case.pool()))
        mixed = run_shuffled(case, native_attention(2)(case.pool()), 3)
        assert [a.tobytes() for a in alone] == [b.tobytes() for b in mixed]
        for sequence, output in zip(case.sequences, alone, strict=True):
            np.testing.assert_allclose(output, expected(case, sequence), atol=TOLERANCE, rtol=0)


def test_an_unknown_instruction_set_is_refused_and_changes_nothing(first_isa: str) -> None:
    assert not use_isa("mmx")
    assert isa_in_use() == first_isa


def test_rotation_and_packing_give_the_same_bits_as_rotating_and_splitting_first(backend: Backend) -> None:
    case = Case(heads=6, kv_heads=2, dim=24, rotary_dim=16, packed=True)
    rotation = case.rotation
    assert rotation is not None
    plain = Case(heads=6, kv_heads=2, dim=24)
    for sequence, source_of in zip(plain.sequences, case.sequences, strict=True):
        positions = np.arange(len(source_of.query))
        for target, source in ((sequence.query, source_of.query), (sequence.key, source_of.key)):
            target[:] = rotation.apply(source.reshape(len(positions), -1, 24), positions).reshape(target.shape)
    before, after = run_alone(plain, backend(plain.pool())), run_alone(case, backend(case.pool()))
    assert [x.tobytes() for x in before] == [x.tobytes() for x in after]


def test_the_pool_holds_rotated_keys_and_unchanged_values(backend: Backend) -> None:
    case = Case(lengths=(5,), rotary_dim=16, packed=True)
    pool = case.pool()
    run_alone(case, backend(pool))
    block, views = int(tables(case)[0, 0]), pool.layer(1)
    keys, values = (codes[block, :, :5].swapaxes(0, 1) for codes in views[:2])  # [tokens, kv heads, dim] each
    expected_keys = rotated(case, case.sequences[0].key.reshape(5, case.kv_heads, case.dim).astype(np.float64))
    np.testing.assert_allclose(keys, expected_keys, atol=1e-6, rtol=0)
    np.testing.assert_array_equal(values.reshape(5, -1), case.sequences[0].value)


@each_case("case", ROUNDED, ids=str)
def test_every_backend_and_instruction_set_stores_the_same_bytes(case: Case, first_isa: str) -> None:
    case = replace(case)
    for scale in (1.0, 1e-4, 1e-9, 3e5):  # with subnormal scales and codes, and beyond float16
        for sequence in case.sequences:
            sequence.key[:] *= np.float32(scale)
            sequence.value[:] *= np.float32(scale)
        pools = []
        for isa in ("numpy", "avx512", "avx2", "baseline"):
            if isa == "numpy" or use_isa(isa):
                pools.append(case.pool())
                run_alone(case, NumpyAttention(pools[-1]) if isa == "numpy" else native_attention(1)(pools[-1]))
        assert len({pool.blocks.tobytes() for pool in pools}) == 1


def test_keys_and_values_are_written_to_their_layer_and_slot_only(backend: Backend) -> None:
    case = Case(lengths=(5,), block_tokens=4)
    pool = case.pool()
    run_alone(case, backend(pool))
    counts = [sum(int((~np.isnan(codes)).sum()) for codes in pool.layer(layer)[:2]) for layer in (0, 1)]
    assert counts == [0, 5 * 2 * case.kv_heads * case.dim]


@each_case(("dtype", "int4_group"), PRECISIONS)
def test_codes_and_scales_are_written_to_their_layer_and_slot_only(
    dtype: KVType, int4_group: int, backend: Backend
) -> None:
    case = Case(lengths=(5,), block_tokens=4, dtype=dtype, int4_group=int4_group)
    pools = [case.pool(), case.pool()]
    pools[1].blocks[:] = 0
    for pool in pools:
        run_alone(case, backend(pool))
    same = (pools[0].blocks == pools[1].blocks).sum()  # bytes that were written, as the pools began unequal
    vector_bytes = case.dim * {"float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1, "int4": 0.5, "k8v4": 0.75}[dtype]
    layer = case.geometry.layers[1]
    scale_bytes = layer.scales_of_key + layer.scales_of_value  # of two bytes each, averaged over key and value
    assert same == 5 * 2 * case.kv_heads * (vector_bytes + scale_bytes)


@each_case(("dtype", "int4_group"), [("float32", 0), *PRECISIONS])
@each_case("bad", [np.nan, np.inf, -np.inf])
@each_case("name", ["key", "value"])
def test_a_number_that_is_not_finite_reaches_the_tokens_that_see_it_and_no_others(
    dtype: KVType, int4_group: int, bad: float, name: str, backend: Backend
) -> None:
    case = Case(lengths=(90, 90), heads=4, kv_heads=2, dtype=dtype, int4_group=int4_group)
    clean = run_alone(case, backend(case.pool()))
    getattr(case.sequences[0], name)[70, 3] = bad  # token 70, first KV head: query heads 0 and 1
    spoiled = run_alone(case, backend(case.pool()))
    assert spoiled[1].tobytes() == clean[1].tobytes()
    heads = spoiled[0].reshape(90, 4, case.dim)
    assert heads[:, 2:].tobytes() == clean[0].reshape(90, 4, case.dim)[:, 2:].tobytes()
    assert heads[:64].tobytes() == clean[0].reshape(90, 4, case.dim)[:64].tobytes()  # of earlier tiles
    quantized_or_nan = case.geometry.is_quantized or np.isnan(bad)
    if name == "value" or quantized_or_nan:
        assert (~np.isfinite(heads[70:, :2])).any(axis=-1).all()


def test_layers_that_share_keys_and_values_read_them_and_write_nothing(backend: Backend) -> None:
    case = Case(lengths=(40,))
    alone = run_alone(case, backend(case.pool()))[0]
    geometry = KVGeometry(num_layers=2, num_kv_heads=case.kv_heads, head_dim=case.dim, shares=(0, 0))
    pool = KVPool(geometry, 6)
    of_layer_0 = AttentionStep.model_validate({**case.step.model_dump(), "layer": 0})
    sequence, output = case.sequences[0], np.zeros_like(case.sequences[0].query)
    nothing = np.zeros(40, np.int64)
    batch = ForwardBatch(nothing, nothing, nothing, np.array([0, 40], np.int32), np.array([40], np.int32), tables(case))
    under_test = backend(pool)
    under_test.begin(batch)
    own = AttentionOperands(sequence.query, sequence.key, sequence.value)
    under_test.bind(of_layer_0, own, output)()
    before = pool.blocks.tobytes()
    under_test.bind(case.step, AttentionOperands(sequence.query), output)()
    assert output.tobytes() == alone.tobytes()
    assert pool.blocks.tobytes() == before


def test_very_large_scores_do_not_overflow(backend: Backend) -> None:
    case = Case(lengths=(130,))
    case.sequences[0].query[:] *= 1e4
    output = run_alone(case, backend(case.pool()))[0]
    assert np.isfinite(output).all()


def test_concurrent_callers_get_the_bits_they_get_alone() -> None:
    case = Case(heads=8, kv_heads=4, dim=64, lengths=(300,))
    alone = run_alone(case, native_attention(2)(case.pool()))[0].tobytes()
    results: list[bytes] = []

    def call() -> None:
        for _ in range(5):
            results.append(run_alone(case, native_attention(2)(case.pool()))[0].tobytes())

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [alone] * 15


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_attends_with_threads_of_its_own() -> None:
    case = Case(heads=8, kv_heads=4, dim=64, lengths=(300,))
    before = run_alone(case, native_attention(2)(case.pool()))[0].tobytes()
    child = os.fork()
    if child == 0:
        same = run_alone(case, native_attention(2)(case.pool()))[0].tobytes() == before
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_backend_in_use_is_named() -> None:
    expected_name = "numpy" if native_library() is None else f"native-{isa_in_use()}"
    assert attention_backend() == expected_name
    kind = NumpyAttention if native_library() is None else NativeAttention
    assert isinstance(make_attention(Case().pool(), 1), kind)
