"""The table of costs compares every tool with Ingot on the same method."""

from benchmarks.adapters.quantizing import Outcome
from benchmarks.quantizers.speed import INGOT, METHODS, Cost, shape_of, table

MIB = 1 << 20


def test_ratios_are_over_ingots_own_run_of_the_same_method() -> None:
    costs = [
        Cost("GPTQ", INGOT, Outcome(10.0, 100 * MIB, {}, 19.0)),
        Cost("GPTQ", "other", Outcome(50.0, 250 * MIB, {}, 90.0)),
        Cost("AWQ", "other", Outcome(50.0, 250 * MIB, {}, 90.0)),
    ]
    assert table(costs).splitlines()[2:] == [
        "| GPTQ | Ingot | 10.0 | 19.0 | 100 | 1.00 | 1.00 |",
        "| GPTQ | other | 50.0 | 90.0 | 250 | 5.00 | 2.50 |",
        "| AWQ | other | 50.0 | 90.0 | 250 |  |  |",
    ]


def test_a_tool_that_failed_says_why() -> None:
    assert table([Cost("AWQ", "other", failure="no such group")]).endswith("| AWQ | other | no such group | | | | |")


def test_every_method_is_run_by_the_same_tools_and_ours_first() -> None:
    labels = [[peer.label for peer in peers] for peers in METHODS.values()]
    assert all(names == labels[0] for names in labels)
    assert labels[0][0] == INGOT


def test_a_shortened_shape_has_a_name_of_its_own() -> None:
    assert shape_of("smollm2-135m", None).num_layers == 30
    short = shape_of("smollm2-135m", 2)
    assert (short.name, short.num_layers) == ("smollm2-135m-2-layers", 2)
