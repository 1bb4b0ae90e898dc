"""Makes the tiny checkpoints and transformers' logits for them: python -m tests.oracle.make_fixtures [FOLDER]

Needs torch and transformers of the versions in pyproject.toml's group `oracle`. The same versions make the same bytes;
digests.json in the folder holds what they were.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.families import FAMILIES
from tests.oracle.all_cases import ALL_CASES
from tests.oracle.cases import Case
from tests.oracle.make_defaults import EXTENDED
from tests.parity import CHECKPOINTS, DIGESTS, LOGITS

_AUTO_MODEL: Any = transformers.AutoModelForCausalLM  # Any: its annotations are not complete
# Models that the auto class does not list, or that transformers computes under another name.
_UNLISTED: dict[str, Any] = {"mistral4": transformers.Mistral4ForCausalLM, "mimo": transformers.Qwen2ForCausalLM}


def main(folder: Path = CHECKPOINTS) -> None:
    """Make every case below `folder`, and digests.json."""
    digests = {}
    for case in ALL_CASES:
        make_checkpoint(case, folder / case.name)
        tokens = make_tokens(case)
        logits = reference_logits(folder / case.name, tokens)
        save_logits(folder / case.name / LOGITS, tokens, logits)
        digests[case.name] = Checkpoint.open(folder / case.name).digest
        print(f"{case.name}: largest logit {max(np.abs(rows).max() for rows in logits):.2f}")
    (folder / DIGESTS).write_text(json.dumps(digests, indent=1) + "\n")


def make_checkpoint(case: Case, folder: Path) -> None:
    """Write the case's checkpoint: seeded weights, norms and biases that are not trivial."""
    torch.manual_seed(_seed(case))
    config = transformers.AutoConfig.for_model(EXTENDED.get(case.model_type, case.model_type), **case.full_config)
    unlisted = _UNLISTED.get(case.model_type)
    model = (_AUTO_MODEL.from_config(config) if unlisted is None else unlisted(config)).float()
    family = FAMILIES[case.model_type]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *_stored_buffers(model)]:
            if parameter.dim() == 1 or "correction_bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
                if name.endswith("A_log"):
                    parameter.sub_(3)  # remember many tokens: the norm after one alone enlarges its rounding
                if "q_norm" in name and family.scale_key == "one":  # as in trained models, whose norms scale queries
                    parameter.mul_(len(parameter) ** -0.5)
            else:
                parameter.normal_(0, 0.1 if "embed_tokens" in name or "lm_head" in name else 0.2)
    model.to(getattr(torch, case.dtype))
    shards = {"max_shard_size": case.shard_bytes} if case.shard_bytes else {}
    model.save_pretrained(folder, save_original_format=not case.is_fused, **shards)
    _rewrite(folder / "config.json", {**case.rewrite, "model_type": case.model_type})


def _stored_buffers(model: Any) -> list[tuple[str, Any]]:
    """Buffers that are stored as weights are."""
    stored = ("correction_bias", "layer_scalar")
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(stored)]


def make_tokens(case: Case) -> list[list[int]]:
    """Three prompts of the case's lengths."""
    rng = np.random.default_rng(_seed(case))
    return [rng.integers(3, case.full_config["vocab_size"], length).tolist() for length in case.lengths]


def reference_logits(
    folder: Path, tokens: list[list[int]], dtype: torch.dtype = torch.float32
) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Logits of transformers, computed in `dtype`, for each prompt alone, [length, vocab]."""
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}  # others have no float64
    model = model_of(folder, dtype=dtype, **how).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([prompt])).logits[0].float().numpy() for prompt in tokens]


def model_of(folder: Path, **how: Any) -> Any:
    """The checkpoint as a model of transformers."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    return _UNLISTED.get(model_type, _AUTO_MODEL).from_pretrained(folder, **how)


def save_logits(file: Path, tokens: list[list[int]], logits: list[np.ndarray[Any, np.dtype[np.float32]]]) -> None:
    """tokens_i [length] int16 and logits_i [length, vocab] float32."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for index, (prompt, rows) in enumerate(zip(tokens, logits, strict=True)):
        arrays[f"tokens_{index}"] = np.array(prompt, np.int16)
        arrays[f"logits_{index}"] = rows
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _seed(case: Case) -> int:
    return sum(case.name.encode())


def _rewrite(file: Path, changes: Mapping[str, Any]) -> None:
    config = json.loads(file.read_text())
    for key, value in changes.items():
        config.pop(key, None) if value is None else config.update({key: value})
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
