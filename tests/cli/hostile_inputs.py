"""Damaged checkpoints and artifacts, each by the name of its damage: a function that damages a good copy in place."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.artifact.tiny_artifact import reseal
from tests.pipeline.tiny_checkpoint import entry, write_raw

Damage = Callable[[Path], object]
DEEP = 100_000
QUERY = "model.layers.0.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"


def text(name: str, content: str | bytes) -> Damage:
    """Replace a file's content."""
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def keys(file: str, /, **changes: Any) -> Damage:
    """Change keys of a JSON file."""

    def change(folder: Path) -> None:
        values = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**values, **changes}))

    return change


def config(**changes: Any) -> Damage:
    """Change keys of config.json."""
    return keys("config.json", **changes)


def tensor(change: Callable[[np.ndarray], np.ndarray | None], name: str = QUERY) -> Damage:
    """Change one tensor; None removes it."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        changed = {**tensors, name: change(tensors[name])}
        save_file({key: value for key, value in changed.items() if value is not None}, folder / WEIGHTS)

    return apply


def extra(name: str) -> Damage:
    """Add a tensor."""

    def apply(folder: Path) -> None:
        save_file({**load_file(folder / WEIGHTS), name: np.ones((4, 4), np.float32)}, folder / WEIGHTS)

    return apply


def cut(name: str, length: int) -> Damage:
    """Truncate a file; a negative length counts from its end."""

    def apply(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:length])

    return apply


def into_folder(name: str) -> Damage:
    """Put a folder in the place of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return apply


def into_pipe(name: str) -> Damage:
    """Put a pipe, which blocks its reader, in the place of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return apply


def into_loop(name: str) -> Damage:
    """Put a symbolic link to itself in the place of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(name.rpartition("/")[2])

    return apply


