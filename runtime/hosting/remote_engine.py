"""The engine of AsyncEngine where it runs in another process: tokenizer, admission and metrics on this side."""

import time
from collections.abc import Mapping
from dataclasses import replace

from ingot.artifact import Artifact
from ingot.runtime.asking.prompt_encoder import PromptEncoder
from ingot.runtime.asking.prompts import ChatPrompt, Prompt, TokenIds
from ingot.runtime.engine.adapter_registry import AdapterFacts
from ingot.runtime.engine.admission import full
from ingot.runtime.hosting.engine_process import EngineProcess
from ingot.runtime.options import EngineOptions
from ingot.runtime.steps.metrics import EngineMetrics
from ingot.runtime.steps.service_rates import EngineLoad
from ingot.runtime.text.tokenizer import Tokenizer


class RemoteAdmission:
    """Refuses requests beyond `max_requests` without asking the engine."""

    def __init__(self, process: EngineProcess, max_requests: int | None) -> None:
        self.num_refused = 0
        self._process = process
        self._max_requests = max_requests

    @property
    def load(self) -> EngineLoad:
        """How busy the engine was after its last outputs."""
        return self._process.load

    def require_place(self, num_open: int) -> None:
        """Raise Overloaded when `num_open` requests are as many as `max_requests` allows."""
        refusal = full(num_open, self._max_requests, lambda: self.load.rates)
        if refusal:
            self.num_refused += 1
            raise refusal


class RemoteEngine:
    """What a reader sees of an engine in a process of its own. Prompts are encoded here, constraints compiled there."""

    def __init__(self, artifact: Artifact, options: EngineOptions) -> None:
        """Start the process and load the engine. Raises what `Engine.load` raises."""
        self.tokenizer = Tokenizer.of_artifact(artifact)
        self.clock = time.perf_counter  # one for all processes of a machine
        self.process = EngineProcess(artifact, options)
        self.model, self.max_batch_tokens = self.process.model, self.process.max_batch_tokens
        self.admission = RemoteAdmission(self.process, options.max_requests)
        self._prompts = PromptEncoder(self.tokenizer, self.model, options.max_prompt_chars)

    def encode(self, prompt: Prompt | ChatPrompt) -> TokenIds:
        """As `Engine.encode`."""
        return self._prompts.encode(prompt)

    @property
    def adapters(self) -> Mapping[str, AdapterFacts]:
        """As `Engine.adapters`, as of the last change."""
        return self.process.adapters

    def metrics(self) -> EngineMetrics:
        """As of the last answer of the process."""
        metrics = self.process.metrics
        return replace(metrics, num_refused=metrics.num_refused + self.admission.num_refused)
