"""A model on the host and a GPU, on the interpreted device: logits of the host alone, and blocks that both fill.

The host has first layers, experts, or both.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.stages import STAGES_FILE
from ingot.errors import ArtifactError, PassError, UsageError
from ingot.passes.model_facts import MODEL
from ingot.passes.recurrent_ops import recurrent_nodes
from ingot.pipeline.recipe.sections import DeviceShare
from ingot.pipeline.targets.cuda.host_stage import divide, divided_parts
from ingot.runtime import Engine, SamplingParams
from ingot.runtime.cpu.native_executor import NativeExecutor
from ingot.runtime.engine.open_tiers import open_tiers
from ingot.runtime.executors import Executor, PipelinedExecutor, TieredStatefulExecutor
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.options import EngineOptions
from tests.parity import CHECKPOINTS
from tests.runtime.cpu.native.kernel_cases import needs_library
from tests.simulators.triton_interpreter import use_interpreter

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
from tests.simulators.launch_programs import INT8  # noqa: E402

pytestmark = needs_library

LENGTHS = (14, 9)
STEPS = (([9, 0], "last"), ([3, 8], "all"), ([1, 1], "all"), ([1, 0], "none"))
ROWS, BLOCK_TOKENS, BLOCKS = (2, 16), 4, 16
EXPERTS: Rules = {"host": "experts"}
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
    model: ir.Model, folder: Path, places: Sequence[int | Rules], activations: Activations = "float32"
) -> Iterator[float]:
    """The largest difference from the logits of the host alone, of the largest of them, for each placement."""
    slots = 2 if recurrent_nodes(model.graph) else 0
    whole = host_artifact(model, folder / "host", recipe_of(1, activations, ROWS, BLOCK_TOKENS))
    expected = logits_of(NativeExecutor(whole, num_blocks=BLOCKS, num_states=slots, num_threads=1))
    for number, place in enumerate(places):
        artifact = divided_artifact(model, folder / str(number), recipe_of(place, activations, ROWS, BLOCK_TOKENS))
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


def test_stages_and_launches_of_other_artifacts_are_refused(divided: Artifact, tmp_path: Path) -> None:
    plan = json.loads(divided.file(STAGES_FILE).read_text())
    plan["stages"] = [{"device": 0, "end": 3}, {"device": 1, "end": plan["stages"][1]["end"]}]
    copy = shutil.copytree(divided.path, tmp_path / "a")
    (copy / STAGES_FILE).write_text(json.dumps(plan))
    reseal(copy)
    with pytest.raises(ArtifactError, match=r"stages\.json: "):
        executor_of(open_artifact(copy))
