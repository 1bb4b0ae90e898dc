"""Every command's arguments, options and help; what a command does is imported when it runs.

This file imports only click, so that help and completion are quick and work without the compiler's packages.
"""

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from ingot.errors import UsageError, unknown

CHECKPOINT_FORMATS = ("gptq", "gptq-v1", "gptq-v2", "awq", "compressed-tensors", "safetensors", "gguf")
FORMATS = (*CHECKPOINT_FORMATS, "onnx")
FLOAT_TYPES = ("float32", "float16", "bfloat16")


class Command(click.Command):
    """A command whose function, "module:function", is imported when it is invoked."""

    def __init__(self, *args: Any, implementation: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.implementation = implementation

    def load(self) -> Callable[..., int | None]:
        """Import the function that implements the command."""
        module, _, function = self.implementation.partition(":")
        loaded: Callable[..., int | None] = getattr(import_module(module), function)
        return loaded

    def invoke(self, ctx: click.Context) -> int | None:
        """Run the command with the parameters that were parsed; returns its exit code."""
        from ingot.cli.console import show_log  # loads rich, which help does without

        show_log()
        return ctx.invoke(self.load(), **ctx.params)


COMMANDS: dict[str, Command] = {}


class CommandGroup(click.Group):
    """The group of all commands; an unknown one is refused with the nearest name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise UsageError(unknown("command", args[0], self.commands, "commands"))
        return super().resolve_command(ctx, args)


def _command(name: str, implementation: str) -> Callable[[Callable[[], None]], Command]:
    """Declare a command by a function with its options as decorators, its help as docstring and no body."""

    def declare(declaration: Callable[[], None]) -> Command:
        COMMANDS[name] = click.command(name, cls=Command, implementation=implementation)(declaration)
        return COMMANDS[name]

    return declare


_SOURCE = click.argument("source", type=click.Path(path_type=Path))
_OUTPUT = click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder to write.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")


def _format_option(formats: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    names = ", ".join(formats)
    return click.option("--to", "format_name", required=True, metavar="FORMAT", help=f"One of {names}.")


@_command("build", "ingot.cli.build:build_command")
@click.argument("recipe")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value of the recipe.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Artifact folder (default: the recipe's).")
@click.option("--print-ir-after", multiple=True, metavar="PASS", help="Print the IR after this pass, or all.")
@click.option("--save-ir", type=click.Path(path_type=Path), metavar="DIR", help="Save the IR after every pass.")
@click.option("--time-passes", is_flag=True, help="Print each pass's time and effect.")
@click.option("-v", "--verbose", is_flag=True, help="Print each layer's error as it is quantized.")
@click.option("--no-resume", is_flag=True, help="Calibrate from the start, do not resume an interrupted build.")
@click.option("--require-gates", is_flag=True, help="Refuse, before any work, a recipe without gates that must pass.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and any IR to stderr.")
def build() -> None:
    """Build RECIPE (the name of a shipped recipe, or a YAML file), measure it, and seal it if its gates pass.

    \b
    Examples:
      ingot build demo
      ingot build int4-cpu --set checkpoint=./my-model --set evaluation.text=text.txt -o artifacts/mine
    """


@_command("export", "ingot.cli.checkpoints:export_command")
@click.argument("source", metavar="ARTIFACT|RECIPE")
@_format_option(FORMATS)
@_OUTPUT
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value of the recipe.")
@click.option("--round-scales", is_flag=True, help="Round scales to float16, which gptq, awq and gguf store.")
@click.option("--widen", is_flag=True, help="Allow other forms of the same values: more bits, smaller groups, floats.")
@click.option("--no-resume", is_flag=True, help="Calibrate from the start instead of resuming an interrupted run.")
@_JSON
def export() -> None:
    """Write the weights of ARTIFACT, or those that RECIPE makes from its checkpoint, in another tool's format.

    Exporting an artifact needs neither its checkpoint nor its calibration text. The tokenizer is written with the
    weights.

    \b
    Examples:
      ingot export artifacts/mine --to compressed-tensors --widen -o mine-w4
      ingot export int4-cpu --to compressed-tensors -o mine-w4 --set checkpoint=./my-model
          --set passes.quantize-weights.embedding=none --set passes.quantize-weights.lm_head=none
      ingot export fp32-cpu --to safetensors -o floats --set checkpoint=model-q4_0.gguf
      ingot export int4-cpu --to onnx -o mine-onnx --set checkpoint=./my-model
    """


@_command("import", "ingot.cli.checkpoints:import_command")
@_SOURCE
@_OUTPUT
@_JSON
def import_() -> None:
    """Check the checkpoint SOURCE, a folder or a .gguf file, and write it in one form with a recipe that builds it.

    If SOURCE has errors, all of them are listed and nothing is written. The folder holds the same weights, proven, as
    plain safetensors or as compressed-tensors with the same codes, and a recipe.yaml. Recipes can also read SOURCE
    itself.

    \b
    Example:
      ingot import model-q4_k_m.gguf -o model
      ingot build model/recipe.yaml --set evaluation.text=heldout.txt -o artifacts/model
    """


@_command("init-demo", "ingot.cli.init_demo:init_demo_command")
@click.argument("folder", default="ingot-demo", type=click.Path(path_type=Path))
@click.option("--from", "source", metavar="URL", help="Git repository to fetch from (default: the project's).")
def init_demo() -> None:
    """Fetch Ingot's source into FOLDER (default: ingot-demo), with the demo model, by git.

    It is fetched at the tag of this version, if there is one. An installed package holds the recipe `demo`, but not its
    model.

    \b
    Example:
      ingot init-demo
      ingot build ingot-demo/recipes/demo.yaml
    """


@_command("inspect", "ingot.cli.inspect:inspect_command")
@click.argument("artifact", type=click.Path())
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


@_command("lint-checkpoint", "ingot.cli.checkpoints:lint_checkpoint_command")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@_JSON
def lint_checkpoint() -> None:
    """Check CHECKPOINT, a folder or a .gguf file: shapes, finite values, zero points, exclude lists, KV scales.

    Exit codes: 0 no errors (there may be warnings), 1 an error.

    \b
    Example:
      ingot lint-checkpoint ./model-gptq
    """


@_command("passes", "ingot.cli.catalog:passes_command")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def passes() -> None:
    """List the passes, or show one pass with its options.

    \b
    Example:
      ingot passes quantize-weights
    """


@_command("quantize-report", "ingot.cli.validate:quantize_report_command")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Measure the weights' errors against it.")
@click.option("--text", type=click.Path(path_type=Path), help="Measure KL on this text; requires --checkpoint.")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of the text (default: 2048 or fewer).")
@click.option("--top", default=20, show_default=True, type=click.IntRange(min=1), help="Weights to show.")
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
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
@click.argument("name", required=False)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value, as `ingot build` does.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def recipes() -> None:
    """List the shipped recipes, or show one (a name or a file) resolved, with every default filled in.

    \b
    Example:
      ingot recipes int4-cpu
    """


@_command("run", "ingot.cli.run:run_command")
@click.argument("artifact", type=click.Path())
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
@click.option("--stop", multiple=True, help="Stop before this text; can be repeated.")
@click.option("--chat/--no-chat", default=None, help="Treat PROMPT as a message, by the model's chat template.")
@click.option("--system", help="System message of a chat.")
@click.option("--stats", is_flag=True, help="Print latencies, throughput and use of the caches to stderr.")
@click.option("--no-history", is_flag=True, help="Neither read nor keep the history of what is typed.")
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming.")
def run() -> None:
    """Generate from ARTIFACT. PROMPT is text, or - to read standard input.

    Without PROMPT at a terminal, a chat begins if the model has a chat template; otherwise each line is a prompt.

    --prompts-file takes one prompt per line, or a .jsonl file of objects with prompt or messages, id and sampling
    parameters such as max_tokens. Results are one JSON object per line, in the file's order; the exit code is 1 if a
    prompt failed.

    \b
    Examples:
      ingot run artifacts/demo
      ingot run artifacts/demo "def read_file(path):" --max-tokens 64
      ingot run artifacts/chat --chat "Why is the sky blue?" --temperature 0.7 --seed 1
      ingot run artifacts/demo --prompts-file prompts.jsonl -o results.jsonl --stats
    """


@_command("transcode", "ingot.cli.checkpoints:transcode_command")
@_SOURCE
@_format_option(CHECKPOINT_FORMATS)
@_OUTPUT
@click.option("--proof", type=click.Path(path_type=Path), help="File to write the proof to, as JSON.")
@click.option("--lossy", is_flag=True, help="Round scales, minima and floats that the format stores in 16 bits.")
@click.option("--floats", is_flag=True, help="compressed-tensors: write layers that it cannot hold as float32.")
@click.option("--dtype", metavar="TYPE", help=f"Type of weights written as floats: {', '.join(FLOAT_TYPES)}.")
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


@_command("tune", "ingot.cli.tune:tune_command")
@click.argument("source", metavar="ARTIFACT|RECIPE")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The table, a JSON file.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value of the recipe.")
@click.option("--free-order", is_flag=True, help="Let each bucket sum in its own order: faster, less batch-invariant.")
@click.option("--json", "as_json", is_flag=True, help="Print what was chosen as JSON.")
def tune() -> None:
    """Measure the matmuls of ARTIFACT, or of what RECIPE would build, on this machine's GPU.

    Use the table in a build with --set gpu.tiles=FILE. An existing table is extended; Ctrl-C keeps what was measured.

    \b
    Example:
      ingot tune artifacts/mine -o h100.json
      ingot build int4-cuda --set checkpoint=./my-model --set gpu.tiles=h100.json
    """


@_command("validate", "ingot.cli.validate:validate_command")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Make the baseline from this checkpoint folder.")
@click.option("--baseline", type=click.Path(path_type=Path), help="Compare with this artifact.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set evaluation, latency or gates.")
@click.option("--evidence", type=click.Path(path_type=Path), metavar="DIR", help="Write the new evidence here.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def validate() -> None:
    """Check every digest of ARTIFACT; with a checkpoint or a baseline also measure it again by its own recipe.

    Exit codes: 0 all gates pass, 1 error, 2 usage, 3 a gate failed, 4 a gate is undecided.

    \b
    Examples:
      ingot validate artifacts/demo
      ingot validate artifacts/demo --checkpoint examples/models/stdlib-llama-6m
    """
