"""An engine in a process of its own: its steps share no interpreter with the reader, and its death is an error there.

AsyncEngine ── RemoteEngine ──socket──► engine_process.child ── EngineThread ── Engine
"""
