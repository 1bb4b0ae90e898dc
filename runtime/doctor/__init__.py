"""Diagnosis of a slow engine: metrics and facts about the machine, and rules that name causes.

Rules are pure functions of what was read; they run nothing and change nothing. Nothing here imports the server.
"""

from ingot.runtime.doctor.diagnosis import diagnose
from ingot.runtime.doctor.findings import Finding, ObservedFacts
from ingot.runtime.doctor.machine import MachineReading, MachineWindow
from ingot.runtime.doctor.request_time import TimePart, TrafficShape, changes_of, parts_of, shapes_of
from ingot.runtime.doctor.scrapes import Scrape, ScrapeWindow

__all__ = [
    "Finding",
    "MachineReading",
    "MachineWindow",
    "ObservedFacts",
    "Scrape",
    "ScrapeWindow",
    "TimePart",
    "TrafficShape",
    "changes_of",
    "diagnose",
    "parts_of",
    "shapes_of",
]
