"""The demo corpus: English prose from the docstrings of installed packages, as domains of text and as tasks.

The sources are parsed and never imported. A document is a module; its paragraphs have no code, tables, markup
or lists of references."""

import ast
import gc
import importlib.util
import logging
import os
import re
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from inspect import cleandoc
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen
from tqdm import tqdm

from cpt.core.randomness import key
from cpt.core.schema import Allowed, Text, config, option
from cpt.data.sources.base import GENERAL, Source
from cpt.data.sources.examples import RawExample
from cpt.data.sources.files import stamp_files

log = logging.getLogger(__name__)
GENERAL_PACKAGES = ("stdlib", "numpy")
TASK_PACKAGES = {  # of each task
    "package": ("sympy", "networkx", "pandas", "numpy"),
    "sympy": ("sympy",),
    "networkx": ("networkx",),
    "pandas": ("pandas",),
}
TASK_CLASSES, TASK_EXAMPLES = 4, 300  # classes of a task, examples of a class
LEFT_OUT_FOLDERS = {
    "tests",
    "test",
    "_tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
    "_vendor",
    "site-packages",
    "dist-packages",
}
LEFT_OUT_SECTIONS = {"references", "reference", "bibliography", "see also"}
MIN_WORDS, MIN_LETTERS, MIN_FUNCTION_WORDS = 8, 0.82, 0.08
MIN_DOCUMENT_WORDS, MIN_SUMMARY_WORDS = 20, 5
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_ENGLISH = """a an and any are as at be been both but by can each for from given has have if in into is it its
    may must no not of on one or should such than that the their then these this those to used using was were
    when where whether which will with you your"""
_FUNCTION_WORDS = set(_ENGLISH.split())

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

_TEX = {
    "leq": "<=",
    "le": "<=",
    "geq": ">=",
    "ge": ">=",
    "cdot": "*",
    "times": "x",
    "dots": "...",
    "ldots": "...",
    "cdots": "...",
}
_TEX_STYLE = re.compile(r"\\(?:left|right|text\w*|operatorname|math\w+|[bB]igg?|quad)(?![a-zA-Z])|\\[,;! ]")
_MATH = re.compile(r":math:`([^`]+)`|\$+(?!\s)([^$]+?)(?<!\s)\$+(?!\w)")
_MARKUP = (  # a sign in every match, the pattern, its replacement
    ("]_", re.compile(r" ?\[#?(\w+)\]_"), r" [\1]"),
    ("[`", re.compile(r"\[`([^`\]]+)`\](?:\([^)]*\))?"), r"`\1`"),
    ("`~", re.compile(r"(?::[a-z:+-]+:)?`~(?:[^`<]*\.)?([^`.<]+)`"), r"\1"),
    (">`", re.compile(r"(?::[a-z:+-]+:)?`([^`<]+?)\s*<[^`>]*>`_{0,2}"), r"\1"),
    (":`", re.compile(r":[a-z][a-z:+-]*:`!?([^`]+)`"), r"\1"),
    ("``", re.compile(r"``(.+?)``"), r"\1"),
    ("`", re.compile(r"`([^`']+)`_{0,2}"), r"\1"),
    ("*", re.compile(r"(?<![\w*])\*{1,2}(\w(?:[^*]*\w)?[.:]?)\*{1,2}(?![\w*])"), r"\1"),
    ("\\", re.compile(r"\\([ *_`|])"), r"\1"),
)


@config
class InstalledDocs(Source):
    """Prose of the docstrings of installed packages, one document per module."""

    packages: Mapping[str, Sequence[str]] = option("packages of each domain")
    general: Annotated[tuple[Text, ...], MinLen(1), Allowed("a list of texts, one or more")] = option(
        "packages of the general text; stdlib: the standard library"
    )

    @property
    def names(self) -> list[str]:
        return [name for name in self.packages if name != GENERAL]

    def entries_of(self, name: str) -> tuple[str, ...]:
        return (f"packages.{name}",)

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        return read_docs(self.general if name == GENERAL else self.packages[name])

    def fingerprint(self, name: str) -> Any:
        return stamp_docs(self.general if name == GENERAL else self.packages[name])


