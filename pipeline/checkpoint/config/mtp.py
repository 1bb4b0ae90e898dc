"""Multi-token prediction: a layer after the decoder's last that predicts the token after the next.

See section 2.2 of the DeepSeek-V3 report.

    x = projection([embedding_norm(embedding of token i + 1), hidden_norm(hidden state i)])     or the other way round
    h = norm(decoder layer(x))
    logits of token i + 2 = head(h), with the decoder's own embedding and head

Longer drafts apply the layer to its own h and drafts. Only the first such layer of a checkpoint is read.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, Self

from ingot.pipeline.checkpoint.config.decoder import DecoderConfig
from ingot.pipeline.checkpoint.config.layers import LayerConfig
from ingot.pipeline.checkpoint.families.family import MtpRules

DRAFT = "model.draft"
"""Path of the layer's tensors, as if it were one of Llama's; DRAFT.norm, DRAFT.projection and so on are around it."""


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DecoderConfig):
    """The configuration of the layer: a decoder of one layer, whose tensors are under DRAFT.

    layer_name     of the decoder layer in the checkpoint
    draft_names    embedding_norm, hidden_norm, projection and norm -> their names in the checkpoint
    hidden_first   columns of the projection are those of the hidden state, then those of the embedding
    hidden_state   what the layer reads: the decoder's hidden state before or after its last norm
    """

    layer_name: str
    draft_names: Mapping[str, str]
    hidden_first: bool
    hidden_state: Literal["raw", "normed"]

    @classmethod
    def of(cls, config: DecoderConfig, rules: MtpRules) -> Self:
        """The configuration of the first MTP layer after a decoder."""
        layer = rules.layer.format(layer=len(config.layers))
        names = {part: layer + name if name.startswith(".") else name for part, name in rules.names.items()}
        own = {each.name: getattr(config, each.name) for each in fields(DecoderConfig)}
        return cls(
            **{**own, "layers": (_layer(config.layers),)},
            layer_name=layer,
            draft_names=MappingProxyType(names),
            hidden_first=rules.hidden_first,
            hidden_state=rules.hidden_state,
        )

    def tensor_name(self, path: str) -> str:
        """The checkpoint's name of a tensor."""
        below = path.removeprefix(f"{DRAFT}.")
        if below == path:
            return super().tensor_name(path)
        first, _, rest = below.partition(".")
        if first in self.draft_names:
            return f"{self.draft_names[first]}.{rest}"
        return f"{self.layer_name}.{super().tensor_name(below)}"


def find_mtp(config: DecoderConfig, tensors: Collection[str]) -> MtpConfig | None:
    """The MTP layer that a checkpoint brings; None without tensors of one.

    Checkpoints that transformers saved have none, whatever their config.json counts.
    """
    rules = config.family.mtp
    if rules is None:
        return None
    mtp = MtpConfig.of(config, rules)
    return mtp if mtp.tensor_name(f"{DRAFT}.projection.weight") in tensors else None


def _layer(layers: tuple[LayerConfig, ...]) -> LayerConfig:
    """The layer that MTP layers are like: the last that attends, of those with experts if there are any."""
    attending = [layer for layer in layers if layer.attends and layer.recurrent is None]
    sparse = [layer for layer in attending if layer.experts is not None]
    return (sparse or attending)[-1]
