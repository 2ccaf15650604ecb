"""The command line: a config, composed by Hydra of conf/ and the arguments, and the run or sweep of it."""

import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

import hydra
from hydra._internal import utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig

import cpt.sweeps.launcher  # noqa: F401  (registers the sweep launcher)
from cpt import __version__
from cpt.core.config import CONF
from cpt.core.errors import readable_errors
from cpt.core.output import closing_output
from cpt.core.processes import SPINS, is_one_of_several, is_submitit_job
from cpt.train import train
from cpt.trainer.help import FLAG, describe_choices, describe_options, is_question

HYDRA_FORMS = {  # of what a user types
    # The group has a choice already, null: for Hydra a plus would choose it twice.
    re.compile(r"\+(experiment=.*)"): r"\1",
    re.compile(r"([+~]*)method\.routing(=[\w,]+|=\?)"): r"\1routing@method.routing\2",
    # A file or a folder of chats, which is not a choice of the group.
    re.compile(r"chats=(?!(none|default)$)([^,]+)"): r"chats.path=\2",
    # `plan` is a value, which has no options of its own in Hydra.
    re.compile(r"\+*plan\.device(=.*)"): r"plan_device\1",
}
# Options that take texts: names and files, of which a number keeps the form in which it was typed.
TEXT_OPTIONS = (
    "name",
    "order",
    "tags",
    "init_from",
    "cache_dir",
    "model.name",
    "model.name_or_path",
    "model.tokenizer",
    "domains.only",
    "domains.ignore",
    "domains.root",
    "domains.folder",
    "domains.general",
    "domains.column",
    "domains.path",
    "domains.data_files",
    "domains.unasked",
    "chats.path",
    "benchmark.tasks",
    "benchmark.include",
    "endtask.root",
    "endtask.folder",
    "logger.project",
    "logger.entity",
)
QUOTED_KEY = re.compile(r"""(['"])((?:(?!\1).)+)\1(\s*:)""")
BARE_TEXT = re.compile(r"[^\s,\[\]()]+")
# Groups of which one run takes several choices.
LIST_GROUPS = ("callbacks", "experiment", "logger", "mask")
FLAGS = "-m, --config-dir=FOLDER, --cfg=job, --help"
report_errors = utils.run_and_report


def start() -> None:
    """Does what the arguments say. A `_target_` may name a module in the working directory."""
    sys.path.append(os.getcwd())  # last: no file there hides a library
    utils.run_and_report = run_step  # type: ignore[assignment]
    sys.argv = to_hydra(sys.argv)
    with closing_output(), readable_errors():  # --help is not a step of Hydra's
        if "--version" in sys.argv:
            print(f"cpt {__version__}")
        elif FLAG in sys.argv:
            check_flags([argument for argument in sys.argv[1:] if argument != FLAG])
            print(describe_options(sys.argv[1:]))
        elif any(is_question(argument) for argument in sys.argv[1:]):
            check_flags(sys.argv[1:])
            print(describe_choices(sys.argv[1:]))
        else:
            check_command_line(sys.argv[1:])
            check_folder_name(Path.cwd())
            app()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def app(cfg: DictConfig) -> Any:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # torch reads it when it is imported
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    if is_submitit_job() and not is_one_of_several():
        # submitit hands an exception on to the sweep, which reports it. It would wait for the result of a
        # job that has exited, without SLURM's accounting for ever.
        return train(cfg, run_dir=run_dir)
    with readable_errors():  # inside Hydra's own report of an error in a run
        return train(cfg, run_dir=run_dir)


def run_step(step: Callable[[], Any]) -> Any:
    """Replaces Hydra's function of this kind, which reports in many lines what cannot be composed."""
    return report_errors(closing_output()(readable_errors()(step)))


def parse_arguments(arguments: Sequence[str]) -> dict[str, Override]:
    """The overrides among the arguments, without those that Hydra will refuse."""
    overrides = {}
    for argument in arguments:
        if not argument.startswith("-"):
            with suppress(HydraException):
                (overrides[argument],) = OverridesParser.create().parse_overrides([argument])
    return overrides


