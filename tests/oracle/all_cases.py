"""The tiny checkpoints of every family."""

from tests.oracle.cases import CASES, Case
from tests.oracle.dense_cases import DENSE_CASES
from tests.oracle.hybrid_cases import HYBRID_CASES
from tests.oracle.latent_cases import LATENT_CASES
from tests.oracle.moe_cases import MOE_CASES
from tests.oracle.unequal_cases import UNEQUAL_CASES

ALL_CASES: tuple[Case, ...] = (
    *CASES,
    *DENSE_CASES,
    *MOE_CASES,
    *LATENT_CASES,
    *HYBRID_CASES,
    *UNEQUAL_CASES,
)
