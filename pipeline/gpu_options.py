"""The recipe's section `gpu`: what a program for a card is made for. Targets without a card do not read it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ingot.pipeline.recipe_paths import GivenPath

Rows = Annotated[int, Field(ge=1)]
_LEAST_RAGGED = 32
_STEP = 4


class GpuOptions(BaseModel):
    """Activations, the numbers of rows that programs are made for, and the choice of tiles."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    activations: Literal["checkpoint", "float16", "bfloat16", "float32"] = Field(
        default="checkpoint",
        description="type that is computed in; checkpoint: its own where that has 16 bits, else float16",
    )
    decode_rows: tuple[Rows, ...] = Field(
        default=(1, 2, 4, 8, 16, 32, 64),
        min_length=1,
        description="programs for steps of one token a sequence; the largest is the most sequences at a time",
    )
    prefill_rows: tuple[Rows, ...] | None = Field(
        default=None,
        min_length=1,
        description="programs for other steps, by tokens; null: 32, 128, ... up to engine.max_batch_tokens",
    )
    sms: tuple[int, ...] = Field(
        default=(), description="cards that a target with a choice builds for, as [86, 89, 120]"
    )
    tiles: GivenPath | None = Field(default=None, description="table of tiles that `ingot tune` measured on a card")

    @field_validator("decode_rows", "prefill_rows", "sms")
    @classmethod
    def _ascending(cls, values: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if values is not None and list(values) != sorted(set(values)):
            raise ValueError(f"{list(values)} must ascend, and name each value once")
        return values

    def ragged_rows(self, max_batch_tokens: int) -> tuple[int, ...]:
        """Rows of the programs for other steps than plain decoding; the last holds a whole step."""
        given = self.prefill_rows
        if given is None:
            rows, given = _LEAST_RAGGED, ()
            while rows < max_batch_tokens:
                given, rows = (*given, rows), rows * _STEP
        return (*(rows for rows in given if rows < max_batch_tokens), max_batch_tokens)
