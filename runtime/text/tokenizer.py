"""The tokenizer of a checkpoint or an artifact: text to tokens and back, and conversations to prompts.

Files: tokenizer.json and, optionally, tokenizer_config.json, generation_config.json and chat_template.jinja.
ArtifactError names the file, and the key, of what is missing or damaged.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from ingot.artifact import Artifact
from ingot.errors import ArtifactError, IngotError, RequestError, shown
from ingot.runtime.text.chat_template import ChatTemplate
from ingot.runtime.text.detokenizer import Detokenizer, TextDecoder
from ingot.runtime.text.messages import Message
from ingot.runtime.text.text_bounds import max_chars_per_token, max_growth
from ingot.runtime.text.tokenizer_backend import library_errors, read_tokenizer, try_samples
from ingot.runtime.text.tokenizer_files import MAX_TOKEN_ID, GenerationConfig, TokenizerConfig, read_text

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_SMALL_GROWTH = 64  # of a normalizer, for which any text is fine
_MAX_NORMALIZED_CHARACTERS = 1 << 26


class Tokenizer:
    """A tokenizer with its end tokens and chat templates. Made by `load`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        document: Mapping[str, Any],
        config: TokenizerConfig,
        generation: GenerationConfig,
        folder: Path,
        template_file: Path | None = None,
    ) -> None:
        self._backend = backend
        self._config = config
        self._generation = generation
        self._folder = folder
        self.text_decoder = replace(
            TextDecoder.parse(document.get("decoder"), TOKENIZER), plain_tokens=_plain_tokens(document)
        )
        self._growth = max_growth(document.get("normalizer"))
        self.max_chars_per_token = max_chars_per_token(document)
        """The most characters of a text that one token can represent; None where that has no bound."""
        added = backend.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        self._jinja_file = template_file
        self._templates = {"default": read_text(template_file)} if template_file else dict(config.chat_templates)

    @classmethod
    def of_artifact(cls, artifact: Artifact, chat_template: Path | None = None) -> "Tokenizer | None":
        """Read the files that an artifact lists; None where it has no tokenizer. Raises as `load`.

        A chat template that is given replaces the artifact's. ArtifactError with its name if it does not parse.
        """
        files = artifact.files_below("tokenizer")
        tokenizer = cls.load(artifact.path / "tokenizer", files, chat_template) if TOKENIZER in files else None
        if tokenizer and chat_template:
            ChatTemplate(tokenizer.chat_template_text, str(chat_template))
        return tokenizer

    @classmethod
    def load(
        cls, folder: Path | str, files: Collection[str] | None = None, chat_template: Path | None = None
    ) -> "Tokenizer":
        """Read the folder's files, or only those with the names `files`, which an artifact's manifest lists.

        A chat_template.jinja, in the folder or given by path, replaces the templates of tokenizer_config.json.
        Raises ArtifactError with the file's name for one that is missing (tokenizer.json), damaged or contradictory,
        and for a tokenizer that cannot encode and decode sample texts.
        """
        folder = Path(folder)

        def find(name: str) -> Path | None:
            may_read = files is None or name in files
            return folder / name if may_read and (folder / name).is_file() else None

        backend, document = read_tokenizer(folder / TOKENIZER)
        config = TokenizerConfig.read(find(TOKENIZER_CONFIG))
        generation = GenerationConfig.read(find(GENERATION_CONFIG))
        tokenizer = cls(backend, document, config, generation, folder, chat_template or find(CHAT_TEMPLATE))
        for name in ("bos_token", "eos_token"):
            tokenizer._special_id(name)
        for token_ids in try_samples(backend, folder / TOKENIZER):
            tokenizer.decode(token_ids, skip_special_tokens=False)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Entries, including added tokens. A model may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def vocabulary(self) -> dict[str, int]:
        """The id of each token, added tokens included."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a sequence."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's own token that ends a sequence."""
        return self._special_id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        """Id of the token for text that is not in the vocabulary."""
        return self._special_id("unk_token")

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence: those of generation_config.json and the tokenizer's own end token."""
        own = self.eos_token_id
        return self._generation.eos_token_ids | (frozenset() if own is None else {own})

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens by their texts."""
        return {text: token_id for text in self._special if (token_id := self._backend.token_to_id(text)) is not None}

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Texts of the tokens that tokenizer_config.json names: bos_token, eos_token, ..."""
        return self._config.special_tokens

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """How the model's replies are read, as tokenizer_config.json has it; None where it does not say."""
        return self._config.response_template

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The source of each chat template by name; "default" is the usual one."""
        return self._templates

    @property
    def chat_template_text(self) -> str:
        """The source of all chat templates."""
        return "\n".join(self._templates.values())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text; with `add_special_tokens`, the model's tokens for its beginning and end are added.

        Special tokens that are spelled out in the text are recognized. RequestError when it is not a Unicode text, or
        the tokenizer fails on it.
        """
        if not isinstance(text, str):
            raise RequestError(f"the prompt is a {type(text).__name__}; it must be a text or a list of token ids")
        try:
            text.encode()  # the package's own message does not give the position
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt contains half a surrogate pair at character {error.start}; pass valid Unicode text"
            ) from error
        if self._growth > _SMALL_GROWTH and len(text) * self._growth > _MAX_NORMALIZED_CHARACTERS:
            most = int(_MAX_NORMALIZED_CHARACTERS / self._growth)
            raise RequestError(
                f"the text has {len(text):,} characters; at most {most:,} are allowed, because the tokenizer's "
                f"normalizer may make it {self._growth:,.0f} times longer"
            )
        with library_errors(_encoding_failure):
            # As a batch, because `encode` holds the GIL for as long as it takes.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of tokens, equal to the concatenated stream of a Detokenizer. Unknown ids give no text."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def detokenizer(
        self, prompt_tokens: Sequence[int] = (), *, skip_special_tokens: bool = True, kept: Collection[str] = ()
    ) -> Detokenizer:
        """A detokenizer for a sequence that continues `prompt_tokens`; `kept` are special tokens that it shows."""
        token = partial(self.token, skip_special_tokens=skip_special_tokens, kept=kept)
        return Detokenizer(self.text_decoder, token, prompt_tokens)

    def token(self, token_id: int, *, skip_special_tokens: bool = True, kept: Collection[str] = ()) -> str | None:
        """The vocabulary's entry; None for an unknown id and, with `skip_special_tokens`, for one that is not kept."""
        if not 0 <= token_id <= MAX_TOKEN_ID:
            return None
        entry = self._backend.id_to_token(token_id)
        is_skipped = skip_special_tokens and entry in self._special and entry not in kept
        return None if is_skipped else entry

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The template for conversations; None if the folder has none. ArtifactError when it is damaged."""
        return self._chat_template("default")

    def render_chat(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """The prompt text of a conversation; encode it with add_special_tokens=False.

        It ends where the model's answer begins, unless `add_generation_prompt` is False, or with
        `continue_final_message` in the assistant's last message.
        `tools` are JSON schemas, `documents` have "title" and "text"; the template reads other variables by name, such
        as enable_thinking. RequestError for what is wrong with them, or when the template refuses the conversation.
        """
        template = (self._tool_template if tools else None) or self.chat_template
        if template is None:
            raise RequestError(
                "the model has no chat template, so it takes no messages: give the prompt as plain text, serve it with "
                "`ingot serve --chat-template FILE`, or build the artifact with that option (`chat_template` in the "
                "recipe)"
            )
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: object,
    ) -> list[int]:
        """Tokens of a conversation; options as for `render_chat`. The template itself writes the special tokens."""
        text = self.render_chat(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def _tool_template(self) -> ChatTemplate | None:
        return self._chat_template("tool_use")

    def _chat_template(self, name: str) -> ChatTemplate | None:
        source = self._templates.get(name)
        if source is None:
            return None
        file = CHAT_TEMPLATE if self._jinja_file else TOKENIZER_CONFIG
        return ChatTemplate(source, file, self._config.special_tokens)

    def _special_id(self, name: str) -> int | None:
        """Id of a special token; ArtifactError when its text is not in the vocabulary."""
        text = self._config.special_tokens.get(name)
        token_id: int | None = None if text is None else self._backend.token_to_id(text)
        if text is not None and token_id is None:
            raise ArtifactError(
                f"{self._folder / TOKENIZER_CONFIG}: {name} is {shown(text)}, which {TOKENIZER} does not contain; "
                "the two files belong to different tokenizers"
            )
        return token_id


def _plain_tokens(document: Mapping[str, Any]) -> frozenset[str]:
    """Contents of the added tokens, except those that the model's merges make too.

    Of one that merges make, the text is nearly always the bytes that it spells.
    """
    added = document.get("added_tokens") or ()
    contents = {
        entry["content"] for entry in added if isinstance(entry, dict) and isinstance(entry.get("content"), str)
    }
    unclear = {content for content in contents if not content.isascii() and content in document["model"]["vocab"]}
    if not unclear:
        return frozenset(contents)
    merges = document["model"].get("merges") or ()
    merged = {"".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges}
    return frozenset(contents - {content for content in unclear if len(content) == 1 or content in merged})


def _encoding_failure(reason: str) -> IngotError:
    return RequestError(
        f"the tokenizer fails on this text ({reason}); change the text, or give the prompt as token ids"
    )
