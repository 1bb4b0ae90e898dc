"""The generated headers are those of the tables in Python, and the compiler refuses a structure that differs.

python -m tests.runtime.cpu.native.test_abi    writes the headers anew
"""

import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from ingot.artifact.programs.cpu_program import Combine, Linear, Operation, Recurrent
from ingot.artifact.programs.operation_row import Norm
from ingot.errors import EngineError
from ingot.runtime.cpu import native
from ingot.runtime.cpu.native import abi
from ingot.runtime.cpu.native.library import LIBRARY, library_file, load_library

NATIVE = Path(native.__file__).parent


def test_the_headers_are_those_of_the_tables() -> None:
    command = "python -m tests.runtime.cpu.native.test_abi"
    assert (NATIVE / abi.ENUMS_HEADER).read_text() == abi.enums_header(), f"run {command}"
    assert (NATIVE / abi.LAYOUTS_HEADER).read_text() == abi.layouts_header(), f"run {command}"
    assert (NATIVE / abi.OPERATIONS_HEADER).read_text() == abi.operations_header(), f"run {command}"


def test_every_name_of_a_program_has_a_number() -> None:
    kinds = [get_args(kind.model_fields["kind"].annotation) for kind in get_args(get_args(Operation)[0])]
    assert sorted(name for names in kinds for name in names) == sorted(abi.OPERATION.names)
    assert set(get_args(Linear.model_fields["store"].annotation)) == set(abi.FIELD_ENUMS["store"].names)
    assert set(get_args(Combine.model_fields["function"].annotation)) == set(abi.FIELD_ENUMS["function"].names)
    assert {"none", *get_args(Norm.model_fields["kind"].annotation)} == set(abi.NORM.names)


def test_recurrent_operations_are_the_last_ones() -> None:
    """recurrent.h compares kinds with the first of them."""
    kinds = tuple(row.model_fields["kind"].default for row in get_args(Recurrent))
    assert kinds == abi.OPERATION.names[-len(kinds) :]


def test_no_enumerator_is_declared_twice() -> None:
    names = [enumerator for enum in abi.ENUMS for enumerator in enum.enumerators()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("float scale, softcap;", "float softcap, scale;", "struct layer.scale in another place"),
        ("int32_t num_states;", "int64_t num_states;", "struct batch.num_states in another place"),
        ("int32_t b_form; ", "int32_t b_form, more[2]; ", "struct low_rank of another size"),
    ],
)
def test_the_compiler_refuses_a_structure_that_differs(tmp_path: Path, before: str, after: str, message: str) -> None:
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        pytest.skip("needs a C compiler")
    changed = 0
    for source in (*NATIVE.glob("*.h"), NATIVE / "launch_program.c"):
        text = source.read_text()
        changed += before in text
        (tmp_path / source.name).write_text(text.replace(before, after))
    assert changed == 1
    command = [compiler, "-std=gnu11", "-fsyntax-only", str(tmp_path / "launch_program.c")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr.replace('" "', "")


def test_a_library_with_other_numbers_is_refused(tmp_path: Path) -> None:
    built = library_file(NATIVE)
    if built is None:
        pytest.skip("the library was not compiled")
    content = built.read_bytes()
    assert content.count(abi.digest().encode()) == 1
    other = tmp_path / LIBRARY
    other.write_bytes(content.replace(abi.digest().encode(), b"0" * len(abi.digest())))
    with pytest.raises(EngineError, match="was built from another version of its source"):
        load_library(other)


if __name__ == "__main__":
    abi.write_headers(NATIVE)
