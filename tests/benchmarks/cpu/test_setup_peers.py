"""The peers' requirements and the order of their installation agree."""

from benchmarks.cpu.setup_peers import GROUPS, REQUIREMENTS, pinned


def test_every_requirement_is_installed_once_and_torch_first() -> None:
    names = [name for group in GROUPS for name in group]
    assert names[0] == "torch"
    assert sorted(names) == sorted(pinned(REQUIREMENTS.read_text("utf-8")))


def test_comments_and_blank_lines_are_no_requirements() -> None:
    assert pinned("# why\n\none==1.0\ntwo\n") == {"one": "one==1.0", "two": "two"}
