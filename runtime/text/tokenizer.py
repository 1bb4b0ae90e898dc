"""Text to tokens and back, and conversations to prompts, from the files of a checkpoint or an artifact.

The files of a tokenizer's folder, read with types: what is missing or damaged is refused by name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import tokenizers
from tokenizers.processors import TemplateProcessing

from ingot.errors import ArtifactError, RequestError
from ingot.runtime.text.chat_template import ChatTemplate, Message
from ingot.runtime.text.detokenizer import Detokenizer, TextDecoder

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True)
class TokenizerConfig:
    """tokenizer_config.json and generation_config.json, as far as the runtime reads them.

    special_tokens   bos_token, eos_token, ... -> the token's text
    add_bos, add_eos None when the file does not say: then tokenizer.json alone decides
    eos_token_ids    end tokens of generation_config.json
    chat_templates   name -> jinja2 source; "default" is the usual one
    """

    special_tokens: Mapping[str, str]
    add_bos: bool | None
    add_eos: bool | None
    eos_token_ids: tuple[int, ...]
    chat_templates: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> "TokenizerConfig":
        """Read what the folder holds; absent files leave their part empty. ArtifactError for a damaged one."""
        config = _JsonFile.read(folder / TOKENIZER_CONFIG)
        generation = _JsonFile.read(folder / GENERATION_CONFIG)
        templates = config.templates()
        if (folder / CHAT_TEMPLATE).is_file():
            templates = {**templates, "default": _read_text(folder / CHAT_TEMPLATE)}
        return cls(
            special_tokens={name: text for name in _SPECIAL_TOKENS if (text := config.token(name)) is not None},
            add_bos=config.flag("add_bos_token"),
            add_eos=config.flag("add_eos_token"),
            eos_token_ids=generation.token_ids("eos_token_id"),
            chat_templates=templates,
        )


@dataclass(frozen=True)
class _JsonFile:
    """A JSON object and the file it came from, for messages."""

    path: Path
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> "_JsonFile":
        if not path.is_file():
            return cls(path, {})
        values = read_json(path)
        if not isinstance(values, dict):
            raise ArtifactError(f"{path} holds a {type(values).__name__}; it must be a JSON object")
        return cls(path, values)

    def refuse(self, key: str, allowed: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: {key} is {self.values[key]!r}; it must be {allowed}")

    def flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, "true, false or absent")
        return value

    def token(self, key: str) -> str | None:
        """A special token: its text, or the long form {"content": text}."""
        value = self.values.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(text, str):
            raise self.refuse(key, "a text or an object with a text as content")
        return text if isinstance(text, str) else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in found):
            raise self.refuse(key, "a token id or a list of token ids")
        return tuple(found)

    def templates(self) -> dict[str, str]:
        """chat_template: a text, or a list of {"name": ..., "template": ...}."""
        key = "chat_template"
        value = self.values.get(key)
        if isinstance(value, str):
            return {"default": value}
        named: dict[str, str] = {}
        for entry in value if isinstance(value, list) else [] if value is None else [value]:
            name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(template, str):
                raise self.refuse(key, 'a text or a list of {"name": text, "template": text}')
            named[name] = template
        return named


def read_json(path: Path) -> object:
    """The file's JSON; ArtifactError with its name when it is missing or damaged."""
    try:
        value: object = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ArtifactError(f"{path} is no valid JSON ({error}); copy it again from the checkpoint") from error
    return value


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """tokenizer.json as the tokenizers package reads it, without the truncation and padding it may ask for."""
    text = _read_text(path)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises a bare Exception for anything it cannot read
        raise ArtifactError(f"{path} is no tokenizer that can be read ({error}); copy it again") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path} is not UTF-8 text ({error}); copy it again from the checkpoint") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ArtifactError(f"{path} cannot be read ({reason}); the tokenizer's folder must hold it") from error


