"""Time to the first token of a prompt whose prefix is computed, on the device, in host memory, or on disk.

    python -m benchmarks.kv.restore --output benchmarks/results/kv-restore.json      # the shape of TinyLlama, 4 bits
    python -m benchmarks.kv.restore --set cpu.attention=bfloat16                     # with an option of the recipe
    python -m benchmarks.kv.restore --artifact artifacts/demo --case 400,16,3 --crossover-tokens 256

A case is PREFIX,NEW,COLD: tokens of the prefix, of the prompt after it, and prompts that are computed. Each of these is
computed, and then answered `--rounds` times with its prefix on the device, in host memory alone, and on disk alone, by
an engine that was loaded again: once after the folder's files left the system's page cache, once while they are in it.
(A virtual machine's disk may have a cache of its own, which stays.) Each time is divided by the computed one of its
prompt. All logits must be equal bit for bit.

The crossover is the shortest prefix, among lengths that double, from which on restoring was faster than computing in
the median; it stands next to the one that the engine's cost model predicts.
"""

import json
import os
import statistics
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import click
import numpy as np

from benchmarks.device import device_facts
from benchmarks.kv.synthetic_artifacts import WORK_FOLDER, synthetic_artifact
from benchmarks.shapes import SHAPES
from ingot.artifact import Artifact, open_artifact
from ingot.runtime import Completion, Engine, SamplingParams
from ingot.runtime.kv.cost_model import CostModel, TierName
from ingot.runtime.kv.keys import BlockContent
from ingot.runtime.request_options import RequestOptions

Place = Literal["computed", "device", "host", "disk"]
_PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)
_CONTEXT_TOKENS = 32768
_CASES = ("2000,80,3", "4096,16,2", "16384,16,1")
_CROSSOVER_ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """Tokens of a prefix, of the prompt after it, and how many such prompts are computed."""

    prefix_tokens: int
    new_tokens: int
    cold_rounds: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """From "PREFIX,NEW,COLD"."""
        try:
            case = cls(*map(int, text.split(",")))
        except (ValueError, TypeError):
            raise click.BadParameter(f"{text!r}; give PREFIX,NEW,COLD, such as {_CASES[0]}") from None
        if min(asdict(case).values()) < 1:
            raise click.BadParameter(f"{text!r}; all three numbers must be at least 1")
        return case


