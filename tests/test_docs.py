"""What the documents name is there: files, tests, links, programs, choices and values. What starts a run
composes with values that are allowed; nothing is run."""

import re
import shlex
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from cpt.cli import to_hydra
from cpt.trainer.read_config import read_sections
from tests.conftest import ROOT, with_values

README, DOCS, CONF = ROOT / "README.md", ROOT / "docs", ROOT / "conf"
MORE = ("CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
DOCUMENTS = [README, *(ROOT / name for name in MORE), *sorted(DOCS.glob("*.md"))]
WRITTEN_BY_THE_READER = {"cpt/methods/l1.py", "conf/method/l1.yaml"}
CHOSEN_BY_THE_READER = {("method", "mine"), ("experiment", "first"), ("experiment", "manuals")}
CHOSEN_BY_THE_READER |= {("experiment", path.stem) for path in DOCS.glob("examples/experiment/*.yaml")}
OF_PROGRAMS = ("files.md", "options.md", "support.md")  # written from what there is: tests/test_site.py
OF_EXTRAS = {"mkdocs"}
GROUPS = sorted({path.parent.relative_to(CONF).as_posix() for path in CONF.rglob("*/*.yaml")})
CHOICE = re.compile(rf"\+?({'|'.join(GROUPS)})(?:@[\w.]+)?=([\w,|]+)")
OPTION = re.compile(rf"\+?((?:{'|'.join(g.replace('/', '[.]') for g in GROUPS)}|freeze)(?:\.\w+)+)(?:=.*)?")
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
        assert set(re.findall(r"pip install -e ['\"]\.\[(\w+)\]", text)) <= extras, path


def test_choices_exist_and_options_have_names_of_the_config():
    """Options by the last part of their names."""
    texts = [told(path) for path in CONF.rglob("*.yaml")]
    known = {name for text in texts for name in re.findall(r"(\w+):", text)}
    for path in DOCUMENTS:
        found = {match for word in words(path) if (match := CHOICE.fullmatch(word))}
        wanted = {(match[1], name) for match in found for name in re.split(r"[,|]", match[2])}
        wanted -= CHOSEN_BY_THE_READER
        assert missing(wanted, lambda each: (CONF / each[0] / f"{each[1]}.yaml").exists()) == set(), path
        found = {match[1] for word in words(path) if (match := OPTION.fullmatch(word))}
        found = {name for name in found if not name.startswith(OPEN)}
        if path.name not in OF_PROGRAMS:
            assert missing(found, lambda name: name.rpartition(".")[2] in known) == set(), path


def test_every_method_and_source_has_its_page():
    methods, sources = ({path.stem for path in (CONF / of).glob("*.yaml")} for of in ("method", "domains"))
    assert missing(sources, lambda name: f"| `{name}`" in told(DOCS / "data.md")) == set()
    folded = told(DOCS / "fidelity.md").lower().replace("-", "_").replace("++", "pp")
    assert missing(methods - {"ncl", "one", "joint", "none"}, folded.__contains__) == set()


OF_HYDRA = {"-m", "--multirun", "--help", "--options", "--check"}
# In configs of their own.
OF_THE_READER = re.compile(r"(method|experiment)=(mine|first|manuals|with_replay|three_methods|monthly)")
# Of extras, and of searches.
OF_ANOTHER = ("hydra/launcher=slurm", "hydra/launcher=ray_jobs", "hydra/sweeper=", "hydra.sweeper.")
OF_ANOTHER += ("hydra.launcher.partition=", "hydra.launcher.timeout_min=")
NO_FOLDER = re.compile(r"\.root=.*(there is no folder|no such folder)")


def one_of(override: str) -> str:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    if not parsed.is_sweep_override():
        return override
    first = next(iter(parsed.sweep_string_iterator())) if parsed.is_choice_sweep() else "0.001"  # of a range
    return f"{parsed.get_key_element()}={first}"


def reader_configs(folder: Path) -> Path:
    """The YAMLs of the documents whose file is named above them, written there."""
    named = re.compile(r"`my_conf/(\S+)`[^\n]*:\n\n```yaml\n(.*?)^```", re.M | re.S)
    for path in DOCUMENTS:
        for name, text in named.findall(told(path)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text.replace("my_package.my_module.Mine", "cpt.methods.ncl.NCL"))
    return folder


def compose_run(given: list[str], configs: Path) -> None:
    """Composes what a run is told, and has its values checked."""
    flags = OF_HYDRA | {word for word in given if word.startswith(("--config-dir=", "$"))}
    wanted = [one_of(word.replace("…", "x")) for word in given if word not in flags]
    wanted = [word for word in wanted if not word.startswith(OF_ANOTHER)]
    own = to_hydra(wanted)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        if any(OF_THE_READER.fullmatch(word) for word in own):
            path = f"hydra.searchpath=[file://{configs},file://{ROOT / 'docs' / 'examples'}]"
            cfg = compose("config", overrides=[*own, path])
        else:
            cfg = with_values(*own)
    try:
        read_sections(cfg)
    except ValueError as error:
        if not NO_FOLDER.search(str(error)):  # the reader's folders are not here
            raise


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_what_starts_a_run_composes_with_values_that_are_allowed(path, tmp_path):
    configs, wrong = reader_configs(tmp_path), {}
    commands = [part for line in lines(path) for part in line.split("&&")]
    for words in (shlex.split(command, comments=True) for command in commands):
        places = [at for at, word in enumerate(words) if word == "run.py" or (word == "cpt" and at == 0)]
        given = words[places[0] + 1 :] if places else []
        if places and not any("_target_=my_package" in word for word in given):
            try:
                compose_run(given, configs)
            except Exception as error:  # whatever is wrong is told of all commands at once
                wrong[" ".join(given)] = str(error)
    assert wrong == {}


PROGRAMS = sorted({*re.findall(r"python -m (cpt\.[\w.]+)", told(ROOT / "docs/cli.md"))})


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_documented_program_has_a_help(program, capsys):
    is_file = find_spec(program).submodule_search_locations is None
    module = import_module(program if is_file else f"{program}.__main__")
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0 and f"usage: python -m {program}" in capsys.readouterr().out