def to_hydra(arguments: Sequence[str]) -> list[str]:
    """The arguments in Hydra's form. In a sweep over a group, the group's options are swept as well.

    Hydra composes a config for the sweep itself, with the group's default, and sets a fixed option in
    that: `-m method=lora,olora method.lr_multiplier=1` would be refused, since `method=ncl` has no rate."""
    converted = []
    for argument in arguments:
        with_home = expand_home(argument)
        converted.append(to_hydra_form(unquote_patterns(keep_text(with_home))))
    if "-m" not in converted and "--multirun" not in converted:
        return converted

    overrides = parse_arguments(converted)
    swept_groups = []
    for override in overrides.values():
        if override.is_sweep_override():
            swept_groups.append(f"{override.key_or_group}.")
    for index, argument in enumerate(converted):
        key, _, value = argument.partition("=")
        is_fixed = argument in overrides and not overrides[argument].is_sweep_override()
        if is_fixed and value and key.rpartition("@")[2].startswith(tuple(swept_groups)):
            converted[index] = f"{key}=choice({value})"
    return converted


def expand_home(argument: str) -> str:
    """An argument with the home folder in place of ~ where a path in its value begins, as in `key=~/x` and
    `key=[~/x,~/y]`: a shell leaves it there, and Hydra does not take it.

    >>> import os
    >>> expand_home("a=[~/x,y~/z]") == f"a=[{os.path.expanduser('~')}/x,y~/z]"
    True
    """
    home = os.path.expanduser("~")
    return re.sub(r"(?<=[=\[,])~(?=/|$)", lambda _: home, argument)


def to_hydra_form(argument: str) -> str:
    """An argument in the form that Hydra takes, if it has another one of HYDRA_FORMS."""
    for pattern, form in HYDRA_FORMS.items():
        match = pattern.fullmatch(argument)
        if match is not None:
            argument = match.expand(form)
    return argument


def unquote_patterns(argument: str) -> str:
    r"""An argument of regular expressions as keys, in quotes, with a backslash before each character that
    Hydra has another use for: it takes no quoted keys.

    >>> print(unquote_patterns("optim.lr_multipliers={'layers[.]0': 0.5}"))
    optim.lr_multipliers={layers\[.\]0: 0.5}
    """
    if not argument.lstrip("+").startswith("optim.lr_multipliers="):
        return argument

    def escape(match: re.Match[str]) -> str:
        pattern = re.sub(r"^\^", r"\\A", match[2])  # the same, of characters that Hydra knows
        return re.sub(r"([\\()\[\]{}:=, ])", r"\\\1", pattern) + match[3]

    return QUOTED_KEY.sub(escape, argument)


def keep_text(argument: str) -> str:
    """An argument whose texts are quoted where Hydra would make other values of them: the number 202401 of
    `name=2024_01`, 1000.0 of `domains.only=[1e3]`. What has quotes, braces or spaces is left as it is."""
    key, equals, value = argument.partition("=")
    has_other_syntax = re.search(r"""['"$\\{}]|(?<!,)\s""", value)
    if not equals or key.lstrip("+") not in TEXT_OPTIONS or has_other_syntax:
        return argument
    is_list = value.startswith("[")
    return f"{key}={BARE_TEXT.sub(lambda match: quote_number(match[0], is_list=is_list), value)}"


def quote_number(text: str, *, is_list: bool) -> str:
    """A text in quotes if Hydra reads it as a number that is written otherwise or, in a list, as true or
    false."""
    try:
        (override,) = OverridesParser.create().parse_overrides([f"text={text}"])
        value = override.value()
    except HydraException:  # which Hydra reports
        return text
    is_other_number = isinstance(value, int | float) and not isinstance(value, bool) and str(value) != text
    is_other_text = is_other_number or (is_list and isinstance(value, bool))
    return f"'{text}'" if is_other_text else text


