"""The checkpoint's linear layers as rows of a program's linear layers.

Passes pack the checkpoint's layers (q_proj, k_proj and v_proj are one qkv_proj), and an adapter has the checkpoint's
names. A pass that changes what a layer reads or makes (rotate, awq) leaves it without projections: B A of an adapter
would be added to other columns or rows there than it was trained for.
"""

from pydantic import BaseModel, ConfigDict, Field


class Projection(BaseModel):
    """A linear layer of the checkpoint, y = x @ W^T with W [rows, columns], within one of the program.

    module      its name in the checkpoint, "model.layers.0.self_attn.q_proj"
    node        name of the program's linear layer
    first_row   of the layer's output where y begins
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    module: str
    node: str
    first_row: int = Field(default=0, ge=0)
    rows: int = Field(ge=1)
    columns: int = Field(ge=1)
