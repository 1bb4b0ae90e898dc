"""`ingot serve` next to llama.cpp's server: the same model, prompts, lengths and threads, one for each core.

    python -m benchmarks.serve.peers --llama-server PATH [--clients 1,8,32] [--rounds 12] [--output FILE]

The demo checkpoint is converted to GGUF at 4 bits in blocks of 32 (Q4_0), as the demo artifact has it; that needs the
peers' interpreter (benchmarks.cpu.setup_peers). llama-server is built from llama.cpp's source, which the sdist of
llama-cpp-python contains:

    cmake -S vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF
    cmake --build build --target llama-server

The servers run side by side, and one of them is measured while the others sleep. Each round serves the same requests by
all of them, in alternating order: so many clients, each of which sends its next request when its stream ends. They are
one process, which only looks for the ends of streams, on the same cores. Each request has a connection of its own,
because llama-server closes one after a stream. Ratios are those of a round, Ingot to llama.cpp; prompts are random and
differ in every request, so that no prefix cache has them.
"""

import json
import re
import selectors
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import click

from benchmarks.cpu.rounds import order_of_round
from benchmarks.cpu.serve import PROMPT_TOKENS, prompts_of, server
from benchmarks.device import available_cores, device_facts
from benchmarks.paths import RESULTS, ROOT
from benchmarks.peers import DEFAULT_WORK, PEERS_VENV

LLAMA = "llama-server"
# Names of the measured servers of Ingot -> least seconds between events of a stream. llama-server sends every token.
INGOT = {"ingot, an event for each token": 0.0, "ingot, an event each 20 ms (default)": 0.02}
_CHECKPOINT = ROOT / "examples/models/stdlib-llama-6m"
_START_SECONDS = 60
_SETTLE_SECONDS = 0.1  # a server's threads may spin for some milliseconds after its last request
_LEAST_REQUESTS, _REQUESTS_EACH = 24, 6

_DONE = b"data: [DONE]"
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True)
class Outcome:
    """Tokens a second of all streams together, and the median time to a first token, in seconds."""

    tokens_per_second: float
    ttft_seconds: float


Rounds = list[dict[str, Outcome]]  # server -> its outcome, for each round


def gguf_of(checkpoint: Path, folder: Path, peers_python: Path) -> Path:
    """The checkpoint as Q4_0, converted by the peers' interpreter unless the folder has it."""
    code = (
        "import sys; from pathlib import Path; from benchmarks.gguf_export import export_quantized as export;"
        "print(export(Path(sys.argv[1]), Path(sys.argv[2]), 'q4_0', 1))"
    )
    command = [str(peers_python), "-c", code, str(checkpoint), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"the GGUF file could not be made by {peers_python}:\n{done.stderr[-2000:]}")
    return Path(done.stdout.splitlines()[-1])


def llama_options(model: Path, port: int, clients: int, threads: int, context_tokens: int) -> list[str]:
    """A slot for each client, flash attention, no cache of prompts in host memory (no prompt comes twice)."""
    options = {"-m": str(model), "--port": str(port), "--host": "127.0.0.1", "-np": str(clients)}
    options |= {"-c": str(clients * context_tokens), "-t": str(threads), "-tb": str(threads)}
    options |= {"-fa": "on", "--cache-ram": "0", "-ngl": "0", "--log-verbosity": "0"}
    return [word for pair in options.items() for word in pair]


@contextmanager
def llama_server(binary: str, options: Sequence[str], port: int) -> Iterator[str]:
    """llama-server in a process, and its URL once it is ready. RuntimeError with its log's end if it does not start."""
    url = f"http://127.0.0.1:{port}"
    with TemporaryFile("w+") as log, subprocess.Popen([binary, *options], stdout=log, stderr=log) as child:
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not _is_ready(url):
                if child.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{binary} did not start: {log.read()[-2000:]}")
                time.sleep(0.1)
            yield url
        finally:
            child.terminate()
            child.wait()


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health") as answer:
            return bool(answer.status == 200)
    except (URLError, ConnectionError):
        return False


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class _Stream:
    """One request with a connection of its own, and what arrived of its answer."""

    def __init__(self, url: str, prompt: Sequence[int], max_tokens: int) -> None:
        place = urlsplit(url)
        self.socket = socket.create_connection((place.hostname, place.port))
        self.received = bytearray()
        self.first_seconds = 0.0  # to the first event
        request = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps(request | {"stream_options": {"include_usage": True}}).encode()
        self._started = time.perf_counter()
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    def read(self) -> bool:
        """Take what has arrived; whether that was the end."""
        arrived = self.socket.recv(1 << 16)
        self.received += arrived
        if not self.first_seconds and b"data: " in self.received:
            self.first_seconds = time.perf_counter() - self._started
        return not arrived or _DONE in self.received[-100:] or not self.received.startswith(b"HTTP/1.1 200")

    def close(self) -> int:
        """Its number of tokens. RuntimeError if it was not a stream to its end."""
        self.socket.close()
        if _DONE not in self.received:
            raise RuntimeError(f"the server answered {bytes(self.received[:300])!r}")
        return int(_USAGE.findall(self.received)[-1])


