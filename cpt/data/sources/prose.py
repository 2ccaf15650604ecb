"""English prose of docstrings: paragraphs without code, tables, markup and lists of references."""

import re
from collections.abc import Iterable, Iterator, Sequence
from inspect import cleandoc
from itertools import pairwise

LEFT_OUT_SECTIONS = frozenset(["references", "reference", "bibliography", "see also"])
MIN_WORDS, MIN_LETTERS, MIN_FUNCTION_WORDS, MIN_DOCUMENT_WORDS = 8, 0.82, 0.08, 20
_FUNCTION_WORDS = frozenset(
    ["a", "an", "and", "any", "are", "as", "at", "be", "been", "both", "but", "by", "can", "each", "for"]
    + ["from", "given", "has", "have", "if", "in", "into", "is", "it", "its", "may", "must", "no", "not"]
    + ["of", "on", "one", "or", "should", "such", "than", "that", "the", "their", "then", "these", "this"]
    + ["those", "to", "used", "using", "was", "were", "when", "where", "whether", "which", "will", "with"]
    + ["you", "your"]
)
_AS_ASCII = str.maketrans("\u0130\u0131\u017f", "iis")  # what patterns that ignore case take for i and s

_FENCE = re.compile(r" *```\w*$")
_DOCTEST_OR_TABLE = re.compile(r" *(?:>>> |In \[\d|[=-]{2,}(?: +[=-]{2,})+$|\+[-=+]{2,}\+$)")
_ROW = re.compile(r" *\|.*\|$|.*[^\s.!?:] {3,}\S|.*\S {4,}\S|.*::=")
_NOTE = re.compile(
    r"( *)\.\. (?:note|warning|caution|tip|hint|important|deprecated|versionadded|versionchanged)::"
    r"\s*(?:v?\d[\w.]*:?(?:\s+|$))?(.*)"
)
_DIRECTIVE = re.compile(r" *\.\.(?: |$)")
_UNDERLINE = re.compile(r" *([=~^*#\"+_`-])\1{2,}$")
_ITEM = re.compile(
    r"^ *(?:[-*+•]|\(?\d{1,2}[.)]|\(?[a-zA-Z]\)|:\w+(?: [^:]*)?:|\*{0,2}\w+ \([^)]*\):) +(?=\S)"
)
_LABEL = re.compile(r" *[\"'`*]{0,2}[\w./-]+[\"'`*]{0,2}(?:\([^)]*\))?(?::| --?-?| ->) +(?=\S+ \S+ \S)")
_TERM = re.compile(r" *[*`\"']{0,3}[\w.]+[*`\"']{0,3}(?:, ?[*`]{0,3}[\w.]+[*`]{0,3})* :(?: |$)|@\w+ ")
_SENTENCE_END = re.compile(r"[.!?:;][\"'”’`)\]]*$")
_BARE_NAME = re.compile(  # a lower-case name can open a sentence: "axis is ...", "foo() returns ..."
    r"(?!(?:and|but|it|or|that|there|this|what|where|which)\b)[\w.]+(?:\(\))? "
    r"(?:is|are|was|can|may|must|should|will|does|has|have|takes|gives|returns|uses|controls|specifies|allows)\b"
)
_NOT_ENGLISH = re.compile(
    r"://|``|>>>|::|\\[a-z]{2}|[\w^)]\{|%\(\w+\)|\{\w*\}"  # addresses, code, TeX, templates
    r"|^(?:[#*=<>/|+~\\-]|\[?\w+\] |\d+ ?[:>/] )"  # comments, notes, keys
    r"|^(?:\S+ (?:=|->|--+) |[\"'(]\S+ ?(?:-|:) ?(?![A-Z])|\([^)]*\) ?:)"  # definitions
    r"|\b(?:pp?\. ?\d|[Vv]ol\. ?\d|Journal of|Proc\. |ISBN|doi:).*\b(?:19|20)\d\d\b"  # bibliography
    r"|\b(?:19|20)\d\d\b.*\b(?:pp?\. ?\d|[Vv]ol\. ?\d|ISBN|doi:)"
)

_TEX = {"leq": "<=", "le": "<=", "geq": ">=", "ge": ">=", "cdot": "*", "times": "x"}
_TEX |= dict.fromkeys(["dots", "ldots", "cdots"], "...")
_TEX_STYLE = re.compile(r"\\(?:left|right|text\w*|operatorname|math\w+|[bB]igg?|quad)(?![a-zA-Z])|\\[,;! ]")
_MATH = re.compile(r":math:`([^`]+)`|\$+(?!\s)([^$]+?)(?<!\s)\$+(?!\w)")
_MARKUP = [  # what stands in every match, the pattern, what stays of it
    (sign, re.compile(pattern), replacement)
    for sign, pattern, replacement in (
        ("]_", r" ?\[#?(\w+)\]_", r" [\1]"),
        ("[`", r"\[`([^`\]]+)`\](?:\([^)]*\))?", r"`\1`"),
        ("`~", r"(?::[a-z:+-]+:)?`~(?:[^`<]*\.)?([^`.<]+)`", r"\1"),
        (">`", r"(?::[a-z:+-]+:)?`([^`<]+?)\s*<[^`>]*>`_{0,2}", r"\1"),
        (":`", r":[a-z][a-z:+-]*:`!?([^`]+)`", r"\1"),
        ("``", r"``(.+?)``", r"\1"),
        ("`", r"`([^`']+)`_{0,2}", r"\1"),
        ("*", r"(?<![\w*])\*{1,2}(\w(?:[^*]*\w)?[.:]?)\*{1,2}(?![\w*])", r"\1"),
        ("\\", r"\\([ *_`|])", r"\1"),
    )
]


