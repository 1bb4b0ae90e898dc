"""`ingot tune`: measures which tiles are fastest on this GPU, for builds to use."""

from pathlib import Path

from ingot.builder.tune.tune import Choice, Tuner, TuneSource, Tuning, require_gpu
from ingot.cli.set_shorthands import with_shorthands
from ingot.cli.terminal.console import print_json, print_note
from ingot.cli.terminal.progress_display import progress_shown
from ingot.cli.terminal.tables import print_table
from ingot.runtime.cuda.driver.driver import open_device
from ingot.runtime.cuda.driver.stopwatch import EventStopwatch


def tune_command(
    source: str,
    checkpoint: Path | None,
    output: Path,
    overrides: tuple[str, ...],
    free_order: bool,
    as_json: bool,
) -> None:
    """Measure the matmuls of ARTIFACT, or of what RECIPE would build, on this machine's GPU."""
    given = TuneSource.of(source, with_shorthands(overrides, {"CHECKPOINT": checkpoint}))
    device = open_device()
    try:
        require_gpu(given.sms, device)
        with progress_shown():
            program = given.program()
            tuning = Tuner(device, EventStopwatch(), free_order=free_order).tune(program, output)
    except KeyboardInterrupt:
        print_note(f"measurements so far are in {output}; run the same command to continue")
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
        print_table("Matmuls", ("shape", "safe us", "best us", "gain", "tile"), rows)
    held = f", {tuning.held} kept from before" if tuning.held else ""
    print_note(f"{len(rows)} shapes measured{held}: {output}; build with --set gpu.tiles={output}")


def _words(choice: Choice) -> str:
    tile = choice.tile
    if tile.library:
        return tile.library
    splits = f", {tile.splits} splits" if tile.splits > 1 else ""
    return f"{tile.rows} x {tile.columns} by {tile.depth}{splits}, {tile.num_warps} warps, {tile.num_stages} stages"


def _facts(tuning: Tuning, output: Path) -> dict[str, object]:
    choices = [
        {"shape": one.key, "seconds": one.seconds, "safe_seconds": one.safe_seconds, "tile": one.tile.model_dump()}
        for one in tuning.choices
    ]
    return {"table": str(output), "device": tuning.table.device, "held": tuning.held, "choices": choices}
