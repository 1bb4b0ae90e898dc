"""Operands of a recurrent step: its values in the program's buffers, and its tensors.

`check_recurrent` refuses a manifest whose numbers would make the kernels read or write out of bounds, because they do
not check them.
"""

from dataclasses import dataclass

import numpy as np

from ingot.artifact import KVGeometry, Program
from ingot.artifact.programs.recurrent import kind_of, problem_of_sizes, problem_of_state, problem_of_unused
from ingot.artifact.programs.recurrent_steps import ConvolutionStep, DeltaRuleStep, RecurrentStep, ScanStep
from ingot.errors import EngineError, shown
from ingot.runtime.cpu.attention_operands import StepTensors
from ingot.runtime.cpu.buffers import ValueBuffers
from ingot.runtime.forward_batch import FloatArray

RECURRENT = (ConvolutionStep, DeltaRuleStep, ScanStep)


@dataclass(frozen=True)
class RecurrentOperands:
    """What a step computes with, all float32; rows of values are tokens.

    values    by the names of the step's fields, the output included: [rows, columns]
    tensors   weight [taps, channels] and bias [channels] of a convolution; a and d [heads] of a scan
    """

    values: dict[str, FloatArray]
    tensors: dict[str, FloatArray]

    @classmethod
    def of(cls, step: RecurrentStep, buffers: ValueBuffers, tensors: StepTensors) -> "RecurrentOperands":
        """Find them; EngineError for a tensor of another type or shape."""
        values = {name: buffers.floats(getattr(step, name)) for name in step.widths}
        found = {}
        if isinstance(step, ConvolutionStep):
            weight = tensors.floats(step.weight, (step.channels, step.taps))
            found["weight"] = np.ascontiguousarray(weight.T)  # [taps, channels]
            if step.bias is not None:
                found["bias"] = tensors.floats(step.bias, (step.channels,))
        elif isinstance(step, ScanStep):
            found = {name: tensors.floats(getattr(step, name), (step.num_heads,)) for name in ("a", "d")}
        return cls(values, found)


def check_recurrent(program: Program, kv: KVGeometry) -> None:
    """Raise EngineError for steps that would leave their values or the states' slots, or use one state twice."""
    seen: set[tuple[int, str]] = set()
    steps = [step for step in program.steps if isinstance(step, RECURRENT)]
    for step in steps:
        own = (step.layer, kind_of(step))
        place = f"{own[1]} of layer {step.layer}"
        problem = problem_of_sizes(step) or problem_of_state(step, kv.state)
        if own in seen:
            problem = "is computed by two steps"
        seen.add(own)
        if problem:
            raise EngineError(f"{place}: {problem}; build the artifact again")
        for name, columns in step.widths.items():
            value = getattr(step, name)
            facts = program.values[value]
            if (facts.dtype, facts.rows, facts.columns) != ("float32", "tokens", columns):
                raise EngineError(
                    f"{place}: {shown(value)} is {facts.dtype} [{facts.rows}, {facts.columns}]; its {name} must be"
                    f" float32 [tokens, {columns}]; build the artifact again"
                )
    unused = problem_of_unused(steps, kv.state, kv.state_bytes)
    if unused:
        raise EngineError(f"{unused}; build the artifact again")
