"""A request: what is asked, as one value; its text so far and where it ends, its sampler, the rules of beam search.

When it is computed belongs in scheduling/, what a caller sets and gets in asking/.
"""
