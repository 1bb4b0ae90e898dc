"""Prose of documents has lines of a width that a diff can show."""

from check_words import MOST_COLUMNS, long_lines

LONG = "word " * (MOST_COLUMNS // 5)


def test_long_lines_of_paragraphs_and_lists_are_found() -> None:
    assert [*long_lines(["# Title", "", LONG + "x", LONG.strip(), "* " + LONG, "  " + LONG])] == [3, 5, 6]


def test_tables_code_and_addresses_may_be_long() -> None:
    code = ["```sh", LONG + "x", "```", "    " + LONG]
    assert not [*long_lines([*code, "| " + LONG + "|", "  | " + LONG, "[name]: https://" + "x" * MOST_COLUMNS])]
    assert [*long_lines([*code, LONG + "x"])] == [5]
