"""`ingot doctor`: metrics and the machine, to findings."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import click

from ingot.cli.command import naming_options
from ingot.cli.runtime.metrics_source import DEFAULT_URL, is_url, require_seconds, scrape
from ingot.cli.terminal.console import print_json, print_note
from ingot.errors import UsageError, shown_path
from ingot.runtime.doctor import (
    Finding,
    MachineReading,
    MachineWindow,
    ObservedFacts,
    Scrape,
    ScrapeWindow,
    TimePart,
    changes_of,
    diagnose,
    parts_of,
    shapes_of,
)
from ingot.runtime.server.options import ServerOptions

_FOUND = 3  # exit code


def doctor_command(
    sources: tuple[str, ...],
    seconds: float,
    preflight: bool,
    kv_disk_path: Path | None,
    max_requests: int,
    as_json: bool,
) -> int:
    """Read, diagnose and print; returns the exit code."""
    if preflight and sources:
        raise UsageError("--preflight looks at this machine alone; leave out the server and the files")
    require_seconds(seconds, least=0)
    if kv_disk_path is not None and kv_disk_path.exists() and not kv_disk_path.is_dir():
        raise UsageError(f"--kv-disk-path {shown_path(kv_disk_path)} is not a folder; name that of the disk tier")
    with naming_options():
        limits = ServerOptions(max_requests=max_requests)
    if preflight:
        machine = _watch_machine(seconds, kv_disk_path)
        found = {"": diagnose(ObservedFacts(machine=machine, max_requests=limits.max_requests))}
        windows: dict[str, ScrapeWindow] = {}
    else:
        window, machine_window = _read(sources or (DEFAULT_URL,), seconds, kv_disk_path)
        models = window.models or [""]
        windows = {name: window.of(name) if name else window for name in models}
        found = {name: diagnose(ObservedFacts(each, machine_window)) for name, each in windows.items()}
        _print_notes(windows)
    if as_json:
        print_json({name or "machine": _as_json(found[name], windows.get(name)) for name in found})
    else:
        for name, findings in found.items():
            _print(name, findings, windows.get(name))
    return _FOUND if any(found.values()) else 0


def _read(sources: Sequence[str], seconds: float, disk: Path | None) -> tuple[ScrapeWindow, MachineWindow | None]:
    if len(sources) > 2 or (len(sources) == 2 and any(map(is_url, sources))):
        raise UsageError("give one server, one file, or two files of one server")
    if not is_url(sources[0]):
        scrapes = [scrape(source) for source in sources]
        return ScrapeWindow(scrapes[0] if len(scrapes) == 2 else Scrape(), scrapes[-1]), None
    first = scrape(sources[0])
    is_local = _is_local(sources[0])
    machine = MachineReading.take(disk=disk) if is_local else None
    time.sleep(seconds)
    second, later = scrape(sources[0]), MachineReading.take(disk=disk) if is_local else None
    both = MachineWindow(machine, later) if machine and later else None
    return ScrapeWindow(first, second, seconds), both


def _watch_machine(seconds: float, disk: Path | None) -> MachineWindow:
    before = MachineReading.take(disk=disk)
    time.sleep(seconds)
    return MachineWindow(before, MachineReading.take(disk=disk))


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _print_notes(windows: Mapping[str, ScrapeWindow]) -> None:
    """Print what a reader of the findings should know about the numbers that they are from."""
    for model, window in windows.items():
        start = f"{model}: " if model else ""
        if window.has_restarted:
            print_note(f"{start}started anew between the two looks; what it counted since then is diagnosed")
        if not window.counted("finished_requests") and not window.counted("generation_tokens"):
            print_note(f"{start}nothing was served in this time; look while requests are served, or raise --seconds")


def _as_json(findings: list[Finding], window: ScrapeWindow | None) -> dict[str, object]:
    return {
        "findings": [each.as_json() for each in findings],
        "time": [asdict(part) for part in parts_of(window)] if window else [],
        "traffic": [asdict(shape) for shape in shapes_of(window)] if window else [],
        "changed": changes_of(window) if window else [],
    }


def _print(model: str, findings: list[Finding], window: ScrapeWindow | None) -> None:
    start = f"{model}: " if model else ""
    if not findings:
        print_note(f"{model or 'this machine'}: nothing found")
    for number, each in enumerate(findings, 1):
        click.echo(f"{start}{number}. {each.symptom}  [{each.name}]")
        click.echo(f"   cause:   {each.cause}")
        click.echo(f"   action:  {each.action}")
        click.echo(f"   numbers: {', '.join(f'{name} {value:.6g}' for name, value in each.numbers.items())}")
    if window and (parts := parts_of(window)):
        _print_time(start, parts, window)


def _print_time(start: str, parts: list[TimePart], window: ScrapeWindow) -> None:
    """Print where the time of requests went, what kind of traffic it was, and what changed."""
    click.echo(f"{start}time from arrival to last token, and what binds it:")
    for part in parts:
        click.echo(f"   {100 * part.share:3.0f} %  {part.name}: {part.bound_by}")
    for shape in shapes_of(window):
        click.echo(f"{start}traffic: {shape.name} ({shape.seen})")
        click.echo(f"   cause:   {shape.cause}")
        click.echo(f"   action:  {shape.action}")
    for change in changes_of(window):
        click.echo(f"{start}changed: {change}")