def _not_finite(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        changed = array.copy()
        changed.flat[3] = value
        return changed

    return change


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def _sharded(weight_map: object) -> Damage:
    def apply(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return apply


def _header(header: Any, data: bytes = b"", length: int | None = None) -> Damage:
    return lambda folder: write_raw(folder / WEIGHTS, header, data, length)


def _nothing(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


CHECKPOINTS: Mapping[str, Damage] = {
    "an empty folder": _nothing,
    "config: no file": lambda folder: (folder / "config.json").unlink(),
    "config: a folder": into_folder("config.json"),
    "config: a pipe": into_pipe("config.json"),
    "config: a link to itself": into_loop("config.json"),
    "config: empty": text("config.json", ""),
    "config: half": cut("config.json", 100),
    "config: a list": text("config.json", "[]"),
    "config: a number": text("config.json", "5"),
    "config: null": text("config.json", "null"),
    "config: bytes": text("config.json", b"\xff\xfe\x00\xd8"),
    "config: nested lists": text("config.json", "[" * DEEP),
    "config: nested objects": text("config.json", '{"a":' * DEEP),
    "config: a key twice": text("config.json", '{"a": 1, "a": 2}'),
    "config: 5,000 digits": text("config.json", '{"vocab_size": ' + "1" * 5000 + "}"),
    "model_type: none": config(model_type=None),
    "model_type: unknown": config(model_type="lama"),
    "model_type: a list": config(model_type=["llama"]),
    "model_type: 5,000 characters": config(model_type="x" * 5000),
    "layers: a billion": config(num_hidden_layers=10**9),
    "layers: 0": config(num_hidden_layers=0),
    "layers: true": config(num_hidden_layers=True),
    "vocab_size: 10^12": config(vocab_size=10**12),
    "hidden_size: a float": config(hidden_size=32.0),
    "hidden_size: negative": config(hidden_size=-32),
    "heads: 3": config(num_attention_heads=3),
    "positions: 2^40": config(max_position_embeddings=2**40),
    "epsilon: NaN": text("config.json", '{"model_type": "llama", "rms_norm_eps": NaN}'),
    "epsilon: 0": config(rms_norm_eps=0),
    "rope: a number": config(rope_scaling=5),
    "rope: unknown": config(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
    "rope: no factor": config(rope_scaling={"rope_type": "linear"}),
    "rope: nested": config(rope_scaling={"rope_type": {"a": 1}}),
    "activation: unknown": config(hidden_act="mish"),
    "quantization: 5": config(quantization_config=5),
    "quantization: a list": config(quantization_config=[]),
    "quantization: text": config(quantization_config="awq"),
    "quantization: empty": config(quantization_config={}),
    "quantization: unknown": config(quantization_config={"quant_method": "awk"}),
    "quantization: a list as method": config(quantization_config={"quant_method": ["awq"]}),
    "quantization: announced only": config(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32}),
    "quantization: groups of 0": config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 0}),
    "generation: half": text("generation_config.json", '{"eos'),
    "generation: a list": text("generation_config.json", "[1]"),
    "generation: text": text("generation_config.json", '{"eos_token_id": "end"}'),
    "generation: 2^70": text("generation_config.json", '{"eos_token_id": 1180591620717411303424}'),
    "generation: negative": text("generation_config.json", '{"eos_token_id": -1}'),
    "weights: no file": lambda folder: (folder / WEIGHTS).unlink(),
    "weights: a folder": into_folder(WEIGHTS),
    "weights: a pipe": into_pipe(WEIGHTS),
    "weights: empty": text(WEIGHTS, b""),
    "weights: seven bytes": text(WEIGHTS, b"1234567"),
    "weights: a pickle": _pickled,
    "weights: half": cut(WEIGHTS, 60_000),
    "weights: a byte less": cut(WEIGHTS, -1),
    "weights: a byte more": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"x"),
    "weights: text": text(WEIGHTS, "hello, this is not a safetensors file"),
    "header: huge": _header({}, length=2**62),
    "header: nested": _header(b"[" * DEEP),
    "header: a list": _header([]),
    "header: empty": _header({}),
    "header: an entry is a number": _header({"a": 5}),
    "header: negative offsets": _header({"a": entry("F32", [1], -4, 0)}),
    "header: an unknown dtype": _header({"a": entry("F33", [1], 0, 4)}, bytes(4)),
    "header: overlapping": _header({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, bytes(4)),
    "header: 10^18 elements": _header({"a": entry("F32", [10**9, 10**9], 0, 4 * 10**18)}, bytes(4)),
    "header: a long name": _header({"n" * 5000: entry("F32", [1], 0, 4)}, bytes(4)),
    "tensor: missing": tensor(lambda array: None),
    "tensor: another shape": tensor(lambda array: array[:-1].copy()),
    "tensor: transposed axes": tensor(lambda array: array.reshape(-1)),
    "tensor: int8": tensor(lambda array: array.astype(np.int8)),
    "tensor: float64": tensor(lambda array: array.astype(np.float64)),
    "tensor: NaN": tensor(_not_finite(float("nan"))),
    "tensor: infinite": tensor(_not_finite(float("inf"))),
    "tensor: one more": extra("model.layers.0.self_attn.w_proj.weight"),
    "tensor: another layer": extra("model.layers.99.mlp.up_proj.weight"),
    "tensor: a lone qweight": extra("model.layers.0.self_attn.q_proj.qweight"),
    "index: not an object": _sharded([]),
    "index: a missing shard": _sharded({QUERY: "model-00001.safetensors"}),
    "index: outside": _sharded({QUERY: "../model.safetensors"}),
    "index: NUL": _sharded({QUERY: "a\0b"}),
    "index: half a pair": _sharded({QUERY: "\ud800"}),
    "index: 5,000 characters": _sharded({QUERY: "x" * 5000}),
    "index: a number": _sharded({QUERY: 1}),
}


def quantized(leaf: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Damage:
    """Change a tensor of a quantized layer."""
    return tensor(change, f"model.layers.1.mlp.up_proj.{leaf}")


AWQ: Mapping[str, Damage] = {
    "qweight: missing": quantized("qweight", lambda array: None),
    "qweight: int8": quantized("qweight", lambda array: array.astype(np.int8)),
    "qweight: uint32": quantized("qweight", lambda array: array.view(np.uint32)),
    "qweight: fewer rows": quantized("qweight", lambda array: array[:-8].copy()),
    "qzeros: missing": quantized("qzeros", lambda array: None),
    "qzeros: float32": quantized("qzeros", lambda array: array.view(np.float32)),
    "qzeros: transposed": quantized("qzeros", lambda array: np.ascontiguousarray(array.T)),
    "scales: missing": quantized("scales", lambda array: None),
    "scales: int8": quantized("scales", lambda array: array.astype(np.int8)),
    "scales: NaN": quantized("scales", _not_finite(float("nan"))),
    "scales: one row more": quantized("scales", lambda array: np.concatenate([array, array[:1]])),
    "settings: 8 bits": config(quantization_config={"quant_method": "awq", "bits": 8, "group_size": 32}),
    "settings: gemv": config(
        quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}
    ),
    "settings: another group": config(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 64}),
    "settings: groups as text": config(quantization_config={"quant_method": "awq", "bits": 4, "group_size": "32"}),
    "settings: another method": config(quantization_config={"quant_method": "compressed-tensors", "config_groups": {}}),
    "settings: none": config(quantization_config=None),
    "settings: a list of numbers": config(
        quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": [1]}
    ),
}


