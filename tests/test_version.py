"""The installed package finds itself under both of its names, and says how to add an extra from where it came."""

import shlex
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest

from ingot import version
from tests.data_paths import ROOT
from tests.each_case import each_case

SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Source"]
OURS, ANOTHER = "[console_scripts]\ningot = ingot.__main__:main\n", "[console_scripts]\ningot = ingot.cli:cli\n"


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str = "ingot-llm",
    scripts: str = OURS,
    origin: str | None = None,
) -> None:
    """Make a distribution of this name the installed one; other names are not installed."""
    facts = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.2\nProject-URL: Source, {SOURCE}\n"
    )
    (facts / "entry_points.txt").write_text(scripts)
    if origin is not None:
        (facts / "direct_url.json").write_text(origin)

    def distribution(wanted: str) -> Distribution:
        if wanted != name:
            raise PackageNotFoundError(wanted)
        return Distribution.at(facts)

    monkeypatch.setattr(version, "distribution", distribution)
    monkeypatch.setattr(version, "_found", version._installed())


@each_case("name", ["ingot-llm", "ingot"])
def test_both_names_of_the_distribution_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(tmp_path, monkeypatch, name)
    found = version._installed()
    assert found is not None
    assert (found.version, version.project_source()) == ("1.2", SOURCE)


def test_another_project_that_is_called_ingot_is_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "ingot", ANOTHER)
    assert version._installed() is None
    assert version.project_source() is None
    assert shlex.split(version.install_command("serve"))[-1] == "ingot-llm[serve]"


EDITABLE, COPIED = '{"url": "file://PLACE", "dir_info": {"editable": true}}', '{"url": "file://PLACE", "dir_info": {}}'
GIT = '{"url": "https://example.org/ingot", "vcs_info": {"vcs": "git", "commit_id": "abc"}}'


@each_case(
    "origin, requirement",
    [
        (None, ["ingot-llm[serve]"]),
        (EDITABLE, ["-e", "PLACE[serve]"]),
        (COPIED, ["ingot-llm[serve] @ file://PLACE"]),
        (COPIED.replace("PLACE", "PLACE/removed.whl"), ["ingot-llm[serve]"]),
        (GIT, ["ingot-llm[serve] @ git+https://example.org/ingot@abc"]),
    ],
)
def test_the_command_installs_from_where_the_package_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str | None, requirement: list[str]
) -> None:
    install(tmp_path, monkeypatch, origin=origin and origin.replace("PLACE", str(tmp_path)))
    words = shlex.split(version.install_command("serve"))
    assert words[words.index("install") + 1 :] == [word.replace("PLACE", str(tmp_path)) for word in requirement]
