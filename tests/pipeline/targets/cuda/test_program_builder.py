"""The builder of one program: a program is data, and its arena is planned."""

from ingot.artifact.programs.launch_program import LaunchProgram
from ingot.pipeline.targets.arena import lifetimes
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from tests.pipeline.targets.arena_bounds import least_bytes
from tests.simulators.launch_programs import CHECKPOINTS, CONTEXT, fused, imported

LLAMA = CHECKPOINTS / "llama"


def test_a_program_is_data_and_its_arena_is_close_to_the_bound() -> None:
    lowered = lower_to_launches(fused(imported(LLAMA)), (Bucket.decode(8, CONTEXT),))
    (program,) = lowered.programs
    assert LaunchProgram.model_validate_json(program.model_dump_json()) == program
    sizes = {name: place.bytes for name, place in program.places.items()}
    launches = [*program.launches, *program.samplers["greedy"], *program.samplers["draw"]]
    least = least_bytes(lifetimes([one.buffers for one in launches], sizes))  # except buffers that the head keeps
    assert least <= program.arena_bytes <= 1.25 * least