def manifest(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the manifest, and make its digests right."""
    return lambda folder: reseal(folder, change)


def added(name: str) -> Damage:
    """Add a file that the manifest does not list."""

    def apply(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{{ messages }}")

    return apply


def removed(name: str) -> Damage:
    """Remove a file."""
    return lambda folder: (folder / name).unlink()


def linked(name: str) -> Damage:
    """Move a file out of the folder, and link to it."""

    def apply(folder: Path) -> None:
        target = folder.parent / f"{folder.name}-outside"
        (folder / name).rename(target)
        (folder / name).symlink_to(target)

    return apply


def flipped(name: str, at: int) -> Damage:
    """Flip a bit of a file."""

    def apply(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 1
        (folder / name).write_bytes(content)

    return apply


SEGMENT, PROGRAM_WEIGHTS = "program/segment-000.onnx", "program/weights.safetensors"
OPERATIONS = "program/operations.json"
ARTIFACTS: Mapping[str, Damage] = {  # for onnxruntime
    **{
        f"an unlisted {name}": added(name)
        for name in ("tokenizer/chat_template.jinja", ".DS_Store", "program/x.onnx", "manifest.json~", "more/x", "x.py")
    },
    "an unlisted folder": lambda folder: (folder / "empty").mkdir(),
    "an unlisted link": lambda folder: (folder / "link").symlink_to("/etc/passwd"),
    **{f"a link: {name}": linked(name) for name in (SEGMENT, PROGRAM_WEIGHTS, "recipe.yaml", "tokenizer/config.json")},
    **{f"no {name}": removed(name) for name in (SEGMENT, PROGRAM_WEIGHTS)},
    **{f"no {name}": removed(name) for name in ("recipe.yaml", "manifest.json")},
    **{f"half {name}": cut(name, 50) for name in (SEGMENT, PROGRAM_WEIGHTS, "manifest.json", "recipe.yaml")},
    **{f"a bit of {name}": flipped(name, 40) for name in (SEGMENT, PROGRAM_WEIGHTS, "recipe.yaml")},
    "a pipe": into_pipe(SEGMENT),
    "a folder for a file": into_folder(SEGMENT),
    "a loop": into_loop("manifest.json"),
    "manifest: a folder": into_folder("manifest.json"),
    "manifest: a pipe": into_pipe("manifest.json"),
    "manifest: empty": text("manifest.json", ""),
    "manifest: a list": text("manifest.json", "[]"),
    "manifest: nested": text("manifest.json", '{"a":' * DEEP),
    "manifest: a key twice": text("manifest.json", '{"name": 1, "name": 2}'),
    "manifest: NaN": text("manifest.json", '{"name": NaN}'),
    "manifest: bytes": text("manifest.json", b"\xff\x00"),
    "manifest: schema 4": keys("manifest.json", schema_version=4),
    "manifest: schema 10^400": keys("manifest.json", schema_version=10**400),
    "manifest: schema true": keys("manifest.json", schema_version=True),
    "manifest: another name": keys("manifest.json", name="other"),
    "manifest: no files": manifest(lambda raw: raw.update(files={})),
    "manifest: files a list": manifest(lambda raw: raw.update(files=[])),
    "manifest: a path outside": manifest(lambda raw: raw["files"].update({"../x": raw["files"][SEGMENT]})),
    "manifest: a NUL": manifest(lambda raw: raw["files"].update({"a\0": raw["files"][SEGMENT]})),
    "manifest: half a pair": manifest(lambda raw: raw["files"].update({"\ud800": raw["files"][SEGMENT]})),
    "manifest: a long path": manifest(lambda raw: raw["files"].update({"x" * 5000: raw["files"][SEGMENT]})),
    "manifest: negative bytes": manifest(lambda raw: raw["files"][SEGMENT].update(bytes=-1)),
    "manifest: an unknown key": manifest(lambda raw: raw.update(more=1)),
    "manifest: steps reversed": manifest(lambda raw: raw["program"]["steps"].reverse()),
    "manifest: an unknown value": manifest(lambda raw: raw["program"]["steps"][0].update(inputs=["x"])),
    "manifest: huge blocks": manifest(lambda raw: raw["kv"].update(block_tokens=10**9)),
    "manifest: huge batches": manifest(lambda raw: raw.update(max_batch_tokens=10**12)),
    "manifest: an unknown engine": manifest(lambda raw: raw.update(engine="magic")),
    "manifest: a scale of 1e999": manifest(lambda raw: raw["program"]["steps"][1].update(scale=1e999)),
}

NATIVE_ARTIFACTS: Mapping[str, Damage] = {
    f"a link: {OPERATIONS}": linked(OPERATIONS),
    **{f"no {name}": removed(name) for name in (OPERATIONS, PROGRAM_WEIGHTS)},
    **{f"half {name}": cut(name, 50) for name in (OPERATIONS, PROGRAM_WEIGHTS)},
    **{f"a bit of {name}": flipped(name, 40) for name in (OPERATIONS, PROGRAM_WEIGHTS)},
    "a pipe": into_pipe(OPERATIONS),
    "a folder for a file": into_folder(OPERATIONS),
    "manifest: another engine": manifest(lambda raw: raw.update(engine="onnxruntime")),
}