def prose(text: str) -> list[str]:
    """The prose paragraphs of one docstring, each on one line and without reST markup."""
    lines = [line.rstrip() for line in cleandoc(text).splitlines()]
    running = _without_headings(_without_blocks(_without_runs(_without_fences(lines))))
    plain = (plain_text(paragraph) for paragraph in paragraphs_of(running))
    return [paragraph for paragraph in plain if _is_prose(paragraph)]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _without_fences(lines: Iterable[str]) -> Iterator[str]:
    """Empties Markdown code blocks."""
    inside = False
    for line in lines:
        fence = _FENCE.match(line)
        inside = inside != bool(fence)
        yield "" if inside or fence else line


def _without_runs(lines: Iterable[str]) -> Iterator[str]:
    """Empties doctests and tables: both last until a blank line."""
    inside = False
    for line in lines:
        inside = bool(line) and (inside or bool(_DOCTEST_OR_TABLE.match(line)))
        yield "" if inside or _ROW.match(line) else line


def _without_blocks(lines: Iterable[str]) -> Iterator[str]:
    """Empties literal blocks and directives; the text of notes, warnings and version changes stays."""
    opened = None
    for line in lines:
        if opened is not None and (not line or _indent(line) > opened):
            yield ""
            continue
        note, directive = _NOTE.match(line), _DIRECTIVE.match(line)
        literal = line.endswith("::") and not directive
        opened = _indent(line) if literal or (directive and not note) else None
        if note:  # as a list item, so that deeper lines go on with it
            yield f"{note[1]}* {note[2]}" if note[2] else ""
        else:
            yield "" if directive else line[:-1] if literal else line


def _without_headings(lines: Iterable[str]) -> Iterator[str]:
    """Empties underlined headings, and the sections that list references."""
    left_out = False
    for line, below in pairwise([*lines, ""]):
        heading = bool(line and _UNDERLINE.match(below))
        if heading:
            left_out = line.strip().lower() in LEFT_OUT_SECTIONS
        yield "" if left_out or heading or _UNDERLINE.match(line) else line


def paragraphs_of(lines: Iterable[str]) -> Iterator[str]:
    """Joins wrapped lines; a blank line, a list item or another indentation starts the next paragraph."""
    current: list[str] = []
    for line in lines:
        if current and not (line and _goes_on(current, line)):
            yield _joined(current)
            current = []
        if line:
            current.append(line)
    if current:
        yield _joined(current)


def _goes_on(current: Sequence[str], line: str) -> bool:
    """Whether the line continues the paragraph."""
    last = current[-1]
    wrapped = len(last) > 50 and not _SENTENCE_END.search(last)  # a line break that certainly means nothing
    if _ITEM.match(line) or _TERM.match(line) or _TERM.match(last) or (_LABEL.match(line) and not wrapped):
        return False
    deeper = _indent(line) - _indent(last)
    hangs = len(current) == 1 and bool(_ITEM.match(last) or _LABEL.match(last))
    return deeper == 0 or (deeper > 0 and (hangs or (wrapped and not line.lstrip()[0].isupper())))


def _joined(lines: Sequence[str]) -> str:
    return _ITEM.sub("", " ".join(line.strip() for line in lines), count=1)


def plain_text(text: str) -> str:
    """The text with roles, quotes of code, emphasis, links and simple TeX reduced to their words."""
    if "$" in text or ":math:" in text:
        text = _MATH.sub(lambda match: _plain_math(match[1] or match[2]), text)
    for sign, pattern, replacement in _MARKUP:
        if sign in text:
            text = pattern.sub(replacement, text)
    return " ".join(text.split())


def _plain_math(tex: str) -> str:
    tex = re.sub(r"\{(\w)\}", r"\1", _TEX_STYLE.sub("", tex))
    return re.sub(r"\\([a-zA-Z]+)", lambda match: _TEX.get(match[1], match[1]), tex)


def _is_prose(text: str) -> bool:
    """Whether it is long, mostly letters, worded like English and neither opens nor ends in mid-sentence."""
    words = text.split()
    if len(words) < MIN_WORDS or _NOT_ENGLISH.search(text) or _TERM.match(text):
        return False
    visible = "".join(words)
    if sum(map(str.isalpha, visible)) < MIN_LETTERS * len(visible):
        return False
    if sum(map(_is_function_word, words)) < MIN_FUNCTION_WORDS * len(words):
        return False
    ended = bool(_SENTENCE_END.search(text))
    if text[0].islower() or text[0] == "_":
        return ended and bool(_BARE_NAME.match(text))
    return ended or not (text.endswith(",") or _is_function_word(words[-1]))


def _is_function_word(word: str) -> bool:
    return (word if word.isascii() else word.translate(_AS_ASCII)).lower() in _FUNCTION_WORDS
