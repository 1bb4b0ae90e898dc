"""Whether llama.cpp and Ingot compute the same model: logits of one checkpoint by both.

    python -m benchmarks.cpu.gguf_logits [--peers-python .venv-bench/bin/python] [--shapes lfm2-350m]

A shape is shortened to --layers layers and a small vocabulary, and its random weights are those of the comparison.
llama.cpp computes in 32-bit floats, numpy, over the imported model, in 64-bit ones. The figure is the largest
difference of a logit of one prompt, of --tokens tokens, over the largest logit.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.hybrids import ALL_SHAPES, HybridShape
from benchmarks.paths import ROOT
from benchmarks.peers import PEERS_VENV
from benchmarks.shapes import ModelShape
from benchmarks.synthetic import write_checkpoint

_VOCABULARY = 2048
Logits = NDArray[Any]  # [tokens, vocabulary]


def shortened(shape: ModelShape | HybridShape, layers: int) -> ModelShape | HybridShape:
    """The shape's first layers; a hybrid's last one has attention, so that both kinds are there."""
    if isinstance(shape, HybridShape):
        kept = tuple(layer for layer in shape.attention_layers if layer < layers) or (layers - 1,)
        return replace(shape, num_layers=layers, attention_layers=kept, vocab_size=_VOCABULARY)
    return replace(shape, num_layers=layers, vocab_size=_VOCABULARY)


def ingot_logits(checkpoint: Path, tokens: list[int]) -> Logits:
    """Of the imported model, in 64-bit floats, by numpy."""
    from tests.simulators.float64_ir import float64_logits

    from ingot.pipeline.checkpoint.checkpoint import Checkpoint
    from ingot.pipeline.model.importer import import_checkpoint

    return float64_logits(import_checkpoint(Checkpoint.open(checkpoint)), tokens)


def llama_cpp_logits(file: Path, tokens: Sequence[int]) -> Logits:
    """By llama.cpp, in the peers' environment."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = len(tokens)
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for at, token in enumerate(tokens):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, True
        batch.seq_id[at][0] = 0
    if llama_cpp.llama_decode(context, batch) != 0:
        raise RuntimeError(f"llama.cpp cannot compute {file}")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(tokens), vocabulary)).copy()


def _as_peer(checkpoint: Path, tokens: Sequence[int], output: Path) -> None:
    from benchmarks.gguf_export import export

    file = checkpoint / "model.gguf"
    export(checkpoint, file, np.float32)
    np.save(output, llama_cpp_logits(file, tokens))


def difference(shape: ModelShape | HybridShape, layers: int, tokens: int, python: Path) -> float:
    """The largest difference of a logit over the largest logit."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(shortened(shape, layers), Path(folder) / "checkpoint", context_tokens=tokens)
        prompt = np.random.default_rng(0).integers(1, _VOCABULARY, tokens).tolist()
        output = Path(folder) / "logits.npy"
        request = json.dumps([str(checkpoint), prompt, str(output)])
        subprocess.run([python, "-m", "benchmarks.cpu.gguf_logits", "--as-peer", request], cwd=ROOT, check=True)
        theirs, ours = np.load(output), ingot_logits(checkpoint, prompt)
    return float(np.abs(theirs - ours).max() / np.abs(ours).max())


@click.command(help=__doc__)
@click.option("--shapes", default=",".join(ALL_SHAPES), show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--tokens", default=200, show_default=True)
@click.option("--peers-python", type=click.Path(path_type=Path), default=PEERS_VENV / "bin" / "python")
@click.option("--as-peer", hidden=True)
def main(shapes: str, layers: int, tokens: int, peers_python: Path, as_peer: str | None) -> None:
    """Print the difference of each shape; exit status 1 where it is above 1e-4."""
    if as_peer:
        checkpoint, prompt, output = json.loads(as_peer)
        _as_peer(Path(checkpoint), prompt, Path(output))
        return
    found = {name: difference(ALL_SHAPES[name], layers, tokens, peers_python) for name in shapes.split(",")}
    for name, value in found.items():
        click.echo(f"{name}: {value:.1e}")
    sys.exit(max(found.values()) > 1e-4)


if __name__ == "__main__":
    main()
