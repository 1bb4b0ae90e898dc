"""The artifact on disk, read and written by compiler and runtime: manifest, sealing, verified opening, file formats.

Code that only one of the two needs does not belong here; `runtime` and `pipeline` hold that.
"""

from ingot.artifact.kv_geometry import KVGeometry
from ingot.artifact.manifest import (
    CALIBRATION_FILE,
    SCHEMA_VERSION,
    AttentionStep,
    EngineKind,
    FileEntry,
    GateOutcome,
    Manifest,
    ModelFacts,
    Program,
    RotaryTables,
    SegmentStep,
    ValueFacts,
)
from ingot.artifact.reader import MANIFEST, Artifact, open_artifact
from ingot.artifact.writer import ArtifactWriter

__all__ = [
    "CALIBRATION_FILE",
    "MANIFEST",
    "SCHEMA_VERSION",
    "Artifact",
    "ArtifactWriter",
    "AttentionStep",
    "EngineKind",
    "FileEntry",
    "GateOutcome",
    "KVGeometry",
    "Manifest",
    "ModelFacts",
    "Program",
    "RotaryTables",
    "SegmentStep",
    "ValueFacts",
    "open_artifact",
]
