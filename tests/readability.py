"""Counts the constructs at which a reader of Python has to stop, by folder.

    python tests/readability.py                  a table: constructs per 1,000 code lines of each folder
    python tests/readability.py cpt/trainer      every occurrence in a folder or file, as file:line
    python tests/readability.py --lower          lowers the bounds in tests/readability.json to today's counts

`tests/test_readability.py` compares the counts with the bounds, which may only fall. The count is a mirror:
what matters is whether a function can be explained after one reading (CONTRIBUTING.md, "Style"). An empty
name is not improved by another one that is missing in the list.
"""

import argparse
import ast
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
BOUNDS = ROOT / "tests" / "readability.json"
TOP_FOLDERS = ("cpt", "tests", "benchmarks")

# Words that would fit any variable: they say nothing of its content.
EMPTY_NAMES = {
    "about", "above", "added", "again", "ahead", "alike", "alone", "apart", "around", "asked", "away",
    "back", "began", "begun", "below", "beside", "both", "done", "each", "ended", "every", "few",
    "found", "given", "gone", "held", "here", "how", "inside", "just", "kept", "known", "later",
    "least", "left", "less", "made", "many", "mine", "more", "most", "moved", "much", "near", "needed",
    "noted", "now", "once", "one", "ones", "only", "other", "others", "own", "place", "places",
    "present", "rest", "said", "same", "seen", "shown", "since", "some", "still", "taken", "telling",
    "then", "there", "thing", "things", "told", "took", "towards", "tried", "used", "wanted", "way",
    "ways", "what", "when", "whole", "whose", "why", "within", "without", "written",
}  # fmt: skip
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mark:
    """One construct at which a reader stops."""

    kind: str
    line: int
    detail: str = ""


class MarkFinder(ast.NodeVisitor):
    """Collects the marks of one module in `marks`."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.comprehension_depth = 0
        self.message_names: list[set[str]] = []  # by enclosing function: names assigned a text for a message

    def add(self, kind: str, node: ast.AST, detail: str = "") -> None:
        self.marks.append(Mark(kind, getattr(node, "lineno", 0), detail))

    # Names and assignments

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.add("walrus", node, node.target.id)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES:
            self.add("empty name", node, node.id)

    def visit_arg(self, node: ast.arg) -> None:
        if node.arg in EMPTY_NAMES:
            self.add("empty name", node, node.arg)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple | ast.List):
                self.check_unpacking(node, target)
            elif isinstance(target, ast.Name):
                self.record_message(target.id, node.value)
                if keeps_name(target.id, node.value):
                    self.add("conditional", node, "keeps the name")
        self.generic_visit(node)

    def check_unpacking(self, node: ast.Assign, target: ast.Tuple | ast.List) -> None:
        """Several targets may take what one call returns, be swapped, or be constants and names."""
        if any(isinstance(element, ast.Tuple | ast.List) for element in target.elts):
            self.add("packed assignment", node, "nested targets")
        elif isinstance(node.value, ast.Tuple):
            is_swap = ast.unparse(target) == ast.unparse(node.value)
            if not is_swap and not all(map(is_constant_or_name, node.value.elts)):
                self.add("packed assignment", node, "tuple")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name) and node.value is not None:
            self.record_message(node.target.id, node.value)
            is_bag = ast.unparse(node.annotation) in ("dict[str, Any]", "dict[str, object]")
            if is_bag and isinstance(node.value, ast.Dict | ast.BinOp):
                self.add("dict as arguments", node, "dict[str, Any]")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.record_message(node.target.id, node.value)
        if isinstance(node.op, ast.BitOr) and isinstance(node.value, ast.Dict | ast.DictComp | ast.IfExp):
            self.add("dict as arguments", node, "|=")
        self.generic_visit(node)

    # Conditions

    def visit_IfExp(self, node: ast.IfExp) -> None:
        branches = (node.test, node.body, node.orelse)
        if any(contains(branch, ast.IfExp) for branch in branches):
            self.add("conditional", node, "nested")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        operands = (node.left, node.right)
        if isinstance(node.op, ast.Mult):
            is_repeated_text = any(is_text_or_list(operand) for operand in operands)
            has_count = any(is_number(operand) for operand in operands)
            if any(map(is_condition, operands)) or (is_repeated_text and not has_count):
                self.add("arithmetic with a condition", node, "times")
        elif isinstance(node.op, ast.Add | ast.Sub) and any(map(is_condition, operands)):
            self.add("arithmetic with a condition", node, "plus")
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        bounds = [bound for bound in (node.lower, node.upper) if bound is not None]
        if any(map(is_condition, bounds)):
            self.add("arithmetic with a condition", node, "slice")
        self.generic_visit(node)

    # Loops

    def visit_For(self, node: ast.For) -> None:
        if isinstance(node.iter, ast.GeneratorExp | ast.ListComp | ast.IfExp):
            self.add("comprehension", node, "in a for head")
        self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        if not isinstance(node, COMPREHENSIONS):
            super().generic_visit(node)
            return
        if len(node.generators) > 1:
            self.add("comprehension", node, "two for")
        elif self.comprehension_depth > 0:
            self.add("comprehension", node, "nested")
        self.comprehension_depth += 1
        super().generic_visit(node)
        self.comprehension_depth -= 1

    # Calls

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            is_unpacked = keyword.arg is None
            if is_unpacked and isinstance(keyword.value, ast.Dict | ast.DictComp | ast.BinOp | ast.IfExp):
                self.add("dict as arguments", node, "**{…}")
        self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> None:
        is_product = isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Mult)
        if is_product or isinstance(node.value, ast.Tuple | ast.List):
            self.add("dict as arguments", node, "*(…)")
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None and isinstance(value, ast.Dict | ast.DictComp | ast.IfExp):
                self.add("dict as arguments", value, "**{…} in a dict")
        self.generic_visit(node)

    # Errors

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.message_names.append(set())
        self.generic_visit(node)
        self.message_names.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def record_message(self, name: str, value: ast.AST) -> None:
        """Notes that a name holds a text with spaces, as messages are."""
        texts = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        if self.message_names and any(map(is_message, texts)):
            self.message_names[-1].add(name)

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call) and self.message_names:
            names = set().union(*map(names_in, node.exc.args))
            if names & self.message_names[-1]:
                self.add("assembled error", node)
        self.generic_visit(node)


def contains(node: ast.AST, kind: type[ast.AST]) -> bool:
    return any(isinstance(inner, kind) for inner in ast.walk(node))


def names_in(node: ast.AST) -> list[str]:
    return [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]


def keeps_name(name: str, value: ast.AST) -> bool:
    """Whether `name = name if … else …`, or the other way round."""
    if not isinstance(value, ast.IfExp):
        return False
    return any(isinstance(end, ast.Name) and end.id == name for end in (value.body, value.orelse))


def is_constant_or_name(node: ast.AST) -> bool:
    """Whether an expression is a constant, a name, an attribute of a name, or an empty container."""
    while isinstance(node, ast.Attribute):
        node = node.value
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return not node.elts
    if isinstance(node, ast.Dict):
        return not node.keys
    return isinstance(node, ast.Constant | ast.Name)


def is_text_or_list(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, ast.List | ast.Tuple | ast.JoinedStr)


def is_message(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and " " in node.value
    return isinstance(node, ast.JoinedStr)


def is_condition(node: ast.AST) -> bool:
    """Whether an expression is clearly a truth value."""
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.BoolOp):
        return all(map(is_condition, node.values))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("bool", "isinstance", "any", "all", "callable", "hasattr")
    if isinstance(node, ast.Name):
        return node.id.startswith(("is_", "has_", "needs_"))
    return isinstance(node, ast.Attribute) and node.attr.startswith(("is_", "has_", "needs_"))


def is_number(node: ast.AST) -> bool:
    """Whether an expression is a count, so that a text may be repeated by it."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int) and not isinstance(node.value, bool)
    if isinstance(node, ast.BoolOp | ast.Compare):
        return False
    return not is_text_or_list(node) and not is_condition(node)


