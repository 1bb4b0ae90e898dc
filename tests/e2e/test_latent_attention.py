"""A model with latent attention: all answers verify as equal, blocks hold latents, targets without kernels refuse it.

test_imported_families.py compares the families' logits with those of transformers.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.artifact.manifest import CPU_ENGINES
from ingot.cli.main import run
from ingot.errors import PassError, UsageError
from tests.conftest import BuildArtifact, locked
from tests.each_case import each_case

RANK, PLAIN, ROPE, VALUE = 40, 24, 16, 20


@pytest.fixture(scope="session")
def with_latents(two_layers: Path) -> Path:
    """The two layers as a youtu, with random attention: its latents are of another width than anything else."""
    folder = two_layers.parent / "with-latents"
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            shutil.copytree(two_layers, folder, ignore=shutil.ignore_patterns("model.safetensors"))
            config = json.loads((two_layers / "config.json").read_text())
            config |= {"model_type": "youtu", "kv_lora_rank": RANK, "q_lora_rank": None, "v_head_dim": VALUE}
            config |= {"qk_nope_head_dim": PLAIN, "qk_rope_head_dim": ROPE}
            config["num_key_value_heads"] = config["num_attention_heads"]
            (folder / "config.json").write_text(json.dumps(config))
            save_file(_tensors(two_layers / "model.safetensors", config), folder / "model.safetensors")
    return folder


def _tensors(file: Path, config: dict[str, int]) -> dict[str, np.ndarray]:
    rng, hidden, heads = np.random.default_rng(0), config["hidden_size"], config["num_attention_heads"]
    shapes = {
        "q_proj": (heads * (PLAIN + ROPE), hidden),
        "kv_a_proj_with_mqa": (RANK + ROPE, hidden),
        "kv_b_proj": (heads * (PLAIN + VALUE), RANK),
        "o_proj": (hidden, heads * VALUE),
    }
    made = {name: array for name, array in load_file(file).items() if ".self_attn." not in name}
    dtype = made["model.norm.weight"].dtype
    for layer in range(2):
        path = f"model.layers.{layer}.self_attn"
        for name, shape in shapes.items():
            made[f"{path}.{name}.weight"] = (rng.standard_normal(shape) / shape[1] ** 0.5).astype(dtype)
        made[f"{path}.kv_a_layernorm.weight"] = rng.uniform(0.5, 1.5, RANK).astype(dtype)
    return made


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("recipe", ["fp32-cpu", "int4-kv8-cpu"])
def test_every_answer_is_the_plain_paths(
    build_unmeasured: BuildArtifact, with_latents: Path, recipe: str, engine: str
) -> None:
    artifact = build_unmeasured(recipe, with_latents, f"cpu.engine={engine}")
    for cell in ("chunked-prefill+batch-mates", "prefix-hit+preemption", "host-restore+batch-mates"):
        assert run(["verify", str(artifact.path), "--only", cell]) == 0


@each_case(("precision", "bytes_of_vector"), [("float32", 4 * 56), ("float16", 2 * 56), ("int8", 56 + 2)])
def test_a_token_has_one_vector_of_latent_and_rotated_key(
    build_unmeasured: BuildArtifact, with_latents: Path, precision: str, bytes_of_vector: int
) -> None:
    kv = f"passes=[{{quantize-kv-cache: {{precision: {precision}}}}}]"
    geometry = build_unmeasured("fp32-cpu", with_latents, kv).manifest.kv
    assert (geometry.num_kv_heads, geometry.head_dim, geometry.value_dim) == (1, ROPE + RANK, 0)
    assert geometry.block_bytes == 2 * 16 * bytes_of_vector  # layers, tokens


@pytest.mark.parametrize("precision", ["int4", "k8v4"])
def test_four_bits_are_refused(build_unmeasured: BuildArtifact, with_latents: Path, precision: str) -> None:
    kv = f"passes=[{{quantize-kv-cache: {{precision: {precision}}}}}]"
    with pytest.raises(PassError, match=f"latent keys, of which values are a part: precision is {precision}"):
        build_unmeasured("fp32-cpu", with_latents, kv)


@pytest.mark.parametrize("recipe", ["fp16-ort-cuda", "fp16-tensorrt"])
def test_gpu_targets_without_kernels_refuse_latent_keys_by_name(
    build_unmeasured: BuildArtifact, with_latents: Path, recipe: str
) -> None:
    pytest.importorskip("triton", reason="the target requires it: pip install '.[cuda]'")
    with pytest.raises(
        UsageError, match="does not compute latent attention, which model_type youtu has: build for cpu, cuda-sm"
    ):
        build_unmeasured(recipe, with_latents)
