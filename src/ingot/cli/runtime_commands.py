"""The commands of the runtime: to generate, to serve, to look at a server, to verify."""

from collections.abc import Callable
from pathlib import Path

import click

from ingot.cli import completion
from ingot.cli.command import command, path, progress_options

_SAMPLING = "ingot.runtime.asking.sampling_params:SamplingParams"
_RUN_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "n",
    "best_of",
)
_SERVER = "ingot.runtime.server.options:ServerOptions"


speculate = click.option(
    "--speculate",
    metavar="DRAFTER",
    help="Draft tokens: lookup, suffix, mtp, auto, a small artifact, or several, as suffix+artifacts/small.",
    shell_complete=completion.drafters,
)
# The engine's options cost imports, which --help does without.
_PROCESSES = (
    click.option(
        "--stages",
        type=int,
        metavar="N",
        help="Processes of the native CPU engine, each with a part of the layers and requests of its own.",
    ),
    click.option(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="Processes of each stage, which compute every step together, each with a part of every weight.",
    ),
    click.option(
        "--expert-parallel",
        is_flag=True,
        help="With --tensor-parallel, each process has some experts whole.",
    ),
)


def processes(function: Callable[..., None]) -> Callable[..., None]:
    """The options that divide the native CPU engine among processes."""
    for option in reversed(_PROCESSES):
        function = option(function)
    return function


@command("run", "ingot.cli.runtime.run:run_command", takes="artifact", declared={_SAMPLING: _RUN_SAMPLING})
@click.argument("artifact", type=click.Path(), shell_complete=completion.artifacts)
@click.argument("prompt", required=False)
@click.option("--prompts-file", metavar="FILE", help="Generate for every line; .jsonl has an object per line.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for the results of --prompts-file.")
@click.option("--beam-width", type=int, help="Search for the likeliest text with this many beams, at most 64.")
@click.option("--length-penalty", type=float, help="Of a beam search: above 0 favours longer texts; 1 if not given.")
@path("--schema", metavar="FILE", help="Generate JSON that is valid by this JSON schema.")
@click.option("--regex", metavar="PATTERN", help="Generate a text that this regular expression matches as a whole.")
@path("--grammar", metavar="FILE", help="Generate a text of this grammar, in Lark's form as llguidance reads it.")
@click.option("--chat/--no-chat", default=None, help="Treat PROMPT as a message, by the model's chat template.")
@click.option("--system", help="System message of a chat.")
@click.option(
    "--stats",
    is_flag=True,
    help="Print latencies, use of caches, preemptions to stderr; all metrics in --json.",
)
@speculate
@processes
@path("--adapter", metavar="FOLDER", help="Compute with this LoRA adapter, a folder of PEFT; see docs/lora.md.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set an option of the engine, not the artifact's default: max_sequences=8, kv_host_bytes=4GiB; repeatable.",
    shell_complete=completion.engine_settings,
)
@click.option("--no-history", is_flag=True, help="Neither read nor keep the history of what is typed.")
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming.")
def run() -> None:
    """Generate from ARTIFACT. PROMPT is text, or - to read standard input.

    Without PROMPT, what is piped in is the prompt. At a terminal a chat begins if the model has a chat template, and
    without one each line is a prompt.

    --prompts-file takes one prompt per line, or a .jsonl file of objects with prompt or messages, id and sampling
    parameters such as max_tokens or beam_width. Results are one JSON object per line, in the file's order; the exit
    code is 1 if a prompt failed.

    \b
    Examples:
      ingot run artifacts/demo
      ingot run artifacts/demo "def read_file(path):" --max-tokens 64
      ingot run artifacts/chat --chat "Why is the sky blue?" --temperature 0.7 --seed 1
      ingot run artifacts/demo "def read_file(path):" --n 3 --temperature 0.8 --seed 1
      ingot run artifacts/demo "def read_file(path):" --beam-width 4
      ingot run artifacts/demo "A book as JSON: " --schema book.json
      ingot run artifacts/demo --prompts-file prompts.jsonl -o results.jsonl --stats
    """


