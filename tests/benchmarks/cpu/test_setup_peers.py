"""The peers' requirements and the order of their installation agree, and sources are compiled once."""

import io
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cpu.setup_peers import IK_LLAMA, PEERS, VLLM, Environment, compile_ik_llama, pinned

from tests.each_case import each_case


@each_case("environment", [PEERS, VLLM])
def test_every_requirement_is_installed_once_and_torch_first(environment: Environment) -> None:
    names = [name for group in environment.groups for name in group]
    assert names[0] == "torch"
    sources = [IK_LLAMA] if environment is PEERS else []
    assert sorted(names + sources) == sorted(pinned(environment.requirements.read_text("utf-8")))


def test_comments_and_blank_lines_are_no_requirements() -> None:
    assert pinned("# why\n\none==1.0\ntwo\n") == {"one": "one==1.0", "two": "two"}


SOURCES = {
    "CMakeLists.txt": b"",
    "common/CMakeLists.txt": b"",
}


@dataclass(frozen=True)
class Offline(Environment):
    """Downloads a source distribution that it makes, and has a cmake that makes programs."""

    calls: list[str] = field(default_factory=list)

    def pip(self, *arguments: str) -> bool:
        self.calls.append(arguments[0])
        with tarfile.open(Path(arguments[-2]) / "package-1.tar.gz", "w:gz") as archive:
            for name, text in SOURCES.items():
                entry = tarfile.TarInfo(f"package-1/vendor/ik_llama.cpp/{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))
        return True


def offline(folder: Path, cmake: str) -> Offline:
    program = folder / "bin" / "cmake"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{cmake}\n")
    program.chmod(0o755)
    return Offline(folder, PEERS.requirements, ())


def test_the_bench_programs_are_compiled_once(tmp_path: Path) -> None:
    made = (
        'if [ "$1" = --build ]; then mkdir "$2/bin"; echo > "$2/bin/llama-bench"; echo > "$2/bin/llama-batched-bench"'
    )
    version = pinned(PEERS.requirements.read_text("utf-8"))[IK_LLAMA]
    has_sources = (
        f'grep -q "BUILD_COMMIT .{version}.)" "$2/common/cmake/build-info-gen-cpp.cmake" && test -f "$2/CMakeLists.txt"'
    )
    environment = offline(tmp_path, f'{made}; else {has_sources} && mkdir "$4"; fi')
    for _ in range(2):
        assert compile_ik_llama(environment, tmp_path / "programs") == []
    assert sorted(path.name for path in (tmp_path / "programs").iterdir()) == ["llama-batched-bench", "llama-bench"]
    assert environment.calls == ["download"]


def test_a_failed_compilation_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    failed = compile_ik_llama(offline(tmp_path, "exit 1"), tmp_path / "programs")
    assert failed == [f"{pinned(PEERS.requirements.read_text('utf-8'))[IK_LLAMA]} (see cmake's message above)"]
    assert not (tmp_path / "programs").exists()