@dataclass
class Times:
    """Seconds to the first token by where the prefix was, and their ratios to the computed one of the same prompt."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ratios: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, place: str, seconds: float, computed: float) -> None:
        """Record one."""
        self.seconds[place].append(seconds)
        self.ratios[place].append(seconds / computed)

    def rows(self) -> dict[str, dict[str, object]]:
        """Milliseconds, their median, and the median of the ratios, by place."""
        return {
            place: {
                "ms": round(statistics.median(taken) * 1e3, 3),
                "of_computed": round(statistics.median(self.ratios[place]), 5),
                "faster": round(1 / statistics.median(self.ratios[place]), 2),
                "all_ms": [round(each * 1e3, 3) for each in taken],
            }
            for place, taken in self.seconds.items()
        }


class Conversation:
    """One prompt, and an engine with tiers that answers it again and again, with its prefix where it is asked to be."""

    def __init__(self, artifact: Artifact, folder: Path, case: Case, threads: int | None, prompt: list[int]) -> None:
        self._artifact, self._folder, self._threads, self._prompt = artifact, folder, threads, prompt
        self._block_tokens = artifact.manifest.kv.block_tokens
        self._num_prefix_blocks = case.prefix_tokens // self._block_tokens
        self._first: Completion | None = None
        self.engine = self._load()

    def _load(self) -> Engine:
        geometry = self._artifact.manifest.kv
        blocks = -(-len(self._prompt) // geometry.block_tokens) + 4
        engine = Engine.load(
            self._artifact,
            kv_blocks=blocks,
            kv_host_bytes=2 * blocks * geometry.block_bytes,
            kv_disk_path=self._folder,
            kv_disk_bytes=4 * blocks * (geometry.block_bytes + 4096),
            kv_restore="always",  # this measures restoring also where the model would rather compute
            num_threads=self._threads,
        )
        assert engine._tiers is not None
        self.costs: CostModel = engine._tiers.costs
        self._contents = list(
            engine._blocks.contents(array("q", self._prompt), engine._scope(RequestOptions(), adapter=None))
        )
        return engine

    def restart(self) -> None:
        """Close the engine, which leaves all blocks on disk, and load it again."""
        self.close()
        self.engine = self._load()
        self._warm_up()

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

    def _warm_up(self) -> None:
        """Answer a prompt of less than a block: the first step of an engine touches new memory."""
        self.engine.generate(self._prompt[-(self._block_tokens - 1) :], _PARAMS)

    def first_token(self, place: Place) -> float:
        """Seconds to the first token; AssertionError unless the prefix was exactly there, or for other logits."""
        completion = self.engine.generate(self._prompt, _PARAMS, keep_logits=True)
        cached = self._num_prefix_blocks * self._block_tokens if place != "computed" else 0
        found = {name: tokens for name, tokens in completion.cached_tokens_by_tier._asdict().items() if tokens}
        assert found == ({place: cached} if cached else {}), f"the prefix was in {found}, not in {place}"
        self._first = self._first or completion
        assert np.array_equal(self._first.logits, completion.logits), "logits differ"  # type: ignore[arg-type]
        seconds = completion.metrics.ttft_seconds
        assert seconds is not None
        return seconds

    def would_restore(self, tier: TierName) -> bool:
        """Whether the cost model restores the whole prefix where it is free to choose."""
        self.costs._rule = "auto"
        decision = self.costs.decide([tier] * self._num_prefix_blocks, 0)
        self.costs._rule = "always"
        return decision.num_blocks == self._num_prefix_blocks

    def move(self, place: Place) -> None:
        """Leave the prefix in one place, and the blocks after it nowhere."""
        assert self.engine.flush_kv()
        prefix, ends = self._contents[: self._num_prefix_blocks], self._contents[self._num_prefix_blocks :]
        self._evict(ends if place == "device" else self._contents)
        tiers = self.engine._tiers
        assert tiers is not None
        disk = tiers._block_tiers.disk
        assert disk is not None
        assert tiers._store is not None
        with tiers._lock:
            for content in self._contents if place in ("disk", "computed") else ends:
                if (block := tiers.host.find(content)) is not None:
                    tiers.host.lose(block)
            for content in self._contents if place == "computed" else ends:
                tiers._store.remove(content.hash)
            assert all(disk.contains(content.hash) for content in prefix) or place == "computed"

    def _evict(self, contents: Sequence[BlockContent]) -> None:
        """Take blocks from the pool, as a step does that needs others."""
        blocks = self.engine._blocks
        for content in contents:
            block = blocks._index.find(content)
            if block is not None:
                assert block not in blocks._pins
                del blocks._idle[block]
                blocks._unindex(block)
                blocks._free.append(block)


def drop_from_page_cache(folder: Path) -> float:
    """Ask the system to forget the files of a folder; returns the share of files whose first page it did forget."""
    dropped = []
    for path in (path for path in folder.rglob("*.kvs") if path.is_file()):
        file = os.open(path, os.O_RDWR)
        try:
            os.fsync(file)  # only clean pages can be dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            dropped.append(not _is_cached(file))
        finally:
            os.close(file)
    return sum(dropped) / len(dropped)


def _is_cached(file: int) -> bool:
    try:
        os.preadv(file, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class Setting:
    """Artifact and options of all measurements."""

    artifact: Artifact
    threads: int | None
    folder: Path | None
    rng: np.random.Generator

    def prompt(self, num_tokens: int) -> list[int]:
        """A prompt that no other begins like."""
        tokens: list[int] = self.rng.integers(3, self.artifact.manifest.model.vocab_size, num_tokens).tolist()
        return tokens


def measure_case(setting: Setting, case: Case, rounds: int) -> dict[str, object]:
    """Times of a case, and seconds per block that the cost model has learned."""
    times, dropped, started = Times(), [], time.perf_counter()
    for _ in range(case.cold_rounds):
        prompt = setting.prompt(case.prefix_tokens + case.new_tokens)
        with tempfile.TemporaryDirectory(dir=setting.folder) as base:
            folder = Path(base) / "kv"
            with closing(Conversation(setting.artifact, folder, case, setting.threads, prompt)) as conversation:
                conversation._warm_up()
                computed = conversation.first_token("computed")
                times.add("computed", computed, computed)
                for place in ("device", "host"):
                    for _ in range(rounds):
                        conversation.move(place)
                        times.add(place, conversation.first_token(place), computed)
                learned = _learned(conversation.costs, case, setting.artifact.manifest.kv.block_tokens)
                conversation.move("disk")
                conversation.restart()
                for name in ("disk, dropped from the page cache", "disk, in the page cache"):
                    for _ in range(rounds):
                        conversation.move("disk")
                        if "dropped" in name:
                            dropped.append(drop_from_page_cache(folder))
                        times.add(name, conversation.first_token("disk"), computed)
                learned["disk_ms_per_block"] = round(conversation.costs.block_seconds("disk") * 1e3, 4)
    rows = times.rows()
    return {
        **asdict(case),
        "places": rows,
        "share_of_files_dropped": round(min(dropped), 3),
        "cost_model": learned,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _learned(costs: CostModel, case: Case, block_tokens: int) -> dict[str, float]:
    compute = (costs.token_seconds(case.prefix_tokens) or 0.0) * block_tokens
    host = costs.block_seconds("host")
    return {"compute_ms_per_block": round(compute * 1e3, 4), "host_ms_per_block": round(host * 1e3, 4)}


def measure_crossover(setting: Setting, most_tokens: int, new_tokens: int) -> dict[str, object]:
    """Times to the first token for prefixes of 1, 2, 4 ... blocks, and the crossovers by measurement and model."""
    block = setting.artifact.manifest.kv.block_tokens
    lengths = [block << power for power in range(20) if block << power <= most_tokens]
    tiers: tuple[TierName, ...] = ("host", "disk")
    rows, predictions = [], []
    for tokens in lengths:
        case, times = Case(tokens, new_tokens, 1), Times()
        predicted: dict[TierName, bool] = {}
        for _ in range(_CROSSOVER_ROUNDS):
            prompt = setting.prompt(tokens + new_tokens)
            with tempfile.TemporaryDirectory(dir=setting.folder) as base:
                folder = Path(base) / "kv"
                with closing(Conversation(setting.artifact, folder, case, setting.threads, prompt)) as conversation:
                    conversation._warm_up()
                    conversation.first_token("computed")
                    for _ in range(2):  # the second one is measured: both have warm memory then
                        conversation.move("computed")
                        computed = conversation.first_token("computed")
                    times.add("computed", computed, computed)
                    for tier in tiers:
                        conversation.move(tier)
                        times.add(tier, conversation.first_token(tier), computed)
                    for tier in tiers:
                        predicted[tier] = conversation.would_restore(tier)
        predictions.append(predicted)
        rows.append({"prefix_tokens": tokens, **times.rows()})
        click.echo(_line(f"{tokens} + {new_tokens}", times))
    measured = {
        tier: _crossover(lengths, [row[tier]["of_computed"] < 1 for row in rows])  # type: ignore[index]
        for tier in tiers
    }
    predicted_tokens = {tier: _crossover(lengths, [each[tier] for each in predictions]) for tier in tiers}
    return {"rows": rows, "measured_tokens": measured, "predicted_tokens": predicted_tokens}


def _crossover(lengths: Sequence[int], wins: Sequence[bool]) -> int | None:
    """The shortest length from which on all win; None if the longest does not."""
    lost = [index for index, won in enumerate(wins) if not won]
    first = lost[-1] + 1 if lost else 0
    return lengths[first] if first < len(lengths) else None


def _line(name: str, times: Times) -> str:
    cells = [f"{place} {row['ms']:.1f} ms ({row['of_computed']:.4f})" for place, row in times.rows().items()]
    return f"{name}: {'; '.join(cells)}"


@click.command()
@click.option("--artifact", type=click.Path(exists=True, path_type=Path), help="Default: the shape of TinyLlama.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Options of its recipe, int4-cpu.")
@click.option("--work-folder", type=click.Path(path_type=Path), default=WORK_FOLDER, help="Where that is built.")
@click.option("--case", "cases", multiple=True, default=_CASES, show_default=True, help="PREFIX,NEW,COLD tokens.")
@click.option("--rounds", default=3, show_default=True, help="Answers per prompt and place.")
@click.option("--crossover-tokens", default=256, show_default=True, help="Longest prefix of the crossover; 0: none.")
@click.option("--threads", type=int)
@click.option("--folder", type=click.Path(path_type=Path), help="Where the disk tier's folders are made.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the result as JSON.")
def main(
    artifact: Path | None,
    overrides: tuple[str, ...],
    work_folder: Path,
    cases: tuple[str, ...],
    rounds: int,
    crossover_tokens: int,
    threads: int | None,
    folder: Path | None,
    output: Path | None,
) -> None:
    """Measure all cases, then the crossover."""
    parsed = [Case.parse(case) for case in cases]
    if artifact and overrides:
        raise click.UsageError("--set changes the recipe of the built artifact; --artifact has its own")
    if artifact:
        model = open_artifact(artifact)
    else:
        model = synthetic_artifact(
            SHAPES["tinyllama-1.1b"],
            "int4-cpu",
            context_tokens=_CONTEXT_TOKENS,
            folder=work_folder,
            overrides=overrides,
        )
    setting = Setting(model, threads, folder, np.random.default_rng(0))
    document: dict[str, object] = {
        "device": device_facts(),
        "artifact": model.path.name,
        "set": list(overrides),
        "block_bytes": model.manifest.kv.block_bytes,
        "rounds": rounds,
    }
    results = []
    for case in parsed:
        results.append(measure_case(setting, case, rounds))
        click.echo(json.dumps(results[-1]))
        _write({**document, "cases": results}, output)
    if crossover_tokens:
        document["crossover"] = measure_crossover(setting, crossover_tokens, new_tokens=16)
    _write({**document, "cases": results}, output)
    click.echo(json.dumps(document.get("crossover", {})))


def _write(document: dict[str, object], output: Path | None) -> None:
    """Also after each case, so that an interrupted run leaves what it has."""
    if output:
        output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
