"""What a caller asks an engine for and what it gets: prompts, parameters, options of a request, outputs.

Values and their checks; how they are served belongs in requests/ and steps/.
"""
