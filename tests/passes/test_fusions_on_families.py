"""All fusions on checkpoints of every family: the logits stay, and a second run changes nothing."""

from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.parity import CHECKPOINTS, LOGIT_TOLERANCE, LOGITS, compare, load_logits
from tests.reference_runner import ReferenceRunner

FUSIONS = ("fold-constants", "clean-up", "pack-projections", "fuse-residual-norm", "fuse-gated-activation")
FAMILIES = ("gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
# 16-bit weights, biases, tied heads, softcaps
VARIANTS = ("gemma2-tight-softcaps", "granite-tied-biases", "llama-sharded", "llama-tied-biases", "qwen2-rope-yarn")


@each_case("name", FAMILIES + VARIANTS)
def test_logits_stay_and_a_second_run_changes_nothing(name: str) -> None:
    passes = [make_pass(fusion) for fusion in FUSIONS]
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / name))
    before = import_checkpoint(Checkpoint.open(CHECKPOINTS / name))
    PassManager(passes).run(model)
    assert not any(record.modified for record in PassManager(passes).run(model))
    tokens, _ = load_logits(CHECKPOINTS / name / LOGITS)
    parity = compare(ReferenceRunner(model).run_ragged(tokens), ReferenceRunner(before).run_ragged(tokens))
    print(f"{name}: worst difference {parity.worst:.1e}, limit {LOGIT_TOLERANCE:.0e}")
    assert parity.worst <= LOGIT_TOLERANCE


@each_case("name", FAMILIES)
def test_projections_of_every_family_are_packed(name: str) -> None:
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / name))
    PassManager([make_pass("pack-projections", {"strict": True})]).run(model)
    layers = {node.attributes["layer"].as_int() for node in model.graph if node.op_type == "PagedAttention"}
    gemms = [node.name for node in model.graph if node.op_type == "Gemm"]
    assert len(gemms) == 4 * len(layers) + 1  # qkv, o, gate_up, down; the head
