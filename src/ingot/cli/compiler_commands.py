"""The commands of the compiler: checkpoints, recipes, artifacts."""

from collections.abc import Callable, Iterable
from pathlib import Path

import click

from ingot.cli import completion
from ingot.cli.command import Decorated, command, path, progress_options

CHECKPOINT_FORMATS = ("gptq", "gptq-v1", "gptq-v2", "awq", "compressed-tensors", "safetensors", "gguf")
FORMATS = (*CHECKPOINT_FORMATS, "onnx")
FLOAT_TYPES = ("float32", "float16", "bfloat16")


def _set_option(text: str = "Set one value of the recipe.") -> Decorated:
    return click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help=text, shell_complete=completion.overrides
    )


def _report_options(declaration: Callable[..., None]) -> Callable[..., None]:
    """Options of commands that measure and decide gates; they become the parameter `reports`."""
    junit = path("--junit", metavar="FILE", help="Write the gates as JUnit XML, also when one fails or on an error.")
    summary = path("--summary", metavar="FILE", help="Append the evidence as Markdown, also when a gate fails.")
    return junit(summary(declaration))


_SOURCE = click.argument("source", type=click.Path(path_type=Path), shell_complete=completion.checkpoints)
_BUILT = click.argument("source", metavar="ARTIFACT|RECIPE", shell_complete=completion.sources)
_CHECKPOINT = click.argument(
    "checkpoint", required=False, type=click.Path(path_type=Path), shell_complete=completion.checkpoints
)
_CALIBRATION = path("--calibration", metavar="FILE", help="Calibration text: calibration.text of the recipe.")
_OUTPUT = click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder to write.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
_PAGE = path("--html", "page", metavar="FILE", help="Write a page with charts and sliders, one file.")

_LOAD_OPTIONS = (
    click.option(
        "--load",
        required=True,
        metavar="FILE|KIND:RATE",
        help="A trace, or poisson:RATE, bursts:RATE:CV, diurnal:RATE:PEAK[:HOURS], at-once.",
    ),
    click.option("--requests", type=int, help="How many.  [default: all of a trace, 1000 of a distribution]"),
    click.option("--speed", default=1.0, show_default=True, help="Of a trace: 2 sends it in half the time."),
    click.option("--scale", default=1.0, show_default=True, help="Of a trace: of the lengths of prompts and outputs."),
    click.option("--prompt-tokens", default=512, show_default=True, help="Median, of a distribution."),
    click.option("--output-tokens", default=128, show_default=True, help="Median, of a distribution."),
    click.option("--spread", default=0.8, show_default=True, help="Of both, log-normal; 0: all are the median."),
    click.option("--shared-tokens", default=0, show_default=True, help="Leading tokens that prompts have in common."),
    click.option(
        "--prefixes", "num_prefixes", default=1, show_default=True, help="How many such beginnings there are."
    ),
    click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0)),
    click.option(
        "--slo", default="chat", show_default=True, metavar="NAME|LIMITS", help="chat, code, or ttft=0.5,tpot=0.05."
    ),
)


def _load_options(declaration: Callable[..., None]) -> Callable[..., None]:
    """Options of commands that simulate: the requests that arrive, and the times that they must meet."""
    for option in reversed(_LOAD_OPTIONS):
        declaration = option(declaration)
    return declaration


def _format_option(formats: Iterable[str]) -> Decorated:
    return click.option(
        "--to",
        "format_name",
        required=True,
        metavar="FORMAT",
        help=f"One of {', '.join(formats)}.",
        shell_complete=completion.names(formats),
    )


