"""The artifact on disk: manifest, sealing, verified opening, and the file formats that compiler and runtime share.

Code that only one of them needs belongs to `pipeline` or `runtime`.
"""

from ingot.artifact.contents import MANIFEST
from ingot.artifact.kv_geometry import KVGeometry
from ingot.artifact.manifest import (
    CALIBRATION_FILE,
    SCHEMA_VERSION,
    SUMMARY_FILE,
    ArtifactVerdict,
    AttentionStep,
    EngineKind,
    FileEntry,
    GateOutcome,
    Manifest,
    ModelFacts,
    Program,
    RotaryTables,
    SegmentStep,
    SinkTensor,
    ValueFacts,
    artifact_verdict,
    verdict_warning,
)
from ingot.artifact.reader import Artifact, open_artifact, reopen_artifact
from ingot.artifact.writer import ArtifactWriter

__all__ = [
    "CALIBRATION_FILE",
    "MANIFEST",
    "SCHEMA_VERSION",
    "SUMMARY_FILE",
    "Artifact",
    "ArtifactVerdict",
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
    "SinkTensor",
    "ValueFacts",
    "artifact_verdict",
    "open_artifact",
    "reopen_artifact",
    "verdict_warning",
]