def stamp_docs(packages: Sequence[str] = GENERAL_PACKAGES) -> Any:
    """The fingerprint of the docstrings of packages."""
    paths: list[Path] = []
    for package in packages:
        paths += find_modules(package)
    return stamp_files(paths)


def log_general_docs(reason: str) -> None:
    """Logs that this module provides the general text, and why: a model is then compared on text that its
    user has not chosen."""
    log.info("General text: docstrings of Python's standard library and numpy (%s)", reason)


def read_docs(packages: Sequence[str] = GENERAL_PACKAGES) -> Iterator[tuple[str, str]]:
    """(split, document) of the prose of each source file, a blank line between paragraphs; by default the
    general text of sources that have none of their own."""
    return (("train", "\n\n".join(paragraphs)) for _, paragraphs in read_documents_by_module(packages))


def find_modules(package: str) -> dict[Path, str]:
    """The source files of an installed package ("stdlib": Python's) without tests, sorted, each with its
    import name (of Python's own below stdlib). Raises ValueError if there are none."""
    sources = {}
    for root in find_package_roots(package):
        paths = [root] if root.is_file() and root.suffix == ".py" else []
        for folder, inner, names in os.walk(root):
            inner[:] = set(inner) - LEFT_OUT_FOLDERS
            paths += [Path(folder, name) for name in names if name.endswith(".py")]
        for path in sorted(paths):
            parts = path.relative_to(root).with_suffix("").parts if path != root else ()
            sources[path] = ".".join([package, *(part for part in parts if part != "__init__")])
    if not sources:
        raise ValueError(
            f"domains.packages: {package} is invalid: it has no Python sources. "
            "Allowed: stdlib, or the import name of an installed package"
        )
    return sources


