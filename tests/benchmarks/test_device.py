"""A processor's name, and the file of its results."""

from benchmarks.device import file_stem, processor_in, processor_name

from tests.each_case import each_case


def cpuinfo(vendor: str, family: int, model: int, name: str) -> str:
    lines = {"processor": 0, "vendor_id": vendor, "cpu family": family, "model": model, "model name": name}
    one = "".join(f"{key}\t: {value}\n" for key, value in lines.items())
    return f"{one}power management:\n\n{one.replace(name, 'another')}"


@each_case(
    ("vendor", "family", "model", "name", "found"),
    [
        ("AuthenticAMD", 25, 17, "AMD EPYC", "AMD EPYC (Zen 4)"),
        ("AuthenticAMD", 25, 1, "AMD EPYC 7763", "AMD EPYC 7763 (Zen 3)"),
        ("AuthenticAMD", 26, 2, "AMD EPYC", "AMD EPYC (Zen 5)"),
        ("GenuineIntel", 6, 143, "Intel(R) Xeon(R)", "Intel(R) Xeon(R) (Sapphire Rapids)"),
        ("GenuineIntel", 6, 250, "Intel(R) Xeon(R)", "Intel(R) Xeon(R) (family 6, model 250)"),
        ("Another", 1, 2, "CPU", "CPU (family 1, model 2)"),
    ],
)
def test_virtual_machines_hide_the_number_but_not_the_family(
    vendor: str, family: int, model: int, name: str, found: str
) -> None:
    assert processor_in(cpuinfo(vendor, family, model, name)) == found


def test_without_a_model_name_the_system_names_it() -> None:
    assert processor_in("processor\t: 0\nBogoMIPS\t: 50\n") is None
    assert processor_name()


def test_two_processors_never_share_a_file() -> None:
    names = ["AMD EPYC (Zen 4)", "AMD EPYC (Zen 5)", "Intel(R) Xeon(R) Processor"]
    assert [file_stem(name) for name in names] == ["amd-epyc-zen-4", "amd-epyc-zen-5", "intel-xeon-processor"]
