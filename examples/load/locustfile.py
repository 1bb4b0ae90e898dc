"""locust -f examples/load/locustfile.py --host http://localhost:8000 --users 64 --spawn-rate 8

Users stream an answer, wait a moment and go on. Refused requests wait for as long as the server says. The environment
variable OPENAI_API_KEY is sent as the key.
"""

import os
import random
import time

from locust import HttpUser, between, task

_TOPICS = ("read a file", "sort a list", "parse arguments", "open a socket", "count words")


class ChatUser(HttpUser):  # type: ignore[misc]
    """Streams completions and reports the time to the first token as a request of its own."""

    wait_time = between(0.5, 2)

    def on_start(self) -> None:
        if key := os.environ.get("OPENAI_API_KEY"):
            self.client.headers["Authorization"] = f"Bearer {key}"

    @task  # type: ignore[untyped-decorator]
    def complete(self) -> None:
        body = {"prompt": f"# {random.random()}\ndef {random.choice(_TOPICS)}", "max_tokens": 64, "stream": True}
        started = time.perf_counter()
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as answer:
            if answer.status_code == 429:
                answer.success()  # a refusal is an answer
                time.sleep(float(answer.headers["retry-after-ms"]) / 1000)
                return
            has_begun = False
            for line in answer.iter_lines():
                if line.startswith(b"data: ") and not has_begun:
                    has_begun = True
                    self.environment.events.request.fire(
                        request_type="TTFT",
                        name="/v1/completions",
                        response_time=1000 * (time.perf_counter() - started),
                        response_length=0,
                        exception=None,
                        context={},
                    )
