"""Rotations on checkpoints of every family: the logits stay, with any matrix."""

import onnx_ir as ir

from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.passes.rotation.rotate import ROTATE_FACTS
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.oracle.cases import CASES
from tests.parity import CHECKPOINTS, LARGE_LOGIT, LOGITS, compare, load_logits
from tests.reference_runner import ReferenceRunner
from tests.tolerances import within

CASES_BY_NAME = {case.name: case for case in CASES}
POST_NORMS = ("gemma2", "gemma3", "olmo2")  # norms between the layers and the residual stream


def imported(name: str) -> ir.Model:
    return import_checkpoint(Checkpoint.open(CHECKPOINTS / name), CASES_BY_NAME[name].context_tokens)


def rotated(name: str, *passes: str, **options: object) -> ir.Model:
    model = imported(name)
    chain = [make_pass("fold-constants"), *map(make_pass, passes), make_pass("rotate", options)]
    PassManager(chain).run(model)
    return model


def same_logits(name: str, model: ir.Model) -> bool:
    tokens, _ = load_logits(CHECKPOINTS / name / LOGITS)
    parity = compare(ReferenceRunner(model).run_ragged(tokens), ReferenceRunner(imported(name)).run_ragged(tokens))
    return within("parity.float32", parity.worst, name, max(1.0, parity.largest / LARGE_LOGIT))


@each_case("name", CASES_BY_NAME)
def test_logits_stay_before_and_after_pack_projections(name: str) -> None:
    matrix = "orthogonal" if len(name) % 2 else "random-hadamard"
    model = rotated(name, matrix=matrix, seed=len(name))
    facts = ROTATE_FACTS.of(model)
    print(name, facts)
    assert bool(facts["residual"]) != name.startswith(POST_NORMS)
    assert facts["values"] == sum(node.op_type == "PagedAttention" for node in model.graph)
    assert same_logits(name, model)
    packed = rotated(name, "clean-up", "pack-projections", "fuse-gated-activation", matrix=matrix, seed=3)
    assert same_logits(name, packed)
