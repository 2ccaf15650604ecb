"""What the documents name is there: files, tests, links, commands with their options, choices and values."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from cpt.contrib.wandb_tools.rebuild import build_parser
from cpt.evaluation.scores import VERSION
from cpt.report import report_parser
from cpt.reporting.load_runs import FILTERS
from tests.conftest import ROOT
from tests.support.site import program

README, DOCS, CONF = ROOT / "README.md", ROOT / "docs", ROOT / "conf"
MORE = ("CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
DOCUMENTS = [README, *(ROOT / name for name in MORE), *sorted(DOCS.glob("*.md"))]
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
WRITTEN_BY_THE_READER = {"cpt/methods/l1.py", "conf/method/l1.yaml"}
CHOSEN_BY_THE_READER = {("method", "mine"), ("experiment", "first"), ("experiment", "manuals")}
EXAMPLES = {("experiment", path.stem) for path in (DOCS / "examples" / "experiment").glob("*.yaml")}
LONGEST = 120  # lines of the README
OF_PROGRAMS = ("options.md", "support.md")  # written from what there is, as tests/test_site.py sees
OF_EXTRAS = {"mkdocs"}
OF_WANDB = {"--append"}  # that it no longer has this option is what is told
CONFIG_ON_WANDB = {"cpt.label", "cpt.measured", "cpt.group", "cpt.order", "cpt.texts", "cpt.versions"}
GROUPS = sorted({path.parent.relative_to(CONF).as_posix() for path in CONF.rglob("*/*.yaml")})
CHOICE = re.compile(rf"\+?({'|'.join(GROUPS)})(?:@[\w.]+)?=([\w,|]+)")
OPTION = re.compile(rf"\+?((?:{'|'.join(g.replace('/', '[.]') for g in GROUPS)}|freeze)(?:\.\w+)+)(?:=.*)?")
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def told(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def lines(path: Path) -> list[str]:
    """What stands in blocks of code; a line that ends with a backslash goes on."""
    blocks = re.findall(r"^```bash\n(.*?)^```", told(path), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def spans(path: Path) -> list[str]:
    """What stands in backquotes within the prose, and the lines of code."""
    prose = re.sub(r"^```.*?^```", "", told(path), flags=re.DOTALL | re.MULTILINE)
    return [*re.findall(r"`([^`\n]+)`", prose), *lines(path)]


def words(path: Path) -> Iterator[str]:
    """The words of code, without the quotes around some."""
    yield from (word.strip("'\"") for span in spans(path) for word in span.split())


def commands(path: Path, program: str) -> list[list[str]]:
    """The arguments of each call of a program."""
    calls = [call for span in spans(path) for call in span.split("&&") if program in call]
    return [shlex.split(call.split(program, 1)[1], comments=True) for call in calls]


def keys(tree: dict, prefix: str = "") -> set[str]:
    inner = (keys(value, f"{prefix}{key}.") for key, value in tree.items() if isinstance(value, dict))
    return {f"{prefix}{key}" for key in tree}.union(*inner)


def options() -> set[str]:
    """The dotted keys of conf, of all choices together."""
    found = keys(yaml.safe_load(told(CONF / "config.yaml")))
    for path in CONF.rglob("*/*.yaml"):
        group = path.parent.relative_to(CONF).as_posix().replace("/", ".")
        group = group.removesuffix(".parts").removesuffix(".protocol")  # composed into the group's choices
        package = re.match(r"# @package ([\w.]+)", told(path))
        prefix = f"{package[1] if package else group}.".replace("_global_.", "")
        found |= keys(yaml.safe_load(told(path)), prefix)
    return found


def as_in_conf(key: str) -> str:
    """A task's own value is one of all tasks; a choice within a method is one of its own group; callbacks and
    loggers have any name."""
    key = re.sub(r"^(callbacks|logger)\.mine\b.*", "callbacks.lr_monitor", key)
    return re.sub(r"^endtask\.tasks\.\w+\.", "endtask.", key).replace("method.routing.", "routing.")


def is_there(name: str) -> bool:
    """Whether a dotted name is a module's, or that of a function or class at the end of one; nothing of it is
    imported."""
    file, _, last = name.replace(".", "/").rpartition("/")
    whole, outer = ROOT / f"{file}/{last}", ROOT / f"{file}.py"
    within = outer.exists() and re.search(rf"^(def|class) {last}\b", told(outer), re.MULTILINE)
    return whole.is_dir() or whole.with_suffix(".py").exists() or bool(within)


def missing(found, is_known):
    return {each for each in found if not is_known(each)}


@each_document
def test_tests_files_links_programs_and_extras_that_are_named_exist(path):
    text, there = told(path), lambda name: (ROOT / name).exists()
    named = [word.rstrip("/") for word in re.findall(r"`([^`\n]+)`", text)]
    tests = {name for name in named if re.fullmatch(r"test_\w+", name)}
    assert missing(tests, lambda name: f"def {name}(" in TESTS) == set()
    files = {name for name in named if re.fullmatch(r"(cpt|conf|tests|benchmarks|docs)/[\w/.]+", name)}
    assert missing(files - WRITTEN_BY_THE_READER, there) == set()
    links = re.findall(r"\]\(([^)#:\s]+)[^):]*\)", text)
    assert missing(links, lambda link: (path.parent / link).exists()) == set()
    modules = set(re.findall(r"python -m ([\w.]+)", text))
    assert missing(modules - OF_EXTRAS, find_spec) == set()
    assert missing(re.findall(r"python ([\w/]+\.py)", text), there) == set()
    names = {name for name in spans(path) if re.fullmatch(r"cpt(\.\w+)+", name)} - CONFIG_ON_WANDB
    assert missing(names, is_there) == set()
    extras = tomllib.loads(told(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    assert set(re.findall(r"pip install -e ['\"]\.\[(\w+)\]", text)) <= set(extras)


@each_document
def test_choices_that_are_named_exist(path):
    found = {match for word in words(path) if (match := CHOICE.fullmatch(word))}
    choices = {(match[1], name) for match in found for name in re.split(r"[,|]", match[2])}
    wanted = choices - CHOSEN_BY_THE_READER - EXAMPLES
    assert missing(wanted, lambda each: (CONF / each[0] / f"{each[1]}.yaml").exists()) == set()


@pytest.mark.slow
@each_document
def test_options_that_are_named_exist(path):
    if path.name in OF_PROGRAMS:
        return
    found = {as_in_conf(match[1]) for word in words(path) if (match := OPTION.fullmatch(word))}
    open_to = ("domains.packages.", "domains.columns.", "domains.catalogue.", "endtask.tasks.")
    assert {key for key in found - options() if not key.startswith(open_to)} == set()


@pytest.mark.parametrize("name", ["README.md", "docs/comparison.md", "docs/wandb.md", "docs/sweeps.md"])
def test_options_of_the_comparison_exist(name):
    path, there = ROOT / name, set(report_parser()._option_string_actions) | OF_WANDB
    there |= set(build_parser()._option_string_actions)
    alone = {word for span in spans(path) for word in span.split()[:1] if word.startswith("--")}
    called = {word for given in commands(path, "python -m cpt.report") for word in given if word[:2] == "--"}
    assert (alone | called) - there == set()

    if name == "docs/comparison.md":  # its page names every option and filter
        options = {each for each in report_parser()._option_string_actions if each.startswith("--")}
        assert (options - {"--help"}) | set(FILTERS) <= set(words(path))


@pytest.mark.parametrize(
    "page, group",
    [("sweeps.md", "experiment"), ("sweeps.md", "hydra/launcher"), ("endtasks.md", "endtask")]
    + [("parts.md", "routing")],
)
def test_the_pages_name_every_choice(page, group):
    choices = {path.stem for path in (CONF / group).glob("*.yaml")} - {"none", "processes"}
    named = {name for word in words(DOCS / page) for name in re.split("[=|,]", word)}
    assert choices <= named


def test_every_method_and_source_stands_in_the_catalogue_and_methods_in_the_fidelity_page():
    rows = [line.split("|")[1] for line in told(DOCS / "catalogue.md").splitlines() if line.startswith("| `")]
    methods, sources = ({path.stem for path in (CONF / of).glob("*.yaml")} for of in ("method", "domains"))
    assert missing(methods | sources, lambda name: any(f"`{name}`" in row for row in rows)) == set()
    folded = told(DOCS / "fidelity.md").lower().replace("-", "_").replace("++", "pp")
    assert missing(methods - {"ncl", "one", "joint", "none"}, folded.__contains__) == set()


def test_the_readme_is_short_begins_with_two_commands_and_leads_to_every_page():
    text = told(README)
    assert len(text.splitlines()) <= LONGEST
    assert lines(README)[:2] == ["pip install -e . && python run.py", 'pip install -e ".[dev]" && pytest']
    assert "(docs/catalogue.md#methods)" in text
    methods = {path.stem for path in (CONF / "method").glob("*.yaml")} - {"none"}  # which learns nothing
    assert f"| {len(methods)} methods |" in text
    elsewhere = {page for pages in program("pages").SECTIONS.values() for page in pages}
    there = {path.name for path in DOCS.glob("*.md")}
    assert {name for name in there - elsewhere if f"(docs/{name}" not in text} == set()
    assert f"`scores.json` | the same as data (version {VERSION})" in told(DOCS / "running.md")
