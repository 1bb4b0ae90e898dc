"""Every family's program of segments for the CPU against its own IR: fusions, lowering, partition, writer."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from ingot.passes.manager import PassManager
from ingot.passes.model_facts import MODEL
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.segments.onnx_files import write_program
from ingot.pipeline.targets.table import get_target
from tests.data_paths import FIXTURES
from tests.each_case import each_case
from tests.oracle.cases import CASES
from tests.pipeline.targets.program_chain import ProgramChain, reference_logits

CPU = get_target("cpu")
DENSE = ("apertus", "cohere2", "gpt2", "gpt_neox", "ministral3")  # xIELU, parallel blocks, positions, rope by query
CHECKPOINTS = [FIXTURES / "checkpoints" / name for name in sorted([*(case.name for case in CASES), *DENSE])]
FUSIONS = ("fold-constants", "pack-projections", "fuse-residual-norm", "fuse-gated-activation")
SCHEMES: dict[str, dict[str, object]] = {
    "float": {},
    "int8": {"bits": 8, "block_size": 32},
    "int4-channel": {"bits": 4, "block_size": "channel", "symmetric": True, "lm_head": 4, "embedding": 4},
}


def prepared(checkpoint: Path, scheme: dict[str, object]) -> ir.Model:
    """The IR, fused and quantized, before any lowering."""
    model = import_checkpoint(Checkpoint.open(checkpoint), check_weights=False)
    quantize = [make_pass("quantize-weights", scheme)] if scheme else []
    PassManager([*map(make_pass, FUSIONS), *quantize]).run(model)
    return model


def cases() -> Iterator[object]:
    """Every checkpoint in float; one checkpoint of each family (a name without a dash) in every scheme."""
    for checkpoint in CHECKPOINTS:
        for scheme in SCHEMES if "-" not in checkpoint.name else ("float",):
            yield pytest.param(checkpoint, scheme, id=f"{checkpoint.name}-{scheme}")


@each_case(("checkpoint", "scheme"), list(cases()))
def test_the_program_computes_the_same_as_the_ir(checkpoint: Path, scheme: str, tmp_path: Path) -> None:
    model = prepared(checkpoint, SCHEMES[scheme])
    facts = MODEL.of(model)
    tokens = np.random.default_rng(0).integers(0, facts.vocab_size, min(40, facts.context_tokens))
    expected = reference_logits(prepared(checkpoint, SCHEMES[scheme]), tokens)
    exact_activations = make_pass("lower-onnxruntime-cpu", {"accuracy_level": 0})
    passes = [exact_activations if name == exact_activations.name else make_pass(name) for name in CPU.lowering]
    PassManager(passes).run(model)
    program, _ = write_program(model, tmp_path)
    assert all(len(step.inputs) <= 3 for step in program.steps if step.kind == "segment")
    logits = ProgramChain(program, tmp_path).logits(tokens)
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
