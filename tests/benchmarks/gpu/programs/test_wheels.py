"""Wheels for the GPU's machine: which are needed, and that they suit it."""

import sys
import zipfile
from pathlib import Path

import pytest
from benchmarks.gpu.programs import wheels
from benchmarks.gpu.programs.wheels import Wheel, check_wheels, failing_imports, link_distribution, names_in, to_carry

from ingot.errors import BuildError


def wheel(folder: Path, name: str, *requirements: str) -> Wheel:
    """An empty wheel."""
    file = folder / name
    lines = ["Metadata-Version: 2.1", "Name: x", *(f"Requires-Dist: {one}" for one in requirements)]
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x-1.0.dist-info/METADATA", "\n".join(lines) + "\n\nRequires-Dist: in the description\n")
    return Wheel(file)


def test_what_is_imported_is_carried_with_what_it_requires_unless_it_is_there() -> None:
    found = to_carry(["pydantic", "numpy", "click"], ["numpy", "click", "typing-extensions"])
    assert found == ["annotated-types", "pydantic", "pydantic-core", "typing-inspection"]


def test_names_are_read_from_what_pip_prints() -> None:
    text = "Package    Version\n---------- -------\nPyYAML     6.0\nml_dtypes  0.5\nclick==8.1\n# a comment\n"
    assert {"pyyaml", "ml-dtypes", "click"} <= set(names_in(text))


def test_wheels_of_another_python_or_system_and_without_requirements_are_refused(tmp_path: Path) -> None:
    core = wheel(tmp_path, "core-2.0-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl")
    pure = wheel(tmp_path, "pure-1.0-py3-none-any.whl", "core>=2", "torch", 'extra-thing; extra == "more"')
    check_wheels([core, pure], ["torch"])
    with pytest.raises(BuildError, match=r"pure-1.0-py3-none-any.whl requires core>=2, which is neither packed nor on"):
        check_wheels([pure], ["torch"])
    for name in ("core-2.0-cp311-cp311-manylinux_2_17_x86_64.whl", "core-2.0-cp312-cp312-macosx_11_0_arm64.whl"):
        with pytest.raises(BuildError, match=r"does not run on CPython 3.12 of Linux on x86-64"):
            check_wheels([wheel(tmp_path, name)], [])
    with pytest.raises(BuildError, match="several wheels of core are packed"):
        check_wheels([core, wheel(tmp_path, "core-2.1-cp312-cp312-manylinux_2_17_x86_64.whl")], [])


def test_a_missing_package_is_named_with_the_parts_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("click", "packaging"):
        link_distribution(name, tmp_path)
    assert (tmp_path / "click" / "__init__.py").is_file()
    found = failing_imports(tmp_path)
    assert found["hardware"] == "ModuleNotFoundError: No module named 'torch'"
    assert found["steps"] == "ModuleNotFoundError: No module named 'ml_dtypes'"


@pytest.mark.skipif(sys.platform != "linux", reason="wheels are for Linux")
def test_every_part_is_imported_with_the_packages_of_the_gpus_machine_and_what_is_carried() -> None:
    pytest.importorskip("cuda", reason="parts need the GPU's packages: pip install --group oracle")
    there = names_in(wheels.USUAL.read_text("utf-8"))
    carried = to_carry(wheels.imported_distributions(), there)
    assert {"pydantic", "pydantic-core", "annotated-types", "typing-inspection"} <= set(carried)
    wheels.check_imports([], [*there, *carried])
