"""Every command's arguments, options and help; what a command does is imported when it runs.

This file imports only click, so that help and completion are quick and work without the compiler's packages.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from ingot.cli import completion
from ingot.cli.command import Command

CHECKPOINT_FORMATS = ("gptq", "gptq-v1", "gptq-v2", "awq", "compressed-tensors", "safetensors", "gguf")
FORMATS = (*CHECKPOINT_FORMATS, "onnx")
FLOAT_TYPES = ("float32", "float16", "bfloat16")


COMMANDS: dict[str, Command] = {}


def _command(name: str, implementation: str, takes: str = "") -> Callable[[Callable[[], None]], Command]:
    """Declare a command by a function with its options as decorators, its help as docstring and no body.

    `takes` is what its first argument must be, a key of ingot.cli.sources.CHECKS.
    """

    def declare(declaration: Callable[[], None]) -> Command:
        COMMANDS[name] = click.command(name, cls=Command, implementation=implementation, takes=takes)(declaration)
        return COMMANDS[name]

    return declare


_Decorated = Callable[[Callable[..., None]], Callable[..., None]]


def _path(*names: str, complete: completion.Complete | None = None, **attributes: Any) -> _Decorated:
    """An option whose value is a path."""
    return click.option(*names, type=click.Path(path_type=Path), shell_complete=complete, **attributes)


def _set_option(text: str = "Set one value of the recipe.") -> _Decorated:
    return click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help=text, shell_complete=completion.overrides
    )


def _progress_options(declaration: Callable[..., None]) -> Callable[..., None]:
    """Options of commands that take long; see ingot.cli.command.Command for who reads them."""
    kinds = click.Choice(["auto", "plain", "bar", "none"])
    progress = click.option(
        "--progress",
        type=kinds,
        default="auto",
        envvar="INGOT_PROGRESS",
        help="plain: lines, bar: bars; auto: bars at a terminal, else lines.  [env: INGOT_PROGRESS]",
    )
    quiet = click.option("-q", "--quiet", is_flag=True, help="Print results and errors, but no progress and notes.")
    return quiet(progress(declaration))


def _report_options(declaration: Callable[..., None]) -> Callable[..., None]:
    """Options of commands that measure and decide gates; they become the parameter `reports`."""
    junit = _path("--junit", metavar="FILE", help="Write the gates as JUnit XML, also when one fails or on an error.")
    summary = _path("--summary", metavar="FILE", help="Append the evidence as Markdown, also when a gate fails.")
    return junit(summary(declaration))


_SOURCE = click.argument("source", type=click.Path(path_type=Path), shell_complete=completion.checkpoints)
_BUILT = click.argument("source", metavar="ARTIFACT|RECIPE", shell_complete=completion.sources)
_CHECKPOINT = click.argument(
    "checkpoint", required=False, type=click.Path(path_type=Path), shell_complete=completion.checkpoints
)
_CALIBRATION = _path("--calibration", metavar="FILE", help="Calibration text: calibration.text of the recipe.")
_OUTPUT = click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder to write.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")


def _format_option(formats: Iterable[str]) -> _Decorated:
    return click.option(
        "--to",
        "format_name",
        required=True,
        metavar="FORMAT",
        help=f"One of {', '.join(formats)}.",
        shell_complete=completion.names(formats),
    )


@_command("build", "ingot.cli.build:build_command", takes="recipe")
@click.argument("recipe", shell_complete=completion.recipes)
@_CHECKPOINT
@_path("--eval", "evaluation", metavar="FILE", help="Evaluation text: evaluation.text of the recipe.")
@_CALIBRATION
@_path("--chat-template", metavar="FILE", help="Chat template to seal: chat_template of the recipe.")
@_set_option()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Artifact folder (default: the recipe's).")
@click.option(
    "--print-ir-after",
    multiple=True,
    metavar="PASS",
    help="Print the IR after this pass, or all.",
    shell_complete=completion.passes_or_all,
)
@click.option("--save-ir", type=click.Path(path_type=Path), metavar="DIR", help="Save the IR after every pass.")
@click.option("--time-passes", is_flag=True, help="Print each pass's time and effect.")
@click.option("-v", "--verbose", is_flag=True, help="Print each layer's error as it is quantized.")
@click.option("--no-resume", is_flag=True, help="Calibrate from the start, do not resume an interrupted build.")
@click.option("--require-gates", is_flag=True, help="Refuse, before any work, a recipe without gates that must pass.")
@_report_options
@_progress_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and any IR to stderr.")
def build() -> None:
    """Build RECIPE (the name of a shipped recipe, or a YAML file), measure it, and seal it if its gates pass.

    CHECKPOINT is a folder with config.json, or a .gguf file; a recipe may name its own.

    \b
    Examples:
      ingot build demo
      ingot build int4-cpu ./my-model --eval held-out.txt -o artifacts/mine
      ingot build int4-gptq-cpu ./my-model --calibration text.txt --eval held-out.txt --junit gates.xml
    """


@_command("export", "ingot.cli.checkpoints:export_command", takes="artifact or recipe")
@_BUILT
@_CHECKPOINT
@_format_option(FORMATS)
@_OUTPUT
@_CALIBRATION
@_set_option()
@click.option("--round-scales", is_flag=True, help="Round scales to float16, which gptq, awq and gguf store.")
@click.option("--widen", is_flag=True, help="Allow other forms of the same values: more bits, smaller groups, floats.")
@click.option("--no-resume", is_flag=True, help="Calibrate from the start instead of resuming an interrupted run.")
@_progress_options
@_JSON
def export() -> None:
    """Write the weights of ARTIFACT, or those that RECIPE makes from CHECKPOINT, in another tool's format.

    Exporting an artifact needs neither its checkpoint nor its calibration text. The tokenizer is written with the
    weights.

    \b
    Examples:
      ingot export artifacts/mine --to compressed-tensors --widen -o mine-w4
      ingot export int4-cpu ./my-model --to compressed-tensors -o mine-w4
          --set passes.quantize-weights.embedding=none --set passes.quantize-weights.lm_head=none
      ingot export fp32-cpu model-q4_0.gguf --to safetensors -o floats
      ingot export int4-cpu ./my-model --to onnx -o mine-onnx
    """


@_command("import", "ingot.cli.checkpoints:import_command", takes="checkpoint")
@_SOURCE
@_OUTPUT
@_progress_options
@_JSON
def import_() -> None:
    """Check the checkpoint SOURCE, a folder or a .gguf file, and write it in one form with a recipe that builds it.

    If SOURCE has errors, all of them are listed and nothing is written. The folder holds the same weights, proven, as
    plain safetensors or as compressed-tensors with the same codes, and a recipe.yaml. Recipes can also read SOURCE
    itself.

    \b
    Example:
      ingot import model-q4_k_m.gguf -o model
      ingot build model/recipe.yaml --eval heldout.txt -o artifacts/model
    """


@_command("init-demo", "ingot.cli.init_demo:init_demo_command")
@click.argument("folder", default="ingot-demo", type=click.Path(path_type=Path))
@click.option("--from", "source", metavar="URL", help="Git repository to fetch from (default: the project's).")
def init_demo() -> None:
    """Fetch Ingot's source, with the demo model.

    An installed package holds the recipe `demo`, but not its model. git fetches the source into FOLDER (default:
    ingot-demo), at the tag of this version if it has one.

    \b
    Example:
      ingot init-demo
      ingot build ingot-demo/recipes/demo.yaml
    """


@_command("inspect", "ingot.cli.inspect:inspect_command", takes="artifact")
@click.argument("artifact", type=click.Path(), shell_complete=completion.artifacts)
@click.option(
    "--program", "show_program", is_flag=True, help="Also list the program's steps, or its buckets and kernels."
)
@click.option("--bucket", metavar="NAME", help="Also list the launches of one bucket, as decode-1.")
@click.option("--files", "show_files", is_flag=True, help="Also list every file with its digest.")
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect() -> None:
    """Show what ARTIFACT holds and how its gates were decided. Digests are checked first.

    \b
    Example:
      ingot inspect artifacts/demo --files
    """


@_command("lint-checkpoint", "ingot.cli.checkpoints:lint_checkpoint_command", takes="checkpoint")
@click.argument("checkpoint", type=click.Path(path_type=Path), shell_complete=completion.checkpoints)
@_progress_options
@_JSON
def lint_checkpoint() -> None:
    """Check CHECKPOINT, a folder or a .gguf file: shapes, finite values, zero points, exclude lists, KV scales.

    Exit codes: 0 no errors (there may be warnings), 1 an error.

    \b
    Example:
      ingot lint-checkpoint ./model-gptq
    """


@_command("passes", "ingot.cli.catalog:passes_command")
@click.argument("name", required=False, shell_complete=completion.passes)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def passes() -> None:
    """List the passes, or show one pass with its options.

    \b
    Example:
      ingot passes quantize-weights
    """


@_command("quantize-report", "ingot.cli.validate:quantize_report_command", takes="artifact")
@click.argument("artifact", type=click.Path(path_type=Path), shell_complete=completion.artifacts)
@_path("--checkpoint", complete=completion.checkpoints, help="Measure the weights' errors against it.")
@_path("--text", help="Measure KL on this text; requires --checkpoint.")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of the text (default: 2048 or fewer).")
@click.option("--top", default=20, show_default=True, type=click.IntRange(min=1), help="Weights to show.")
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
@_progress_options
@click.option("--json", "as_json", is_flag=True, help="Print all weights as JSON.")
def quantize_report() -> None:
    """Show ARTIFACT's quantized weights, the most costly first: bits, bytes, scales, errors, KL.

    Errors and KL are those that the build measured; with its checkpoint and a text they are measured again.

    \b
    Examples:
      ingot quantize-report artifacts/demo
      ingot quantize-report artifacts/demo --checkpoint ./my-model --text held-out.txt
    """


@_command("recipes", "ingot.cli.catalog:recipes_command")
@click.argument("name", required=False, shell_complete=completion.recipes)
@_set_option("Set one value, as `ingot build` does.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def recipes() -> None:
    """List the shipped recipes, or show one (a name or a file) resolved, with every default filled in.

    \b
    Example:
      ingot recipes int4-cpu
    """


@_command("run", "ingot.cli.run:run_command", takes="artifact")
@click.argument("artifact", type=click.Path(), shell_complete=completion.artifacts)
@click.argument("prompt", required=False)
@click.option("--prompts-file", metavar="FILE", help="Generate for every line; .jsonl has an object per line.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for the results of --prompts-file.")
@click.option("--max-tokens", default=128, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", default=0, show_default=True, help="Keep the k likeliest tokens; 0 keeps all.")
@click.option("--top-p", default=1.0, show_default=True, help="Keep the likeliest tokens of this total probability.")
@click.option("--min-p", default=0.0, show_default=True, help="Drop tokens below this share of the likeliest one's.")
@click.option("--seed", type=int, help="Same seed, same text.")
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Above 1 penalizes repeated tokens.")
@click.option("--presence-penalty", default=0.0, show_default=True, help="Above 0 penalizes generated tokens.")
@click.option("--frequency-penalty", default=0.0, show_default=True, help="The same, once for each time.")
@click.option("--stop", multiple=True, help="Stop before this text; can be repeated.")
@click.option("--n", default=1, show_default=True, help="Number of completions; they share the prompt's work.")
@click.option("--best-of", type=int, help="Sample this many, keep the --n with the highest mean log-probability.")
@click.option("--beam-width", type=int, help="Search for the likeliest text with this many beams, at most 64.")
@click.option("--length-penalty", type=float, help="Of a beam search: above 0 favours longer texts; 1 if not given.")
@click.option("--chat/--no-chat", default=None, help="Treat PROMPT as a message, by the model's chat template.")
@click.option("--system", help="System message of a chat.")
@click.option(
    "--stats",
    is_flag=True,
    help="Print latencies, use of caches, preemptions to stderr; all metrics in --json.",
)
@click.option("--speculate", metavar="lookup|DRAFT", help="Draft tokens: copied from the text, or by a small artifact.")
@_path("--adapter", metavar="FOLDER", help="Compute with this LoRA adapter, a folder of PEFT; see docs/lora.md.")
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

    Without PROMPT at a terminal, a chat begins if the model has a chat template; otherwise each line is a prompt.

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
      ingot run artifacts/demo --prompts-file prompts.jsonl -o results.jsonl --stats
    """


