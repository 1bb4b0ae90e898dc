"""The cheapest way to serve a load within a service level: configurations, the search, and files that deploy one.

What each costs to compute is predicted by ingot.planning, and what becomes of requests by ingot.planning.simulation.
"""
