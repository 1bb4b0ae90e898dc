"""The tests of one file: those of its name, else those that import it."""

from pathlib import Path

from fast import main, own_tests

from tests.ci.repositories import repository

FILES = {
    "runtime/kv/blocks.py": "",
    "runtime/kv/tiers.py": "",
    "src/ingot/cli/build.py": "",
    "tests/runtime/kv/test_blocks.py": "",
    "tests/runtime/test_engine.py": "from ingot.runtime.kv.tiers import Tiers\n",
    "tests/cli/test_build.py": "",
}


def test_a_file_has_the_own_tests_its_name_itself_or_those_that_import_it(tmp_path: Path) -> None:
    graph = repository(tmp_path, FILES)
    assert own_tests("runtime/kv/blocks.py", graph) == ["tests/runtime/kv/test_blocks.py"]
    assert own_tests("src/ingot/cli/build.py", graph) == ["tests/cli/test_build.py"]
    assert own_tests("tests/cli/test_build.py", graph) == ["tests/cli/test_build.py"]
    assert own_tests("runtime/kv/tiers.py", graph) == ["tests/runtime/test_engine.py"]
    assert own_tests("README.md", graph) == []


def test_a_file_that_does_not_exist_is_refused() -> None:
    assert main(["runtime/none.py"]) == 2
    assert main([]) == 2
