"""`ingot tune`: measure on the card which tiles are fastest, for builds to use."""

from pathlib import Path

import click

from ingot.builder.tune.tune import Choice, Tuner, TuneSource, Tuning, require_card
from ingot.cli.console import print_json, print_note, print_table, progress_bars
from ingot.runtime.cuda.driver import open_device
from ingot.runtime.cuda.stopwatch import EventStopwatch


@click.command("tune")
@click.argument("source", metavar="ARTIFACT|RECIPE")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The table, a JSON file.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value of the recipe.")
@click.option("--free-order", is_flag=True, help="Let every bucket add up its sums in an order of its own.")
@click.option("--json", "as_json", is_flag=True, help="Print what was chosen as JSON.")
def tune_command(source: str, output: Path, overrides: tuple[str, ...], free_order: bool, as_json: bool) -> None:
    """Measure the products of ARTIFACT, or of what RECIPE would build, on this machine's card.

    The table goes into a build with --set gpu.tiles=FILE. A table that exists is gone on with; Ctrl-C keeps what is
    measured.

    \b
    Example:
      ingot tune artifacts/mine -o h100.json
      ingot build int4-cuda --set checkpoint=./my-model --set gpu.tiles=h100.json
    """
    given = TuneSource.of(source, overrides)
    device = open_device()
    try:
        require_card(given.sms, device)
        with progress_bars() as progress:
            program = given.program(progress)
            tuning = Tuner(device, EventStopwatch(), free_order=free_order).tune(program, output, progress)
    except KeyboardInterrupt:
        print_note(f"what was measured is in {output}, if anything; the same command goes on from there")
        raise
    finally:
        device.close()
    if as_json:
        print_json(_facts(tuning, output))
    else:
        _print(tuning, output)


def _print(tuning: Tuning, output: Path) -> None:
    rows = [
        (one.key, f"{one.safe_seconds * 1e6:.1f}", f"{one.seconds * 1e6:.1f}", f"{one.gain:.2f}", _words(one))
        for one in sorted(tuning.choices, key=lambda one: one.seconds - one.safe_seconds)
    ]
    if rows:
        print_table("Products", ("shape", "safe us", "best us", "gain", "tile"), rows)
    held = f", {tuning.held} were there before" if tuning.held else ""
    print_note(f"{len(rows)} shapes measured{held}: {output}; build with --set gpu.tiles={output}")


def _words(choice: Choice) -> str:
    tile = choice.tile
    if tile.library:
        return tile.library
    parts = f", {tile.splits} parts" if tile.splits > 1 else ""
    return f"{tile.rows} x {tile.columns} by {tile.depth}{parts}, {tile.num_warps} warps, {tile.num_stages} stages"


def _facts(tuning: Tuning, output: Path) -> dict[str, object]:
    choices = [
        {"shape": one.key, "seconds": one.seconds, "safe_seconds": one.safe_seconds, "tile": one.tile.model_dump()}
        for one in tuning.choices
    ]
    return {"table": str(output), "device": tuning.table.device, "held": tuning.held, "choices": choices}
