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
from cpt.trainer.help import describe_choices, is_question
from cpt.trainer.read_config import read_sections
from tests.conftest import ROOT, compose_in_two_steps

README = ROOT / "README.md"
DOCS = ROOT / "docs"
CONF = ROOT / "conf"
MORE = ("CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
DOCUMENTS = [README, *(ROOT / name for name in MORE), *sorted(DOCS.glob("*.md"))]
DOCUMENTS += sorted((DOCS / "fidelity").glob("*.md"))
WRITTEN_BY_THE_READER = {"cpt/methods/l1.py", "conf/method/l1.yaml"}
CHOSEN_BY_THE_READER = {("method", "mine"), ("experiment", "first"), ("experiment", "manuals")}
CHOSEN_BY_THE_READER |= {("method", "das_paper"), ("experiment", "paper")}
CHOSEN_BY_THE_READER |= {("chats", name) for name in ("FILE", "FOLDER", "my_chats")}
CHOSEN_BY_THE_READER.add(("method", "lwf"))  # a wrong name, by which docs/cli.md shows the message
CHOSEN_BY_THE_READER |= {("experiment", path.stem) for path in DOCS.glob("examples/experiment/*.yaml")}
OF_PROGRAMS = ("files.md", "options.md", "support.md")  # written from what there is: tests/test_site.py
OF_EXTRAS = {"mkdocs"}
GROUPS = sorted({path.parent.relative_to(CONF).as_posix() for path in CONF.rglob("*/*.yaml")})
CHOICE = re.compile(rf"\+?({'|'.join(GROUPS)})(?:@[\w.]+)?=([\w,|]+)")
OPTION = re.compile(rf"\+?((?:{'|'.join(g.replace('/', '[.]') for g in GROUPS)}|freeze)(?:\.\w+)+)(?:=.*)?")
OPEN = (
    "domains.packages.",
    "domains.columns.",
    "domains.catalogue.",
    "endtask.tasks.",
    "replay.sources.",
)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def code_lines(path: Path) -> list[str]:
    """The lines in blocks of code; a line that ends with a backslash is joined with the next."""
    blocks = re.findall(r"^```bash\n(.*?)^```", read(path), re.DOTALL | re.MULTILINE)
    return "".join(blocks).replace("\\\n", " ").splitlines()


def spans(path: Path) -> list[str]:
    """What is in backquotes within the prose, and the lines of code."""
    prose = re.sub(r"^```.*?^```", "", read(path), flags=re.DOTALL | re.MULTILINE)
    return [*re.findall(r"`([^`\n]+)`", prose), *code_lines(path)]


def words(path: Path) -> list[str]:
    return [word.strip("'\"") for word in " ".join(spans(path)).split()]


def find_missing(names, exists):
    return {name for name in names if not exists(name)}


def is_in_checkout(name):
    return (ROOT / name).exists()


def test_tests_files_links_programs_and_extras_that_are_named_exist():
    all_tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    extras = set(tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"])

    for path in DOCUMENTS:
        text = read(path)
        quoted = [word.rstrip("/") for word in re.findall(r"`([^`\n]+)`", text)]
        tests = {name for name in quoted if re.fullmatch(r"test_\w+", name)}
        assert find_missing(tests, lambda name: f"def {name}(" in all_tests) == set(), path
        files = {name for name in quoted if re.fullmatch(r"(cpt|conf|tests|benchmarks|docs)/[\w/.]+", name)}
        assert find_missing(files - WRITTEN_BY_THE_READER, is_in_checkout) == set(), path

        links = re.findall(r"\]\(([^)#:\s]+)[^):]*\)", text)
        assert find_missing(links, lambda link, folder=path.parent: (folder / link).exists()) == set(), path
        modules = set(re.findall(r"python -m ([\w.]+)", text))
        assert find_missing(modules - OF_EXTRAS, find_spec) == set(), path
        assert find_missing(re.findall(r"python ([\w/]+\.py)", text), is_in_checkout) == set(), path
        assert set(re.findall(r"pip install -e ['\"]\.\[([\w-]+)\]", text)) <= extras, path


def list_anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\s-]", "", title.strip().lower()).replace(" ", "-")
        anchors.add(f"{anchor}-1" if anchor in anchors else anchor)
    return anchors


def test_links_to_headings_of_pages_lead_there():
    pages = [README, *(ROOT / name for name in MORE), *sorted(DOCS.rglob("*.md"))]
    anchors_by_page = {page: list_anchors(read(page)) for page in pages}
    dead_links = []
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", read(page)):
            target_page = (page.parent / target).resolve() if target else page
            if anchor not in anchors_by_page.get(target_page, set()):
                dead_links.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert dead_links == []


def find_choices(path: Path) -> set[tuple[str, str]]:
    """The group and the choice of each word like `method=ewc`; of `method=ewc,kd` both choices."""
    choices = set()
    for word in words(path):
        match = CHOICE.fullmatch(word)
        if match:
            choices.update((match[1], name) for name in re.split(r"[,|]", match[2]))
    return choices


def find_options(path: Path) -> set[str]:
    """The option of each word like `method.strength=1` or `method.strength`."""
    matches = map(OPTION.fullmatch, words(path))
    return {match[1] for match in matches if match and not match[1].startswith(OPEN)}


def test_choices_exist_and_options_have_names_of_the_config():
    """Options by the last part of their names."""
    config_keys = set(re.findall(r"(\w+):", "\n".join(map(read, CONF.rglob("*.yaml")))))
    for path in DOCUMENTS:
        for group, name in find_choices(path) - CHOSEN_BY_THE_READER:
            assert (CONF / group / f"{name}.yaml").exists(), (path, group, name)
        if path.name not in OF_PROGRAMS:
            options = find_options(path)
            assert find_missing(options, lambda option: option.rpartition(".")[2] in config_keys) == set(), (
                path
            )


def test_every_method_and_source_has_its_page():
    methods = {path.stem for path in (CONF / "method").glob("*.yaml")}
    sources = {path.stem for path in (CONF / "domains").glob("*.yaml")}
    assert find_missing(sources, lambda name: f"| `{name}`" in read(DOCS / "data.md")) == set()
    described = methods - {"ncl", "one", "joint", "none"}
    pages = "\n".join(map(read, sorted((DOCS / "fidelity").glob("*.md"))))
    fidelity = pages.lower().replace("-", "_").replace("++", "pp")
    assert find_missing(described, fidelity.__contains__) == set()
    defaults = read(DOCS / "fidelity.md").partition("## Is the default the paper's")[2]
    without_equation = {"replay", "peft", "merge_lora"}
    assert find_missing(described - without_equation, lambda name: f"| `{name}` |" in defaults) == set()


OF_HYDRA = {"-m", "--multirun", "--help", "--options", "--check"}
# In configs of their own.
OF_THE_READER = re.compile(
    r"(method|experiment)=(mine|das_paper|first|manuals|paper|with_replay|three_methods|monthly|slurm_chat)"
)
# Of extras, and of searches.
OF_ANOTHER = ("hydra/launcher=slurm", "hydra/launcher=ray_jobs", "hydra/sweeper=", "hydra.sweeper.")
OF_ANOTHER += ("hydra.launcher.partition=", "hydra.launcher.timeout_min=")
NO_FOLDER = re.compile(r"\.(root|path)=.*(there is no folder|no such (folder|file))")


def choose_one(override: str) -> str:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    if not parsed.is_sweep_override():
        return override
    first = next(iter(parsed.sweep_string_iterator())) if parsed.is_choice_sweep() else "0.001"  # of a range
    return f"{parsed.get_key_element()}={first}"


def reader_configs(folder: Path) -> Path:
    """The YAMLs and modules of the documents whose file is named above them, written there."""
    named = re.compile(
        r"`(?:my_conf/)?(\S+[.](?:yaml|py))`[^\n]*:\n\n```(?:yaml|python)\n(.*?)^```", re.M | re.S
    )
    for path in DOCUMENTS:
        for name, text in named.findall(read(path)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def compose_run(arguments: list[str], configs: Path) -> None:
    """Composes the config of a run with these arguments, and has its values checked."""
    flags = OF_HYDRA | {word for word in arguments if word.startswith(("--config-dir=", "$"))}
    words_of_run = [word.replace("…", "x") for word in arguments if word not in flags]
    overrides = to_hydra([word for word in words_of_run if not word.startswith(OF_ANOTHER)])
    overrides = [choose_one(override) for override in overrides]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        if any(OF_THE_READER.fullmatch(override) for override in overrides):
            path = f"hydra.searchpath=[file://{configs},file://{ROOT / 'docs' / 'examples'}]"
            cfg = compose("config", overrides=[*overrides, path])
        else:
            cfg = compose_in_two_steps(*overrides)
    try:
        read_sections(cfg)
    except ValueError as error:
        if not NO_FOLDER.search(str(error)):  # the reader's folders are not here
            raise


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_what_starts_a_run_composes_with_values_that_are_allowed(path, tmp_path, monkeypatch):
    configs = reader_configs(tmp_path)
    monkeypatch.syspath_prepend(str(configs))
    commands = []
    for line in code_lines(path):
        commands += line.split("&&")

    errors = {}
    for command in commands:
        arguments = find_arguments(shlex.split(command, comments=True))
        if arguments is None or any("_target_=my_package" in argument for argument in arguments):
            continue
        if any(map(is_question, arguments)):
            describe_choices(arguments)
            continue
        try:
            compose_run(arguments, configs)
        except Exception as error:  # the errors of all commands are shown at once
            errors[" ".join(arguments)] = str(error)
    assert errors == {}


def find_arguments(command_words: list[str]) -> list[str] | None:
    """The arguments of `cpt …` or `… run.py …`; None for other commands."""
    if command_words[:1] == ["cpt"]:
        return command_words[1:]
    if "run.py" in command_words:
        return command_words[command_words.index("run.py") + 1 :]
    return None


PROGRAMS = sorted({*re.findall(r"python -m (cpt\.[\w.]+)", read(ROOT / "docs/cli.md"))})


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_documented_program_has_a_help(program, capsys):
    is_file = find_spec(program).submodule_search_locations is None
    module = import_module(program if is_file else f"{program}.__main__")
    with pytest.raises(SystemExit) as raised:
        module.main(["--help"])
    assert raised.value.code == 0 and f"usage: python -m {program}" in capsys.readouterr().out
