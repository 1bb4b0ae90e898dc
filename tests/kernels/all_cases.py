"""The cases of every kernel except the samplers, whose results are tokens."""

from tests.kernels import (
    attention_cases,
    dequantize_cases,
    expert_cases,
    fixed_split_cases,
    matmul_cases,
    pool_cases,
    prefill_cases,
    row_cases,
)
from tests.kernels.cases import Case


def all_cases() -> list[Case]:
    """All cases, in the order of the modules."""
    return [
        case
        for module in (
            row_cases,
            matmul_cases,
            dequantize_cases,
            pool_cases,
            attention_cases,
            prefill_cases,
            fixed_split_cases,
            expert_cases,
        )
        for case in module.cases()
    ]
