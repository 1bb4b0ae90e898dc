"""Serving in virtual time: the engine's own scheduler, blocks, tiers and admission, with predicted times of steps.

What computes is simulated here, and who sends; what decides is imported from ingot.runtime.
"""
