"""The team of threads: every unit runs once and in order, with any threads, callers, forks and busy neighbours."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ingot.runtime.cpu import native

NATIVE = Path(native.__file__).parent
CHECK = Path(__file__).parent / "team_check.c"
HUNG_SECONDS = 120  # the check takes a second or two
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}")


def compile_check(folder: Path, *flags: str) -> Path | None:
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None or not (NATIVE / "thread_team.c").exists():
        return None
    program = folder / "team_check"
    sources = (str(CHECK), str(NATIVE / "thread_team.c"))
    command = [compiler, *FLAGS, *flags, "-o", str(program), *sources, "-lm", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    return (
        None if flags and "sanitize" in done.stderr else program if done.returncode == 0 else pytest.fail(done.stderr)
    )


@pytest.fixture(scope="module")
def team_check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = compile_check(tmp_path_factory.mktemp("team"))
    return program or pytest.skip("no C compiler, or no sources")


@contextmanager
def busy_neighbours() -> Iterator[None]:
    """A process on each core that computes all the time."""
    loop = [sys.executable, "-c", "while True: pass"]
    neighbours = [subprocess.Popen(loop) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def run_check(program: Path, callers: int, works: int, forks: int, cores: Sequence[int] = ()) -> None:
    """Run it; a team that waits forever fails the test."""
    command = [str(program), *map(str, (callers, works, forks, *cores))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("callers", [1, 3])
def test_every_unit_of_every_phase_runs_once_before_the_next_phase(team_check: Path, callers: int) -> None:
    run_check(team_check, callers, works=1000, forks=0)


def test_forked_children_have_teams_of_their_own(team_check: Path) -> None:
    run_check(team_check, callers=2, works=100, forks=10)


def test_the_team_never_hangs_next_to_busy_neighbours(team_check: Path) -> None:
    with busy_neighbours():
        run_check(team_check, callers=2, works=300, forks=2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin threads")
@pytest.mark.parametrize("count", [1, 2])
def test_pinned_threads_work_on_their_cores_and_callers_are_free_afterwards(team_check: Path, count: int) -> None:
    cores = sorted(os.sched_getaffinity(0), reverse=True)[:count]
    run_check(team_check, callers=2, works=200, forks=2, cores=cores)


@pytest.mark.slow
def test_no_data_race_is_found(tmp_path: Path) -> None:
    program = compile_check(tmp_path, "-fsanitize=thread", "-g")
    if program is None or subprocess.run([program, "1", "0", "0"], capture_output=True).returncode != 0:
        pytest.skip("no thread sanitizer runs here")
    run_check(program, callers=3, works=100, forks=0)
