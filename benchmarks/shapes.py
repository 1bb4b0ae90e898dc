"""The measured model shapes as rows of a table. To add one, add a row.

The weights are random, so only the shape matters: no figure here says anything about quality.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """One matrix [out_features, in_features] of a decoder layer, packed as Ingot's lowering packs it."""

    name: str
    in_features: int
    out_features: int

    @property
    def num_weights(self) -> int:
        """Elements of the matrix."""
        return self.in_features * self.out_features


@dataclass(frozen=True)
class ModelShape:
    """A Llama-architecture shape.

    num_experts    of a mixture as Mixtral's: each has the intermediate size; 0: the feed-forward is dense
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    tied_head: bool
    num_experts: int = 0
    chosen_experts: int = 0  # for each token

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_layers(self) -> int:
        """Layers with keys and values: all."""
        return self.num_layers

    @property
    def kv_size(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_linears(self) -> tuple[Linear, ...]:
        """The four matrices of a layer, with q|k|v and gate|up packed into one each."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        return (
            Linear("qkv", hidden, hidden + 2 * self.kv_size),
            Linear("o", hidden, hidden),
            Linear("gate_up", hidden, 2 * ffn),
            Linear("down", ffn, hidden),
        )

    @property
    def head(self) -> Linear:
        """The output head."""
        return Linear("lm_head", self.hidden_size, self.vocab_size)


SHAPES: dict[str, ModelShape] = {
    "smollm2-135m": ModelShape(
        name="smollm2-135m",
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        tied_head=True,
    ),
    "tinyllama-1.1b": ModelShape(
        name="tinyllama-1.1b",
        hidden_size=2048,
        num_layers=22,
        num_heads=32,
        num_kv_heads=4,
        intermediate_size=5632,
        vocab_size=32000,
        tied_head=False,
    ),
    "mixture-1b": ModelShape(
        name="mixture-1b",
        hidden_size=1024,
        num_layers=16,
        num_heads=16,
        num_kv_heads=4,
        intermediate_size=512,
        vocab_size=32000,
        tied_head=False,
        num_experts=32,
        chosen_experts=4,
    ),
}
