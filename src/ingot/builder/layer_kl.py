"""KL of the model's predictions with one weight quantized, on windows of the evaluation text.

The model just before quantization is compared with the same model with one weight rounded. Earlier passes may have
scaled or rotated weights, which does not change the model's function. All is computed in float32, so that the engine's
rounding of activations does not count.

This module is not in validation because it runs the model with the compiler's CalibrationEngine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import onnx_ir as ir

from ingot.artifact import ModelFacts
from ingot.errors import DataError
from ingot.passes.calibration import CalibrationFacts
from ingot.passes.model_facts import MODEL
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.quantization.sensitivity import divergences_of_each
from ingot.passes.weights import float32_values, weight_sites
from ingot.pipeline.calibrate import CalibrationData, CalibrationEngine
from ingot.runtime import Tokenizer
from ingot.validation.quantization import KlMeasurement
from ingot.validation.windows import EvaluationText, read_text

AUTO_TOKENS = 2048
LEAST_TOKENS = 64
MOST_MULTIPLICATIONS = 1 << 42  # a few minutes on two cores

Weights = Mapping[str, Callable[[], Float32Array]]


@dataclass(frozen=True)
class KlOptions:
    """The text to measure on, in whole windows spread evenly over its first `text_tokens` tokens.

    tokens    approximate number to measure; None: AUTO_TOKENS, or fewer to stay within MOST_MULTIPLICATIONS
    """

    text: Path
    window_tokens: int
    text_tokens: int
    tokens: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class LayerKl:
    """KL in nats per token by node name, and facts of the measurement."""

    kl: Mapping[str, float]
    measurement: KlMeasurement


def layer_kl(
    model: ir.Model, weights: Weights, tokenizer: Callable[[], Tokenizer], options: KlOptions
) -> LayerKl | str:
    """Measure the model with each weight in turn; `weights` is keyed by the name of the node that reads the weight.

    `tokenizer` loads the model's tokenizer.

    Returns a reason instead if `options.tokens` is None and LEAST_TOKENS would take too many multiplications.
    DataError if the text is shorter than one window or cannot be read.
    """
    start, multiplications = perf_counter(), _multiplications_per_token(model, weights)
    options = options if options.tokens is not None else _affordable(options, multiplications)
    if not options.tokens:
        return (
            f"{LEAST_TOKENS} tokens would take {multiplications * LEAST_TOKENS:.1e} multiplications; "
            "set evaluation.layer_kl_tokens to measure it anyway"
        )
    data = _windows(MODEL.of(model), tokenizer(), options)
    engine = CalibrationEngine(data, threads=options.threads)
    found = divergences_of_each(model, engine, weights, tokens=data.tokens, name="KL of single weights")
    facts = data.facts
    measurement = KlMeasurement(
        facts.text, facts.sha256, facts.tokens, facts.sequence_tokens, round(perf_counter() - start, 3)
    )
    return LayerKl(found, measurement)


def quantized_weights(before: ir.Model, after: ir.Model) -> Weights:
    """Return the dequantized values of the weights that `after` holds quantized and `before` does not, by node name."""
    plain = {site.node.name for site in weight_sites(before) if not site.is_quantized}
    return {
        site.node.name or "": partial(float32_values, site.operand)
        for site in weight_sites(after)
        if site.is_quantized and site.node.name in plain
    }


def _multiplications_per_token(model: ir.Model, weights: Weights) -> int:
    """Count multiplications per token of all measurements; one of a weight recomputes it and every weight after it."""
    total = following = 0
    for site in reversed(weight_sites(model)):
        following += site.weight.const_value.size if site.weight.const_value is not None else 0
        total += following if site.node.name in weights else 0
    return total


def _affordable(options: KlOptions, multiplications: int) -> KlOptions:
    tokens = min(AUTO_TOKENS, MOST_MULTIPLICATIONS // max(multiplications, 1))
    if tokens < LEAST_TOKENS:
        return replace(options, tokens=0)
    return replace(options, tokens=tokens, window_tokens=min(options.window_tokens, tokens))


def _windows(model: ModelFacts, tokenizer: Tokenizer, options: KlOptions) -> CalibrationData:
    text, sha256 = read_text(options.text)
    prefix = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id][:1]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    EvaluationText(options.text.name, sha256, tuple(tokens)).require_vocabulary(model.vocab_size)
    size = min(options.window_tokens, model.context_tokens - len(prefix))
    available = min(len(tokens), options.text_tokens) // size
    if not available:
        raise DataError(
            f"{options.text.name}: the text has {len(tokens)} tokens, less than one window of {size}; give a longer "
            "one, or set evaluation.layer_kl_tokens to 0"
        )
    count = min(max(1, (options.tokens or 0) // size), available)
    chosen = np.unique(np.linspace(0, available - 1, count).astype(np.int64))
    rows = np.array([prefix + tokens[at * size : (at + 1) * size] for at in chosen], np.int64)
    facts = CalibrationFacts(options.text.name, sha256, len(tokens), len(rows), rows.shape[1], seed=0)
    return CalibrationData(facts, rows)
