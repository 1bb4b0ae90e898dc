"""A request while it is served: its text so far and where it ends, its sampler, and the rules of beam search.

When it is computed belongs in scheduling/, what a caller sets and gets in asking/.
"""
