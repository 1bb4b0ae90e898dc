"""`--set` of `ingot run`: options of the engine by name, or one error that names what is allowed."""

import pytest

from ingot.cli.engine_options import engine_options
from ingot.errors import UsageError
from ingot.runtime import SpeculationOptions
from tests.each_case import each_case


def test_values_are_yaml_and_sizes_may_have_units() -> None:
    settings = ["kv_host_bytes=4GiB", "max_sequences=null", "kv_policy=arc", "kv_disk_bytes=0", "kv_disk_path=/tmp/7"]
    assert engine_options(settings) == {
        "kv_host_bytes": 4 << 30,
        "max_sequences": None,
        "kv_policy": "arc",
        "kv_disk_bytes": 0,
        "kv_disk_path": "/tmp/7",
    }
    for text in ("0-1,3", "[0, 1, 3]"):
        assert engine_options([f"cpu_affinity={text}"]) == {"cpu_affinity": (0, 1, 3)}
    assert engine_options(["cpu_affinity=0"]) == {"cpu_affinity": (0,)}
    assert engine_options(["num_threads=1"]) == {"num_threads": 1}
    assert engine_options(["kv_disk_path=null"]) == {"kv_disk_path": None}
    assert engine_options(["kv_disk_path=[7"]) == {"kv_disk_path": "[7"}, "a path is text"
    assert engine_options([]) == {}
    assert engine_options(["kv_blocks=64"]) == {"kv_blocks": 64}
    assert engine_options(["prefix_cache=false", "state_slots=4"]) == {"prefix_cache": False, "state_slots": 4}


def test_options_of_drafts_belong_to_the_drafter() -> None:
    settings = ["num_draft_tokens=4", "adaptive=false", "draft_kv_bytes=64MiB"]
    chosen = SpeculationOptions("lookup", num_draft_tokens=4, adaptive=False, draft_kv_bytes=64 << 20)
    assert engine_options(settings, "lookup") == {"speculation": chosen}
    assert engine_options([], "lookup") == {"speculation": SpeculationOptions("lookup")}
    assert engine_options(["draft_kv_bytes=null"], "a/draft") == {"speculation": SpeculationOptions("a/draft")}
    assert engine_options(["history_path=/a/7"], "auto") == {
        "speculation": SpeculationOptions("auto", history_path="/a/7")
    }
    with pytest.raises(UsageError, match=r"--set adaptive: .* add --speculate with one of auto, lookup, mtp, suffix"):
        engine_options(["adaptive=false"])


@each_case(
    ("setting", "message"),
    [
        ("kv_host_bytes", "--set 'kv_host_bytes' is not KEY=VALUE, such as kv_host_bytes=4GiB"),
        ("kv_host_bytes=", "is not KEY=VALUE"),
        ("kv_host_byte=4", "--set: unknown option 'kv_host_byte'. Did you mean 'kv_host_bytes'"),
        ("kv_host_bytes=4XB", "--set kv_host_bytes: '4XB' is not a size"),
        (
            "kv_host_bytes=-1",
            "--set kv_host_bytes is -1; it must be a whole number of bytes, or 0 for none, and",
        ),
        (
            "max_sequences=0",
            "--set max_sequences is 0; it must be a whole number from 1 to 1048576",
        ),
        ("kv_host_bytes=null", "--set kv_host_bytes is null; it must be a whole number of bytes, or 0 for none, and"),
        ("kv_policy=lro", "--set kv_policy is 'lro'; it must be 'lru-uses' or 'lru' or 'arc'"),
        ("cpu_affinity=0,0", r"--set cpu_affinity: '0,0' names core 0 twice"),
        ("num_threads=two", "--set num_threads is 'two'; it must be a whole number$"),
        ("kv_blocks=2GiB", "--set kv_blocks is '2GiB'; it must be a whole number$"),
        ("num_draft_tokens=0", "--set num_draft_tokens is 0; it must be a whole number from 1 to 64"),
        ("adaptive=x", "--set adaptive is 'x'; it must be true or false"),
        ("draft_kv_bytes=4XB", "--set draft_kv_bytes: '4XB' is not a size"),
        ("max_sequences=[", r"--set max_sequences: '\[' is not a YAML value"),
    ],
)
def test_other_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine_options([setting], "lookup")