def serve(url: str, prompts: Sequence[Sequence[int]], clients: int, max_tokens: int) -> Outcome:
    """Send all prompts, so many at a time. RuntimeError for another number of tokens than was asked for."""
    left, firsts, num_tokens = iter(prompts), list[float](), 0
    with selectors.DefaultSelector() as selector:

        def begin() -> None:
            if (prompt := next(left, None)) is not None:
                stream = _Stream(url, prompt, max_tokens)
                selector.register(stream.socket, selectors.EVENT_READ, stream)

        started = time.perf_counter()
        for _ in range(clients):
            begin()
        while selector.get_map():
            for key, _ in selector.select():
                if key.data.read():
                    selector.unregister(key.fileobj)
                    firsts.append(key.data.first_seconds)
                    num_tokens += key.data.close()
                    begin()
    seconds = time.perf_counter() - started
    if num_tokens != len(prompts) * max_tokens:
        raise RuntimeError(f"{url} gave {num_tokens} tokens for {len(prompts)} requests of {max_tokens}")
    return Outcome(num_tokens / seconds, statistics.median(firsts))


def requests_of(clients: int) -> int:
    """Requests of a round: enough for a median of the times to a first token, and for full batches most of the time."""
    return max(_LEAST_REQUESTS, _REQUESTS_EACH * clients)


def measure(urls: Mapping[str, str], clients: int, rounds: int, max_tokens: int, vocab_size: int) -> Rounds:
    """Serve the same requests by all servers, in turn; the first round warms up and is left out."""
    found: Rounds = []
    for number in range(rounds + 1):
        prompts = prompts_of(1000 * clients + number, requests_of(clients), vocab_size)
        outcomes = {}
        for name in order_of_round(list(urls), number):
            time.sleep(_SETTLE_SECONDS)
            outcomes[name] = serve(urls[name], prompts, clients, max_tokens)
        found.append(outcomes)
    return found[1:]


def row_of(rounds: Rounds) -> dict[str, object]:
    """Medians of every server, and ratios to llama-server's of each of the others, by round."""
    row: dict[str, object] = {}
    for name in sorted(rounds[0]):
        own = {
            "tokens_per_second": round(statistics.median(each[name].tokens_per_second for each in rounds)),
            "ttft_ms": round(1000 * statistics.median(each[name].ttft_seconds for each in rounds), 2),
        }
        if name != LLAMA:
            rates = [each[name].tokens_per_second / each[LLAMA].tokens_per_second for each in rounds]
            firsts = [each[name].ttft_seconds / each[LLAMA].ttft_seconds for each in rounds]
            row[name] = own | {"ratio_of_tokens_per_second": _spread(rates), "ratio_of_ttft": _spread(firsts)}
        else:
            row[name] = own
    return row


def _spread(values: Sequence[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(median, 3), "lower_quartile": round(lower, 3), "upper_quartile": round(upper, 3)}


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    if not all(word.isdecimal() and int(word) for word in value.split(",")):
        raise click.BadParameter(f"{value!r} is not a list of numbers of clients, such as 1,8,32")
    return tuple(int(word) for word in value.split(","))


@click.command(help=__doc__)
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option("--llama-server", "binary", required=True, help="Path of the program.")
@click.option("--clients", callback=_numbers, default="1,8,32", show_default=True, help="Clients at a time.")
@click.option("--max-tokens", default=48, show_default=True, help="Tokens of each answer.")
@click.option("--rounds", type=click.IntRange(min=2), default=12, show_default=True)
@click.option("--checkpoint", type=click.Path(path_type=Path), default=_CHECKPOINT, help="Of the artifact.")
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK / "llama_cpp", help="Has the GGUF file.")
@click.option("--peers-python", type=click.Path(path_type=Path), default=PEERS_VENV / "bin" / "python")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "serve-llama.json", show_default=True)
def main(
    artifact: str,
    binary: str,
    clients: tuple[int, ...],
    max_tokens: int,
    rounds: int,
    checkpoint: Path,
    work: Path,
    peers_python: Path,
    output: Path,
) -> None:
    """Measure, print and write."""
    model, port, threads = gguf_of(checkpoint, work, peers_python), free_port(), available_cores()
    options = llama_options(model, port, max(clients), threads, 4 * (PROMPT_TOKENS + max_tokens))
    vocab_size = int(json.loads((checkpoint / "config.json").read_text("utf-8"))["vocab_size"])
    found = {}
    with ExitStack() as running:
        urls = {LLAMA: running.enter_context(llama_server(binary, options, port))}
        for name, seconds in INGOT.items():
            urls[name] = running.enter_context(server(artifact, "--stream-seconds", str(seconds)))
        for number in clients:
            found[f"{number} clients"] = row_of(measure(urls, number, rounds, max_tokens, vocab_size))
            click.echo(f"{number} clients: {json.dumps(found[f'{number} clients'], indent=1)}")
    facts = {
        "device": device_facts(),
        "artifact": Path(artifact).name,
        "llama_server": _version(binary),
        "llama_options": [
            word.replace(str(model), model.name) for word in options if word not in ("--port", str(port))
        ],
        "threads": threads,
        "prompt_tokens": PROMPT_TOKENS,
        "max_tokens": max_tokens,
        "requests_of_a_round": {str(number): requests_of(number) for number in clients},
        "rounds": rounds,
    }
    output.write_text(json.dumps({**facts, "found": found}, indent=2) + "\n")


def _version(binary: str) -> str:
    done = subprocess.run([binary, "--version"], capture_output=True, text=True)
    return (done.stdout + done.stderr).strip()


if __name__ == "__main__":
    main()
