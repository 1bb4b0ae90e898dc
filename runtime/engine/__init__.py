"""The engine: requests in, completions out, by the thread that calls it.

It joins steps, tiers, adapters and limits; other threads and processes reach it through hosting/.
"""
