"""Check that text in the repository is plain English: reports the phrases that the table below replaces.

Prose in Markdown has lines of at most 120 columns, so that a diff shows what changed in a paragraph.

    python .ci/check_words.py [PATH ...]      files or folders; default: every file that git tracks

Reads Python, C, Markdown, YAML, TOML and Jinja files, strings and comments and code alike. A use that is right is
allowed by a line in .ci/allowed_words.txt, "PATH-PATTERN: PHRASE" (the pattern as in fnmatch, the phrase as it is in
the line). Exit code 1 when anything was found.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".c", ".h", ".md", ".yaml", ".toml", ".jinja", ".css"}
SKIPPED = ("tests/fixtures/*", "examples/models/*", ".ci/check_words.py", ".ci/allowed_words.txt", "LICENSE")

WORDS = {  # what to find -> what to write
    r"(?<![Tt]here )\b(?:is|are|was|were|be) no "
    r"(?!longer\b|more\b|less\b|need\b|such\b|way\b|\w+er\b)": '"is not a ..."',
    r"\bthere (?:is|are|was|were) none\b": '"no such ..."',
    r"\bthat there (?:is|are) (?:none|no)\b": '"no such ..."',
    r"\b[Ww]hat is known\b": '"facts about ..."',
    r"\bbeside\b": '"next to", "with", "and"',
    r"\bbehind\b": '"after", "by", "from"',
    r"\b(?:stands?|stood|lies|lay) (?:in|at|on|there|for|beside|behind)\b": '"is in", "is stored in"',
    r"\b(?:is|are|was|were) told\b": '"is reported", "is documented in"',
    r"\b(?:it|that|which|this|who|file|table|header|test|pass|kernel|recipe) (?:wants?|asks?|tells?|knows?)\b": (
        '"requires", "needs", "reports", "records"'
    ),
    r"\b(?:nobody|whoever|somebody|anybody|everybody)\b": '"the caller", "unused"',
    r"\b(?:gone on with|is had|in vain|dear|dearer|dearest)\b": '"resumes", "runs in", "wasted", "expensive"',
    r"\bcomes? to (?!an end\b|life\b)": '"equals", "reaches"',
    r"(?:(?<![A-Za-z])(?:card|CARD)|Card)s?(?![a-z])": '"GPU"',
    r"(?:(?<![A-Za-z])(?:product|PRODUCT)|Product)s?(?![a-z])": '"matmul", "GEMM"',
    r"(?:(?<![A-Za-z])look-?up|Look-?up)s?(?![a-z])": '"gather"',
    r"(?:(?<![A-Za-z])(?:tail|TAIL)|Tail)s?(?![a-z])": '"sampling kernel", "rest"',
    r"\bthe promise\b": '"batch invariance"',
    r"\b(?:manners|in the room of|as it were)\b": "plain words",
}

MOST_COLUMNS = 120
_LINK = re.compile(r"\[[^\]]+\]: ")


def main(arguments: list[str]) -> int:
    """Print every finding as path:line: phrase -> replacement."""
    allowed = [line.split(": ", 1) for line in _lines(ROOT / ".ci/allowed_words.txt") if line and line[0] != "#"]
    num_found = 0
    for path in _files(arguments):
        name = path.relative_to(ROOT).as_posix()
        phrases = [phrase for pattern, phrase in allowed if fnmatch(name, pattern)]
        for number, phrase, instead in _findings(path, phrases):
            print(f"{name}:{number}: {phrase!r}: write {instead}")
            num_found += 1
        for number in long_lines(_lines(path)) if path.suffix == ".md" else ():
            print(f"{name}:{number}: prose beyond column {MOST_COLUMNS}: break the line")
            num_found += 1
    if num_found:
        print(f"{num_found} lines to rewrite; a phrase that is right goes into .ci/allowed_words.txt")
    return 1 if num_found else 0


def _findings(path: Path, allowed: list[str]) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(_lines(path), 1):
        for phrase in allowed:
            line = line.replace(phrase, "")
        for pattern, instead in WORDS.items():
            for match in re.finditer(pattern, line):
                yield number, match[0], instead


def long_lines(lines: Sequence[str]) -> Iterator[int]:
    """Yield the numbers of lines that are too long, but for tables, code and addresses of links."""
    is_code = False
    for number, line in enumerate(lines, 1):
        is_code ^= line.lstrip().startswith("```")
        is_prose = not (is_code or line.startswith("    ") or line.lstrip().startswith("|") or _LINK.match(line))
        if is_prose and len(line) > MOST_COLUMNS:
            yield number


def _files(arguments: list[str]) -> Iterator[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "--", *map(_absolute, arguments)]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        path = ROOT / name
        is_skipped = any(fnmatch(name, pattern) for pattern in SKIPPED)
        if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink() and not is_skipped:
            yield path


def _absolute(name: str) -> str:
    return str(Path(name).resolve())


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
