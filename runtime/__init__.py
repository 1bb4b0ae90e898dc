"""Runtime: artifact -> tokens. Imports nothing of the compiler."""
