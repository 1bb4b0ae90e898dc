"""The cases of every kernel but the samplers, whose results are tokens."""

from tests.kernels import attention_cases, dequantize_cases, pool_cases, row_cases
from tests.kernels import matmul_cases as product_cases
from tests.kernels.cases import Case


def all_cases() -> list[Case]:
    """In order of the modules."""
    return [
        case
        for module in (row_cases, product_cases, dequantize_cases, pool_cases, attention_cases)
        for case in module.cases()
    ]
