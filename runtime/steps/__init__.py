"""Steps of the engine: what is drafted, computed and read in a step, and what happens when it fails.

Which tokens a step computes is chosen in scheduling/, the text of a request grows in requests/, blocks are in kv/.
"""
