"""A process reads its own memory from /proc/self/status."""

from ingot.validation.memory_probe import ProcessMemory, parse_status, process_memory

STATUS = """Name:\tpython
VmHWM:\t  200 kB
VmRSS:\t  150 kB
RssAnon:\t  100 kB
RssFile:\t   50 kB
""".splitlines()


def test_status_lines_become_bytes() -> None:
    assert parse_status(STATUS) == ProcessMemory(204_800, 153_600, 102_400, 51_200)


def test_the_peak_is_at_least_the_resident_memory() -> None:
    memory = process_memory()
    assert memory.peak_bytes >= memory.resident_bytes > 1_000_000
