"""Speculation: drafters guess the tokens that follow, one step verifies several, and a control sets how many.

Which tokens a request gets is decided in `ingot.runtime.steps` alone; what is here can only make them come sooner.
"""
