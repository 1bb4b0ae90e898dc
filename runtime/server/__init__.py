"""The HTTP server of `ingot serve`: OpenAI's API in front of the runtime's engines.

It needs the extra `serve`; the rest of the runtime does without this folder. What concerns tokens belongs in the
runtime, what concerns HTTP, JSON and the life of the process belongs here: lifecycle.py is the process, app.py the
routes, service.py the state that all requests share.
"""
