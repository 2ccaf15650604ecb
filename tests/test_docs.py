"""What the documents name is there: files, tests, links, commands with their options, choices and values."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from cpt.contrib.wandb_tools.rebuild import build_parser
from cpt.evaluation.scores import VERSION
from cpt.report import report_parser
from cpt.reporting.load_runs import FILTERS
from tests.conftest import ROOT
from tests.support.site import program

README, DOCS, CONF = ROOT / "README.md", ROOT / "docs", ROOT / "conf"
DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks" / "README.md",
    *sorted(DOCS.glob("*.md")),
]
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


def is_override(word: str) -> bool:
    return "=" in word and not word.startswith("--")


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


@each_document
def test_tests_and_files_that_are_named_exist(path):
    named = [word.rstrip("/") for word in re.findall(r"`([^`\n]+)`", told(path))]
    tests = {name for name in named if re.fullmatch(r"test_\w+", name)}
    assert {name for name in tests if f"def {name}(" not in TESTS} == set()
    files = {name for name in named if re.fullmatch(r"(cpt|conf|tests|benchmarks|docs)/[\w/.]+", name)}
    assert {name for name in files - WRITTEN_BY_THE_READER if not (ROOT / name).exists()} == set()


@each_document
def test_links_lead_to_files(path):
    links = re.findall(r"\]\(([^)#:\s]+)[^):]*\)", told(path))
    assert {link for link in links if not (path.parent / link).exists()} == set()


@each_document
def test_choices_that_are_named_exist(path):
    found = {match for word in words(path) if (match := CHOICE.fullmatch(word))}
    choices = {(match[1], name) for match in found for name in re.split(r"[,|]", match[2])}
    wanted = choices - CHOSEN_BY_THE_READER - EXAMPLES
    assert {(group, name) for group, name in wanted if not (CONF / group / f"{name}.yaml").exists()} == set()


@pytest.mark.slow
@each_document
def test_options_that_are_named_exist(path):
    if path.name in OF_PROGRAMS:
        return
    found = {as_in_conf(match[1]) for word in words(path) if (match := OPTION.fullmatch(word))}
    open_to = ("domains.packages.", "domains.columns.", "domains.catalogue.", "endtask.tasks.")
    assert {key for key in found - options() if not key.startswith(open_to)} == set()


@pytest.mark.slow
@each_document
def test_runs_that_are_shown_are_hydras_and_set_what_there_is(path):
    shown = [word for given in commands(path, "python run.py") for word in given if is_override(word)]
    parsed = OverridesParser.create().parse_overrides([word.replace("…", "x") for word in shown])
    set_whole = {each.key_or_group for each in parsed} - set(GROUPS)
    assert {key for key in set_whole if "." not in key} <= options()


@each_document
def test_modules_and_programs_that_are_named_exist(path):
    text = told(path)
    modules = set(re.findall(r"python -m ([\w.]+)", text))
    assert {name for name in modules - OF_EXTRAS if find_spec(name) is None} == set()
    programs = set(re.findall(r"python ([\w/]+\.py)", text))
    assert {name for name in programs if not (ROOT / name).exists()} == set()
    names = {name for name in spans(path) if re.fullmatch(r"cpt(\.\w+)+", name)} - CONFIG_ON_WANDB
    assert {name for name in names if not is_there(name)} == set()


@each_document
def test_extras_that_are_named_exist(path):
    there = tomllib.loads(told(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    assert set(re.findall(r"pip install -e ['\"]\.\[(\w+)\]", told(path))) <= set(there)


@pytest.mark.parametrize("name", ["README.md", "docs/compare.md", "docs/tracking.md", "docs/sweeps.md"])
def test_options_of_the_comparison_exist(name):
    path, there = ROOT / name, set(report_parser()._option_string_actions) | OF_WANDB
    there |= set(build_parser()._option_string_actions)
    alone = {word for span in spans(path) for word in span.split()[:1] if word.startswith("--")}
    called = {word for given in commands(path, "python -m cpt.report") for word in given if word[:2] == "--"}
    assert (alone | called) - there == set()


def test_the_page_of_the_comparison_names_every_option_and_filter():
    named = set(words(DOCS / "comparison.md"))
    options = {name for name in report_parser()._option_string_actions if name.startswith("--")} - {"--help"}
    assert options | set(FILTERS) <= named


@pytest.mark.parametrize(
    "page, group",
    [("sweeps.md", "experiment"), ("sweeps.md", "hydra/launcher"), ("endtasks.md", "endtask")]
    + [("parts.md", "routing")],
)
def test_the_pages_name_every_choice(page, group):
    choices = {path.stem for path in (CONF / group).glob("*.yaml")} - {"none", "processes"}
    named = {name for word in words(DOCS / page) for name in re.split("[=|,]", word)}
    assert choices <= named


def test_every_method_stands_in_the_catalogue_and_in_the_fidelity_page():
    catalogue, fidelity = told(DOCS / "catalogue.md"), told(DOCS / "fidelity.md")
    methods = {path.stem for path in (CONF / "method").glob("*.yaml")}
    rows = [line.split("|")[1] for line in catalogue.splitlines() if line.startswith("| `")]
    assert {name for name in methods if not any(f"`{name}`" in row for row in rows)} == set()
    folded = fidelity.lower().replace("-", "_").replace("++", "pp")
    assert {name for name in methods - {"ncl", "one", "joint", "none"} if name not in folded} == set()


def test_every_source_of_text_stands_in_the_catalogue():
    rows = [line.split("|")[1] for line in told(DOCS / "catalogue.md").splitlines() if line.startswith("| `")]
    sources = {path.stem for path in (CONF / "domains").glob("*.yaml")}
    assert {name for name in sources if not any(f"`{name}`" in row for row in rows)} == set()


def test_the_readme_is_short_begins_with_two_commands_and_leads_to_every_page():
    text = told(README)
    assert len(text.splitlines()) <= LONGEST
    assert lines(README)[:2] == ["pip install -e . && python run.py", 'pip install -e ".[dev]" && pytest']
    assert "(docs/methods.md#methods)" in text
    methods = {path.stem for path in (CONF / "method").glob("*.yaml")} - {"none"}  # which learns nothing
    assert f"| {len(methods)} methods |" in text
    elsewhere = {
        page for pages in program("pages").SECTIONS.values() for page in pages
    }  # of the site's navigation
    there = {path.name for path in DOCS.glob("*.md")}
    assert {name for name in there - elsewhere if f"(docs/{name}" not in text} == set()
    assert f"`scores.json` | the same as data (version {VERSION})" in told(DOCS / "running.md")
