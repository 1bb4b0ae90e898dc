"""Tries an artifact before it is sealed: the runtime loads it, runs a step and generates the recipe's sample.

What fails here would fail for every user of the artifact. A program for a GPU is run where such a GPU is; elsewhere its
files are read and compared with each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.launch_checks import read_launches
from ingot.artifact.launch_program import WEIGHTS_FILE, cubins_file
from ingot.artifact.safetensors import MappedTensors
from ingot.builder.measurements import missing_gpu
from ingot.errors import ArtifactError, BuildError, IngotError
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.sections import GenerateOptions
from ingot.progress import note
from ingot.runtime import Engine, EngineOptions, SamplingParams, Tokenizer
from ingot.runtime.text.tokenizer import TOKENIZER
from ingot.validation.result import Sample
from ingot.validation.windows import read_text

_PROMPT_TOKENS = 32
_PROMPT_CHARACTERS = 4_096  # enough for so many tokens: an evaluation text may have many megabytes
_REPLACEMENT = "\ufffd"  # decoded in place of a character whose last bytes are cut off


@dataclass(frozen=True)
class SampleRequest:
    """Prompt and parameters of a sample, for candidate and baseline alike."""

    prompt: str
    params: SamplingParams

    def text(self, artifact: Artifact, threads: int | None = None) -> str:
        """Load the artifact and generate."""
        with _load(artifact, threads) as engine:
            return engine.generate(self.prompt, self.params).text


def sample_request(recipe: Recipe, tokenizer: Tokenizer | None, context_tokens: int) -> SampleRequest | None:
    """Return the recipe's `generate`, or else a request with the first tokens of the evaluation text; None without."""
    if tokenizer is None:
        return None
    if recipe.generate:
        sample = recipe.generate
        params = SamplingParams(max_tokens=sample.max_tokens, temperature=sample.temperature, seed=recipe.seed)
        return SampleRequest(sample.prompt, params)
    file = recipe.evaluation_text()
    if file is None:
        return None
    tokens = tokenizer.encode(read_text(file)[0][:_PROMPT_CHARACTERS], add_special_tokens=False)
    prompt = tokenizer.decode(tokens[: min(_PROMPT_TOKENS, context_tokens // 2)]).rstrip(_REPLACEMENT)
    params = SamplingParams(max_tokens=GenerateOptions.model_fields["max_tokens"].default, seed=recipe.seed)
    return SampleRequest(prompt, params) if prompt else None


def try_artifact(staged: Path, target: Path, recipe: Recipe, request: SampleRequest | None) -> Sample | None:
    """Load the artifact in the staging folder, run it, and return its sample; None without a request or its GPU.

    Raises BuildError if the artifact cannot be loaded or run. `target` is its final folder, for messages.
    """
    with _explained(staged, target):
        artifact = open_artifact(staged, verify=False)
        missing = missing_gpu(recipe)
        if missing is not None:
            _check_launch_program(artifact)
            note(f"the program was checked but not run, and generated no sample: {missing}")
            return None
        with _load(artifact, recipe.threads) as engine:
            if request is not None:
                return Sample(request.prompt, engine.generate(request.prompt, request.params).text)
            engine.generate([artifact.manifest.model.bos_token_id or 0], SamplingParams(max_tokens=1, ignore_eos=True))
            return None


def _load(artifact: Artifact, threads: int | None) -> Engine:
    """Load the artifact with all options given: the machine that builds need not have the memory of `serving`."""
    return Engine.load(artifact, **vars(EngineOptions(num_threads=threads)))


@contextmanager
def _explained(staged: Path, target: Path) -> Iterator[None]:
    try:
        yield
    except IngotError as error:
        reason = str(error).replace(str(staged), str(target))  # the staging folder will be gone
        raise BuildError(f"the artifact was built but cannot be used, so it is not sealed: {reason}") from error


def _check_launch_program(artifact: Artifact) -> None:
    """Read what the runtime would read before it needs the GPU. ArtifactError names what is missing or damaged."""
    if artifact.has(f"tokenizer/{TOKENIZER}"):
        Tokenizer.load(artifact.path / "tokenizer", artifact.files_below("tokenizer"))
    program = read_launches(artifact)
    MappedTensors(artifact.file(WEIGHTS_FILE))
    for sm, kernels in program.cubins.items():
        file = artifact.file(cubins_file(sm))
        stored = MappedTensors(file).tensors
        absent = sorted(set(kernels) - set(stored))
        if absent:
            raise ArtifactError(f"{file}: holds no kernel {absent[0]!r} for SM {sm}; build the artifact again")
