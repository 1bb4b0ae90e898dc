"""Which sequences and tokens a step computes, in which order sequences wait, and the step's batch.

Texts and parameters of requests belong in requests/, blocks in kv/.
"""
