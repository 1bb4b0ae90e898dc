"""Hybrids as launch programs, in the interpreter, against plain onnxruntime with numpy's recurrences in float32."""

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact.programs.launch_program import ActivationType, Launch
from ingot.errors import PassError
from ingot.pipeline.targets.cuda.lower import recurrent
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches, lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from tests.each_case import each_case
from tests.simulators.launch_programs import (
    CHECKPOINTS,
    CONTEXT,
    exact_logits,
    fused,
    imported,
    logits_by_program,
    prompts,
)

LIMIT = 2e-5
DELTA_RULES = ("qwen3_5_text", "olmo_hybrid")
SCANS = ("bamba", "granitemoehybrid", "nemotron_h", "falcon_h1")


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 positions from 5 tokens on: the interpreter is slow, and the fixtures' contexts are short."""
    monkeypatch.setattr(recurrent, "CHUNK", 16)
    monkeypatch.setattr(recurrent, "FEW_TOKENS", 4)


def error_of(name: str, activations: ActivationType = "fp32") -> float:
    """The largest error of the logits, over the largest logit: of a prompt and its next token, with a batch mate."""
    ids = prompts(10, 3)
    model = imported(CHECKPOINTS / name)
    wanted = [exact_logits(model, sequence)[-2:] for sequence in ids]
    found = logits_by_program(fused(model), ids, activations=activations)
    return max(float(np.abs(one - exact).max() / np.abs(exact).max()) for one, exact in zip(found, wanted, strict=True))


@each_case("name", [*DELTA_RULES, *SCANS, "lfm2", "qwen3_next"])
def test_logits_equal_onnxruntimes(name: str) -> None:
    assert error_of(name) <= LIMIT


@pytest.mark.usefixtures("chunked")
@each_case("name", ["qwen3_5_text", "bamba"])
def test_logits_of_chunks_equal_onnxruntimes(name: str) -> None:
    assert error_of(name) <= LIMIT


def test_states_stay_in_float32_where_activations_have_16_bits() -> None:
    assert error_of("qwen3_5_text", "fp16") <= 2e-2


@each_case("name", ["qwen3_5_moe_text", "lfm2_moe", "granitemoehybrid-dense", "falcon_h1-normed"])
def test_other_families_have_a_kernel_for_every_node(name: str) -> None:
    assert lower_to_launches(fused(imported(CHECKPOINTS / name)), (Bucket.decode(4, CONTEXT),)).programs


def lowered(name: str, *buckets: Bucket, invariant: bool = False) -> LoweredLaunches:
    model = fused(imported(CHECKPOINTS / name))
    return lower_to_launches(model, buckets or (Bucket.decode(4, CONTEXT),), "fp16", batch_invariant=invariant)


def kernels_of(found: LoweredLaunches, part: str) -> Counter[str]:
    steps = found.programs[0].launches
    return Counter(step.kernel.partition("-")[0] for step in steps if isinstance(step, Launch) and part in step.node)


def test_decoding_a_delta_rule_is_one_launch_for_each_rate_and_one_for_the_state() -> None:
    found = lowered("qwen3_next")
    assert kernels_of(found, "layers.0.linear_attn.rule") == {"recurrence_rates": 2, "recurrence": 1}
    assert kernels_of(found, "layers.0.linear_attn.conv1d") == {"short_convolution": 1}
    assert not any("rate" in step.node for step in found.programs[0].launches if isinstance(step, Launch))


def test_prompts_have_kernels_of_chunks_except_in_batch_invariant_programs() -> None:
    chunks = {"recurrence_chunks": 1, "chunked_recurrence": 1}
    bucket = Bucket.ragged(recurrent.FEW_TOKENS + 1, CONTEXT, 4)
    of_a_scan = {"recurrence_rates": 1, "recurrence": 1}
    assert kernels_of(lowered("bamba", bucket), "layers.0.linear_attn.scan") == {**of_a_scan, **chunks}
    assert kernels_of(lowered("bamba", bucket, invariant=True), "layers.0.linear_attn.scan") == of_a_scan
    few = Bucket.ragged(recurrent.FEW_TOKENS, CONTEXT, 4)
    assert kernels_of(lowered("bamba", few), "layers.0.linear_attn.scan") == of_a_scan


def test_a_program_has_chunks_for_any_cut_of_its_rows() -> None:
    """Sequences of 17 tokens around a multiple of the size have two chunks each."""
    rows, sequences, size = 512, 30, recurrent.CHUNK
    launch = next(
        step
        for step in lowered("bamba", Bucket.ragged(rows, CONTEXT, sequences)).programs[0].launches
        if isinstance(step, Launch) and step.kernel.startswith("recurrence_chunks")
    )
    rng = np.random.default_rng(0)
    for number in (1, 2, 7, sequences):
        counts = rng.multinomial(rows - number, np.ones(number) / number) + 1
        begins = rng.integers(0, size, number)
        assert sum(-(-(begins + counts) // size)) <= launch.grid[0]
    assert sum(-(-(size - 1 + np.full(sequences, 17)) // size)) <= launch.grid[0]


def limits(found: LoweredLaunches) -> set[tuple[float, float]]:
    """Limits of the launches of rates."""
    steps = [step for step in found.programs[0].launches if isinstance(step, Launch)]
    rates = [step.arguments[7:9] for step in steps if step.kernel.startswith("recurrence_rates")]
    return {tuple(one.value for one in pair if one.kind == "number") for pair in rates}  # type: ignore[misc]


def test_limits_of_time_steps_are_part_of_their_launch() -> None:
    ((least, most),) = limits(lowered("granitemoehybrid"))
    assert 0 <= most < 1e3 or 0 < least < 1
    ((least, _),) = limits(lowered("nemotron_h"))
    assert 0 < least < 1
    ((least, most),) = limits(lowered("bamba"))
    assert least < -1e30
    assert most > 1e30


def test_sizes_that_no_kernel_has_are_refused_by_name() -> None:
    model = fused(imported(CHECKPOINTS / "bamba"))
    scan = next(node for node in model.graph if node.op_type == "SelectiveScan")
    scan.attributes["state_dim"] = ir.AttrInt64("state_dim", 300)
    with pytest.raises(PassError, match=r"scan' \(SelectiveScan\) has states of 300 rows; CUDA kernels take 256"):
        lower_to_launches(model, (Bucket.decode(4, CONTEXT),))


def test_a_rate_with_other_readers_is_refused_by_the_name_of_its_node() -> None:
    model = fused(imported(CHECKPOINTS / "bamba"))
    node = next(node for node in model.graph if node.op_type == "Softplus")
    dt = node.outputs[0]
    model.graph.insert_after(node, made := ir.node("Relu", [dt], name="other"))
    made.outputs[0].shape = dt.shape
    with pytest.raises(PassError, match=r"dt.positive' \(Softplus\) has no CUDA kernel"):
        lower_to_launches(model, (Bucket.decode(4, CONTEXT),))
