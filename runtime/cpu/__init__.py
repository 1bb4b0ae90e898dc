"""Executors: what runs a program on a batch. The protocol is `ingot.runtime.batch.Executor`."""
