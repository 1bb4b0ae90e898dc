"""A model on the host and a GPU, on the interpreted device: logits of the host alone, and blocks that both fill.

The host has first layers, experts, or both.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import LAUNCHES_FILE
from ingot.artifact.programs.stages import STAGES_FILE, STREAMED_WEIGHTS_FILE
from ingot.cli import main
from ingot.cli.main import run
from ingot.errors import ArtifactError, EngineError, PassError, UsageError
from ingot.passes.model_facts import MODEL
from ingot.passes.recurrent_ops import recurrent_nodes
from ingot.pipeline.recipe.sections import DeviceShare
from ingot.pipeline.targets.cuda import host_stage
from ingot.pipeline.targets.cuda.host_stage import divide, divided_parts
from ingot.runtime import Engine, SamplingParams
from ingot.runtime.cpu.native_executor import NativeExecutor
from ingot.runtime.engine.open_tiers import open_tiers
from ingot.runtime.executors import Executor, PipelinedExecutor, TieredStatefulExecutor
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.options import EngineOptions
from ingot.sizes import format_bytes
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.runtime.cpu.native.kernel_cases import needs_library
from tests.simulators.triton_interpreter import use_interpreter, use_ordered_dots

use_interpreter()

from ingot.runtime.cuda.host_stage import HostAndGpuExecutor  # noqa: E402
from tests.artifact.tiny_artifact import reseal  # noqa: E402
from tests.runtime.cuda.batches import Growing, token_ids  # noqa: E402
from tests.runtime.cuda.demo_model import TOLERANCES  # noqa: E402
from tests.simulators.divided_models import (  # noqa: E402
    TARGET,
    Activations,
    Rules,
    divided_artifact,
    host_artifact,
    prepared,
    recipe_of,
)
from tests.simulators.interpreted_device import InterpretedDevice  # noqa: E402
from tests.simulators.launch_programs import INT4, INT8, Entry  # noqa: E402

pytestmark = needs_library

LENGTHS = (14, 9)
Json = dict[str, Any]
STEPS = (([9, 0], "last"), ([3, 8], "all"), ([1, 1], "all"), ([1, 0], "none"))
ROWS, BLOCK_TOKENS, BLOCKS = (2, 16), 4, 16
EXPERTS: Rules = {"host": "experts"}
FIRST = {"embed_tokens": "cpu"}
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPTS: list[list[int]] = [token_ids(count, seed).tolist() for seed, count in enumerate((11, 9, 10, 13))]


def logits_of(executor: Executor) -> FloatArray:
    """Logits [rows, vocabulary] of two sequences: chunks of prompts, decoding, and both."""
    ids = [token_ids(count, seed) for seed, count in enumerate(LENGTHS)]
    tables = np.random.default_rng(0).permutation(BLOCKS).reshape(len(ids), -1)
    growing = Growing(ids, tables.tolist())
    found = [executor.forward(growing.step(counts, wanted)).copy() for counts, wanted in STEPS]
    executor.close()
    return np.concatenate(found)


def differences(
    model: ir.Model,
    folder: Path,
    places: Sequence[int | Rules],
    activations: Activations = "float32",
    stream_experts: int = 0,
) -> Iterator[float]:
    """The largest difference from the logits of the host alone, of the largest of them, for each placement."""
    slots = 2 if recurrent_nodes(model.graph) else 0
    whole = host_artifact(model, folder / "host", recipe_of(1, activations, ROWS, BLOCK_TOKENS))
    expected = logits_of(NativeExecutor(whole, num_blocks=BLOCKS, num_states=slots, num_threads=1))
    for number, place in enumerate(places):
        recipe = recipe_of(place, activations, ROWS, BLOCK_TOKENS, stream_experts)
        artifact = divided_artifact(model, folder / str(number), recipe)
        found = logits_of(executor_of(artifact, state_slots=slots or None))
        yield float(np.abs(found - expected).max() / np.abs(expected).max())


def executor_of(artifact: Artifact, device: InterpretedDevice | None = None, **options: Any) -> HostAndGpuExecutor:
    given = EngineOptions(**{"kv_blocks": BLOCKS, "num_threads": 1, **options})
    return HostAndGpuExecutor(artifact, device or InterpretedDevice(), given)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_every_split_has_the_logits_of_the_host_up_to_the_order_of_sums(family: str, tmp_path: Path) -> None:
    model = prepared(CHECKPOINTS / family)
    layers = MODEL.of(model).num_layers
    found = list(differences(model, tmp_path, range(1, layers + 1)))
    assert len(found) == layers
    assert max(found) <= TOLERANCES["fp32"]
    assert min(found) > 0, "both are the same program"


@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("qwen2_moe", EXPERTS),
        ("gpt_oss", {"embed_tokens": "cpu", "layers.0": "cpu", "layers.1.mlp.experts": "cpu"}),
        ("gpt_oss", {"layers.1.mlp.experts": "cpu"}),
        ("nemotron_h-experts", EXPERTS),
    ],
)
def test_experts_on_the_host_have_the_logits_of_the_host(family: str, place: Rules, tmp_path: Path) -> None:
    (error,) = differences(prepared(CHECKPOINTS / family), tmp_path, [place])
    assert 0 < error <= TOLERANCES["fp32"]


def test_packed_experts_of_rounded_activations_have_the_logits_of_the_host(tmp_path: Path) -> None:
    model = prepared(CHECKPOINTS / "qwen2_moe", INT8, ("quantize-activations", {}))
    assert 0 < max(differences(model, tmp_path, [EXPERTS])) <= TOLERANCES["fp32"]


def test_side_state_is_divided_as_blocks_are(tmp_path: Path) -> None:
    model = prepared(CHECKPOINTS / "qwen3_next")
    assert max(differences(model, tmp_path, range(2, 4))) <= TOLERANCES["fp32"]


def test_hidden_states_and_keys_are_rounded_to_the_activations_type(tmp_path: Path) -> None:
    model = prepared(CHECKPOINTS / "llama")
    artifact = divided_artifact(model, tmp_path / "a", recipe_of(1, "float16", ROWS, BLOCK_TOKENS))
    assert artifact.manifest.kv.dtype == "float16"
    (error,) = differences(model, tmp_path, [1], "float16")
    assert TOLERANCES["fp32"] < error <= TOLERANCES["fp16"]


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A model whose host has the experts of the second of three layers; the GPU has their shared expert."""
    model = prepared(CHECKPOINTS / "qwen2_moe")
    return divided_artifact(
        model, tmp_path_factory.mktemp("b") / "a", recipe_of(EXPERTS, "float32", ROWS, BLOCK_TOKENS)
    )


