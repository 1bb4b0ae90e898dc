"""The measured shapes of hybrids, models with recurrent layers, as rows of a table. To add one, add a row.

Sizes are those of the models in the names, but for the vocabulary, which is 32,000 in all of them, so that the head
takes no larger a part of a step than in the other shapes. A kind of hybrid is a function of its recurrent layers'
tensors and a function of its config.json; benchmarks/gguf_hybrids.py writes the same for llama.cpp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from benchmarks.shapes import SHAPES, ModelShape

Shapes = dict[str, tuple[int, ...]]
Kind = Literal["lfm2", "qwen3_5_text", "granitemoehybrid"]  # model_type
_VOCABULARY, _THETA, _EPSILON = 32000, 10000.0, 1e-5


@dataclass(frozen=True)
class HybridShape:
    """A hybrid's sizes; head and embedding are tied.

    attention_layers    the layers with attention; all others are recurrent
    state               heads of the recurrence, dim of a head's values, and of its keys; zeros for a convolution
    width               of the short convolution
    """

    name: str
    kind: Kind
    hidden_size: int
    num_layers: int
    attention_layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    state: tuple[int, int, int] = (0, 0, 0)
    width: int = 4
    vocab_size: int = _VOCABULARY
    tied_head: bool = True
    num_experts: int = 0

    @property
    def kv_layers(self) -> int:
        """Layers with keys and values."""
        return len(self.attention_layers)

    @property
    def kv_size(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim

    def config(self, context_tokens: int) -> dict[str, object]:
        """The config.json."""
        names = ["full_attention" if layer in self.attention_layers else "" for layer in range(self.num_layers)]
        common: dict[str, object] = {
            "model_type": self.kind,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": context_tokens,
            "tie_word_embeddings": True,
            "torch_dtype": "float16",
        }
        return common | _KINDS[self.kind].config(self, names)

    def tensors(self) -> Shapes:
        """Name and shape of every tensor, in file order."""
        kind, hidden = _KINDS[self.kind], self.hidden_size
        shapes: Shapes = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            own = kind.attention(self) if layer in self.attention_layers else kind.recurrence(self)
            shapes |= {f"model.layers.{layer}.{name}": dims for name, dims in (own | kind.feed_forward(self)).items()}
        return shapes | {f"model.{kind.last_norm}.weight": (hidden,)}


@dataclass(frozen=True)
class _Kind:
    """How a model_type names things."""

    config: Callable[[HybridShape, list[str]], dict[str, object]]
    attention: Callable[[HybridShape], Shapes]
    recurrence: Callable[[HybridShape], Shapes]
    feed_forward: Callable[[HybridShape], Shapes]
    last_norm: str


def spread(name: str, dims: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a random tensor, for which states remember for some tens of tokens."""
    if name.endswith("A_log"):
        return -1.0, 0.3
    if name.endswith("dt_bias"):
        return -2.0, 0.3
    if len(dims) == 3:  # a short convolution
        return 0.0, 0.4
    if name.endswith("conv1d.bias"):
        return 0.0, 0.1
    return (1.0, 0.1) if len(dims) == 1 else (0.0, 0.02)


def _projections(shape: HybridShape, queries: int, out: str) -> Shapes:
    hidden, width = shape.hidden_size, shape.num_heads * shape.head_dim
    return {
        "self_attn.q_proj.weight": (queries * width, hidden),
        "self_attn.k_proj.weight": (shape.kv_size, hidden),
        "self_attn.v_proj.weight": (shape.kv_size, hidden),
        f"self_attn.{out}.weight": (hidden, width),
    }


def _norms(shape: HybridShape, prefix: str, names: tuple[str, str]) -> Shapes:
    return {f"{prefix}.{name}.weight": (shape.head_dim,) for name in names}


def _lfm2_config(shape: HybridShape, names: list[str]) -> dict[str, object]:
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": shape.width,
        "conv_bias": False,
        "layer_types": [name or "conv" for name in names],
        "norm_eps": _EPSILON,
        "rope_theta": _THETA,
    }


def _lfm2_recurrence(shape: HybridShape) -> Shapes:
    hidden = shape.hidden_size
    return {
        "conv.in_proj.weight": (3 * hidden, hidden),
        "conv.conv.weight": (hidden, 1, shape.width),
        "conv.out_proj.weight": (hidden, hidden),
    }


def _lfm2_feed_forward(shape: HybridShape) -> Shapes:
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    return {
        "feed_forward.w1.weight": (ffn, hidden),
        "feed_forward.w3.weight": (ffn, hidden),
        "feed_forward.w2.weight": (hidden, ffn),
        "operator_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
    }


