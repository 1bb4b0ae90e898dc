"""Facts about the machine, from /proc and the installed packages."""

import getpass
import json
import platform

from ingot.validation.environment import cpu_facts, environment, memory_bytes


def test_the_environment_has_machine_and_versions_but_no_host_or_user() -> None:
    found = environment(threads=3)
    text = json.dumps(found)
    assert found["threads"] == 3
    assert found["packages"]["numpy"]
    assert found["python"].startswith(platform.python_implementation())
    assert platform.node() not in text
    assert f"/{getpass.getuser()}/" not in text


def test_the_instruction_sets_of_matrix_kernels_are_kept_in_order() -> None:
    text = "processor : 0\nmodel name : A CPU\nflags : fpu avx512_vnni avx2 sse4_2\nprocessor : 1\nmodel name : B\n"
    assert cpu_facts(text) == {"model": "A CPU", "flags": ["avx2", "avx512_vnni", "sse4_2"]}


def test_arm_flags_are_read_from_features() -> None:
    assert cpu_facts("Features : fp asimd i8mm\nCPU part : 0xd40\n") == {"model": "0xd40", "flags": ["asimd", "i8mm"]}


def test_memory_is_in_bytes_and_may_be_unknown() -> None:
    assert memory_bytes("MemTotal:  2 kB\nMemFree: 1 kB\n") == 2048
    assert memory_bytes("") is None
