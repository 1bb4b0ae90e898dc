"""Copies tokens that the previous step chose on the device to the inputs of this step.

The host queues a step before it has the previous step's tokens; `carried` gives the row of the previous step that
chose each input token.
"""

import triton
import triton.language as tl

from ingot.kernels.common import wait_for_inputs


@triton.jit
def carry_tokens(input_ids, carried, tokens, rows, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False):
    """Grid (rows / BLOCK,). input_ids [rows] int64, carried [rows] int32: a row of `tokens` int64, or -1 for none.

    A token of -1 (its logits were not finite) becomes 0: the host ends that request.
    """
    wait_for_inputs(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(carried + at, mask=at < rows, other=-1)
    token = tl.load(tokens + source, mask=source >= 0, other=0)
    tl.store(input_ids + at, tl.maximum(token, 0), mask=source >= 0)
