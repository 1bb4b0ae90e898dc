"""Time and memory of importing a mixture of experts, by default of the shape of Qwen3-30B-A3B, from sparse files.

    python -m benchmarks.cpu.hollow_experts

The files are as long as the real ones and hold a header and a hole each, so nothing but the import itself is measured.
It runs in a process of its own, whose peak memory is reported next to that before the import.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from benchmarks.gpu.programs.packing import write_hollow_tensors
from benchmarks.synthetic import weights_header
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import ModelSource

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 768, 32, 4, 128, 151936
Shapes = dict[str, tuple[int, ...]]


def write_checkpoint(folder: Path, layers: int, experts: int) -> None:
    """A shard for each layer, and one for embedding and head."""
    shards = {f"model-{layer:05}.safetensors": _layer(layer, experts) for layer in range(layers)}
    shards["model-head.safetensors"] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for file, shapes in shards.items():
        write_hollow_tensors(folder / file, weights_header(shapes))
    index = {name: file for file, shapes in shards.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), "utf-8")
    (folder / "config.json").write_text(json.dumps(_config(layers, experts)), "utf-8")


def _layer(layer: int, experts: int) -> Shapes:
    path, queries, keys = f"model.layers.{layer}", HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: Shapes = {
        f"{path}.input_layernorm.weight": (HIDDEN,),
        f"{path}.post_attention_layernorm.weight": (HIDDEN,),
        f"{path}.self_attn.q_proj.weight": (queries, HIDDEN),
        f"{path}.self_attn.k_proj.weight": (keys, HIDDEN),
        f"{path}.self_attn.v_proj.weight": (keys, HIDDEN),
        f"{path}.self_attn.o_proj.weight": (HIDDEN, queries),
        f"{path}.self_attn.q_norm.weight": (HEAD_DIM,),
        f"{path}.self_attn.k_norm.weight": (HEAD_DIM,),
        f"{path}.mlp.gate.weight": (experts, HIDDEN),
    }
    for expert in range(experts):
        own = f"{path}.mlp.experts.{expert}"
        shapes |= {f"{own}.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{own}.down_proj.weight"] = (HIDDEN, INNER)
    return shapes


def _config(layers: int, experts: int) -> dict[str, object]:
    return {
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "moe_intermediate_size": INNER,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "norm_topk_prob": True,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
    }


def measure(folder: Path) -> dict[str, float]:
    """Seconds of processor time and MiB of one import in this process."""
    before, started = _peak_mib(), time.process_time()
    checkpoint = Checkpoint.open(folder)
    opened = time.process_time()
    source = ModelSource(checkpoint)
    parameters = source.facts.num_parameters
    imported = time.process_time()
    model = source.copy()
    return {
        "open_seconds": opened - started,
        "import_seconds": imported - opened,
        "copy_seconds": time.process_time() - imported,
        "parameters": parameters,
        "mib_before": before,
        "mib_peak": _peak_mib(),
        "nodes": len(list(model.graph)),
        "tensors": len(checkpoint.tensors),
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@click.command()
@click.option("--layers", default=48, show_default=True)
@click.option("--experts", default=128, show_default=True)
@click.option("--measure", "folder", type=click.Path(path_type=Path), hidden=True)
def main(layers: int, experts: int, folder: Path | None) -> None:
    """Measure in a process of its own, and print the figures as JSON."""
    if folder is not None:
        print(json.dumps({name: round(value, 3) for name, value in measure(folder).items()}))
        return
    with tempfile.TemporaryDirectory() as made:
        write_checkpoint(Path(made), layers, experts)
        subprocess.run([sys.executable, "-m", "benchmarks.cpu.hollow_experts", "--measure", made], check=True)


if __name__ == "__main__":
    main()
