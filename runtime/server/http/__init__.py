"""A request before its body is parsed, and the bytes of its answer: connections, keys, rate limits, times to retry.

Nothing here knows a model or the fields of an API.
"""
