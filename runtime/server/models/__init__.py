"""The models that a server serves: found by name, admitted to, unloaded, restarted and replaced.

What a client's request looks like belongs in api/; what an engine does with it belongs in the runtime.
"""
