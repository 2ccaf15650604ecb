"""What the documents name is there: files, tests, links, commands with their options, choices and values."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from cpt.contrib.wandb_tools.rebuild import build_parser
from cpt.report import report_parser
from cpt.reporting.load_runs import FILTERS
from tests.conftest import ROOT

README, DOCS, CONF = ROOT / "README.md", ROOT / "docs", ROOT / "conf"
MORE = ("CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
DOCUMENTS = [README, *(ROOT / name for name in MORE), *sorted(DOCS.glob("*.md"))]
WRITTEN_BY_THE_READER = {"cpt/methods/l1.py", "conf/method/l1.yaml"}
CHOSEN_BY_THE_READER = {("method", "mine"), ("experiment", "first"), ("experiment", "manuals")}
CHOSEN_BY_THE_READER |= {("experiment", path.stem) for path in DOCS.glob("examples/experiment/*.yaml")}
OF_PROGRAMS = ("files.md", "options.md", "support.md")  # written from what there is: tests/test_site.py
OF_EXTRAS = {"mkdocs"}
CONFIG_ON_WANDB = {"cpt.label", "cpt.measured", "cpt.group", "cpt.order", "cpt.texts", "cpt.versions"}
GROUPS = sorted({path.parent.relative_to(CONF).as_posix() for path in CONF.rglob("*/*.yaml")})
CHOICE = re.compile(rf"\+?({'|'.join(GROUPS)})(?:@[\w.]+)?=([\w,|]+)")
OPTION = re.compile(rf"\+?((?:{'|'.join(g.replace('/', '[.]') for g in GROUPS)}|freeze)(?:\.\w+)+)(?:=.*)?")
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
OPEN = ("domains.packages.", "domains.columns.", "domains.catalogue.", "endtask.tasks.")


def told(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def lines(path: Path) -> list[str]:
    """What is in blocks of code; a line that ends with a backslash goes on."""
    blocks = re.findall(r"^```bash\n(.*?)^```", told(path), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def spans(path: Path) -> list[str]:
    """What is in backquotes within the prose, and the lines of code."""
    prose = re.sub(r"^```.*?^```", "", told(path), flags=re.DOTALL | re.MULTILINE)
    return [*re.findall(r"`([^`\n]+)`", prose), *lines(path)]


def words(path: Path) -> list[str]:
    return [word.strip("'\"") for span in spans(path) for word in span.split()]


def keys(tree: dict, prefix: str = "") -> set[str]:
    inner = (keys(value, f"{prefix}{key}.") for key, value in tree.items() if isinstance(value, dict))
    return {f"{prefix}{key}" for key in tree}.union(*inner)


def as_in_conf(key: str) -> str:
    """A task's own value is one of all tasks; a choice within a method is one of its own group; callbacks and
    loggers have any name."""
    key = re.sub(r"^(callbacks|logger)\.mine\b.*", "callbacks.lr_monitor", key)
    key = key.replace("method.mixture.", "replay.").replace("method.mask.", "mask.migu.")
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


def test_tests_files_links_programs_and_extras_that_are_named_exist():
    all_tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    extras = set(tomllib.loads(told(ROOT / "pyproject.toml"))["project"]["optional-dependencies"])

    def there(name):
        return (ROOT / name).exists()

    for path in DOCUMENTS:
        text = told(path)
        named = [word.rstrip("/") for word in re.findall(r"`([^`\n]+)`", text)]
        tests = {name for name in named if re.fullmatch(r"test_\w+", name)}
        assert missing(tests, lambda name: f"def {name}(" in all_tests) == set(), path
        files = {name for name in named if re.fullmatch(r"(cpt|conf|tests|benchmarks|docs)/[\w/.]+", name)}
        assert missing(files - WRITTEN_BY_THE_READER, there) == set(), path
        links = re.findall(r"\]\(([^)#:\s]+)[^):]*\)", text)
        assert missing(links, lambda link, at=path.parent: (at / link).exists()) == set(), path
        modules = set(re.findall(r"python -m ([\w.]+)", text))
        assert missing(modules - OF_EXTRAS, find_spec) == set(), path
        assert missing(re.findall(r"python ([\w/]+\.py)", text), there) == set(), path
        names = {name for name in spans(path) if re.fullmatch(r"cpt(\.\w+)+", name)} - CONFIG_ON_WANDB
        assert missing(names, is_there) == set(), path
        assert set(re.findall(r"pip install -e ['\"]\.\[(\w+)\]", text)) <= extras, path


@pytest.mark.slow
def test_choices_and_options_that_are_named_exist():
    known = keys(yaml.safe_load(told(CONF / "config.yaml"))) | {"method.routing"}
    for path in CONF.rglob("*/*.yaml"):
        group = path.parent.relative_to(CONF).as_posix().replace("/", ".")
        group = group.removesuffix(".parts").removesuffix(".protocol")  # composed into the group's choices
        package = re.match(r"# @package ([\w.]+)", told(path))
        prefix = f"{package[1] if package else group}.".replace("_global_.", "")
        known |= keys(yaml.safe_load(told(path)), prefix)
    for path in DOCUMENTS:
        found = {match for word in words(path) if (match := CHOICE.fullmatch(word))}
        wanted = {(match[1], name) for match in found for name in re.split(r"[,|]", match[2])}
        wanted -= CHOSEN_BY_THE_READER
        assert missing(wanted, lambda each: (CONF / each[0] / f"{each[1]}.yaml").exists()) == set(), path
        found = {as_in_conf(match[1]) for word in words(path) if (match := OPTION.fullmatch(word))}
        if path.name not in OF_PROGRAMS:
            assert {key for key in found - known if not key.startswith(OPEN)} == set(), path
    # The page of the comparison names every option and filter of its own.
    given = {each for each in report_parser()._option_string_actions if each.startswith("--")} - {"--help"}
    assert given | set(FILTERS) <= set(words(DOCS / "compare.md"))
    there = given | set(build_parser()._option_string_actions) | {"--help", "--append", "--json", "--watch"}
    for name in ("README.md", "docs/compare.md", "docs/tracking.md", "docs/sweeps.md"):
        assert {w for span in spans(ROOT / name) for w in span.split()[:1] if w.startswith("--")} <= there


def test_a_config_that_is_copied_from_a_page_has_its_package_in_the_first_line():
    """Hydra reads it nowhere else."""
    blocks = [
        block for path in DOCUMENTS for block in re.findall(r"^```yaml\n(.*?)^```", told(path), re.S | re.M)
    ]
    given = [block for block in blocks if "# @package" in block]
    assert given and all(block.startswith("# @package") for block in given)


def test_every_method_and_source_stands_in_the_catalogue_and_methods_in_the_fidelity_page():
    pages = told(DOCS / "methods.md") + told(DOCS / "data.md")
    rows = [line.split("|")[1] for line in pages.splitlines() if line.startswith("| `")]
    methods, sources = ({path.stem for path in (CONF / of).glob("*.yaml")} for of in ("method", "domains"))
    assert missing(methods | sources, lambda name: any(f"`{name}`" in row for row in rows)) == set()
    folded = told(DOCS / "fidelity.md").lower().replace("-", "_").replace("++", "pp")
    assert missing(methods - {"ncl", "one", "joint", "none"}, folded.__contains__) == set()
