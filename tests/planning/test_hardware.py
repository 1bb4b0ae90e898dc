"""Rows of hardware have sources; names are found in any case, and unknown ones get the nearest."""

import re
from pathlib import Path

import pytest

from ingot.errors import DataError, UsageError
from ingot.planning.hardware import SHIPPED, FlopType, find_hardware, hardware_rows, read_hardware

WIDEST_FIRST: tuple[FlopType, ...] = ("fp32", "fp16", "fp8", "fp4")
ROW = """date: 2026-01-01
rows:
  mine:
    words: a GPU
    kind: gpu
    memory: 1.0e+10
    bandwidth: 5.0e+11
    flops: {fp16: 1.0e+14}
    host_link: 3.0e+10
    network: 1.0e+10
    sources: [measured by me]
"""


def test_every_row_has_sources_and_a_price_has_its_own() -> None:
    assert read_hardware(SHIPPED).date.year >= 2026
    for row in hardware_rows().values():
        assert row.sources
        assert (row.price_per_hour is None) == (not any(source.startswith("price") for source in row.sources))
        assert row.bandwidth < row.flops.get("fp16", row.peak("fp16")[1])


def test_every_row_has_the_fields_of_its_kind_and_a_dated_source() -> None:
    for name, row in read_hardware(SHIPPED).rows.items():
        assert re.search(r"\((19|20)\d\d\)", row.sources[0]), f"{name}: the first source has no year"
        assert {"fp16"} <= row.flops.keys(), name
        assert row.kind != "cpu" or {"fp32", "int8"} <= row.flops.keys(), name
        assert row.words.startswith("NVIDIA") == bool(row.sm or name == "grace"), name
        assert (row.checked is None) == (not any(source.startswith("read: ") for source in row.sources)), name
        assert row.network <= row.link <= row.bandwidth, name
        rates = [row.flops[type_] for type_ in WIDEST_FIRST if type_ in row.flops]
        assert rates == sorted(rates), f"{name}: a narrower type is slower"


def test_names_are_found_and_unknown_ones_get_the_nearest() -> None:
    assert find_hardware("H100") == find_hardware(" h100 ")
    assert find_hardware("RTX 4090").words.endswith("4090 24 GB")
    with pytest.raises(UsageError, match=r"unknown hardware 'h1000'\. Did you mean 'h100'"):
        find_hardware("h1000")


def test_rows_of_a_file_come_before_those_that_ship(tmp_path: Path) -> None:
    file = tmp_path / "rows.yaml"
    file.write_text(ROW.replace("mine", "h100"))
    assert find_hardware("h100", (file,)).words == "a GPU"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth: 5.0e+11", "bandwidth: -1", "rows.mine.bandwidth: Input should be greater than 0; it is -1"),
        ("bandwidth: 5.0e+11", "bandwith: 1", "rows.mine.bandwidth: Field required"),
        ("kind: gpu", "kind: board", "rows.mine.kind"),
        ("sources: [measured by me]", "sources: []", "rows.mine.sources"),
        ("words: a GPU", "words: &a a GPU\n    cache: *a", "has aliases"),
        ("date: 2026-01-01", "date: [", "cannot be read as YAML"),
    ],
)
def test_a_wrong_row_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.yaml"
    file.write_text(ROW.replace(old, new))
    with pytest.raises(DataError, match=message):
        hardware_rows((file,))


def test_a_type_without_flops_takes_the_next_wider() -> None:
    assert find_hardware("a100").peak("fp8") == ("fp16", 312e12)
    assert find_hardware("b200").peak("fp4")[0] == "fp4"
