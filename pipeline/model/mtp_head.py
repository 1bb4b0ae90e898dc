"""The MTP layer of a checkpoint as a model of its own, the draft head of the decoder (config/mtp.py).

It shares the decoder's embedding and head, and reads the decoder's hidden states in place of its layers.
"""

import onnx_ir as ir

from ingot.artifact.programs.draft_head import HIDDEN_STATES
from ingot.pipeline.checkpoint.config.mtp import MtpConfig
from ingot.pipeline.model.decoder import DecoderBuilder
from ingot.pipeline.model.graph_builder import GraphBuilder


class MtpBuilder(DecoderBuilder):
    """Appends an MTP layer between the decoder's embedding and its head."""

    def __init__(self, builder: GraphBuilder, config: MtpConfig, context_tokens: int) -> None:
        super().__init__(builder, config, context_tokens)
        self._mtp = config

    def _layers(self, hidden: ir.Value, input_ids: ir.Value) -> ir.Value:
        b, width = self.builder, self.config.hidden_size
        states = b.input(HIDDEN_STATES, ir.DataType.FLOAT, ["T", width])
        both = [self._norm("draft.embedding_norm", hidden), self._norm("draft.hidden_norm", states)]
        joined = b.op("Concat", "draft.joined", both[:: -1 if self._mtp.hidden_first else 1], ["T", 2 * width], axis=1)
        return self._layer("draft", 0, self.config.layers[0], self._linear("draft.projection", joined, width, False))

    def _last_norm(self) -> str:
        return "draft.norm"
