"""From texts and conversations to tokens, with bounds on their length: encoding takes time in proportion to it.

A text that cannot fit the model's context is refused before it is encoded, wherever the tokenizer tells how many
characters a token can represent (`Tokenizer.max_chars_per_token`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.artifact import ModelFacts
from ingot.errors import RequestError, shown
from ingot.runtime.asking.prompts import ChatPrompt, Prompt, TokenIds
from ingot.runtime.text.tokenizer import Tokenizer

_UNBOUNDED_CHARS_PER_TOKEN = 64  # of a tokenizer that may drop text; real texts have 2 to 6


class PromptEncoder:
    """Encodes prompts for one model; several threads may use it at a time.

    max_chars   most characters of a text or conversation; None: what can fit the model's context
    """

    def __init__(self, tokenizer: Tokenizer | None, model: ModelFacts, max_chars: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._context_tokens = model.context_tokens
        self._max_chars = max_chars

    def encode(self, prompt: Prompt | ChatPrompt) -> TokenIds:
        """Tokens of a text, or of a conversation up to the start of the model's answer; token ids are left unchanged.

        RequestError for a text or conversation that is too long, when the model has no chat template, and when that
        refuses the conversation.
        """
        if isinstance(prompt, ChatPrompt):
            return self.encode_chat(prompt)
        if not isinstance(prompt, str):
            return prompt
        tokenizer = self._require_tokenizer("text")
        if len(prompt) > self._limit(tokenizer):
            raise self._too_long(f"the prompt has {len(prompt)}", tokenizer)
        return tokenizer.encode(prompt)

    def encode_chat(self, conversation: ChatPrompt) -> list[int]:
        """As `encode`."""
        messages, tools = conversation.messages, conversation.tools
        tokenizer = self._require_tokenizer("messages")
        options: dict[str, Any] = dict(conversation.variables or {})
        for name in options:
            if not isinstance(name, str) or name == "tools":
                raise RequestError(
                    f"the variables of the chat template have {shown(name)}; names are strings, and tools are given as"
                    " `tools`",
                    field="variables",
                )
        limit = self._limit(tokenizer)
        if _num_chars((messages, tools, options), limit) > limit:
            raise self._too_long(f"the conversation has more than {limit}", tokenizer)
        text = tokenizer.render_chat(messages, tools=tools, **options)
        if len(text) > limit:
            raise self._too_long(f"the conversation has {len(text)}", tokenizer)
        return tokenizer.encode(text, add_special_tokens=False)

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"the artifact has no tokenizer, so it takes no {what}; give the prompt as token ids")
        return self._tokenizer

    def _limit(self, tokenizer: Tokenizer) -> int:
        if self._max_chars is not None:
            return self._max_chars
        return self._context_tokens * (tokenizer.max_chars_per_token or _UNBOUNDED_CHARS_PER_TOKEN)

    def _too_long(self, found: str, tokenizer: Tokenizer) -> RequestError:
        context = f"the model's context of {self._context_tokens} tokens"
        if self._max_chars is not None:
            reason = "are allowed by max_prompt_chars"
        elif tokenizer.max_chars_per_token is not None:
            reason = f"fit {context}"
        else:
            reason = f"are accepted for {context}, unless max_prompt_chars is set"
        return RequestError(f"{found} characters, and at most {self._limit(tokenizer)} {reason}: shorten it")


def _num_chars(value: object, limit: int) -> int:
    """Characters of all texts in nested data, of which each item counts as one; stops counting above `limit`."""
    left, total = [value], 0
    while left and total <= limit:
        item = left.pop()
        total += len(item) if isinstance(item, str) else 1
        if isinstance(item, Mapping):
            left.extend(item.values())
        elif isinstance(item, Sequence) and not isinstance(item, str | bytes | bytearray):
            left.extend(item)
    return min(total, limit + 1)
