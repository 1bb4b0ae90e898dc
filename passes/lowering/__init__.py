"""From the IR to what an engine runs."""
