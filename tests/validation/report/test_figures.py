"""Which figures the evidence gives, and what the plot of layers groups."""

import re
from dataclasses import replace

import pytest

from ingot.validation.quantization import Quantization
from ingot.validation.report.figures import (
    accuracy_figures,
    latency_figures,
    quantization_figures,
    resource_figures,
)
from ingot.validation.result import Evidence
from tests.validation.sample_evidence import sample_evidence, weight


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return sample_evidence()


def test_the_loss_is_shown_as_a_difference_and_never_as_a_diagonal(evidence: Evidence) -> None:
    first, second, *_ = accuracy_figures(evidence)
    assert (first.title, second.title) == ("Difference in loss against loss", "Difference in loss, distribution")
    assert "candidate - baseline" in first.svg


def test_every_concurrency_has_its_ratios_and_three_distributions(evidence: Evidence) -> None:
    titles = [figure.title for figure in latency_figures(evidence)]
    assert len(titles) == 8
    assert titles[4] == "Ratio per round, 4 in flight"


def test_sizes_and_memory_are_paired_by_kind_and_have_a_total(evidence: Evidence) -> None:
    size, memory = resource_figures(evidence)
    assert "total 23.6 MB and 5.3 MB" in size.svg
    assert "peak 241.0 MB and 183.0 MB" in memory.svg or "peak 240.0 MB and 183.0 MB" in memory.svg
    assert "on the GPU" not in memory.svg


def test_what_was_not_measured_has_no_figure() -> None:
    small = sample_evidence((), with_runs=False)
    assert accuracy_figures(small) == latency_figures(small) == quantization_figures(small.notes.quantization) == []
    assert [figure.title for figure in resource_figures(small)] == ["Size on disk"]


def test_weights_are_grouped_by_layer_in_the_order_of_the_program() -> None:
    found = Quantization(
        (
            weight("embed_tokens", kl=0.1),
            replace(weight("layers.0.mlp.up_proj", kl=0.2), stored_bytes=1125),
            replace(weight("layers.0.mlp.down_proj", kl=0.3), elements=3000, stored_bytes=1875),
            weight("layers.10.mlp.up_proj", kl=0.1),
            weight("lm_head", kl=0.0),
        )
    )
    bits, cost = (figure.svg for figure in quantization_figures(found))
    assert re.findall(r"<rect[^>]*><title>(.*?)</title>", bits) == [
        "embed: 5 bits",
        "0: 6 bits",  # 8 * (1125 + 1875) / 4000
        "10: 5 bits",
        "lm: 5 bits",
    ]
    assert "0: 0.5 nats" in cost


def test_cost_is_omitted_where_kl_was_not_measured() -> None:
    assert [figure.title for figure in quantization_figures(Quantization((weight("a"),)))] == ["Bits per layer"]
