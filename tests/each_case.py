"""Many cases in one test: an item of pytest takes milliseconds in every worker, to collect and to report."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

Test = Callable[..., None]

ONLY: list[str] = []
"""Texts of the option --case: of the cases, those run whose name contains one of them."""

HAS_SKIPPED: list[bool] = []
"""Whether some cases of the last test were skipped, and others ran."""

_OUTER: list[str] = []
"""Names of the cases that are running, of decorators further out."""


@dataclass(frozen=True)
class _Case:
    name: str
    values: tuple[Any, ...]


def each_case(
    names: str | Sequence[str], cases: Iterable[Any], ids: Callable[[Any], str] | Iterable[str] | None = None
) -> Callable[[Test], Test]:
    """As pytest.mark.parametrize, but one item of pytest runs all cases, also after one has failed.

    The failure is that of the first case that fails; a note names all that do. Each case has its own `tmp_path` and
    `monkeypatch`, and reads from `capsys` and `caplog` what it has written itself; it shares other fixtures with the
    rest. A case may skip; without any case, as where data are missing, the test does.
    """
    arguments = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
    given = list(cases)
    shown = ids if ids is None or callable(ids) else list(ids)
    assert not isinstance(shown, list) or len(shown) == len(given), f"{len(given)} cases have {len(shown)} names"
    rows = [_case(number, case, len(arguments), shown) for number, case in enumerate(given)]

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        assert set(arguments) <= set(signature.parameters), f"{test.__name__} does not take all of {arguments}"

        @wraps(test)
        def run(**fixtures: Any) -> None:
            failed: dict[str, BaseException] = {}
            skipped: list[BaseException] = []
            chosen = [row for row in rows if hasattr(test, "runs_cases") or _is_chosen(row)]
            for number, row in enumerate(chosen):
                _OUTER.append(row.name)
                try:
                    with _fixtures_of_a_case(fixtures, number) as own:
                        test(**own, **dict(zip(arguments, row.values, strict=True)))
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - raised after the last case
                    failed[row.name] = error
                finally:
                    _OUTER.pop()
            if failed:
                first = next(iter(failed.values()))
                first.add_note(f"{len(failed)} of {len(chosen)} cases failed: {'; '.join(failed)}")
                raise first
            if not chosen:
                pytest.skip("no case has such a name" if rows else "no case was found")
            if len(skipped) == len(chosen):
                raise skipped[0]
            HAS_SKIPPED[:] = [bool(skipped)]

        kept = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        run.runs_cases = True  # type: ignore[attr-defined]
        return run

    return decorate


def _is_chosen(row: _Case) -> bool:
    name = ", ".join([*_OUTER, row.name])
    return not ONLY or any(text in name for text in ONLY)


def _case(number: int, case: Any, num_arguments: int, ids: Callable[[Any], str] | list[str] | None) -> _Case:
    name = None
    if isinstance(case, ParameterSet):
        assert not case.marks, "a case has no marks of its own"
        values, name = tuple(case.values), case.id
    else:
        values = (case,) if num_arguments == 1 else tuple(case)
    if ids is not None:
        name = ", ".join(str(ids(value)) for value in values) if callable(ids) else ids[number]
    return _Case(str(name) if name else ", ".join(map(_shown, values)), values)


def _shown(value: object) -> str:
    text = str(getattr(value, "__name__", value))
    return text if len(text) <= 80 else f"{text[:77]}..."


@contextmanager
def _fixtures_of_a_case(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """The fixtures, with those replaced that would carry something from one case to the next."""
    own = dict(fixtures)
    with ExitStack() as stack:
        if isinstance(folder := own.get("tmp_path"), Path):
            own["tmp_path"] = folder / str(number)
            own["tmp_path"].mkdir()
        if "monkeypatch" in own:
            own["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
        if "capsys" in own:
            own["capsys"].readouterr()
        if "caplog" in own:
            own["caplog"].clear()
        yield own