def find_package_roots(package: str) -> list[Path]:
    """The folders of a package, or the file that it is."""
    if package == "stdlib":
        return [Path(sysconfig.get_paths()["stdlib"])]
    # Only a top-level name is found without importing: find_spec("a.b") imports a.
    if not package.isidentifier():
        return []
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [Path(location) for location in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.origin and spec.has_location else []


def read_documents_by_module(packages: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The module (pandas.core.frame) and the paragraphs of each file, each once; raises ValueError as
    `modules`."""
    # Many docstrings may have the same paragraph: it counts where it is read first.
    seen_paragraphs: set[str] = set()
    sources = {package: find_modules(package) for package in packages}  # all of them, before any is read
    for package, package_modules in sources.items():
        bar = tqdm(package_modules.items(), desc=f"reading {package}", disable=None, leave=False)
        for path, module in bar:
            for texts in read_file_docstrings(path):
                paragraphs = dict.fromkeys(chain.from_iterable(map(extract_prose, texts)))
                new_paragraphs = [paragraph for paragraph in paragraphs if paragraph not in seen_paragraphs]
                seen_paragraphs.update(paragraphs)
                if sum(len(paragraph.split()) for paragraph in new_paragraphs) >= MIN_DOCUMENT_WORDS:
                    yield module, new_paragraphs


def read_file_docstrings(path: Path) -> list[list[str]]:
    """The docstrings of each document in a file: one document, in the language reference one per topic."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
    except (SyntaxError, ValueError):  # an encoding that is unknown or does not hold
        return []
    if path.parts[-2:] != ("pydoc_data", "topics.py"):
        return [list(extract_docstrings(source))]
    assigned = (node for node in ast.parse(source).body if isinstance(node, ast.Assign))
    topics = next(node.value for node in assigned if ast.unparse(node.targets[0]) == "topics")
    return [[topic] for topic in ast.literal_eval(topics).values()]


def extract_docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module, its classes and its functions, in file order; none if it does not parse."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, SyntaxWarning):  # before and since Python 3.12
            warnings.filterwarnings("ignore", r".*invalid (?:octal )?escape sequence", category)
        collects = gc.isenabled()
        gc.disable()  # it takes a sixth of the time to read, and finds nothing to free
        try:
            stack: list[ast.AST] = [ast.parse(source)]
        except (SyntaxError, ValueError):  # packages ship templates, null bytes, other Pythons' syntax
            return
        finally:
            if collects:
                gc.enable()

    # ast.walk goes level by level. Here the bodies of a node go on the stack in reverse: what is first in the
    # file is taken from it first.
    while stack:
        node = stack.pop()
        if isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield text
        for name in ("cases", "finalbody", "orelse", "handlers", "body"):
            stack += reversed(getattr(node, name, ()))


def extract_prose(text: str) -> list[str]:
    """The prose paragraphs of one docstring, each on one line and without reST markup."""
    lines = select_running_lines(map(str.rstrip, cleandoc(text).splitlines()))
    return list(filter(is_prose, map(reduce_to_words, join_paragraphs(lines))))


def select_running_lines(lines: Iterable[str]) -> Iterator[str]:
    """Lines of a docstring; empty for what is not running text: code blocks, doctests and tables (until a
    blank line), literal blocks and directives (but notes, warnings and version changes), headings,
    references."""
    text_lines = blank_blocks(blank_tables(lines))
    is_left_out = False
    for line, next_line in pairwise([*text_lines, ""]):
        is_heading = bool(line and _UNDERLINE.match(next_line))
        if is_heading:
            is_left_out = line.strip().lower() in LEFT_OUT_SECTIONS
        yield "" if is_left_out or is_heading or _UNDERLINE.match(line) else line


def blank_tables(lines: Iterable[str]) -> Iterator[str]:
    """Lines; empty for those of fenced code, doctests and tables."""
    is_fenced = False
    is_table = False
    for line in lines:
        # A fence opens or closes a block, and belongs to it.
        is_fence = bool(_FENCE.match(line))
        if is_fence:
            is_fenced = not is_fenced
        is_code = is_fenced or is_fence

        # A doctest or table ends with a blank line.
        is_blank = is_code or not line
        is_table = not is_blank and (is_table or bool(_DOCTEST_OR_TABLE.match(line)))
        yield "" if is_blank or is_table or _ROW.match(line) else line


def blank_blocks(lines: Iterable[str]) -> list[str]:
    """Lines; empty for those of literal blocks and directives, which deeper lines continue. A note becomes a
    list item."""
    text_lines = []
    block_indent = None  # of the line that a block belongs to
    for line in lines:
        if block_indent is not None and (not line or _indent(line) > block_indent):
            text_lines.append("")
            continue

        # A line that is not deeper ends the block, and may begin another one.
        block_indent = None
        note = _NOTE.match(line)
        is_directive = bool(_DIRECTIVE.match(line))
        if note:
            text_lines.append(f"{note[1]}* {note[2]}" if note[2] else "")
        elif is_directive:
            block_indent = _indent(line)
            text_lines.append("")
        elif line.endswith("::"):
            block_indent = _indent(line)
            text_lines.append(line[:-1])
        else:
            text_lines.append(line)
    return text_lines


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def join_paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Joins wrapped lines; a blank line, a list item or another indentation starts the next paragraph."""
    current: list[str] = []
    for line in [*lines, ""]:
        if current and (not line or starts_paragraph(line, current)):
            joined = " ".join(current_line.strip() for current_line in current)
            yield _ITEM.sub("", joined, count=1)
            current = []
        if line:
            current.append(line)


def starts_paragraph(line: str, current: Sequence[str]) -> bool:
    """Whether a line is the first of a paragraph, after the lines of the current one."""
    last = current[-1]
    if _ITEM.match(line) or _TERM.match(line) or _TERM.match(last):
        return True
    is_wrapped = len(last) > 50 and not _SENTENCE_END.search(last)  # a line break that means nothing
    if _LABEL.match(line) and not is_wrapped:
        return True

    deeper = _indent(line) - _indent(last)
    if deeper == 0:
        return False
    is_hanging = len(current) == 1 and (_ITEM.match(last) or _LABEL.match(last))
    is_continued = is_hanging or (is_wrapped and not line.lstrip()[0].isupper())
    return deeper < 0 or not is_continued


def reduce_to_words(text: str) -> str:
    """The text with roles, quotes of code, emphasis, links and simple TeX reduced to their words."""

    def plain_math(match: re.Match[str]) -> str:
        tex = re.sub(r"\{(\w)\}", r"\1", _TEX_STYLE.sub("", match[1] or match[2]))
        return re.sub(r"\\([a-zA-Z]+)", lambda command: _TEX.get(command[1], command[1]), tex)

    if "$" in text or ":math:" in text:
        text = _MATH.sub(plain_math, text)
    for sign, pattern, replacement in _MARKUP:
        if sign in text:  # much faster than a search by the expression
            text = pattern.sub(replacement, text)
    return " ".join(text.split())


def is_prose(text: str) -> bool:
    """Whether it is long, mostly letters, worded like English and neither opens nor ends in mid-sentence."""
    words = text.split()
    visible = "".join(words)
    if len(words) < MIN_WORDS or _NOT_ENGLISH.search(text) or _TERM.match(text):
        return False
    if sum(map(str.isalpha, visible)) < MIN_LETTERS * len(visible):
        return False
    if sum(word.lower() in _FUNCTION_WORDS for word in words) < MIN_FUNCTION_WORDS * len(words):
        return False
    is_ended = bool(_SENTENCE_END.search(text))
    if text[0].islower() or text[0] == "_":
        return is_ended and bool(_BARE_NAME.match(text))
    return is_ended or not (text.endswith(",") or words[-1].lower() in _FUNCTION_WORDS)


def find_subpackages(documents: Iterable[tuple[str, Sequence[str]]]) -> dict[str, str]:
    """The first-level sub-package of each module, by the paragraphs of each; one that holds more than half of
    all paragraphs is divided into its own, as pandas.core is."""
    num_paragraphs = Counter[tuple[str, ...]]()  # by the first components of a module's name
    total = 0
    components_of = {}
    for module, paragraphs in documents:
        components = tuple(module.split("."))
        components_of[module] = components
        for depth in range(2, len(components)):
            num_paragraphs[components[:depth]] += len(paragraphs)
        total += len(paragraphs)

    labels = {}
    for module, components in components_of.items():
        depth = 2
        while depth < len(components) and 2 * num_paragraphs[components[:depth]] > total:
            depth += 1
        labels[module] = ".".join(components[:depth])
    return labels


def compile_label_pattern(labels: Iterable[str]) -> re.Pattern[str]:
    """What matches the names in labels, as words or as words of an identifier."""
    escaped: set[str] = set()
    for label in labels:
        escaped.update(map(re.escape, label.split(".")))
    names = sorted(escaped, key=len, reverse=True)
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(names)})(?![^\W_])", re.IGNORECASE)


def make_package_task(name: str) -> Iterator[RawExample]:
    """First paragraphs of docstrings with their package or part of one, whose names are blanked out."""
    labelled: list[tuple[str, str]] = []  # paragraph, label
    for package in TASK_PACKAGES[name]:
        summaries = list_package_summaries(package)
        labels = find_subpackages((module, [text]) for module, text in summaries)
        for module, text in summaries:
            label = package if name == "package" else labels[module].rpartition(".")[2]
            labelled.append((text, label))

    sizes = Counter(label for _, label in labelled)
    classes = sorted(label for label, _ in sizes.most_common(TASK_CLASSES))
    class_names = compile_label_pattern(classes)
    num_examples = Counter[str]()
    for text, label in sorted(labelled, key=lambda example: key("package task", *example)):
        num_examples[label] += 1
        if label in classes and num_examples[label] <= TASK_EXAMPLES:
            yield RawExample({"text": class_names.sub("_", text)}, label)


@cache
def list_package_summaries(package: str) -> list[tuple[str, str]]:
    """The module and the first paragraph of each docstring of a package, each paragraph once."""
    module_of_summary: dict[str, str] = {}
    bar = tqdm(find_modules(package).items(), desc=f"reading {package}", disable=None, leave=False)
    for path, module in bar:
        for text in chain.from_iterable(read_file_docstrings(path)):
            lines = map(str.rstrip, cleandoc(text).splitlines())
            summary = reduce_to_words(next(join_paragraphs(lines), ""))
            if len(summary.split()) >= MIN_SUMMARY_WORDS:
                module_of_summary.setdefault(summary, module)
    return [(module, summary) for summary, module in module_of_summary.items()]