class Tokenizer:
    """A tokenizer and what its folder says of beginning, end and chat. Made by `load`."""

    def __init__(
        self, backend: tokenizers.Tokenizer, decoder: TextDecoder, config: TokenizerConfig, folder: Path
    ) -> None:
        self._backend = backend
        self._config = config
        self._folder = folder
        self.text_decoder = decoder
        added = backend.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """Read tokenizer.json and, where present, tokenizer_config.json, generation_config.json, chat_template.jinja.

        Raises ArtifactError with the file's name for one that is missing (tokenizer.json), damaged or contradicting.
        """
        folder = Path(folder)
        backend = read_backend(folder / TOKENIZER)
        config = TokenizerConfig.read(folder)
        document = read_json(folder / TOKENIZER)
        decoder = TextDecoder.parse(document.get("decoder") if isinstance(document, dict) else None, TOKENIZER)
        tokenizer = cls(backend, decoder, config, folder)
        tokenizer._set_ends()
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Entries, added tokens among them. A model may have more rows than that."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token(self) -> str | None:
        """Text of the token that opens a sequence."""
        return self._config.special_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The token that opens a sequence."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own token that ends a sequence."""
        return self._special_id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        """The token that stands for what the vocabulary lacks."""
        return self._special_id("unk_token")

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence: those of generation_config.json and the tokenizer's own end token."""
        own = self.eos_token_id
        return frozenset(self._config.eos_token_ids) | (frozenset() if own is None else {own})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text; with `add_special_tokens` the tokens that the model wants at its ends are added.

        Special tokens that are spelled out in the text are recognised. RequestError when it is no Unicode text.
        """
        if not isinstance(text, str):
            raise RequestError(f"the prompt is a {type(text).__name__}; it must be a text or a list of token ids")
        try:
            text.encode()  # the package's own message would not name the place
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt holds half a surrogate pair at character {error.start}; pass valid Unicode text"
            ) from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of tokens: what a Detokenizer's stream adds up to. Unknown ids give no text."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def detokenizer(self, prompt_tokens: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one sequence that goes on after `prompt_tokens`."""
        token = partial(self.token, skip_special_tokens=skip_special_tokens)
        return Detokenizer(self.text_decoder, token, prompt_tokens)

    def token(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        """The vocabulary's entry; None for an unknown id, and for a special token unless those are wanted."""
        entry = self._backend.id_to_token(token_id)
        return None if skip_special_tokens and entry in self._special else entry

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The template for conversations; None when the folder has none. RequestError when it is damaged."""
        return self._chat_template("default")

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The prompt text of a conversation; encode it with add_special_tokens=False. See ChatTemplate.render."""
        template = (self._tool_template if tools else None) or self.chat_template
        if template is None:
            raise RequestError(
                f"the model has no chat template, so it takes no messages: give the prompt as plain text, or put a "
                f"{CHAT_TEMPLATE} beside {self._folder / TOKENIZER}"
            )
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]:
        """Tokens of a conversation. The template writes the special tokens itself: none is added."""
        text = self.render_chat(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def _tool_template(self) -> ChatTemplate | None:
        return self._chat_template("tool_use")

    def _chat_template(self, name: str) -> ChatTemplate | None:
        source = self._config.chat_templates.get(name)
        if source is None:
            return None
        file = CHAT_TEMPLATE if (self._folder / CHAT_TEMPLATE).is_file() else TOKENIZER_CONFIG
        return ChatTemplate(source, file, self._config.special_tokens)

    def _special_id(self, name: str) -> int | None:
        """Id of a special token; ArtifactError when its text is not in the vocabulary."""
        text = self._config.special_tokens.get(name)
        token_id: int | None = None if text is None else self._backend.token_to_id(text)
        if text is not None and token_id is None:
            raise ArtifactError(
                f"{self._folder / TOKENIZER_CONFIG}: {name} is {text!r}, which {TOKENIZER} does not hold; "
                "the two files are not of the same tokenizer"
            )
        return token_id

    def _set_ends(self) -> None:
        """Follow add_bos_token and add_eos_token where the config states one of them, as transformers 5 does.

        Otherwise tokenizer.json's own post-processor stays.
        """
        add_bos, add_eos = self._config.add_bos, self._config.add_eos
        bos_id, eos_id = self._special_id("bos_token"), self._special_id("eos_token")
        if add_bos is None and add_eos is None:
            return
        tokens = self._config.special_tokens
        before = [(tokens["bos_token"], bos_id)] if add_bos and bos_id is not None else []
        after = [(tokens["eos_token"], eos_id)] if add_eos and eos_id is not None else []
        pattern = [*(text for text, _ in before), "$A", *(text for text, _ in after)]
        self._backend.post_processor = TemplateProcessing(single=pattern, special_tokens=[*before, *after])