@_command("schema", "ingot.cli.catalog:schema_command")
@_path("-o", "--output", metavar="FILE", help="Write it to a file instead of stdout.")
def schema() -> None:
    """Print the JSON Schema of recipes, by which editors complete and check them, with the options of every pass.

    An editor that reads `# yaml-language-server: $schema=FILE` in a recipe's first line uses it.

    \b
    Example:
      ingot schema -o recipe.schema.json
    """


@_command("serve", "ingot.cli.serve:serve_command", takes="artifact")
@click.argument("artifact", type=click.Path(), shell_complete=completion.artifacts)
@click.argument("more_artifacts", metavar="[ARTIFACT]...", nargs=-1, shell_complete=completion.artifacts)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free port.")
@click.option("--alias", "aliases", multiple=True, metavar="ALIAS=MODEL", help="Another name of a model; repeatable.")
@_path("--api-keys", metavar="FILE", help="Require one of these keys, one per line with its limits; see docs/serve.md.")
@click.option("--max-requests", default=256, show_default=True, help="Most open requests of a model; more get 429.")
@click.option("--max-waiting-tokens", default=65536, show_default=True, help="Most prompt tokens that wait; then 429.")
@click.option("--max-ttft-seconds", type=float, help="Refuse requests whose first token would take longer (no limit).")
@click.option("--max-prompt-tokens", type=int, help="Longest prompt (default: what the model's context holds).")
@click.option("--max-body-bytes", default=8 << 20, show_default=True, help="Longest body of a request; then 413.")
@click.option("--request-seconds", type=float, help="Longest time of a request; it ends with its output so far.")
@click.option("--body-seconds", default=30.0, show_default=True, help="Longest time for a request's body to arrive.")
@click.option(
    "--send-seconds", default=30.0, show_default=True, help="Abort requests whose client accepts nothing for so long."
)
@click.option(
    "--stream-seconds", default=0.02, show_default=True, help="Least time between events of a stream; 0: none."
)
@_path("--admin-keys", metavar="FILE", help="Keys for POST /admin/reload and for adapters, one per line (without: no).")
@click.option(
    "--lora-modules",
    multiple=True,
    metavar="NAME=FOLDER",
    help="Serve a LoRA adapter as a model of this name; repeatable. NAME@MODEL=FOLDER where several models are served.",
)
@_path(
    "--allow-lora-updates",
    "lora_folder",
    metavar="FOLDER",
    help="Let holders of admin keys load adapters from this folder, and unload them, while the server runs.",
)
@click.option("--verify-new", is_flag=True, help="Before a swap, run ingot verify --quick on the new artifact.")
@click.option(
    "--idle-unload", "idle_unload_seconds", type=float, metavar="SECONDS", help="Unload a model after this idle time."
)
@click.option("--probation-seconds", default=60.0, show_default=True, help="Time to go back after a swap by SIGHUP.")
@click.option("--drain-seconds", default=30.0, show_default=True, help="Time to serve open requests after SIGTERM.")
@click.option(
    "--stored-responses",
    default=1024,
    show_default=True,
    help="Most kept responses of /v1/responses; 0: none.",
)
@click.option(
    "--stored-response-bytes", default=64 << 20, show_default=True, help="Most bytes of those and their conversations."
)
@click.option("--stall-seconds", default=120.0, show_default=True, help="Longest step; then /health fails.")
@click.option(
    "--log-requests", is_flag=True, help="Print a line of JSON for each request: numbers and names, no texts."
)
@click.option("--trace", is_flag=True, help="Send spans of OpenTelemetry (extra trace); OTEL_* variables say where.")
@click.option("--speculate", metavar="lookup|DRAFT", help="Draft tokens: copied from the text, or by a small artifact.")
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

    \b
    POST /v1/chat/completions, /v1/completions, /v1/responses, /tokenize, /detokenize
    GET  /v1/models, /version, /health (alive), /ready (takes requests), /metrics (Prometheus)

    More requests than the limits allow get 429 with the time to retry. SIGTERM or Ctrl-C stops taking requests, serves
    the open ones for --drain-seconds, and ends with code 0; a second one ends at once. See docs/serve.md.

    \b
    Examples:
      ingot serve artifacts/demo
      ingot serve artifacts/chat artifacts/code --alias gpt-4o-mini=chat --host 0.0.0.0 --api-keys keys.txt
      ingot serve artifacts/chat --set max_sequences=64 --max-requests 512 --drain-seconds 60
    """


@_command("doctor", "ingot.cli.doctor:doctor_command")
@click.argument("sources", metavar="[URL|FILE]...", nargs=-1)
@click.option(
    "--seconds", default=5.0, show_default=True, help="Time between two looks at a server and at the machine."
)
@click.option("--preflight", is_flag=True, help="Look at this machine alone, before a server starts.")
@_path("--kv-disk-path", metavar="FOLDER", help="Folder of the KV cache's disk tier.")
@click.option("--max-requests", default=256, show_default=True, help="As of ingot serve, for --preflight.")
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


@_command("top", "ingot.cli.top:top_command")
@click.argument("url", required=False)
@click.option(
    "--seconds", default=2.0, show_default=True, type=click.FloatRange(min=0.1), help="Time between two looks."
)
@click.option(
    "--price", type=click.FloatRange(min=0), metavar="PER_HOUR", help="Price of the machine, for the cost of tokens."
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


@_command("transcode", "ingot.cli.checkpoints:transcode_command", takes="checkpoint")
@_SOURCE
@_format_option(CHECKPOINT_FORMATS)
@_OUTPUT
@click.option("--proof", type=click.Path(path_type=Path), help="File to write the proof to, as JSON.")
@click.option("--lossy", is_flag=True, help="Round scales, minima and floats that the format stores in 16 bits.")
@click.option("--floats", is_flag=True, help="compressed-tensors: write layers that it cannot hold as float32.")
@click.option(
    "--dtype",
    metavar="TYPE",
    help=f"Type of weights written as floats: {', '.join(FLOAT_TYPES)}.",
    shell_complete=completion.names(FLOAT_TYPES),
)
@_progress_options
@_JSON
def transcode() -> None:
    """Write the checkpoint SOURCE, a folder or a .gguf file, in another format without changing a weight.

    Codes, scales and zero points are copied; nothing is quantized again. The result is read back, and every dequantized
    weight is compared with the source's before the folder appears. If the format cannot hold a scheme, the error names
    the formats that can.

    \b
    Examples:
      ingot transcode ./model-gptq --to compressed-tensors -o model-ct --proof proof.json
      ingot transcode model-q4_0.gguf --to awq -o model-awq
    """


@_command("tune", "ingot.cli.tune:tune_command", takes="artifact or recipe")
@_BUILT
@_CHECKPOINT
@_path("-o", "--output", required=True, help="The table, a JSON file.")
@_set_option()
@click.option("--free-order", is_flag=True, help="Let each bucket sum in its own order: faster, less batch-invariant.")
@_progress_options
@click.option("--json", "as_json", is_flag=True, help="Print what was chosen as JSON.")
def tune() -> None:
    """Measure the matmuls of ARTIFACT, or of what RECIPE would build from CHECKPOINT, on this machine's GPU.

    Use the table in a build with --set gpu.tiles=FILE. An existing table is extended; Ctrl-C keeps what was measured.

    \b
    Example:
      ingot tune artifacts/mine -o h100.json
      ingot build int4-cuda ./my-model --set gpu.tiles=h100.json
    """


@_command("validate", "ingot.cli.validate:validate_command", takes="artifact")
@click.argument("artifact", type=click.Path(path_type=Path), shell_complete=completion.artifacts)
@_path("--checkpoint", complete=completion.checkpoints, help="Make the baseline from this checkpoint folder.")
@_path("--baseline", complete=completion.artifacts, help="Compare with this artifact.")
@_set_option("Set evaluation, latency or gates.")
@_path("--evidence", metavar="DIR", help="Write the new evidence here.")
@_report_options
@_progress_options
@_JSON
def validate() -> None:
    """Check every digest of ARTIFACT; with a checkpoint or a baseline also measure it again by its own recipe.

    Exit codes: 0 all gates pass, 1 error, 2 usage, 3 a gate failed, 4 a gate is undecided.

    \b
    Examples:
      ingot validate artifacts/demo
      ingot validate artifacts/demo --checkpoint examples/models/stdlib-llama-6m
    """


@_command("verify", "ingot.cli.verify:verify_command", takes="artifact")
@click.argument("artifact", type=click.Path(), shell_complete=completion.artifacts)
@click.option("--quick", is_flag=True, help="Fewer requests with shorter outputs, and no triples.")
@click.option("--only", multiple=True, metavar="PAIR", help="Verify only this cell, as prefix-hit+preemption.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Chooses prompts and samples.")
@_path("--prompts", metavar="FILE", help="Text for the prompts (default: the model's own samples).")
@_path("--draft", metavar="ARTIFACT", help="Verify speculation with this draft model too.")
@_path("-o", "--output", metavar="FILE", help="Write the result as JSON to a file outside of the artifact.")
@click.option("--list", "show_list", is_flag=True, help="List the features, and which of them ARTIFACT has.")
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
@_progress_options
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
