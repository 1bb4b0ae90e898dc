"""Which of an artifact's compiled kernels a card can run.

Compiled code runs on cards of its own major version whose minor version is not lower (CUDA Programming Guide, Binary
Compatibility): code for SM 80 runs on 86 and 89. From SM 90 on kernels are compiled for the architecture's own
features (sm_90a, sm_120a), and such code runs on that very SM alone.
"""

import logging
from collections.abc import Mapping

from ingot.artifact import Artifact
from ingot.artifact.launch_program import CudaProgram, cubins_file
from ingot.artifact.safetensors import MappedTensors
from ingot.errors import EngineError
from ingot.runtime.cuda.device import Device, LoadedKernel

_LOG = logging.getLogger(__name__)
_OWN_FEATURES_FROM = 90  # triton/backends/nvidia/compiler.py: sm_arch_from_capability


def runs_on(built: int, card: int) -> bool:
    """Whether code that was compiled for the SM `built` runs on a card of the SM `card`."""
    return built == card or (built < _OWN_FEATURES_FROM and built // 10 == card // 10 and built < card)


def choose_sm(program: CudaProgram, device: Device) -> int:
    """The best of the SMs that the program was compiled for. EngineError names both where none runs on the card."""
    fitting = [sm for sm in program.cubins if runs_on(sm, device.sm)]
    if not fitting:
        built = ", ".join(str(sm) for sm in sorted(program.cubins))
        raise EngineError(
            f"the artifact's kernels are compiled for SM {built}, and {device.name} has SM {device.sm}; build it for "
            f"the target cuda-sm{device.sm}{_lower_minors(device.sm)}, or run it on a card of SM {built}"
        )
    if max(fitting) != device.sm:
        _LOG.info("kernels for SM %d run on %s, which has SM %d", max(fitting), device.name, device.sm)
    if program.tuned_on not in (None, device.name):
        _LOG.warning(
            "the kernels' tiles were measured on %s, and this is %s; they are right but may be slow: run `ingot tune` "
            "here and build with its table",
            program.tuned_on,
            device.name,
        )
    return max(fitting)


def load_kernels(artifact: Artifact, program: CudaProgram, device: Device) -> Mapping[str, LoadedKernel]:
    """Every kernel of the program on the device, by its key."""
    sm = choose_sm(program, device)
    cubins = MappedTensors(artifact.file(cubins_file(sm)))
    return {
        key: device.load_kernel(cubins.view(key).copy(), program.kernels[key], facts)
        for key, facts in program.cubins[sm].items()
    }


def _lower_minors(sm: int) -> str:
    """What else a card runs."""
    return "" if sm >= _OWN_FEATURES_FROM or sm % 10 == 0 else f" (or one from cuda-sm{sm // 10 * 10} up to it)"