@command("build", "ingot.cli.compiler.build:build_command", takes="recipe")
@click.argument("recipe", shell_complete=completion.recipes)
@_CHECKPOINT
@path("--eval", "evaluation", metavar="FILE", help="Evaluation text: evaluation.text of the recipe.")
@_CALIBRATION
@path("--chat-template", metavar="FILE", help="Chat template to seal: chat_template of the recipe.")
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
@click.option("--if-changed", is_flag=True, help="Build only if inputs, recipe or Ingot changed since the last build.")
@click.option("--force", is_flag=True, help="Replace an artifact whose gates passed, also by one that has none.")
@click.option("--require-gates", is_flag=True, help="Refuse, before any work, a recipe without gates that must pass.")
@_report_options
@progress_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and any IR to stderr.")
def build() -> None:
    """Build RECIPE (the name of a shipped recipe, or a YAML file), measure it, and seal it if its gates pass.

    CHECKPOINT is a folder with config.json, or a .gguf file; a recipe may name its own.

    \b
    Examples:
      ingot build demo
      ingot build int4-cpu ./my-model --eval held-out.txt -o artifacts/mine
      ingot build int4-cpu ./my-model --eval held-out.txt -o artifacts/mine --if-changed
      ingot build int4-gptq-cpu ./my-model --calibration text.txt --eval held-out.txt --junit gates.xml
    """


@command("compare", "ingot.cli.compiler.compare:compare_command", takes="artifacts or recipes")
@click.argument("sources", nargs=-1, required=True, metavar="RECIPE|ARTIFACT...", shell_complete=completion.sources)
@path(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    complete=completion.checkpoints,
    help="Build every recipe from it; repeatable (default: the recipes' own).",
)
@path("--eval", "evaluation", metavar="FILE", help="Evaluation text of all, or checkpoint:FILE of each checkpoint.")
@_CALIBRATION
@_set_option("Set one value of every recipe.")
@click.option(
    "--gate",
    "gates",
    multiple=True,
    metavar="METRIC=LIMIT",
    help="Decide by this gate, such as kl_mean=0.03, in place of the recipes' own; repeatable.",
)
@click.option(
    "--axes",
    default="kl_mean,tpot,bytes",
    show_default=True,
    metavar="NAME,...",
    help="Axes of the Pareto front: bits, bytes, perplexity_ratio, kl_mean, top1_agreement, ttft, tpot,"
    " tokens_per_second, cost, peak_memory.",
)
@click.option(
    "--prefer", default="tpot", show_default=True, metavar="NAME", help="The axis on which the winner is best."
)
@click.option("--on", "hardware_name", metavar="HARDWARE", help="Row of hardware: times of --predict, and the price.")
@path("--hardware", "hardware_files", multiple=True, metavar="FILE", help="Further rows of hardware, in YAML.")
@click.option("--price", type=click.FloatRange(min=0, min_open=True), help="Dollars for this machine and hour.")
@click.option(
    "--predict", "only_predict", is_flag=True, help="Only predict sizes and times; build and measure nothing."
)
@path("--state", metavar="FOLDER", help="Folder of artifacts and measurements.  [default: artifacts/compare]")
@path("-o", "--output", metavar="FILE", help="Write the winner as a recipe.")
@progress_options
@_JSON
def compare() -> None:
    """Compare recipes over one or more checkpoints, and artifacts: sizes, accuracy, latency, cost, and the winner.

    All candidates of a checkpoint are measured on the same windows of text, against one baseline. The same command
    resumes after an interruption; what is built and measured already is not repeated.

    Exit codes: 0 done, 1 a candidate could not be built or measured, 2 usage, 3 every candidate fails a gate, 4 none
    passes and one is undecided.

    \b
    Examples:
      ingot compare int4-cpu int8-cpu w8a8-cpu --checkpoint ./my-model --eval held-out.txt --predict --on epyc-9654
      ingot compare int4-cpu int8-cpu w8a8-cpu --checkpoint ./my-model --eval held-out.txt --gate kl_mean=0.03
          -o winner.yaml
      ingot compare mine.yaml artifacts/demo --checkpoint examples/models/stdlib-llama-6m --price 0.4
    """