@command("serve", "ingot.cli.runtime.serve:serve_command", takes="artifact to serve", declared={_SERVER: ()})
@click.argument("artifact", type=click.Path(), shell_complete=completion.artifacts)
@click.argument("more_artifacts", metavar="[ARTIFACT]...", nargs=-1, shell_complete=completion.artifacts)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("-p", "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: a free one.")
@click.option("--alias", "aliases", multiple=True, metavar="ALIAS=MODEL", help="Another name of a model; repeatable.")
@path("--chat-template", metavar="FILE", help="jinja2 template for conversations, in place of the artifact's.")
@path("--api-keys", metavar="FILE", help="Require one of these keys, one per line with its limits; see docs/serve.md.")
@path("--admin-keys", metavar="FILE", help="Keys for POST /admin/reload and for adapters, one per line (without: no).")
@click.option(
    "--lora-modules",
    multiple=True,
    metavar="NAME=FOLDER",
    help="Serve a LoRA adapter as a model of this name; repeatable. NAME@MODEL=FOLDER where several models are served.",
)
@click.option("--verify-new", is_flag=True, help="Before a swap, run ingot verify --quick on the new artifact.")
@click.option(
    "--log-requests", is_flag=True, help="Print a line of JSON for each request: numbers and names, no texts."
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of the log on stderr; json: an object in each line.",
)
@click.option("--trace", is_flag=True, help="Send spans of OpenTelemetry (extra trace); OTEL_* variables say where.")
@speculate
@processes
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set an option of the engines, not the artifact's default: max_sequences=64, kv_bytes=4GiB; repeatable.",
    shell_complete=completion.engine_settings,
)
@click.option(
    "--engine-process/--no-engine-process",
    default=True,
    show_default=True,
    help="Run each engine in a process of its own; one that dies or hangs is started again.",
)
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors, but no notes.")
def serve() -> None:
    """Serve ARTIFACT over HTTP, in the form of OpenAI's API. With several, requests name theirs as `model`.

    A checkpoint in its place is built first, by the default recipe, and so is a recipe that names its checkpoint: once.
    NAME=ARTIFACT serves one under another name than it was built with.

    \b
    POST /v1/chat/completions, /v1/completions, /v1/responses, /tokenize, /detokenize
    GET  /v1/models, /version, /health (alive), /ready (takes requests), /metrics (Prometheus)

    More requests than the limits allow get 429 with the time to retry. SIGTERM or Ctrl-C stops taking requests, serves
    the open ones for --drain-seconds, and ends with code 0; a second one ends at once. See docs/serve.md.

    \b
    Examples:
      ingot serve artifacts/demo
      ingot serve demo
      ingot serve ./my-model
      ingot serve artifacts/chat artifacts/code --alias gpt-4o-mini=chat --host 0.0.0.0 --api-keys keys.txt
      ingot serve artifacts/chat --set max_sequences=64 --max-requests 512 --drain-seconds 60
      ingot serve small=artifacts/chat-int4 exact=artifacts/chat-int8
    """


@command("doctor", "ingot.cli.runtime.doctor:doctor_command", declared={_SERVER: ("max_requests",)})
@click.argument("sources", metavar="[URL|FILE]...", nargs=-1)
@click.option(
    "--seconds", default=5.0, show_default=True, help="Time between two looks at a server and at the machine."
)
@click.option("--preflight", is_flag=True, help="Look at this machine alone, before a server starts.")
@path("--kv-disk-path", metavar="FOLDER", help="Folder of the KV cache's disk tier.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor() -> None:
    """Find what slows a server down, or would: each symptom with its cause, what to do, and the numbers.

    Reads the metrics of a server twice (default: http://127.0.0.1:8000), or a file with the text of /metrics, or two
    files of which the second was saved later. This machine is looked at too, unless the metrics are a file's or another
    machine's. The exit code is 0 when nothing was found and 3 otherwise.

    \b
    Examples:
      ingot doctor
      ingot doctor http://10.0.0.7:8000 --seconds 30
      ingot doctor before.txt after.txt --json
      ingot doctor --preflight --kv-disk-path /var/cache/kv
    """


@command("top", "ingot.cli.runtime.top:top_command")
@click.argument("url", required=False)
@click.option("--seconds", default=2.0, show_default=True, help="Time between two looks.")
@click.option(
    "--price",
    type=click.FloatRange(min=0),
    metavar="PER_HOUR",
    help="Price of the machine, for the cost of tokens.  [default: the server's --price-per-hour]",
)
@click.option("--once", is_flag=True, help="Look twice, print once and end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a line each time.")
def top() -> None:
    """Watch a server in the terminal: requests, tokens a second, latencies, KV pool and caches of each model.

    URL is that of `ingot serve` (default: http://127.0.0.1:8000). Rates are of the time between two looks.

    \b
    Examples:
      ingot top
      ingot top http://10.0.0.7:8000 --price 2.40
      ingot top --once --json
    """


@command("verify", "ingot.cli.runtime.verify:verify_command", takes="artifact")
@click.argument("artifact", type=click.Path(), shell_complete=completion.artifacts)
@click.option("--quick", is_flag=True, help="Fewer requests with shorter outputs, and no triples.")
@click.option("--only", multiple=True, metavar="PAIR", help="Verify only this cell, as prefix-hit+preemption.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Chooses prompts and samples.")
@path("--prompts", metavar="FILE", help="Text for the prompts (default: the model's own samples).")
@path("--draft", metavar="ARTIFACT", help="Verify speculation with this draft model too.")
@processes
@path("-o", "--output", metavar="FILE", help="Write the result as JSON to a file outside of the artifact.")
@click.option("--list", "show_list", is_flag=True, help="List the features, and which of them ARTIFACT has.")
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
@progress_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify() -> None:
    """Prove that no feature of the runtime changes an answer of ARTIFACT, on this machine.

    Prompts are served with every feature (prefix hits, chunked prefill, preemption, ...), with every pair of them, and
    with every triple that contains speculation. Each answer is compared with that of the plain path: one request alone,
    its prompt in one step, nothing cached. Tokens, text and reasons must be equal, and on the CPU every bit of the
    logits. A run that did not do what it should verify does not pass.

    Exit codes: 0 all are equal, 1 error, 2 usage, 3 one differs, 4 one was not exercised.

    \b
    Examples:
      ingot verify artifacts/demo --quick
      ingot verify artifacts/demo --only prefix-hit+preemption --seed 7
      ingot verify artifacts/demo --prompts held-out.txt -o verify.json
    """
