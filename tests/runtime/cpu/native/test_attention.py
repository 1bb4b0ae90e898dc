"""The attention backend: INGOT_ATTENTION decides, else whether the kernel was built."""

from collections.abc import Iterator

import pytest

from ingot.errors import EngineError, UsageError
from ingot.runtime.cpu.native import attention
from ingot.runtime.cpu.native.attention import attention_backend, make_attention, native_library
from ingot.runtime.cpu.native.numpy_attention import NumpyAttention
from tests.runtime.cpu.native.attention_cases import Case


@pytest.fixture(autouse=True)
def _uncached() -> Iterator[None]:
    attention_backend.cache_clear()
    yield
    attention_backend.cache_clear()


def test_numpy_is_used_when_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_ATTENTION", "numpy")
    assert attention_backend() == "numpy"
    assert isinstance(make_attention(Case().pool(), 1), NumpyAttention)


@pytest.mark.skipif(native_library() is None, reason="the kernel was not built")
def test_the_kernel_is_used_when_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_ATTENTION", "native")
    assert attention_backend().startswith("native-")


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


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_ATTENTION", "cuda")
    with pytest.raises(UsageError, match="INGOT_ATTENTION is 'cuda'; it must be native or numpy"):
        attention_backend()
