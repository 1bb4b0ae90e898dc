"""Every extra of the package that messages, documents and scripts name is one that pip can install."""

import re
import tomllib
from collections.abc import Iterator

from ingot.cli.failure import EXTRAS
from ingot.pipeline.compile import TOOLS
from ingot.pipeline.targets.table import TARGETS
from tests.data_paths import ROOT
from tests.packaging.test_packaging import FOLDERS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# ingot-llm[NAME,...] as pip takes it, .[NAME,...] from the source, EXTRAS=NAME,... of the Dockerfile, "extra `NAME`"
_NAMED = re.compile(r"""(?:\bingot-llm|["' ]\.)\[([a-z0-9,-]+)\]|\bEXTRAS=([a-z0-9,-]+)|\bextras? `([a-z0-9-]+)`""")
_PLACES = (*FOLDERS, "src", "docs", "deploy", "examples", "Makefile", "README.md", "CHANGELOG.md", "pyproject.toml")
_SUFFIXES = {".py", ".md", ".yaml", ".toml", ""}  # no suffix: Makefile, Dockerfile
_STANDARD_KEYS = {
    "name", "version", "description", "readme", "requires-python", "license", "license-files", "authors",
    "maintainers", "keywords", "classifiers", "urls", "scripts", "gui-scripts", "entry-points", "dependencies",
    "optional-dependencies", "dynamic",
}  # fmt: skip


def named_extras() -> Iterator[tuple[str, str]]:
    """Extras that the files of the project name, with the file."""
    for place in _PLACES:
        for path in [ROOT / place, *(ROOT / place).rglob("*")]:
            if path.suffix in _SUFFIXES and path.is_file():
                for match in _NAMED.finditer(path.read_text("utf-8", errors="replace")):
                    names = next(filter(None, match.groups())).split(",")
                    yield from ((extra, str(path.relative_to(ROOT))) for extra in names)


def test_every_extra_that_a_file_names_exists() -> None:
    found = list(named_extras())
    assert {"serve", "structured", "trace", "compiler", "cuda"} <= {extra for extra, _ in found}
    assert [each for each in found if each[0] not in PROJECT["optional-dependencies"]] == []


def test_every_extra_that_a_message_or_a_target_fills_in_exists() -> None:
    found = {extra for extra, _ in EXTRAS.values()} | {target.extra for target in TARGETS.values()} - {""}
    assert found <= set(PROJECT["optional-dependencies"])


def test_the_project_table_has_only_keys_of_the_standard() -> None:
    assert set(PROJECT) <= _STANDARD_KEYS, "the build backend ignores others: a list of packages there is not an extra"


def test_the_tools_whose_versions_a_build_records_are_installed_with_it() -> None:
    declared = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["compiler"]]
    names = {re.split(r"[^a-z0-9-]", requirement)[0] for requirement in declared}
    assert {*TOOLS} <= names
