"""Tokenizer: the files of its folder, tokens added at both ends, and errors for missing or damaged files."""

import itertools
import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from ingot.errors import ArtifactError, RequestError
from ingot.runtime.text.tokenizer import Tokenizer
from tests.data_paths import DEMO_MODEL, shared_data
from tests.each_case import each_case

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the demo model's tokenizer.json alone."""
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", tmp_path / "tokenizer.json")
    return tmp_path


def write_config(folder: Path, values: Mapping[str, object], name: str = "tokenizer_config.json") -> None:
    (folder / name).write_text(json.dumps(values), encoding="utf-8")


def change_tokenizer(folder: Path, **entries: object) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **entries}), encoding="utf-8")


def test_the_demo_models_tokenizer_has_its_size_and_end_tokens() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (4096, 0)
    assert tokenizer.eos_token_ids == {0}
    assert tokenizer.decode(tokenizer.encode("def f(x):\n    return x")) == "def f(x):\n    return x"


def test_a_tokenizer_states_how_many_characters_a_token_can_stand_for() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    bound = tokenizer.max_chars_per_token
    assert bound is not None
    assert len(" " * 999) <= bound * len(tokenizer.encode(" " * 999))
    assert Tokenizer.load(shared_data("models/babyllama-105")).max_chars_per_token is None  # it strips white space


def test_end_tokens_come_from_generation_config_and_tokenizer(folder: Path) -> None:
    write_config(folder, {"eos_token": {"content": "<|endoftext|>"}})
    write_config(folder, {"eos_token_id": [5, 7]}, "generation_config.json")
    assert Tokenizer.load(folder).eos_token_ids == {0, 5, 7}
    write_config(folder, {"eos_token_id": 9}, "generation_config.json")
    assert Tokenizer.load(folder).eos_token_ids == {0, 9}


def test_tokenizer_json_alone_is_enough(folder: Path) -> None:
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.chat_template is None


BOS_FIRST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}
FLAGS = [
    dict(zip(("add_bos_token", "add_eos_token"), pair, strict=True))
    for pair in itertools.product((True, False), repeat=2)
]


@each_case("flags", [{}, *FLAGS, {"add_bos_token": True}, {"add_eos_token": True}])
@pytest.mark.parametrize("post_processor", [None, BOS_FIRST], ids=["none", "bos_first"])
def test_the_post_processor_alone_decides_which_tokens_are_added(
    folder: Path, flags: dict[str, bool], post_processor: dict[str, object] | None
) -> None:
    change_tokenizer(folder, post_processor=post_processor)
    write_config(folder, {"bos_token": "<|endoftext|>", "eos_token": "!", **flags})
    tokenizer = Tokenizer.load(folder)
    plain = tokenizer.encode("x = 1", add_special_tokens=False)
    assert tokenizer.encode("x = 1") == ([0, *plain] if post_processor else plain)


def test_transformers_adds_the_same_tokens(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for post_processor, flags in itertools.product((None, BOS_FIRST), FLAGS):
        change_tokenizer(folder, post_processor=post_processor)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "!"}
        write_config(folder, {**config, **flags})
        expected = transformers.AutoTokenizer.from_pretrained(folder).encode("x = 1")
        assert Tokenizer.load(folder).encode("x = 1") == expected, (post_processor, flags)


def test_the_tokens_of_a_post_processor_are_left_out_on_demand() -> None:
    tokenizer = Tokenizer.load(shared_data("models/stories260K"))
    assert tokenizer.encode("Once")[0] == tokenizer.bos_token_id == 1
    assert 1 not in tokenizer.encode("Once", add_special_tokens=False)


def add_tokens(folder: Path, *contents: str, **model: object) -> None:
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    entries = [{"id": 4096 + index, "content": content, **flags} for index, content in enumerate(contents)]
    change_tokenizer(folder, added_tokens=[*document["added_tokens"], *entries], model={**document["model"], **model})


@each_case("text", ["a<č>b", "naïve", "xÖly", "señor", "漢字<č>"])
def test_added_tokens_decode_as_themselves_though_their_letters_spell_bytes(folder: Path, text: str) -> None:
    add_tokens(folder, "<č>", "naïve", "Öl", "señor")
    tokenizer = Tokenizer.load(folder)
    token_ids = tokenizer.encode(text)
    assert any(token_id >= 4096 for token_id in token_ids)
    assert tokenizer.decode(token_ids) == text


