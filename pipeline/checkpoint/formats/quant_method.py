"""The base class of quantization methods: how a quantization_config says that a checkpoint's layers are stored.

A method's fields are the settings of its quantization_config, read strictly: a setting that would change the result and
that Ingot does not support is refused by its key. To add a method: a class in a module of its own, and its line of
METHODS in quantized_folder.py. Its tensors are a table (leaves.py) that every reader of the checkpoint checks.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Self

from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from ingot.errors import ConfigError, did_you_mean, one_of, shown
from ingot.pipeline.checkpoint.formats.activations import CONTRADICTION, InputScheme
from ingot.pipeline.checkpoint.formats.codes import FloatArray
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.formats.leaves import Leaf, Sizes, Stored, check_leaves
from ingot.sizes import ceil_div

Arrays = Mapping[str, NDArray[Any]]  # leaf name -> values


class Settings(BaseModel):
    """An object of a quantization_config. Keys without a field are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class QuantMethod(Settings, ABC):
    """Decoder of the layers of one checkpoint."""

    title: ClassVar[str]
    """The method's name in messages."""

    @classmethod
    def read(cls, config: Mapping[str, Any], place: str) -> Self:
        """Return the method with its settings. ConfigError names the first wrong key, its value and what is allowed."""
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            raise ConfigError(f"{place}: {first_message(error)}") from error

    @abstractmethod
    def table(self, module: str) -> Sequence[Leaf]:
        """Return the tensors of a layer; ValueError for a module that the settings do not cover."""

    @abstractmethod
    def sizes(self, module: str, leaves: Stored) -> Sizes:
        """Return the sizes that the table names, `in` and `out` among them. ConfigError when they contradict."""

    def read_leaves(self, module: str, leaves: Stored) -> tuple[Stored, tuple[int, int]]:
        """Return the leaves that the weight is decoded from, and [out, in]. ConfigError for what the table refuses."""
        name = self.storage_of(module) or self.title
        found, sizes = check_leaves(self.table(module), leaves, partial(self.sizes, module), name)
        return found, (sizes["out"], sizes["in"])

    @abstractmethod
    def decode(self, module: str, arrays: Arrays) -> DecodedWeight | FloatArray:
        """Return the layer's weight; ValueError when its tensors contradict one another."""

    def storage_of(self, module: str) -> str:
        """Return the storage format of a layer; "" for a method that has only one."""
        return ""

    def activations_of(self, module: str) -> InputScheme | None:
        """Return how a layer's inputs are quantized; None when they are not."""
        return None


def num_groups(columns: int, group_size: int) -> int:
    """Return the groups of a row; a group size of -1 means the whole row."""
    return 1 if group_size == -1 else ceil_div(columns, group_size)


def unsupported(reason: str) -> AfterValidator:
    """Return the validator of a setting that must be absent, null, false or empty."""

    def check(value: Any) -> Any:
        if value:
            raise ValueError(reason)
        return value

    return AfterValidator(check)


def readable(names: Collection[str], owner: str = "") -> BeforeValidator:
    """Return the validator of a setting that must be one of the names; the refusal lists them with their owner."""

    def check(value: Any) -> Any:
        if value not in names:
            raise ValueError(f"Ingot reads {one_of(names)}{owner}.{did_you_mean(str(value), names)}")
        return value

    return BeforeValidator(check)


def _group_size(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("it must be a number from 1, or -1 for whole rows")
    return value


GroupSize = Annotated[int, AfterValidator(_group_size)]


def first_message(error: ValidationError) -> str:
    """Return the first problem as key, value and what is allowed."""
    details = error.errors(include_url=False)[0]
    key, value, kind = ".".join(map(str, details["loc"])), details["input"], details["type"]
    if kind == "missing":
        return f"{key} is missing, and has no default"
    if kind == CONTRADICTION:
        return f"{key}: {details['msg']}"
    if kind == "value_error":
        return f"{key} is {shown(value)}; {details['ctx']['error']}"
    return f"{key} is {shown(value)}; {details['msg'].replace('Input should be', 'it must be')}"