@command("export", "ingot.cli.compiler.checkpoints:export_command", takes="artifact or recipe")
@_BUILT
@_CHECKPOINT
@_format_option(FORMATS)
@_OUTPUT
@_CALIBRATION
@_set_option()
@click.option("--round-scales", is_flag=True, help="Round scales to float16, which gptq, awq and gguf store.")
@click.option("--widen", is_flag=True, help="Allow other forms of the same values: more bits, smaller groups, floats.")
@click.option("--no-resume", is_flag=True, help="Calibrate from the start instead of resuming an interrupted run.")
@progress_options
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


@command("import", "ingot.cli.compiler.checkpoints:import_command", takes="checkpoint")
@_SOURCE
@_OUTPUT
@progress_options
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


@command("init-demo", "ingot.cli.compiler.init_demo:init_demo_command")
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


@command("choose", "ingot.cli.compiler.choose:choose_command")
@click.argument("what", shell_complete=completion.sources)
@click.option(
    "--on",
    "hardware_names",
    multiple=True,
    default=("all",),
    show_default=True,
    metavar="HARDWARE",
    help="Row of hardware such as h100, a kind (gpu, cpu), or all that have a price; repeatable.",
)
@path("--hardware", "hardware_files", multiple=True, metavar="FILE", help="Further rows of hardware, in YAML.")
@click.option(
    "--price", "prices", multiple=True, metavar="NAME=DOLLARS", help="Price of a device and hour; repeatable."
)
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    metavar="RECIPE",
    help="Recipe to build WHAT with; repeatable.  [default: those that need no calibration text]",
    shell_complete=completion.recipes,
)
@path("--checkpoint", complete=completion.checkpoints, help="Checkpoint, or config.json, of a recipe WHAT.")
@_set_option("Set one value of every recipe.")
@_load_options
@click.option("--drafted", default=0, type=click.IntRange(0, 64), help="Also try to draft so many tokens a step.")
@click.option("--acceptance", default=0.0, type=click.FloatRange(0, 1), help="Probability that a draft is right.")
@click.option("--devices", default=1, show_default=True, type=click.IntRange(1, 1024), help="Most of a replica.")
@click.option("--replicas", default=64, show_default=True, type=click.IntRange(min=1), help="Most replicas.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), help="Most dollars an hour, for all replicas.")
@path("--manifests", metavar="FOLDER", help="Write files for Kubernetes and KServe into this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def choose() -> None:
    """Choose the cheapest way to serve WHAT within a service level: recipe, hardware, engine options, replicas.

    WHAT is a checkpoint, a config.json alone, a recipe or an artifact. Candidates are simulated by successive halving;
    the answer holds with every step at the upper end of its predicted interval. The last round serves the load's first
    400 requests, or --requests. See docs/planning.md.

    Exit codes: 0 an answer, 3 nothing meets the service level.

    \b
    Examples:
      ingot choose ./my-model/config.json --on h100 --on a100 --load poisson:8 --slo chat
      ingot choose ./my-model --load trace.jsonl --slo ttft=1,tpot=0.05 --budget 40 --manifests deploy-files
    """


@command("inspect", "ingot.cli.compiler.inspect:inspect_command", takes="artifact")
@click.argument("artifact", type=click.Path(), shell_complete=completion.artifacts)
@click.option(
    "--program", "show_program", is_flag=True, help="Also list the program's steps, or its buckets and kernels."
)
@click.option("--bucket", metavar="NAME", help="Also list the launches of one bucket, as decode-1.")
@click.option("--files", "show_files", is_flag=True, help="Also list every file with its digest.")
@click.option("--memory", "show_memory", is_flag=True, help="Also show in which pages of memory the weights are.")
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect() -> None:
    """Show what ARTIFACT holds and how its gates were decided. Digests are checked first.

    \b
    Example:
      ingot inspect artifacts/demo --files
    """


@command("lint-checkpoint", "ingot.cli.compiler.checkpoints:lint_checkpoint_command", takes="checkpoint")
@click.argument("checkpoint", type=click.Path(path_type=Path), shell_complete=completion.checkpoints)
@progress_options
@_JSON
def lint_checkpoint() -> None:
    """Check CHECKPOINT, a folder or a .gguf file: shapes, finite values, zero points, exclude lists, KV scales.

    Exit codes: 0 no errors (there may be warnings), 1 an error.

    \b
    Example:
      ingot lint-checkpoint ./model-gptq
    """


@command("passes", "ingot.cli.compiler.catalog:passes_command")
@click.argument("name", required=False, shell_complete=completion.passes)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def passes() -> None:
    """List the passes, or show one pass with its options.

    \b
    Example:
      ingot passes quantize-weights
    """


@command("plan", "ingot.cli.compiler.plan:plan_command")
@click.argument("what", required=False, shell_complete=completion.sources)
@click.option("--on", "hardware_name", metavar="HARDWARE", help="Name of a row of hardware, such as h100.")
@click.option("--recipe", metavar="RECIPE", help="Recipe to build WHAT with.", shell_complete=completion.recipes)
@path("--checkpoint", complete=completion.checkpoints, help="Checkpoint, or config.json, of a recipe WHAT.")
@_set_option()
@click.option("--context", type=click.IntRange(min=1), help="Tokens of prompt and output, a quarter of it output.")
@click.option("--prompt", type=click.IntRange(min=1), help="Tokens of a prompt (default: the service level's).")
@click.option("--output", type=click.IntRange(min=1), help="Tokens of an output (default: the service level's).")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Requests at a time.")
@click.option("--cached", default=0, type=click.IntRange(min=0), help="Tokens of a prompt that the prefix cache has.")
@click.option("--drafted", default=0, type=click.IntRange(0, 64), help="Tokens that a step drafts for a sequence.")
@click.option("--acceptance", default=0.0, type=click.FloatRange(0, 1), help="Probability that a draft is right.")
@click.option("--slo", metavar="NAME|LIMITS", help="chat, code, documents, batch, or ttft=0.5,tpot=0.05.")
@click.option("--devices", type=click.IntRange(min=1), help="Devices of a replica (default: the fewest that suffice).")
@click.option("--price", type=click.FloatRange(min=0, min_open=True), help="Dollars for a device and hour.")
@click.option("--api-price", type=click.FloatRange(min=0, min_open=True), help="Dollars of an API for 1,000 tokens.")
@path("--rows", "rows_file", metavar="CSV", help="Measured rows of an engine, instead of the data sheet.")
@click.option("--measure", "is_measured", is_flag=True, help="Measure steps of the artifact WHAT on this machine.")
@path("--hardware", "hardware_files", multiple=True, metavar="FILE", help="Further rows of hardware, in YAML.")
@click.option("--explain", is_flag=True, help="Also show which term binds, and the arithmetic with units.")
@click.option("--advise", "with_advice", is_flag=True, help="Also order optimizations by gain; own devices or an API.")
@click.option("--tokens-a-day", type=click.FloatRange(min=1), help="For the advice: tokens of output, as 1e8.")
@click.option(
    "--data", type=click.Choice(["public", "internal", "restricted"]), help="For the advice: who may see the data."
)
@click.option("--team", type=click.IntRange(min=0), help="For the advice: engineers who run servers.")
@path("--scoreboard", metavar="FOLDER", help="Score the predictions that the builds of a folder's artifacts made.")
@path("--alerts", metavar="FILE", help="Write Prometheus alerts of the service level; needs no WHAT.")
@_PAGE
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan() -> None:
    """Plan WHAT on hardware: memory, latency, throughput, cost. Nothing is built, and no weight is read.

    WHAT is an artifact, a recipe, a checkpoint or a config.json alone. Without WHAT, list the hardware.

    \b
    Examples:
      ingot plan ./my-model/config.json --on h100 --context 4096
      ingot plan ./my-model --recipe int4-cuda --on rtx-4090 --batch 16 --slo chat --explain
      ingot plan artifacts/demo --on epyc-9654 --json
      ingot plan artifacts/demo --measure --context 1024
      ingot plan --scoreboard artifacts
      ingot plan --slo chat --alerts alerts-chat.yaml
    """


@command("quantize-report", "ingot.cli.compiler.validate:quantize_report_command", takes="artifact")
@click.argument("artifact", type=click.Path(path_type=Path), shell_complete=completion.artifacts)
@path("--checkpoint", complete=completion.checkpoints, help="Measure the weights' errors against it.")
@path("--text", help="Measure KL on this text; requires --checkpoint.")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of the text (default: 2048 or fewer).")
@click.option("--top", default=20, show_default=True, type=click.IntRange(min=1), help="Weights to show.")
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
@progress_options
@click.option("--json", "as_json", is_flag=True, help="Print all weights as JSON.")
def quantize_report() -> None:
    """Show ARTIFACT's quantized weights, the most costly first: bits, bytes, scales, errors, KL.

    Errors and KL are those that the build measured; with its checkpoint and a text they are measured again.

    \b
    Examples:
      ingot quantize-report artifacts/demo
      ingot quantize-report artifacts/demo --checkpoint ./my-model --text held-out.txt
    """


@command("models", "ingot.cli.compiler.catalog:models_command")
@click.argument("model_type", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def models() -> None:
    """List the model types that Ingot imports, or say what keeps one from being imported.

    \b
    Example:
      ingot models falcon_mamba
    """


@command("recipes", "ingot.cli.compiler.catalog:recipes_command")
@click.argument("name", required=False, shell_complete=completion.recipes)
@_set_option("Set one value, as `ingot build` does.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def recipes() -> None:
    """List the shipped recipes, or show one (a name or a file) resolved, with every default filled in.

    \b
    Example:
      ingot recipes int4-cpu
    """


@command("schema", "ingot.cli.compiler.catalog:schema_command")
@path("-o", "--output", metavar="FILE", help="Write it to a file instead of stdout.")
def schema() -> None:
    """Print the JSON Schema of recipes, by which editors complete and check them, with the options of every pass.

    An editor that reads `# yaml-language-server: $schema=FILE` in a recipe's first line uses it.

    \b
    Example:
      ingot schema -o recipe.schema.json
    """


@command("transcode", "ingot.cli.compiler.checkpoints:transcode_command", takes="checkpoint")
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
@progress_options
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


@command("simulate", "ingot.cli.compiler.simulate:simulate_command")
@click.argument("what", type=click.Path(), shell_complete=completion.artifacts)
@click.option("--on", "hardware", metavar="HARDWARE", help="Row of the hardware table, such as h100 or l40s.")
@path("--hardware", "hardware_file", metavar="FILE", help="Further rows of hardware, YAML.")
@click.option("--recipe", metavar="RECIPE", help="What a checkpoint would be built by.  [default: its own types]")
@click.option("--steps", metavar="COUNT=SECONDS,...", help="Times of steps as you state them: steps=0.003,rows=0.0002.")
@path("--profile", metavar="FOLDER", help="Times of steps from a profile of a GPU by layer; see docs/simulation.md.")
@click.option("--measure", "is_measured", is_flag=True, help="Times of steps of an artifact, measured on this machine.")
@click.option(
    "--tensor-parallel", default=1, show_default=True, type=click.IntRange(1, 64), help="Devices of an engine."
)
@_load_options
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set an option of the engine: batching=static, max_batch_tokens=512, kv_host_bytes=64GiB; repeatable.",
    shell_complete=completion.engine_settings,
)
@click.option("--acceptance", metavar="P,P,...", help="Speculate: the chance that each draft in turn is accepted.")
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds after which a request ends.")
@click.option("--replicas", default=1, show_default=True, help="Engines, and the fewest of --autoscale.")
@click.option(
    "--router",
    default="least-connections",
    show_default=True,
    help="round-robin, least-connections, cost, prefix-reported, prefix-predicted or prefix-hybrid.",
)
@click.option("--autoscale", type=int, metavar="MOST", help="Start and drain replicas, up to so many.")
@click.option(
    "--scaling-rule", default="queue-depth", type=click.Choice(["queue-depth", "predictive"]), show_default=True
)
@click.option("--open-per-replica", default=16.0, show_default=True, help="Open requests for which there is a replica.")
@click.option("--startup-seconds", default=120.0, show_default=True, help="Until a new replica takes requests.")
@click.option("--fail", multiple=True, metavar="SECOND:REPLICA[:DOWN]", help="A replica fails; repeatable.")
@click.option(
    "--drain", multiple=True, metavar="SECOND:REPLICA[:DOWN]", help="A replica ends once it has served; repeatable."
)
@click.option("--disaggregate", metavar="PREFILL:DECODE", help="Replicas for prompts and others for decoding, as 2:6.")
@click.option(
    "--kv-link",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="Gigabytes a second of KV blocks out of a replica of --disaggregate.  [default: the hardware's link]",
)
@click.option(
    "--region",
    multiple=True,
    metavar="NAME:REPLICAS:LATENCY[:SHARE]",
    help="Users and replicas, and seconds from them to the other regions' exchange; repeatable.",
)
@click.option("--capacity", "find_capacity", is_flag=True, help="Find the highest rate that keeps the service level.")
@_PAGE
@click.option("--open", "opens", is_flag=True, help="Serve a page on this machine, whose sliders simulate anew.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate() -> None:
    """Simulate traffic on WHAT, an artifact, a recipe, a checkpoint or a config.json, in virtual time.

    The engine's own scheduler, KV blocks, prefix cache, admission and tiers run; only steps are not computed: they take
    the time that the hardware's data sheet, a profile or --steps predicts. See docs/simulation.md.

    \b
    Examples:
      ingot simulate config.json --on h100 --load poisson:8 --slo chat
      ingot simulate config.json --on h100 --load conversation_trace.jsonl --replicas 8 --router prefix-hybrid
      ingot simulate artifacts/demo --steps steps=0.003,rows=0.00025 --set kv_blocks=512 --load poisson:20 --capacity
    """


@command("tune", "ingot.cli.compiler.tune:tune_command", takes="artifact or recipe")
@_BUILT
@_CHECKPOINT
@path("-o", "--output", required=True, help="The table, a JSON file.")
@_set_option()
@click.option("--free-order", is_flag=True, help="Let each bucket sum in its own order: faster, less batch-invariant.")
@progress_options
@click.option("--json", "as_json", is_flag=True, help="Print what was chosen as JSON.")
def tune() -> None:
    """Measure the matmuls of ARTIFACT, or of what RECIPE would build from CHECKPOINT, on this machine's GPU.

    Use the table in a build with --set gpu.tiles=FILE. An existing table is extended; Ctrl-C keeps what was measured.

    \b
    Example:
      ingot tune artifacts/mine -o h100.json
      ingot build int4-cuda ./my-model --set gpu.tiles=h100.json
    """


@command("validate", "ingot.cli.compiler.validate:validate_command", takes="artifact")
@click.argument("artifact", type=click.Path(path_type=Path), shell_complete=completion.artifacts)
@path("--checkpoint", complete=completion.checkpoints, help="Make the baseline from this checkpoint folder.")
@path("--baseline", complete=completion.artifacts, help="Compare with this artifact.")
@_set_option("Set evaluation, latency or gates.")
@path("--evidence", metavar="DIR", help="Write the new evidence here.")
@_report_options
@progress_options
@_JSON
def validate() -> None:
    """Check every digest of ARTIFACT; with a checkpoint or a baseline also measure it again by its own recipe.

    Exit codes: 0 all gates pass, 1 error, 2 usage, 3 a gate failed, 4 a gate is undecided.

    \b
    Examples:
      ingot validate artifacts/demo
      ingot validate artifacts/demo --checkpoint examples/models/stdlib-llama-6m
    """