def test_an_added_token_that_merges_make_too_keeps_the_bytes_that_it_spells(folder: Path) -> None:
    vocab = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    spelled = next(token for token in vocab if token.startswith("Ġ") and token.isascii() is False and len(token) > 1)
    add_tokens(folder, spelled)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode([vocab[spelled]]) == spelled.replace("Ġ", " ")


def test_truncation_and_padding_of_tokenizer_json_are_ignored(folder: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    change_tokenizer(folder, truncation=truncation)
    assert len(Tokenizer.load(folder).encode("one two three four five six seven")) > 4


def test_a_prompt_must_be_unicode_text() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    with pytest.raises(RequestError, match="half a surrogate pair at character 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(RequestError, match="the prompt is a bytes"):
        tokenizer.encode(b"a")  # type: ignore[arg-type]


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json cannot be read \(No such file"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": "1.0"}', b"\xff\xfe", b"[]"])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is n"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"3", b"[" * 100_000])
def test_a_damaged_config_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("tokenizer_config.json", {"bos_token": 7}, "bos_token is 7; it must be a text"),
        ("tokenizer_config.json", {"eos_token": {"x": 1}}, "eos_token is"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "chat_template is"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template is 3"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id is '2'; it must be a token id"),
        ("generation_config.json", {"eos_token_id": [True]}, "eos_token_id is"),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id is -1"),
    ],
)
def test_a_wrong_value_is_refused_with_file_and_key(
    folder: Path, file: str, values: dict[str, object], message: str
) -> None:
    write_config(folder, values, file)
    with pytest.raises(ArtifactError) as caught:
        Tokenizer.load(folder)
    assert f"{file}: {message}" in str(caught.value)


def test_a_bos_token_that_the_vocabulary_lacks_is_refused(folder: Path) -> None:
    write_config(folder, {"bos_token": "<s>"})
    with pytest.raises(ArtifactError, match=r"bos_token is '<s>', which tokenizer\.json does not contain"):
        Tokenizer.load(folder)


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(
        RequestError,
        match=r"no chat template.*plain text, .*`ingot serve --chat-template FILE`, or build .*`chat_template`",
    ):
        Tokenizer.load(DEMO_MODEL, ("tokenizer.json",)).encode_chat(MESSAGES)


def test_a_chat_is_encoded_with_the_special_tokens_of_the_template_alone(folder: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    write_config(folder, {"bos_token": "<|endoftext|>", "add_bos_token": True, "chat_template": template})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render_chat(MESSAGES) == "<|endoftext|>Hello"
    assert tokenizer.encode_chat(MESSAGES) == [0, *tokenizer.encode("Hello", add_special_tokens=False)]


def test_the_template_file_wins_over_the_configs(folder: Path) -> None:
    write_config(folder, {"chat_template": "config"})
    (folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert Tokenizer.load(folder).render_chat(MESSAGES) == "file"


def test_a_given_template_replaces_all_of_the_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    write_config(folder, {"chat_template": [{"name": "tool_use", "template": "tools of the config"}]})
    (folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    given = tmp_path_factory.mktemp("mine") / "mine.jinja"
    given.write_text("given", encoding="utf-8")
    tokenizer = Tokenizer.load(folder, chat_template=given)
    assert tokenizer.render_chat(MESSAGES) == "given"
    assert tokenizer.render_chat(MESSAGES, tools=[{"name": "add"}]) == "given"


def test_the_template_for_tools_is_used_when_there_are_tools(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    write_config(folder, {"chat_template": named})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render_chat(MESSAGES) == "plain"
    assert tokenizer.render_chat(MESSAGES, tools=[{"name": "add"}]) == "add"


def test_other_threads_run_while_a_text_is_encoded() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    num_turns, ended = 0, threading.Event()

    def take_turns() -> None:
        nonlocal num_turns
        while not ended.wait(0.001):
            num_turns += 1

    thread = threading.Thread(target=take_turns)
    thread.start()
    before = num_turns
    tokenizer.encode("def read(path):\n" * 50_000)
    turns = num_turns - before
    ended.set()
    thread.join()
    assert turns > 5, "encoding held the GIL"
