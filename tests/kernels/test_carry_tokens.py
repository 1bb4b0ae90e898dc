"""Tokens of the step before, in place of this step's."""

import torch

from ingot.kernels.carry_tokens import carry_tokens


def test_carried_tokens_replace_their_rows_and_leave_the_others() -> None:
    ids = torch.tensor([5, 6, 7, 8, 9])
    carried = torch.tensor([-1, 2, -1, 0, 1], dtype=torch.int32)
    carry_tokens[(3,)](ids, carried, torch.tensor([40, -1, 42]), 5, BLOCK=2)
    assert ids.tolist() == [5, 42, 7, 40, 0]
