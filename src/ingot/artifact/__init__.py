"""The artifact on disk: its manifest, how it is sealed and how it is opened.

`manifest` is the schema, `writer` seals a folder atomically, `reader` verifies before anything is used.
Compiler and runtime both stand on this package and on nothing of each other.
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