def test_the_gpu_computes_shared_experts_while_the_host_computes_its_own(with_experts: Artifact) -> None:
    for program in read_launches(with_experts).programs:
        nodes = [step.node for step in program.launches]
        send, receive = (nodes.index(f"layers.1.mlp.combine.{name}") for name in ("send", "receive"))
        meanwhile = nodes[send + 1 : receive]
        assert "layers.1.mlp.shared_expert.down_proj" in meanwhile
        assert all("shared_expert" in node for node in meanwhile)


def test_stages_and_copies_are_shown(with_experts: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(with_experts.path), "--program", "--bucket", "decode-2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "cpu:0: 1 operations, " in shown
    assert "in 3 stages" in shown
    assert "1 cpu:0 11-11 layers.1.mlp.combine" in shown
    for direction in ("send", "receive"):
        assert f"host layers.1.mlp.combine.{direction} {direction}, stage 1 layers.1" in shown


def test_launches_between_stages_of_the_host_are_captured_once(with_experts: Artifact) -> None:
    device = InterpretedDevice()
    executor = executor_of(with_experts, device)
    executor.warm_up()
    # Before and while the host computes; after it with logits, greedy and random tokens, and for prompts without any.
    decode, prompts = 2 + 3, 2 + 4
    assert device.num_captures == decode + prompts
    growing = Growing([token_ids(9)], [[0, 1, 2]])
    for counts, wanted in (([8], "none"), ([1], "all")):
        executor.forward(growing.step(counts, wanted))
    assert device.num_captures == decode + prompts
    assert device.num_replays == 2 * 3
    executor.close()


def test_every_launch_is_waited_for_where_failures_are_to_name_their_kernel(
    with_experts: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_CUDA_BLOCKING", "1")
    device = InterpretedDevice()
    executor = executor_of(with_experts, device)
    batch = Growing([token_ids(2)], [[0]]).step([1], "none")
    executor.forward(batch)
    assert device.num_captures == 0
    device.failing = "layers.1.mlp.shared_expert.down_proj"
    with pytest.raises(EngineError, match=r"shared_expert\.down_proj' of the decode bucket"):
        executor.forward(batch)
    executor.close()


def test_a_lost_device_ends_a_step_that_the_host_waits_in(with_experts: Artifact) -> None:
    device = InterpretedDevice()
    executor = executor_of(with_experts, device)
    device.failing = "layers.1.mlp.router"
    with pytest.raises(EngineError, match=r"layers\.1\.mlp\.combine\.send.*router broke"):
        executor.forward(Growing([token_ids(1)], [[0]]).step([1]))
    executor.close()


def test_other_sequences_change_no_bit_of_a_batch_invariant_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ordered_dots(monkeypatch)
    recipe = recipe_of(EXPERTS, "float32", ROWS, BLOCK_TOKENS, batch_invariant=True)
    artifact = divided_artifact(prepared(CHECKPOINTS / "qwen2_moe"), tmp_path / "a", recipe)
    ids, tables = [token_ids(count, seed) for seed, count in enumerate((9, 5))], [[3, 1, 4], [5, 9, 2]]
    alone, together = Growing(ids[:1], tables[:1]), Growing(ids, tables)
    executor = executor_of(artifact)
    expected = [executor.forward(alone.step([count])).copy() for count in (7, 1, 1)]
    found = [executor.forward(together.step([count, other])).copy() for count, other in ((7, 2), (1, 3), (1, 0))]
    for one, other in zip(expected, found, strict=True):
        assert one.tobytes() == other[: len(one)].tobytes()
    executor.close()


# Streamed weights

FIRST_AND_EXPERTS: Rules = {"embed_tokens": "cpu", "layers.0": "cpu", "layers.*.mlp.experts": "cpu"}


@pytest.mark.parametrize(("family", "place"), [("exaone_moe", EXPERTS), ("gpt_oss", FIRST_AND_EXPERTS)])
def test_experts_that_the_gpu_computes_in_prompts_alone_have_the_logits_of_the_host(
    family: str, place: Rules, tmp_path: Path
) -> None:
    (error,) = differences(prepared(CHECKPOINTS / family), tmp_path, [place], stream_experts=ROWS[-1])
    assert 0 < error <= TOLERANCES["fp32"]


@pytest.mark.parametrize(
    ("family", "quantization", "make_device"), [("qwen2_moe", [INT4], "random"), ("gpt_oss", [], "hasty")]
)
def test_copied_weights_have_the_bits_of_those_on_the_gpu(
    family: str, quantization: list[Entry], make_device: str, tmp_path: Path
) -> None:
    model = prepared(CHECKPOINTS / family, *quantization)
    found = list[FloatArray]()
    places: list[tuple[int | Rules, int]] = [(MODEL.of(model).num_layers, 0), (EXPERTS, 1)]
    for number, (place, rows) in enumerate(places):
        recipe = recipe_of(place, "float32", ROWS, BLOCK_TOKENS, rows)
        artifact = divided_artifact(model, tmp_path / str(number), recipe)
        assert artifact.has(STREAMED_WEIGHTS_FILE) == bool(rows)
        found.append(logits_of(executor_of(artifact, DEVICES[make_device]())))
    assert found[0].tobytes() == found[1].tobytes()


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A model with experts in the last three of four layers, which the GPU computes in prompts."""
    recipe = recipe_of(EXPERTS, "float32", ROWS, BLOCK_TOKENS, ROWS[-1])
    return divided_artifact(prepared(CHECKPOINTS / "exaone_moe"), tmp_path_factory.mktemp("c") / "a", recipe)


def test_weights_of_a_layer_are_copied_while_the_layer_before_is_computed(streamed: Artifact) -> None:
    decode, prompts = read_launches(streamed).programs
    assert decode.host_copies
    assert not decode.weight_copies
    assert not prompts.host_copies
    layers = [f"layers.{layer}.mlp.experts" for layer in (1, 2, 3)]
    order = [(one.action, one.tensor) for one in prompts.weight_copies]
    assert order == [
        ("begin", layers[0]),
        ("begin", layers[1]),
        ("wait", layers[0]),
        ("begin", layers[2]),
        ("wait", layers[1]),
        ("wait", layers[2]),
    ]
    steps, (last, *_) = (
        prompts.launches,
        [step for step in prompts.launches if step.node == "layers.1.mlp.combine"][-1:],
    )
    third = next(at for at, step in enumerate(steps) if step in prompts.weight_copies and step.buffers == (layers[2],))
    assert layers[0] in steps[third - 1].buffers
    assert steps.index(last) == third + 1, "the sum of the first layer's experts reads no weights"
    places = [prompts.places[layer] for layer in layers]
    assert places[0] == places[2] != places[1]


def test_decoding_between_prompts_and_mixed_steps_have_the_same_tokens(streamed: Artifact) -> None:
    options, params = EngineOptions(kv_blocks=40, num_threads=1, max_sequences=2), replace(PARAMS, max_tokens=2)
    with engine_with(streamed, DEVICES["random"](), options) as engine:
        alone = [engine.generate(prompt, params).token_ids for prompt in PROMPTS[:2]]
        assert [one.token_ids for one in engine.generate(PROMPTS[:2], params)] == alone


def test_inspect_shows_copies_and_the_weights_that_the_host_has_twice(
    streamed: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["inspect", str(streamed.path), "--bucket", "ragged-16"])
    shown = " ".join(capsys.readouterr().out.split())
    size = format_bytes(streamed.manifest.files[STREAMED_WEIGHTS_FILE].bytes)
    assert f"of weights and {size} of the same experts for the GPU, pinned" in shown
    assert "weights layers.3.mlp.combine wait, stage 5 layers.3.mlp.experts@" in shown


def test_each_device_counts_the_weights_that_it_keeps() -> None:
    model = prepared(CHECKPOINTS / "exaone_moe")
    recipe, streaming = (recipe_of(EXPERTS, "float32", ROWS, BLOCK_TOKENS, rows) for rows in (0, ROWS[-1]))
    (gpu, host), sizes = divided_parts(divide(model.clone(), recipe, TARGET), recipe, TARGET)
    (of_gpu, of_host), more = divided_parts(divide(model.clone(), streaming, TARGET), streaming, TARGET)
    assert sizes.pinned_bytes == 0
    assert of_host.weights - host.weights == more.pinned_bytes > 0
    assert of_gpu.weights == gpu.weights
    assert of_gpu.arena - gpu.arena > 0.6 * more.pinned_bytes, "two of three layers"
    small = streaming.model_copy(update={"devices": (DeviceShare(cuda=1 << 40), DeviceShare(cpu=of_host.total - 1))})
    with pytest.raises(UsageError, match=r"place: cpu:0 needs .*: 1 bytes are missing"):
        divide(model.clone(), small, TARGET)


def test_auto_streams_experts_where_that_pays_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, named = prepared(CHECKPOINTS / "exaone_moe"), ("h100", "epyc-9654")

    def least(hardware: Sequence[str | None] = (None, None), memory: int = 1 << 40, **more: Any) -> int | None:
        recipe, (gpu, host) = recipe_of(EXPERTS, "float32", (2, 256), BLOCK_TOKENS, **more), hardware
        devices = DeviceShare(cuda=1 << 40, hardware=gpu), DeviceShare(cpu=memory, hardware=host)
        options = recipe.gpu.model_copy(update={"prefill_rows": (16, 64)})
        found = divide(model.clone(), recipe.model_copy(update={"devices": devices, "gpu": options}), TARGET)
        return found.streamed.least_rows if found.streamed else None

    assert least() is None, "nothing is predicted without hardware"
    assert least(named) is None, "so small a layer takes a GPU longer in all steps"
    assert least(stream_experts=17) == 17
    monkeypatch.setattr(host_stage, "least_streamed_rows", lambda *_: 256)
    assert least(named) == 256
    assert least(named, stream_experts=0) is None
    assert least(named, batch_invariant=True) is None
    recipe = recipe_of(EXPERTS, "float32", (2, 256), BLOCK_TOKENS, 256)
    needed = divided_parts(divide(model.clone(), recipe, TARGET), recipe, TARGET)[0][1].total
    assert least(named, needed) == 256
    assert least(named, needed - 1) is None, "no memory for them"


def test_auto_leaves_experts_without_a_kernel_to_the_host_and_a_number_refuses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = prepared(CHECKPOINTS / "qwen2_moe", INT8, ("quantize-activations", {}))
    monkeypatch.setattr(host_stage, "least_streamed_rows", lambda *_: 256)
    devices = DeviceShare(cuda=1 << 40, hardware="h100"), DeviceShare(cpu=1 << 40, hardware="epyc-9654")
    recipe = recipe_of(EXPERTS, "float32", (2, 256), BLOCK_TOKENS).model_copy(update={"devices": devices})
    assert divide(model.clone(), recipe, TARGET).streamed is None
    with pytest.raises(PassError, match=r"activations rounded to 8 bits"):
        divide(model.clone(), recipe.model_copy(update={"stream_experts": 256}), TARGET)


@pytest.mark.parametrize(
    ("place", "rows", "message"),
    [
        (EXPERTS, 17, r"stream_experts is 17, and a step has at most 16 rows \(engine.max_batch_tokens\); lower"),
        (1, 16, r"stream_experts is 16, and the host has no experts of layers on the GPU; place some there"),
    ],
)
def test_rows_that_stream_no_experts_are_refused(place: int | Rules, rows: int, message: str) -> None:
    recipe = recipe_of(place, "float32", ROWS, BLOCK_TOKENS, rows)
    with pytest.raises(UsageError, match=f"^{message}"):
        divide(prepared(CHECKPOINTS / "qwen2_moe"), recipe, TARGET)


# Blocks


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Two of llama's three layers on the GPU."""
    model = prepared(CHECKPOINTS / "llama")
    return divided_artifact(model, tmp_path_factory.mktemp("a") / "a", recipe_of(2, "float32", ROWS, BLOCK_TOKENS))


def test_a_slot_in_host_memory_has_both_parts_of_a_block(divided: Artifact) -> None:
    executor = executor_of(divided)
    assert isinstance(executor, TieredStatefulExecutor)
    assert not isinstance(executor, PipelinedExecutor)
    executor.forward(Growing([token_ids(8)], [[3, 5]]).step([8]))
    blocks = executor.host_blocks(4)
    saved = [blocks.save(block, slot) for slot, block in enumerate((3, 5))]
    wait(saved)
    contents = [blocks.view(slot).copy() for slot in range(2)]
    runs = sorted((run.whole, run.bytes) for run in executor._blocks.layout.runs)
    begin, count = runs[0]
    assert 0 < begin < begin + count == len(contents[0]), "the host's layer is first, then those of the GPU"
    for content in contents:
        assert content[:begin].any()
        assert content[begin:].any()
    wait([blocks.restore(0, 7), blocks.restore(1, 3)])
    wait([blocks.save(7, 2), blocks.save(3, 3)])
    assert [blocks.view(slot).tobytes() for slot in (2, 3)] == [one.tobytes() for one in contents]
    executor.copy_block(7, 1)
    wait([blocks.save(1, 2)])
    assert blocks.view(2).tobytes() == contents[0].tobytes()
    blocks.close()
    executor.close()
    executor.close()


def wait(transfers: Any) -> None:
    while not all(transfer.done for transfer in transfers):
        pass
    assert [transfer.error for transfer in transfers] == [None] * len(transfers)


def test_a_transfer_that_the_gpu_has_begun_is_not_dropped(divided: Artifact) -> None:
    executor = executor_of(divided)
    blocks = executor.host_blocks(4)
    begun = blocks.save(1, 0)
    assert not begun.cancel()
    wait([begun])
    blocks.close()
    executor.close()


def engine_with(artifact: Artifact, device: InterpretedDevice, options: EngineOptions) -> Engine:
    executor = HostAndGpuExecutor(artifact, device, options)
    return Engine(
        executor,
        max_sequences=executor.max_sequences,
        prefix_cache=options.prefix_cache,
        identity=artifact.manifest.identity,
        tiers=partial(open_tiers, options=options),
    )


DEVICES: dict[str, Callable[[], InterpretedDevice]] = {
    "late": InterpretedDevice,
    "hasty": lambda: InterpretedDevice(hasty=True),
    "random": lambda: InterpretedDevice(rng=random.Random(0)),
}


@pytest.mark.parametrize("make_device", DEVICES.values(), ids=list(DEVICES))
def test_restored_prompts_have_the_same_tokens(divided: Artifact, make_device: Callable[[], InterpretedDevice]) -> None:
    def engine_of(kv_blocks: int, device: InterpretedDevice, **more: Any) -> Engine:
        return engine_with(divided, device, EngineOptions(kv_blocks=kv_blocks, num_threads=1, max_sequences=2, **more))

    with engine_of(40, InterpretedDevice()) as engine:
        expected = [engine.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]
    with engine_of(6, make_device(), kv_host_bytes=1 << 20, kv_restore="always") as engine:
        for _ in range(2):
            assert [engine.generate(prompt, PARAMS).token_ids for prompt in PROMPTS] == expected
            engine.check()
        metrics = engine.metrics().kv_tiers
    assert metrics is not None
    assert metrics.restored_blocks > 0
    assert metrics.failed_transfers == 0


def test_preempted_and_restored_sequences_with_experts_on_the_host_have_the_same_tokens(with_experts: Artifact) -> None:
    prompts = [PROMPTS[0], PROMPTS[0][:8] + PROMPTS[1][:3]]
    options = EngineOptions(kv_blocks=40, num_threads=1, max_sequences=2)
    with engine_with(with_experts, InterpretedDevice(), options) as engine:
        expected = [one.token_ids for one in engine.generate(prompts, PARAMS)]
    options = replace(options, kv_blocks=5, kv_host_bytes=1 << 20, kv_restore="always")
    with engine_with(with_experts, DEVICES["random"](), options) as engine:
        for _ in range(2):
            assert [one.token_ids for one in engine.generate(prompts, PARAMS)] == expected
            engine.check()
        metrics = engine.metrics()
    assert metrics.num_preemptions > 0
    assert metrics.prefix_hit_tokens > 0
    assert metrics.kv_tiers is not None
    assert metrics.kv_tiers.restored_blocks > 0
    assert metrics.kv_tiers.failed_transfers == 0


# Refusals


@pytest.mark.parametrize(
    ("family", "count", "message"),
    [
        ("qwen3_next", 1, "place: the layers from 2 on have no attention; a GPU needs one such layer"),
        ("gemma4_text", 4, r"takes one value from the host's layers, and this model passes 5 \(embed_tokens.scaled, "),
    ],
)
def test_layers_that_cannot_be_apart_are_refused(family: str, count: int, message: str, tmp_path: Path) -> None:
    model = prepared(CHECKPOINTS / family)
    with pytest.raises(PassError, match=message):
        divided_artifact(model, tmp_path / "a", recipe_of(count, "float32", ROWS, BLOCK_TOKENS))


@pytest.mark.parametrize(
    ("family", "place", "message"),
    [
        ("llama", EXPERTS, r"the model has no experts, so {host: experts} places nothing; leave place out"),
        ("llama", {"layers.1": "cpu"}, r"'layers.1.self_attn.qkv_proj' is on cpu:0, and layers before or after it on"),
        ("llama", {"layers.0": "cpu"}, r".* the host may have the embedding with the first layers, and experts of any"),
        ("llama", FIRST | {"layers.0.mlp": "cpu"}, r"'layers.0.mlp.gate_up_proj' is on cpu:0"),
        ("llama", FIRST | {"layers.0.self_attn": "cpu"}, r"'layers.0.self_attn.qkv_proj' is on cpu:0"),
        ("llama", {"layers.2": "cpu", "lm_head": "cpu"}, r"'layers.2.self_attn.qkv_proj' is on cpu:0"),
        ("llama", {"layers": "cuda"}, r"all operations are on one device; leave place out, with the target cpu or cu"),
        ("qwen2_moe", {"layers.1.mlp": "cpu"}, r"'layers.1.mlp.router' is on cpu:0"),
    ],
)
def test_placements_that_the_host_cannot_have_are_refused(
    family: str, place: Rules, message: str, tmp_path: Path
) -> None:
    recipe = recipe_of(place, "float32", ROWS, BLOCK_TOKENS)
    with pytest.raises(UsageError, match=f"^place: {message}"):
        divide(prepared(CHECKPOINTS / family), recipe, TARGET)


def test_a_device_that_is_too_small_for_experts_or_the_rest_names_the_split_that_fits() -> None:
    model, recipe = prepared(CHECKPOINTS / "qwen2_moe"), recipe_of(EXPERTS, "float32", ROWS, BLOCK_TOKENS)
    gpu, host = divided_parts(divide(model.clone(), recipe, TARGET), recipe, TARGET)[0]
    assert gpu.kv > 0
    assert host.kv == 0
    for cuda, cpu, lacking in ((gpu.total - 1, 1 << 40, "cuda:0"), (1 << 40, host.total - 1, "cpu:0")):
        small = recipe.model_copy(update={"devices": (DeviceShare(cuda=cuda), DeviceShare(cpu=cpu))})
        message = rf"{lacking} needs .*: 1 bytes are missing\. The nearest split by layers that fits is {{gpu_layers"
        with pytest.raises(UsageError, match=message):
            divide(model.clone(), small, TARGET)


def test_a_gpu_that_is_too_small_names_the_split_that_fits(tmp_path: Path) -> None:
    model = prepared(CHECKPOINTS / "llama")
    recipe = recipe_of(3, "float32", ROWS, BLOCK_TOKENS)
    gpu, host = divided_parts(divide(model.clone(), recipe, TARGET), recipe, TARGET)[0]
    assert (gpu.name, host.name) == ("cuda:0", "cpu:0")
    small = recipe.model_copy(update={"devices": (DeviceShare(cuda=gpu.total - 1), DeviceShare(cpu=1 << 40))})
    with pytest.raises(UsageError, match=r"cuda:0 needs .*: 1 bytes are missing\. The nearest .* {gpu_layers: 2}$"):
        divide(model.clone(), small, TARGET)


def test_auto_takes_the_fastest_split_that_fits(tmp_path: Path) -> None:
    model, by_layers = prepared(CHECKPOINTS / "llama"), recipe_of(2, "float32", ROWS, BLOCK_TOKENS)
    two = divided_parts(divide(model.clone(), by_layers, TARGET), by_layers, TARGET)[0][0].total

    def layers_on_gpu(memory: int, fast: str, slow: str) -> int:
        devices = DeviceShare(cuda=memory, hardware=fast), DeviceShare(cpu=1 << 40, hardware=slow)
        recipe = by_layers.model_copy(update={"place": "auto", "devices": devices})
        return len(divide(model.clone(), recipe, TARGET).cut.devices[0].layers)

    # So small a model is faster where a layer costs no launches.
    assert layers_on_gpu(1 << 40, "h100", "epyc-9654") == 1
    assert layers_on_gpu(1 << 40, "epyc-9654", "h100") == 3
    assert layers_on_gpu(two, "epyc-9654", "h100") == 2
    with pytest.raises(UsageError, match=r"place: auto: no layer fits on cuda:0, with the rest on cpu:0: raise the"):
        layers_on_gpu(1000, "h100", "epyc-9654")


def test_auto_leaves_experts_to_the_host_where_that_is_the_fastest_that_fits() -> None:
    model, recipe = prepared(CHECKPOINTS / "qwen2_moe"), recipe_of(EXPERTS, "float32", ROWS, BLOCK_TOKENS)
    needed = divided_parts(divide(model.clone(), recipe, TARGET), recipe, TARGET)[0][0].total

    def stages(memory: int) -> list[int]:
        devices = DeviceShare(cuda=memory, hardware="epyc-9654"), DeviceShare(cpu=1 << 40, hardware="h100")
        auto = recipe.model_copy(update={"place": "auto", "devices": devices})
        return [stage.device for stage in divide(model.clone(), auto, TARGET).plan.stages]

    assert stages(1 << 40) == [1, 0], "all layers on the first device"
    assert stages(needed) == [0, 1, 0], "experts on the host"
    assert stages(needed - 1) == [1, 0], "fewer layers on the first device"


def test_stages_and_launches_of_other_artifacts_are_refused(divided: Artifact, tmp_path: Path) -> None:
    plan = json.loads(divided.file(STAGES_FILE).read_text())
    plan["stages"] = [{"device": 0, "end": 3}, {"device": 1, "end": plan["stages"][1]["end"]}]
    copy = shutil.copytree(divided.path, tmp_path / "a")
    (copy / STAGES_FILE).write_text(json.dumps(plan))
    reseal(copy)
    with pytest.raises(ArtifactError, match=r"stages\.json: "):
        executor_of(open_artifact(copy))


def copies(raw: Json) -> list[Json]:
    """The copies to and from the host of the first bucket."""
    return [step for step in raw["programs"][0]["launches"] if step["kind"] == "host"]


def drop_copy(raw: Json) -> None:
    raw["programs"][0]["launches"].remove(copies(raw)[0])


def wait_in_head(raw: Json) -> None:
    raw["programs"][0]["head_start"] = raw["programs"][0]["launches"].index(copies(raw)[1])


def change(number: int, **changes: object) -> Callable[[Json], None]:
    return lambda raw: copies(raw)[number].update(changes)


def change_value(number: int, **changes: object) -> Callable[[Json], None]:
    return lambda raw: copies(raw)[number]["values"][0].update(changes)


def change_rows(number: int, **changes: object) -> Callable[[Json], None]:
    return lambda raw: copies(raw)[number]["values"][0]["rows"].update(changes)


DAMAGED: dict[str, tuple[Callable[[Json], None], str]] = {
    "a copy less": (
        drop_copy,
        r"decode-2: it copies \(1, 'receive', .* where program/stages\.json needs \(1, 'se",
    ),
    "stage": (change(0, stage=0), r"it copies \(0, 'send', .* needs \(1, 'send', "),
    "no stage": (change(1, stage=9), r"it copies \(9, 'receive', .* needs \(1, 'receive', "),
    "direction": (change(0, direction="receive"), r"it copies \(1, 'receive'.* needs \(1, 'send'"),
    "unknown direction": (change(0, direction="up"), r"direction: Input should be 'send' or 'receive'"),
    "no values": (change(0, values=[]), r"values: Tuple should have at least 1 item"),
    "buffer": (change_value(0, buffer="x"), r"it copies .*'x'"),
    "column": (change_value(1, column=1), r"the copy of 'layers\.1\.mlp\.combine' ends at column 33 of 32"),
    "columns": (change_value(0, columns=8), r"'layers\.1\.mlp\.combine' reads columns of .* that are not copied"),
    "element type": (change_rows(0, type="i32"), r"has rows of 'i32'; they must be of bf16, fp16, fp32"),
    "offset": (change_rows(1, offset=1), r"the copy of .* ends at byte 260 of 256 of "),
    "rows": (change_rows(1, name="input_ids"), r"ends at byte 256 of 0 of 'input_ids'"),
    "head": (wait_in_head, r"its head waits for the host"),
}


def weight_copies(raw: Json) -> list[Json]:
    """The copies of weights of the last bucket."""
    return [step for step in raw["programs"][-1]["launches"] if step["kind"] == "weights"]


def change_weights(number: int, **changes: object) -> Callable[[Json], None]:
    return lambda raw: weight_copies(raw)[number].update(changes)


def change_first_weights(**changes: object) -> Callable[[Json], None]:
    """Change both the beginning of the first layer's copy, and where it is waited for."""

    def damage(raw: Json) -> None:
        for number in (0, 2):
            weight_copies(raw)[number].update(changes)

    return damage


def change_bytes(raw: Json) -> None:
    change_first_weights(bytes=weight_copies(raw)[0]["bytes"] - 256)(raw)


def move_weights(raw: Json) -> None:
    change_first_weights(weights={**weight_copies(raw)[0]["weights"], "offset": 256})(raw)


def drop_weights(number: int) -> Callable[[Json], None]:
    return lambda raw: raw["programs"][-1]["launches"].remove(weight_copies(raw)[number])


def wait_at_the_end(raw: Json) -> None:
    launches, wait = raw["programs"][-1]["launches"], weight_copies(raw)[-1]
    launches.remove(wait)
    launches.insert(raw["programs"][-1]["head_start"] - 1, wait)


def copy_in_head(raw: Json) -> None:
    raw["programs"][-1]["head_start"] = raw["programs"][-1]["launches"].index(weight_copies(raw)[-1])


DAMAGED_WEIGHTS: dict[str, tuple[Callable[[Json], None], str]] = {
    "tensor": (
        change_first_weights(tensor="layers.9.mlp.experts"),
        r"copies 'layers\.9\.mlp\.experts', which .*streamed_weights\.safetensors does not have",
    ),
    "size": (change_bytes, r"ragged-16: it copies \d+ bytes of 'layers\.1\.mlp\.experts', which has \d+"),
    "place": (move_weights, r"the copy of 'layers\.1\.mlp\.experts' ends at byte \d+ of \d+ of 'layers\.1\.mlp\.exp"),
    "other place": (
        change_weights(2, weights={"name": "logits", "type": "u8"}),
        r"the copy of 'layers\.1\.mlp\.experts' ends at byte \d+ of 0 of 'logits'",
    ),
    "other stage": (change_weights(2, stage=3), r"waits for a copy of 'layers\.1\.mlp\.experts' that did not begin"),
    "no begin": (drop_weights(0), r"it waits for a copy of 'layers\.1\.mlp\.experts' that did not begin"),
    "no wait": (drop_weights(2), r"reads 'layers\.1\.mlp\.experts', whose copy may not have ended"),
    "late wait": (wait_at_the_end, r"reads 'layers\.3\.mlp\.experts', whose copy may not have ended"),
    "begin twice": (change_weights(2, action="begin"), r"it copies 'layers\.1\.mlp\.experts' twice"),
    "unknown action": (change_weights(0, action="end"), r"action: Input should be 'begin' or 'wait'"),
    "stage of the GPU": (
        change_first_weights(stage=0),
        r"it copies nothing to or from the host where .* needs \(1, 'send'",
    ),
    "head": (copy_in_head, r"its head copies 'layers\.3\.mlp\.experts'"),
}


@each_case("case", DAMAGED_WEIGHTS)
def test_copies_of_weights_that_do_not_fit_are_refused(streamed: Artifact, tmp_path: Path, case: str) -> None:
    damage, message = DAMAGED_WEIGHTS[case]
    raw = json.loads(streamed.file(LAUNCHES_FILE).read_text())
    damage(raw)
    copy = shutil.copytree(streamed.path, tmp_path / "a")
    (copy / LAUNCHES_FILE).write_text(json.dumps(raw))
    reseal(copy)
    with pytest.raises(ArtifactError, match=message):
        read_launches(open_artifact(copy))


@each_case("case", DAMAGED)
def test_copies_that_do_not_fit_the_stages_are_refused(with_experts: Artifact, tmp_path: Path, case: str) -> None:
    damage, message = DAMAGED[case]
    raw = json.loads(with_experts.file(LAUNCHES_FILE).read_text())
    damage(raw)
    copy = shutil.copytree(with_experts.path, tmp_path / "a")
    (copy / LAUNCHES_FILE).write_text(json.dumps(raw))
    reseal(copy)
    with pytest.raises(ArtifactError, match=message):
        read_launches(open_artifact(copy))


def test_stages_that_the_launches_were_not_made_for_are_refused(with_experts: Artifact, tmp_path: Path) -> None:
    plan = json.loads(with_experts.file(STAGES_FILE).read_text())
    assert [stage["device"] for stage in plan["stages"]] == [0, 1, 0]
    plan["stages"] = [plan["stages"][0], {"device": 1, "end": plan["stages"][-1]["end"]}]
    copy = shutil.copytree(with_experts.path, tmp_path / "a")
    (copy / STAGES_FILE).write_text(json.dumps(plan))
    reseal(copy)
    with pytest.raises(ArtifactError, match=r"stages\.json: "):
        executor_of(open_artifact(copy))
