"""The C sampler: the tokens of `truncation_sampling`, exactly, on every instruction set and from every compiler."""

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.cpu.native import sample_tokens as binding
from ingot.runtime.cpu.native.attention import isa_in_use, use_isa
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.sample_tokens import SKIPPED, mask_logits, sample_tokens
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.truncation_sampling import TokenChoice, choose_token
from tests.each_case import each_case

NATIVE = Path(binding.__file__).parent
LAST = 1 - 2.0**-53
UNIFORMS = [0.0, 0.2, 0.5, 0.77, LAST]
CHOICES = [
    TokenChoice.of(SamplingParams(**params))  # type: ignore[arg-type]
    for params in (
        {},
        {"temperature": 0.8},
        {"temperature": 5e-324, "top_p": 0.5},
        {"temperature": 1.7e308, "top_p": 0.3},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 40},
        {"temperature": 1.0, "top_k": 2**70},
        {"temperature": 1.3, "top_k": 300, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 1.0, "top_p": 5e-324},
        {"temperature": 1.0, "top_p": LAST},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.5, "min_p": 1.0},
    )
]

pytestmark = pytest.mark.skipif(native_library() is None, reason="the library was not built")


def rows_of(vocab: int, seed: int = 0) -> list[FloatArray]:
    """Rows of many shapes: peaked, flat, with ties, forbidden tokens, sorted, extreme."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(vocab)
    forbidden = np.where(rng.random(vocab) < 0.7, -np.inf, normal)
    forbidden[rng.integers(vocab)] = 2.0
    rows = (
        normal,
        6 * normal,
        np.round(2 * normal) / 2,
        np.zeros(vocab),
        forbidden,
        np.sort(normal * 3),
        -np.sort(-normal * 3),
        normal * 4e37,
        normal * 1e-40,
    )
    return [row.astype(np.float32) for row in rows]


def assert_same(row: FloatArray, choices: list[TokenChoice], uniforms: list[float]) -> None:
    rows = np.tile(row, (len(choices) * len(uniforms), 1))
    pairs = [(choice, uniform) for choice in choices for uniform in uniforms]
    tokens = sample_tokens(rows, [choice for choice, _ in pairs], [uniform for _, uniform in pairs])
    assert tokens == [choose_token(row, choice, uniform) for choice, uniform in pairs]


@pytest.fixture(params=["avx512", "avx2", "baseline"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = isa_in_use()
    if not use_isa(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    use_isa(before)


@each_case("vocab", [1, 15, 16, 17, 100, 5003])
def test_every_instruction_set_gives_the_tokens_of_the_definition(isa: str, vocab: int) -> None:
    for row in rows_of(vocab):
        assert_same(row, CHOICES, UNIFORMS)


def test_a_large_vocabulary_too(isa: str) -> None:
    for row in rows_of(128_256)[:4]:
        assert_same(row, CHOICES[1::3], [0.3, LAST])


scores = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1.0, 1.5, -np.inf, 2.0**-149]),
    st.integers(-8, 8).map(float),
)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(scores, min_size=1, max_size=70),
    st.one_of(st.just(0.0), st.floats(5e-324, 1e308), st.floats(0.1, 3)),
    st.integers(0, 80),
    st.one_of(st.just(1.0), st.floats(5e-324, 1), st.floats(0.1, 0.999)),
    st.one_of(st.just(0.0), st.floats(0, 1)),
    st.integers(0, 2**53 - 1).map(lambda whole: whole / 2**53),
)
def test_any_row_and_any_parameters_give_the_token_of_the_definition(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_same(np.array(values, np.float32), [TokenChoice.of(params)], [uniform])


def test_rows_without_a_token_and_skipped_ones_change_no_other() -> None:
    rows = np.stack([row for row in rows_of(100) for _ in range(2)])
    rows[2, 99], rows[5, 3], rows[7] = np.nan, np.inf, -np.inf
    rows[9].view(np.uint32)[4] = 0xFFC00000  # NaN with a sign, as inf - inf gives
    choices = [CHOICES[index % len(CHOICES)] for index in range(len(rows))]
    choices[11] = SKIPPED
    tokens = sample_tokens(rows, choices, [0.4] * len(rows))
    assert [tokens[row] for row in (2, 5, 7, 9, 11)] == [-1, -1, -1, -1, -2]
    others = [row for row in range(len(rows)) if row not in (2, 5, 7, 9, 11)]
    assert [tokens[row] for row in others] == [choose_token(rows[row], choices[row], 0.4) for row in others]


def test_rows_may_be_any_array() -> None:
    rows = np.stack(rows_of(64))
    expected = [choose_token(row, CHOICES[1], 0.4) for row in rows]
    for array in (rows[::-1][::-1], np.asfortranarray(rows), np.repeat(rows, 2, 0)[::2], rows.astype(np.float64)):
        assert sample_tokens(array, [CHOICES[1]] * len(rows), [0.4] * len(rows)) == expected  # type: ignore[arg-type]
    assert sample_tokens(rows[:0], [], []) == []


def test_without_the_library_numpy_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.stack(rows_of(100))
    choices = [*CHOICES[: len(rows) - 1], SKIPPED]
    built = sample_tokens(rows, choices, [0.6] * len(rows))
    monkeypatch.setattr(binding, "_native", lambda: None)
    assert sample_tokens(rows, choices, [0.6] * len(rows)) == built


def test_threads_sample_at_the_same_time() -> None:
    rows = np.stack([rows_of(5003, seed)[1] for seed in range(8)])
    expected = [choose_token(row, CHOICES[8], 0.9) for row in rows]
    found: list[list[int]] = []

    def call() -> None:
        for _ in range(20):
            found.append(sample_tokens(rows, [CHOICES[8]] * 8, [0.9] * 8))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 80


@each_case("compiler", ["gcc", "clang"])
@each_case("flags", ["-O0", "-O3 -march=native", "-Os"])
def test_compilers_and_their_flags_change_no_token(compiler: str, flags: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    stub, library = tmp_path / "isa.c", tmp_path / "alone.so"
    stub.write_text('const char *paged_attention_isa(void) { return "baseline"; }\n')
    fixed = "-std=gnu11 -fno-fast-math -ffp-contract=off -fPIC -shared"  # as in hatch_build.py
    command = [compiler, *flags.split(), *fixed.split(), "-o", str(library), str(stub), str(NATIVE / "sample_tokens.c")]
    subprocess.run(command, check=True)
    rows = np.stack(rows_of(1003))
    tokens = np.empty(len(rows), np.int32)
    alone = ctypes.CDLL(str(library))
    alone.sample_tokens_scratch.restype = ctypes.c_int64
    scratch = ctypes.create_string_buffer(alone.sample_tokens_scratch(ctypes.c_int64(1003)))
    for choice in CHOICES:
        alone.sample_tokens(
            ctypes.c_void_p(rows.ctypes.data),
            *map(ctypes.c_int64, (1003, 1003, len(rows))),
            choice.packed * len(rows),
            (ctypes.c_double * len(rows))(*[0.7] * len(rows)),
            scratch,
            ctypes.c_void_p(tokens.ctypes.data),
        )
        assert tokens.tolist() == [choose_token(row, choice, 0.7) for row in rows]


@settings(max_examples=60, deadline=None)
@given(vocab=st.integers(1, 200), seed=st.integers(0, 10_000), share=st.sampled_from([0.0, 0.1, 0.9, 1.0]))
def test_a_mask_forbids_tokens_and_finds_what_is_not_finite(vocab: int, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    row = rng.standard_normal(vocab).astype(np.float32)
    row[rng.random(vocab) < 0.2] = -np.inf
    allowed = rng.random(vocab) < share
    mask = np.zeros(-(-vocab // 32), np.uint32)
    mask.view(np.uint8)[: -(-vocab // 8)] = np.packbits(allowed, bitorder="little")
    masked = np.zeros(vocab, np.float32)
    assert mask_logits(row, mask, masked)
    np.testing.assert_array_equal(masked, np.where(allowed, row, -np.inf))
    for wrong in (np.nan, np.inf):
        row[int(rng.integers(vocab))] = wrong
        assert not mask_logits(row, mask, masked), "also where the mask forbids the token"
