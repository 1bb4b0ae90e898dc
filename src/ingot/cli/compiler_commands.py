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
      ingot build int4-gptq-cpu ./my-model --calibration text.txt --eval held-out.txt --junit gates.xml
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