def _qwen_config(shape: HybridShape, names: list[str]) -> dict[str, object]:
    heads, values, keys = shape.state
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "layer_types": [name or "linear_attention" for name in names],
        "linear_conv_kernel_dim": shape.width,
        "linear_key_head_dim": keys,
        "linear_value_head_dim": values,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "rms_norm_eps": _EPSILON,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": _THETA, "rope_type": "default"},
    }


def _qwen_recurrence(shape: HybridShape) -> Shapes:
    hidden, (heads, values, keys) = shape.hidden_size, shape.state
    mixed = heads * (2 * keys + values)
    return {
        "linear_attn.in_proj_qkv.weight": (mixed, hidden),
        "linear_attn.in_proj_z.weight": (heads * values, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (mixed, 1, shape.width),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (values,),
        "linear_attn.out_proj.weight": (hidden, heads * values),
    }


def _qwen_feed_forward(shape: HybridShape) -> Shapes:
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    return {
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def _granite_config(shape: HybridShape, names: list[str]) -> dict[str, object]:
    heads, values, keys = shape.state
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "attention_bias": False,
        "attention_multiplier": shape.head_dim**-0.5,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "layer_types": [{"full_attention": "attention"}.get(name, "mamba") for name in names],
        "logits_scaling": 3.0,
        "mamba_conv_bias": True,
        "mamba_d_conv": shape.width,
        "mamba_d_head": values,
        "mamba_d_state": keys,
        "mamba_expand": heads * values // shape.hidden_size,
        "mamba_n_groups": 1,
        "mamba_n_heads": heads,
        "mamba_proj_bias": False,
        "num_experts_per_tok": 0,
        "num_local_experts": 0,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.25,
        "rms_norm_eps": _EPSILON,
        "rope_theta": _THETA,
        "shared_intermediate_size": shape.intermediate_size,
    }


def _granite_recurrence(shape: HybridShape) -> Shapes:
    hidden, (heads, values, keys) = shape.hidden_size, shape.state
    inner = heads * values
    mixed = inner + 2 * keys
    return {
        "mamba.in_proj.weight": (inner + mixed + heads, hidden),
        "mamba.conv1d.weight": (mixed, 1, shape.width),
        "mamba.conv1d.bias": (mixed,),
        "mamba.A_log": (heads,),
        "mamba.D": (heads,),
        "mamba.dt_bias": (heads,),
        "mamba.norm.weight": (inner,),
        "mamba.out_proj.weight": (hidden, inner),
    }


def _granite_feed_forward(shape: HybridShape) -> Shapes:
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    return {
        "shared_mlp.input_linear.weight": (2 * ffn, hidden),
        "shared_mlp.output_linear.weight": (hidden, ffn),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


_KINDS: Mapping[Kind, _Kind] = MappingProxyType(
    {
        "lfm2": _Kind(
            _lfm2_config,
            lambda shape: (
                _projections(shape, 1, "out_proj") | _norms(shape, "self_attn", ("q_layernorm", "k_layernorm"))
            ),
            _lfm2_recurrence,
            _lfm2_feed_forward,
            "embedding_norm",
        ),
        "qwen3_5_text": _Kind(
            _qwen_config,
            lambda shape: _projections(shape, 2, "o_proj") | _norms(shape, "self_attn", ("q_norm", "k_norm")),
            _qwen_recurrence,
            _qwen_feed_forward,
            "norm",
        ),
        "granitemoehybrid": _Kind(
            _granite_config,
            lambda shape: _projections(shape, 1, "o_proj"),
            _granite_recurrence,
            _granite_feed_forward,
            "norm",
        ),
    }
)

HYBRIDS: dict[str, HybridShape] = {
    "lfm2-350m": HybridShape(
        name="lfm2-350m",
        kind="lfm2",
        hidden_size=1024,
        num_layers=16,
        attention_layers=(2, 5, 8, 10, 12, 14),
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=4608,
        width=3,
    ),
    "qwen3.5-0.8b": HybridShape(
        name="qwen3.5-0.8b",
        kind="qwen3_5_text",
        hidden_size=1024,
        num_layers=24,
        attention_layers=(3, 7, 11, 15, 19, 23),
        num_heads=8,
        num_kv_heads=2,
        head_dim=256,
        intermediate_size=3584,
        state=(16, 128, 128),
    ),
    "granite-4.0-h-350m": HybridShape(
        name="granite-4.0-h-350m",
        kind="granitemoehybrid",
        hidden_size=768,
        num_layers=32,
        attention_layers=(10, 13, 17, 27),
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=2048,
        state=(48, 32, 128),
    ),
}
ALL_SHAPES: Mapping[str, ModelShape | HybridShape] = MappingProxyType({**SHAPES, **HYBRIDS})
