"""Progress goes to the listener of the innermost block, notes and details to their loggers."""

import contextvars
import threading

import pytest

from ingot.progress import DETAILS, NOTES, Stage, detail, note, progress_to, report_progress

Report = tuple[str, int, int]


def test_the_innermost_listener_hears_progress_and_the_outer_one_again_after_an_error() -> None:
    outer: list[Report] = []
    inner: list[Report] = []
    report_progress("before", 0, 1)
    with progress_to(lambda *report: outer.append(report)):
        with pytest.raises(ZeroDivisionError), progress_to(lambda *report: inner.append(report)):
            report_progress("inside", 1, 2)
            raise ZeroDivisionError
        report_progress("after", 2, 2)
    report_progress("beyond", 0, 1)
    assert (inner, outer) == ([("inside", 1, 2)], [("after", 2, 2)])


def test_a_stage_reports_its_start_and_every_step() -> None:
    reports: list[Report] = []
    with progress_to(lambda *report: reports.append(report)):
        stage = Stage("layers", 5)
        stage.advance()
        stage.advance(3)
    assert reports == [("layers", 0, 5), ("layers", 1, 5), ("layers", 4, 5)]


def test_a_thread_reports_to_the_listener_of_the_context_that_it_runs_in() -> None:
    reports: list[Report] = []
    with progress_to(lambda *report: reports.append(report)):
        context = contextvars.copy_context()
    for run in (lambda: context.run(report_progress, "with", 1, 1), lambda: report_progress("without", 1, 1)):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert reports == [("with", 1, 1)]


def test_notes_and_details_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", NOTES), caplog.at_level("INFO", DETAILS):
        note("gptq: resumed at 50 %")
        detail("gptq", "layers.0 done")
    assert caplog.record_tuples == [(NOTES, 20, "gptq: resumed at 50 %"), (DETAILS, 20, "gptq: layers.0 done")]
