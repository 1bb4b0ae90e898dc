"""Artifacts in one file each, to be copied to a GPU's machine; those of large models without their weights.

A packed program holds launches, cubins, the manifest, and types and shapes of the weights. `unpack` makes an artifact
of it whose weights file is sparse, with the real length; device.py fills the weights on the GPU. Large files of
artifacts with weights are stored once for all of them, by their digests.
"""

import json
import zipfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from ingot.artifact import MANIFEST, Artifact, open_artifact
from ingot.artifact.programs.launch_program import (
    LAUNCHES_FILE,
    WEIGHTS_FILE,
    CubinFacts,
    CudaProgram,
    Kernel,
    cubins_file,
)
from ingot.artifact.safetensors import DTYPE_BYTES

WEIGHTS_TABLE = "weights.json"
LADDER_FILE, TUNE_FILE = "ladder.zip", "tune-kernels.zip"  # variants of the programs' kernels
LARGE_BYTES = 2**20  # of files that several packed artifacts share
_SHARED, _SHARED_NAME = "shared", "data"  # the folder of shared files, next to the artifacts; the name within each
_KERNELS, _CUBINS = "kernels.json", "cubins.safetensors"
UNKNOWN_DIGEST = "0" * 64  # digest of a file that was not read


def pack(files: Mapping[str, bytes], file: Path) -> None:
    """Write files by name into one zip file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def pack_kernels(kernels: Mapping[str, Kernel], cubins: Mapping[str, Any], file: Path) -> None:
    """Write kernels with their compiled code (`Cubin`) into one zip file."""
    facts = {key: [kernel.model_dump(), cubins[key].facts.model_dump()] for key, kernel in kernels.items()}
    codes = {key: np.frombuffer(cubins[key].code, np.uint8) for key in kernels}
    pack({_KERNELS: json.dumps(facts).encode(), _CUBINS: save(codes)}, file)


class PackedKernels:
    """Kernels and their code in a packed file: a launch program, or what `pack_kernels` wrote."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @cached_property
    def kernels(self) -> dict[str, tuple[Kernel, CubinFacts]]:
        """The kernels by key."""
        with zipfile.ZipFile(self.file) as archive:
            if _KERNELS in archive.namelist():
                listed = json.loads(archive.read(_KERNELS))
            else:
                program = json.loads(archive.read(LAUNCHES_FILE))
                (facts,) = program["cubins"].values()
                listed = {key: (kernel, facts[key]) for key, kernel in program["kernels"].items()}
        return {key: (Kernel(**kernel), CubinFacts(**facts)) for key, (kernel, facts) in listed.items()}

    @cached_property
    def _codes(self) -> dict[str, NDArray[Any]]:
        with zipfile.ZipFile(self.file) as archive:
            if _KERNELS in archive.namelist():
                return load(archive.read(_CUBINS))
            (sm,) = json.loads(archive.read(LAUNCHES_FILE))["sms"]
            return load(archive.read(cubins_file(sm)))

    def code(self, key: str) -> NDArray[np.uint8]:
        """A kernel's code."""
        return self._codes[key]


def read_program(file: Path) -> CudaProgram:
    """The launch program of a packed artifact."""
    with zipfile.ZipFile(file) as archive:
        return CudaProgram.model_validate_json(archive.read(LAUNCHES_FILE))


def pack_artifact(artifact: Artifact, file: Path) -> None:
    """Pack all files of an artifact, weights included. Artifacts in one folder share large files with equal bytes."""
    content = {name: (artifact.path / name).read_bytes() for name in (MANIFEST, *artifact.manifest.files)}
    for name, entry in artifact.manifest.files.items():
        if entry.bytes >= LARGE_BYTES:
            data, shared = content.pop(name), _shared_file(file, entry.sha256)
            if not shared.exists():
                pack({_SHARED_NAME: data}, shared)
    pack(content, file)


def unpack_artifact(file: Path, folder: Path) -> Artifact:
    """Unpack and verify what `pack_artifact` packed."""
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    for name, entry in json.loads((folder / MANIFEST).read_bytes())["files"].items():
        if entry["bytes"] >= LARGE_BYTES:
            with zipfile.ZipFile(_shared_file(file, entry["sha256"])) as archive:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(archive.read(_SHARED_NAME))
    return open_artifact(folder)


def remove_unused(folder: Path) -> None:
    """Remove shared files that no packed artifact of a folder has, as after a model was packed again."""
    used = {shared for file in folder.glob("*.zip") for shared in _shared_files(file)}
    for shared in {*(folder / _SHARED).glob("*.zip")} - used:
        shared.unlink()


def _shared_files(file: Path) -> list[Path]:
    """Shared files of a packed artifact; none of other packed files."""
    with zipfile.ZipFile(file) as archive:
        listed = json.loads(archive.read(MANIFEST))["files"] if MANIFEST in archive.namelist() else {}
    return [_shared_file(file, entry["sha256"]) for entry in listed.values() if entry["bytes"] >= LARGE_BYTES]


def _shared_file(file: Path, digest: str) -> Path:
    return file.parent / _SHARED / f"{digest}.zip"


def unpack(file: Path, folder: Path) -> Artifact:
    """Unpack an artifact with a sparse weights file; sizes are checked, digests are not."""
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    weights = folder / WEIGHTS_FILE
    write_hollow_tensors(weights, _entries(json.loads((folder / WEIGHTS_TABLE).read_bytes())))
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for name in (WEIGHTS_FILE, WEIGHTS_TABLE):
        manifest["files"][name] = {"bytes": (folder / name).stat().st_size, "sha256": UNKNOWN_DIGEST}
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    return open_artifact(folder, verify=False)


def _entries(table: Mapping[str, Mapping[str, Any]]) -> dict[str, object]:
    """The safetensors header of a table of weights."""
    entries: dict[str, object] = {}
    end = 0
    for name, weight in table.items():
        size = int(np.prod(weight["shape"], dtype=np.int64)) * DTYPE_BYTES[weight["dtype"]]
        entries[name] = {**weight, "data_offsets": [end, end + size]}
        end += size
    return entries


def write_hollow_tensors(file: Path, entries: dict[str, object]) -> None:
    """Write a safetensors file of these entries whose data is sparse and reads as zeros."""
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    ends = [entry["data_offsets"][1] for entry in entries.values() if isinstance(entry, dict) and "dtype" in entry]
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + max(ends, default=0))