def find_marks(source: str) -> list[Mark]:
    """The marks of a module, by line."""
    finder = MarkFinder()
    finder.visit(ast.parse(source))
    return sorted(finder.marks, key=lambda mark: mark.line)


def count_code_lines(source: str) -> int:
    """Lines that are neither blank nor a comment nor of a docstring."""
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            statement = node.body[0] if node.body else None
            if isinstance(statement, ast.Expr) and is_text_or_list(statement.value):
                docstring_lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))

    lines = enumerate(source.splitlines(), 1)
    code = [line.strip() for number, line in lines if number not in docstring_lines]
    return sum(1 for line in code if line and not line.startswith("#"))


def list_files(folder: Path) -> Iterator[Path]:
    yield from [folder] if folder.is_file() else sorted(folder.rglob("*.py"))


def name_folder(path: Path) -> str:
    """The folder to which a file is counted: of two levels at most, as `cpt/data` or `tests`."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: min(2, len(parts) - 1)])


def count_by_folder() -> dict[str, tuple[int, int]]:
    """Marks and code lines of each folder."""
    num_marks: Counter[str] = Counter()
    num_lines: Counter[str] = Counter()
    for top_folder in TOP_FOLDERS:
        for path in list_files(ROOT / top_folder):
            source = path.read_text(encoding="utf-8")
            folder = name_folder(path)
            num_marks[folder] += len(find_marks(source))
            num_lines[folder] += count_code_lines(source)
    return {folder: (num_marks[folder], num_lines[folder]) for folder in sorted(num_lines)}


def load_bounds() -> dict[str, int]:
    """By folder, the most marks that it may have."""
    bounds: dict[str, int] = json.loads(BOUNDS.read_text(encoding="utf-8"))
    return bounds


def lower_bounds() -> None:
    """Writes today's counts where they are below the bounds; adds folders that have none."""
    bounds = load_bounds() if BOUNDS.exists() else {}
    counts = {folder: num_marks for folder, (num_marks, _) in count_by_folder().items()}
    lowered = {folder: min(count, bounds.get(folder, count)) for folder, count in counts.items()}
    BOUNDS.write_text(json.dumps(lowered, indent=1) + "\n", encoding="utf-8")


def print_table() -> None:
    print(f"{'folder':24} {'code lines':>10} {'marks':>6} {'per 1,000':>9}")
    for folder, (num_marks, num_lines) in count_by_folder().items():
        print(f"{folder:24} {num_lines:10,} {num_marks:6} {1000 * num_marks / max(1, num_lines):9.1f}")


def print_marks(folder: Path) -> None:
    for path in list_files(folder):
        for mark in find_marks(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(ROOT)}:{mark.line}: {mark.kind} {mark.detail}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", type=Path, help="folder or file whose marks are listed")
    parser.add_argument("--lower", action="store_true", help="lower the bounds to today's counts")
    arguments = parser.parse_args()

    if arguments.lower:
        lower_bounds()
    elif arguments.path is not None:
        print_marks(arguments.path.resolve())
    else:
        print_table()


if __name__ == "__main__":
    main()
