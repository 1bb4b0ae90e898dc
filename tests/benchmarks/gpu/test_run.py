"""The GPU benchmark keeps everything through crashes, hangs and kills, and calls nothing fine that did not run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.gpu import run as gpu
from benchmarks.gpu.figures import summary
from benchmarks.gpu.journal import FILE, Journal
from benchmarks.gpu.parts import Part, Record
from benchmarks.gpu.run import Bout, exit_status, wrong_count
from click.testing import CliRunner

from tests.benchmarks.gpu.fake_parts import CHILD_FILE
from tests.data_paths import ROOT

FAKES = "tests.benchmarks.gpu.fake_parts"


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(gpu, "_LEAST_SECONDS", 0.0)
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path))


def bout(folder: Path, budget: float = 60.0, resumed: Path | None = None, seconds: float = 60.0) -> Bout:
    names = ("fine", "failing", "broken", "empty", "slow")
    parts = {name: Part(f"{FAKES}:{name}", seconds, is_proof=True, needs_device=False) for name in names}
    deadline = time.monotonic() + budget
    return Bout(Journal(folder / FILE, resumed), {}, folder, folder, folder, deadline, parts=parts)


def test_every_task_but_those_that_fail_runs_and_each_failure_says_how(tmp_path: Path) -> None:
    log = bout(tmp_path).run("failing")
    assert log.status == "failed"
    assert [record["value"] for record in log.all_records] == [1, 2, 3, 4, 5]
    assert log.errors.keys() == {"raises", "crashes", "loses", "hangs"}
    assert log.errors["raises"].endswith("ValueError: out of range")
    assert 'File "tests/benchmarks/gpu/fake_parts.py"' in log.errors["raises"]  # and no folder of this machine
    assert log.errors["crashes"].endswith("the process was ended by SIGABRT")
    assert log.errors["loses"].startswith("the process ended with exit status 17")
    assert log.errors["hangs"].endswith("the process was killed: it took too long")
    assert log.left == []


def test_a_task_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    bout(tmp_path).run("failing")
    child = int((tmp_path / CHILD_FILE).read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_part_ends_at_its_own_limit_and_names_what_did_not_run(tmp_path: Path) -> None:
    made = bout(tmp_path, seconds=1.5)
    log = made.run("slow")
    assert log.status == "incomplete"
    assert log.left
    assert not log.errors
    assert made.run("fine").status == "done"


def test_a_part_that_no_longer_fits_the_budget_is_incomplete(tmp_path: Path) -> None:
    log = bout(tmp_path, budget=-1.0).run("fine")
    assert log.status == "incomplete"
    assert exit_status([log]) == 3


def test_a_part_without_a_package_is_broken_and_the_next_part_runs(tmp_path: Path) -> None:
    made = bout(tmp_path)
    log = made.run("broken")
    assert log.status == "failed"
    assert log.broken is not None
    assert log.broken.endswith("ModuleNotFoundError: No module named 'pydantic'")
    assert made.run("fine").status == "done"


def test_a_proof_without_tasks_is_a_failure(tmp_path: Path) -> None:
    log = bout(tmp_path).run("empty")
    assert log.status == "failed"
    assert log.broken == f"nothing to do in {tmp_path}: run `python -m benchmarks.gpu.programs` first"


def test_failure_never_reads_as_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bout(tmp_path)
    fine = made.run("fine")
    assert wrong_count([fine]) == 0
    assert wrong_count([fine, None]) is None  # a part that never ran
    assert exit_status([fine]) == 0
    broken = made.run("broken")
    assert wrong_count([fine, broken]) == 1
    assert exit_status([fine, broken]) == 1
    monkeypatch.setenv("FAKE_WRONG", "1")
    wrong = bout(tmp_path / "other").run("fine")
    assert wrong.status == "wrong"
    assert wrong_count([wrong]) == 1
    text = summary([], made.goals(), made.journal.parts)
    assert "NOT MET  kernels and models that are wrong or failed: 1" in text
    assert "FAILED     broken: 0 of 0 tasks" in text
    assert "No module named 'pydantic'" in text


def test_the_journal_has_every_record_before_the_part_ends_and_a_later_run_resumes_from_it(tmp_path: Path) -> None:
    first = bout(tmp_path / "first", seconds=1.5)
    log = first.run("slow")
    held = len(log.all_records)
    lines = (tmp_path / "first" / FILE).read_text().splitlines()
    assert sum(json.loads(line)["event"] == "record" for line in lines) == held > 0
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join(lines)[:-20])  # killed within the last line
    again = bout(tmp_path / "second", resumed=cut, seconds=1.5).run("slow")
    assert len(again.all_records) > held
    begun = [json.loads(line) for line in (tmp_path / "second" / FILE).read_text().splitlines()]
    tasks = [event["task"] for event in begun if event["event"] == "end" and not event["skipped"]]
    assert len(tasks) == len(set(tasks))


def test_the_report_is_named_after_the_gpu_and_replaced_as_a_whole(tmp_path: Path) -> None:
    made = bout(tmp_path)
    made.run("fine")
    assert json.loads((tmp_path / "gpu-unknown.json").read_text())["parts"]["fine"]["status"] == "done"
    device: Record = {"figure": "hardware", "device": "NVIDIA H100 80GB"}
    made.journal.write("fine", {"event": "record", "task": "one", "record": device})
    assert made.write_report().name == "gpu-nvidia-h100-80gb.json"
    assert list(tmp_path.glob("*.part")) == []


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.benchmarks.gpu.test_run import bout;"
        "bout(Path(sys.argv[1])).run('slow')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    journal = tmp_path / FILE
    while not journal.exists() or '"record"' not in journal.read_text():
        assert starter.poll() is None
        time.sleep(0.05)
    workers = _children(starter.pid)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    assert workers
    limit = time.monotonic() + 30
    while any(_runs(worker) for worker in workers):
        assert time.monotonic() < limit, "the worker goes on alone"
        time.sleep(0.05)


def test_an_unknown_part_is_refused() -> None:
    result = CliRunner().invoke(gpu.main, ["--parts", "hardware,cheks"])
    assert result.exit_code == 2
    assert "unknown part 'cheks'; parts: imports" in result.output


def _children(parent: int) -> list[int]:
    threads = Path(f"/proc/{parent}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def _runs(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