def check_command_line(arguments: Sequence[str]) -> None:
    """Raises ValueError for an unknown or wrong flag, an argument that assigns no value, and a choice of a
    group that is not a name: Hydra takes many lines to report these, or names what only its grammar knows."""
    check_assignments(check_flags(arguments))
    for argument, override in parse_arguments(arguments).items():
        group = override.key_or_group
        if not group:
            raise ValueError(f"{argument} is invalid: it names no option. Allowed: key=value")
        is_choice = (CONF / group).is_dir() and override.type is not OverrideType.DEL
        if is_choice and not names_choices(override.value()):
            raise ValueError(f"{argument} is invalid. Allowed: a choice of conf/{group}, or a list of them")
        choices = override.value()
        if is_choice and group not in LIST_GROUPS and isinstance(choices, list):
            raise wrong_list_error(argument, group, choices)


def check_folder_name(folder: Path) -> None:
    """Raises ValueError for a working folder with `${` in its path: in the config, which has this path, it
    begins the name of another value."""
    if "${" in str(folder):
        raise ValueError(
            f"the working folder {folder} is invalid: ${{…}} in it would be replaced in the paths of a run. "
            "Allowed: a folder without ${ in its path"
        )


def wrong_list_error(argument: str, group: str, choices: Sequence[str]) -> ValueError:
    """The error of a list of choices for a group of which a run has one."""
    allowed = f"a choice of conf/{group}"
    if choices:
        allowed = f"{group}={choices[0]}"
    if len(choices) > 1 and not group.startswith("hydra/"):  # one launcher, and one sweeper, for all runs
        allowed += f", -m {group}={','.join(choices)} for a run of each"
    return ValueError(f"{argument} is invalid: a run has one choice of {group}. Allowed: {allowed}")


def check_assignments(arguments: Sequence[str]) -> None:
    """Raises ValueError for the first argument that assigns no value: a shell has divided a value with
    spaces, or there is a space in place of the `=`."""
    for index, argument in enumerate(arguments):
        if "=" in argument or argument.startswith("~"):  # ~key removes an option
            continue

        further_parts = list(itertools.takewhile(lambda part: "=" not in part, arguments[index:]))
        previous = arguments[index - 1] if index else ""
        typed = " ".join([previous, *further_parts])
        if previous.count("[") > previous.count("]"):
            without_spaces = re.sub(r"(?<=[\[,])\s+|\s+(?=[\],])", "", typed)
            raise ValueError(f"{typed} is invalid: a list with spaces. Allowed: {without_spaces}")
        if "=" in previous:
            raise ValueError(
                f"{argument} is invalid: it assigns no value, or belongs to the value before it. "
                f"Allowed: key=value, with spaces in quotes, like {shlex.quote(typed)}"
            )
        value = further_parts[1] if len(further_parts) > 1 else "VALUE"
        raise ValueError(
            f"{argument} is invalid: it assigns no value. Allowed: key=value, like {argument}={value}"
        )


def check_flags(arguments: Sequence[str]) -> list[str]:
    """Raises ValueError for an unknown or wrong flag; returns the arguments that are neither flags nor their
    values, as `job` of `--cfg job`."""

    def refuse(message: str) -> NoReturn:
        problem = message.partition(" could match")[0]
        raise ValueError(f"{' '.join(arguments)} is invalid: {problem}. Allowed: key=value, {FLAGS}")

    parser = utils.get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    parsed_arguments, unknown = parser.parse_known_args(list(arguments))
    for argument in unknown:
        if not argument.startswith("-"):
            raise ValueError(
                f"{argument} is invalid: a flag is between it and other options. "
                f"Allowed: flags before or after all options, like -m name=NAME {argument}"
            )
        name = argument.lstrip("-").partition("=")[0]
        raise ValueError(
            f"{argument} is invalid: unknown flag. "
            f"Allowed: options without dashes, like {name}=VALUE; {FLAGS}"
        )
    return list(parsed_arguments.overrides)


def names_choices(value: Any) -> bool:
    """Whether the value of a group may be a choice, or a list of choices. Hydra takes a mapping instead of a
    choice for the values of the group."""
    wrong_types: tuple[type, ...] = (NoneType, int, float)
    if isinstance(value, list):
        return not any(isinstance(item, (*wrong_types, dict, list)) for item in value)
    return not isinstance(value, wrong_types)


if __name__ == "__main__":
    raise SystemExit("cpt: python -m cpt.cli is invalid. Allowed: python run.py, cpt, python -m cpt")
