"""An engine for services: stepped by a thread, or in a process of its own whose death is an error here.

AsyncEngine ── EngineThread ── Engine
AsyncEngine ── RemoteEngine ── EngineProcess ──socket──► engine_process_child ── EngineThread ── Engine
"""
