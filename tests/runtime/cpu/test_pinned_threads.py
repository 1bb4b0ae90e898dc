"""Pinned threads: each on its core, for as long as an engine names it; what cannot be is refused.

That every unit of work runs on its thread's core is checked in C (native/test_thread_team.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.artifact import Artifact
from ingot.errors import EngineError
from ingot.runtime.cpu import native_executor
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native_executor import NativeExecutor
from tests.data_paths import ROOT
from tests.runtime.cpu.native.tiny_program import VOCAB, write_artifact
from tests.runtime.cuda.batches import Growing, token_ids

pytestmark = [
    pytest.mark.skipif(native_library() is None, reason="the library was not built"),
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin threads"),
]
CORES = tuple(sorted(os.sched_getaffinity(0), reverse=True)[:2])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return write_artifact(tmp_path_factory.mktemp("pinned") / "tiny")


def executor(artifact: Artifact, cores: tuple[int, ...] | None = CORES) -> NativeExecutor:
    return NativeExecutor(artifact, num_blocks=4, num_threads=None if cores else 1, cores=cores)


def test_a_step_has_as_many_threads_as_cores_are_named_and_the_same_bits(artifact: Artifact) -> None:
    ids = [token_ids(20, 0, VOCAB)]
    plain = executor(artifact, None).forward(Growing(ids, [[0, 1]]).step([20])).copy()
    before = os.sched_getaffinity(0)
    pinned = executor(artifact)
    assert pinned.num_threads == len(CORES)
    assert pinned.forward(Growing(ids, [[0, 1]]).step([20])).tobytes() == plain.tobytes()
    assert os.sched_getaffinity(0) == before
    pinned.close()


MEMBERS = """
import os
from ingot.artifact import open_artifact
from ingot.runtime.cpu.native.program import program_library
from ingot.runtime.cpu.native_executor import NativeExecutor

def cores_of_new_threads():
    names = set(os.listdir("/proc/self/task")) - before
    return sorted(sorted(os.sched_getaffinity(int(name))) for name in names)

artifact, allowed = open_artifact({path!r}), sorted(os.sched_getaffinity(0))
first, second = allowed[:2]
before = set(os.listdir("/proc/self/task"))
plain = NativeExecutor(artifact, num_blocks=2, num_threads=2)
assert cores_of_new_threads() == [allowed], "the team's other thread may run anywhere"
pinned = [NativeExecutor(artifact, num_blocks=2, cores=(second, first)) for _ in range(2)]
assert cores_of_new_threads() == [[first]]
child = os.fork()
if child == 0:
    before = set(os.listdir("/proc/self/task"))
    program_library().team_start(2)
    assert cores_of_new_threads() == [[first]], "a forked child keeps the cores"
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
pinned[0].close()
pinned[0].close()
assert cores_of_new_threads() == [[first]], "the second engine still names them"
pinned[1].close()
assert cores_of_new_threads() == [allowed]
NativeExecutor(artifact, num_blocks=2, cores=(first, second)).close()
held = NativeExecutor(artifact, num_blocks=2, cores=(first, second))
assert cores_of_new_threads() == [[second]]
del held
assert cores_of_new_threads() == [allowed], "an executor that is dropped lets go"
"""


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_threads_are_pinned_until_the_last_engine_that_names_cores_is_closed(artifact: Artifact) -> None:
    script = MEMBERS.format(path=str(artifact.path))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_engines_that_name_different_cores_are_refused(artifact: Artifact) -> None:
    first, second = CORES[:1], CORES[1:]
    holder = executor(artifact, first)
    same = executor(artifact, first)
    message = f"cpu_affinity is {second[0]}, and another engine .* share, to {first[0]}; name the same cores"
    with pytest.raises(EngineError, match=message):
        executor(artifact, second)
    executor(artifact, None).close()  # names none, and shares the threads
    same.close()
    holder.close()
    executor(artifact, second).close()


def test_cores_that_the_process_may_not_run_on_are_refused(artifact: Artifact) -> None:
    allowed = os.sched_getaffinity(0)
    other = max(allowed) + 1
    with pytest.raises(
        EngineError, match=f"cpu_affinity is {other}; this process may not run on {other}: choose from 0"
    ):
        executor(artifact, (other,))


def test_cores_that_the_system_refuses_are_named(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_executor, "check_cores", lambda cores: None)
    with pytest.raises(
        EngineError, match="cpu_affinity is 8000, and the system refused to pin a thread: Invalid argument"
    ):
        executor(artifact, (8000,))
    executor(artifact, CORES[:1]).close()  # nothing is held


def test_other_systems_say_that_they_do_not_pin(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(
        EngineError, match=f"only Linux pins threads to cores, and this is {sys.platform}; leave it out"
    ):
        executor(artifact, (0,))


def test_the_limits_are_those_of_the_library() -> None:
    header = Path(native_executor.__file__).parent / "native" / "thread_team.h"
    if not header.exists():
        pytest.skip("no sources")
    assert "MAX_THREADS = 256" in header.read_text()
    assert "MAX_CORES = 8192" in header.read_text()
