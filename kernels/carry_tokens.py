"""Tokens that the step before chose on the device, put where this step reads its tokens.

The host queues a step before it knows what the one before it chose; `carried` says which of those choices stands for a
token.
"""

import triton
import triton.language as tl


@triton.jit
def carry_tokens(input_ids, carried, tokens, rows, BLOCK: tl.constexpr):
    """Grid (rows / BLOCK,). input_ids [rows] int64, carried [rows] int32: a row of `tokens` int64, or -1 for none.

    A token of -1, which no logits could be chosen from, is read as 0: the host ends its request.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(carried + at, mask=at < rows, other=-1)
    token = tl.load(tokens + source, mask=source >= 0, other=0)
    tl.store(input_ids + at, tl.maximum(token, 0), mask=source >= 0)
