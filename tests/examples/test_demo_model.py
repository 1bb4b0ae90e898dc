"""The demo model's chat template: a conversation is source text, which the model continues."""

from ingot.runtime import Tokenizer
from tests.data_paths import DEMO_MODEL
from tests.each_case import each_case

CALL = [{"role": "assistant", "content": None}, {"role": "tool", "content": "3"}]
USER = {"role": "user", "content": "def read(path):\n"}
SYSTEM = {"role": "system", "content": "Python 3.\nTyped."}
ANSWER = {"role": "assistant", "content": "    return open(path)"}


@each_case(
    "messages, prompt",
    [
        ([USER], "def read(path):\n"),
        ([SYSTEM, USER], "# Python 3.\n# Typed.\ndef read(path):\n"),
        ([USER, ANSWER, USER], "def read(path):\n    return open(path)\n\ndef read(path):\n"),
        (
            [USER, *CALL],
            "def read(path):\n\n\n# 3\n",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "import os"}]}], "import os"),
    ],
)
def test_a_conversation_is_source_text(messages: list[dict[str, object]], prompt: str) -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render(messages) == prompt
    assert list(tokenizer.encode_chat(messages)) == tokenizer.encode(prompt, add_special_tokens=False)


def test_an_answer_can_be_continued() -> None:
    template = Tokenizer.load(DEMO_MODEL).chat_template
    assert template is not None
    assert template.render([USER, ANSWER], continue_final_message=True) == "def read(path):\n    return open(path)"
