"""Errors that a user can read: one line, a non-zero exit code."""

import errno
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import Timeout
from hydra import errors as hydra_errors
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import OmegaConf
from omegaconf import errors as omegaconf_errors
from yaml import YAMLError

from cpt.core import foreign_names
from cpt.core.config import CONF, flatten
from cpt.core.files import NO_ROOM_ERRNOS, explain_write_error
from cpt.core.messages import abbreviate
from cpt.core.naming import CONFIG
from cpt.core.overrides import FULL_MAPPINGS
from cpt.core.preemption import GO_ON, Preempted
from cpt.core.processes import is_one_of_several
from cpt.core.schema import describe_unknown_name, join
from cpt.core.secrets import redact_text

NEEDS_QUOTES = re.compile(r"[^\w\s./:+@%*?|$,(){}\[\]\\~-]")  # signs that Hydra takes only in quotes
# Messages of Hydra: a choice (group, name) of a list of choices does not exist; `override` of a group that
# the defaults do not have (config, group), or of a key that the config does not have. Of OmegaConf: a section
# is set to one value.
MISSING_CHOICE = re.compile(r"Could not load '(.+)'")
UNKNOWN_OVERRIDE = re.compile(r"Could not override '([^']+)'")
OVERRIDE_WITHOUT_DEFAULT = re.compile(r"In '(\S+)': Could not override '([\w/@.]+)'")
VALUE_FOR_SECTION = re.compile(r"Cannot merge DictConfig with")
NOT_REMOVABLE = re.compile(r"does not support deletion")
# The folder of a run has the name, the order, the seed and the chosen method in its path.
REMOVED_KEY = re.compile(r"Interpolation key '(?:hydra\.runtime\.choices\.)?(\w+)' not found")
CONFIG_GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
# Classes of errors that a user's input causes: one line is shown for them, and no traceback.
INPUT_ERRORS = (ValueError, OSError, HydraException, omegaconf_errors.OmegaConfBaseException, YAMLError)
# Groups whose options are looked for in other sections, as `model.lora_alpha`.
SEARCHED_GROUPS = ("method", "lr_scheduler", "optim", "domains")
MAX_LISTED_CHOICES = 5  # that have an option
HERE = "_here_"  # of a default: the options of a file are those of the choice itself
OPEN_SECTIONS = ("callbacks", "logger", "optim")  # that take further keys, as sections within sections do
# By a pattern of Hydra's message on a config that cannot be composed, our message; {0} is the first group.
COMPOSITION_MESSAGES = {
    r"Multiple values for (\S+)\. To override a value use 'override \S+: (.*)'": (
        "+{0}={1} is invalid. Allowed: {0}={1}, without +"
    ),
    r"Error resolving interpolation '(.*)', possible interpolation keys: (.*)": (
        "${{{0}}} is invalid: unknown where a choice is made of it. Allowed: {1}"
    ),
    r"Ambiguous value for argument '((.*?)=(.*))'": (
        "{0} is invalid: several values for one run. Allowed: one value, a list {1}=[{2}] where the option "
        "takes one, -m for a run of each"
    ),
    r"Could not delete from config. '(.*)' does not exist": (
        "~{0} is invalid: there is no {0}, or it is null. Allowed: {0}=null"
    ),
    r"Could not delete from config. The value of '(.*)' is (.*) and not (.*)\.": (
        "~{0}={2} is invalid: its value is {1}. Allowed: ~{0}"
    ),
    r"Could not delete '(\w+)=(.*)'\. No match in the defaults list": (
        "~{0}={1} is invalid: {1} is not the choice of {0}. Allowed: {0}=CHOICE, one of conf/{0}"
    ),
    r"Could not append to config. An item is already at '(.*)'\.\s+Either remove \+ prefix: '(.*)'": (
        "+{1} is invalid: the config has {0} already. Allowed: {1}, without +"
    ),
    r"Sweep parameters '(.*)' requires --multirun": (
        "{0} is invalid: several values for one run. Allowed: one value, -m for a run of each"
    ),
    r"Sweeping over Hydra's configuration is not supported : '(.*)'": (
        "{0} is invalid: several values of an option of Hydra's. Allowed: one value for all runs of a sweep"
    ),
}
# By a pattern of Hydra's message on where it looks for configs, our message.
SEARCH_MESSAGES = {
    r"Cannot find primary config '(.*)'\.": (
        "--config-name={0} is invalid: there is no such config. Allowed: config, which is the default, or "
        "the name of a YAML file in the folder of --config-dir"
    ),
    r"Primary config (?:directory|module)": (
        "--config-path is invalid: there is no such folder. Allowed: the absolute path of one, or "
        "--config-dir=FOLDER, which adds to the choices of cpt"
    ),
}
# By config group, the options that take a path {0}; in HUB_FORMS those that take a repository of the Hub, if
# they differ.
PATH_FORMS = {
    "benchmark": "benchmark=lm_eval benchmark.include={0}",
    "domains": "domains=texts domains.root={0}",
    "endtask": "endtask=texts endtask.root={0}",
    "model": "model=hf model.name_or_path={0}",
    "replay": "replay=sources 'replay.sources={{NAME: {{path: {0}, ratio: 0.05}}}}'",
}
HUB_FORMS = {
    "domains": "domains=hub 'domains.catalogue={{NAME: {{path: {0}}}}}'",
    "endtask": "endtask=hub 'endtask.tasks={{DOMAIN: {{path: {0}}}}}'",
}
FAILED_ALLOCATION = re.compile(
    r"out of memory|can't allocate memory|Cannot allocate memory|bad_alloc|can't start new thread"
    r"|could not create a (primitive|memory)"  # oneDNN
    r"|quantization error"  # Pillow, of a picture's colours
    r"|DataLoader worker .* killed by signal: Killed"
)
LOST_LOADER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) .*|Pin memory thread exited unexpectedly"  # of torch
)


def find_reason(error: BaseException) -> str:
    """An error's message on one line. An error inside a Hydra instantiation or a loader's process has the
    message of its cause."""
    lines = [line.strip() for line in explain_error(error).splitlines() if line.strip()]
    if lines and re.match(r"Caught \w+ in DataLoader worker process", lines[0]):
        _, _, message = lines[-1].partition(": ")
        lines = [message or lines[-1]]
    return " ".join(lines) or type(error).__name__


def explain_error(error: BaseException) -> str:
    """An error's message. Messages of Hydra and OmegaConf about nodes and merging are replaced by one that
    names the option and what is allowed."""
    if isinstance(error, HydraException):
        message = explain_hydra(error)
        if message:
            return message

    # Hydra wraps the error of a constructor into its own errors, which only say where it was raised.
    while error.__cause__ is not None and isinstance(error, HydraException):
        error = error.__cause__

    match error:
        case omegaconf_errors.MissingMandatoryValue(full_key=str(key)):
            return f"{key} is missing. Allowed: {key}=VALUE"
        case omegaconf_errors.InterpolationResolutionError(full_key=str(key)):
            match = REMOVED_KEY.match(str(error))
            if match is not None and key.startswith("hydra.") and match[1] in list_config_keys():
                return describe_missing_key(match[1])
            return f"{key} is invalid: {str(error).splitlines()[0]}. Allowed: ${{KEY}} of an existing key"
        case omegaconf_errors.GrammarParseError(full_key=key, value=value):
            # Of a list the key is a number, and of Hydra's own list of arguments the value has the key.
            has_name = re.fullmatch(r"[\w.]+", str(key)) is not None
            typed = f"{key}={value}" if has_name else value
            return (
                f"{typed} is invalid: ${{ in it begins nothing that can be replaced. "
                r"Allowed: ${KEY} of an existing key, \${ for these characters"
            )
        case omegaconf_errors.KeyValidationError(full_key=str(key)):
            return f"{key} is invalid: one of its keys is no text. Allowed: {{NAME: VALUE}}"
        case omegaconf_errors.ConfigTypeError(full_key=str(key)) if VALUE_FOR_SECTION.match(str(error)):
            return f"{key} is invalid: it has keys with values, not a value. Allowed: {key}.NAME=…"
        case omegaconf_errors.ConfigTypeError(full_key=str(key)) if NOT_REMOVABLE.search(str(error)):
            return f"~{key} is invalid: it cannot be removed. Allowed: {key}=VALUE"
    return str(error)


def list_config_keys() -> list[str]:
    """The keys at the top of a config: config groups, and options outside of a group."""
    options = yaml.safe_load((CONF / f"{CONFIG}.yaml").read_text(encoding="utf-8"))
    return [*CONFIG_GROUPS, *options]


def describe_missing_key(key: str) -> str:
    """The message for a key at the top of the config that was removed, by `~key`."""
    if key in CONFIG_GROUPS:
        return f"{key} is missing. Allowed: {key}=CHOICE, one of conf/{key}"
    return f"{key} is missing. Allowed: {key}=VALUE"


def explain_hydra(error: HydraException) -> str:
    """The message for a choice or an argument that Hydra rejects; empty for another error of Hydra."""
    if isinstance(error, hydra_errors.MissingConfigException):
        message = explain_missing_choice(error) or match_message(str(error), SEARCH_MESSAGES)
        if message:
            return message
    match error:
        case hydra_errors.OverrideParseException():
            return explain_unparsed(error)
        case hydra_errors.SearchPathException():
            return f"{' '.join(str(error).splitlines())}. Allowed: an existing folder"
        case ConfigCompositionException(
            __cause__=omegaconf_errors.ConfigAttributeError() | omegaconf_errors.ConfigKeyError() as cause
        ):
            match = UNKNOWN_OVERRIDE.match(str(error))
            return explain_unknown_key(cause, match[1] if match else str(cause.full_key))
        case ConfigCompositionException():
            return explain_composition(error)
    return ""


def explain_missing_choice(error: hydra_errors.MissingConfigException) -> str:
    """The message for a choice that its config group does not have; empty if Hydra misses another file."""
    path = error.missing_cfg_file
    if not isinstance(path, str) or not isinstance(error.options, list):
        match = MISSING_CHOICE.search(str(error))  # of a list of choices
        path = match[1] if match is not None else ""
    group, name = divide_choice(path)
    return describe_unknown_choice(group, name, list_group_choices(group)) if group else ""


def divide_choice(path: str) -> tuple[str, str]:
    """The config group and the choice that Hydra has looked for in the path of a config. A choice may be a
    path itself; the group is the longest beginning that is one. Without one, both are empty.

    >>> divide_choice("domains/template/x"), divide_choice("model//models/x"), divide_choice("x/y")
    (('domains/template', 'x'), ('model', '/models/x'), ('', ''))
    """
    parts = path.split("/")
    for num_parts in range(len(parts) - 1, 0, -1):
        is_within_groups = not {"", ".", ".."}.intersection(parts[:num_parts])
        group = "/".join(parts[:num_parts])
        if is_within_groups and list_group_choices(group):
            return group, "/".join(parts[num_parts:])
    return "", ""


def describe_unknown_choice(group: str, name: str, choices: Sequence[str]) -> str:
    """The message for a choice that a config group does not have. It suggests the choice that other libraries
    and papers call by this name, or the option that takes a path, and says how to list all choices."""
    meant = foreign_names.find_choice(group, name)
    if meant not in choices:
        meant = ""
    if not meant and is_path_or_repository(name):
        meant = find_path_options(group, name)

    message = describe_unknown_name(f"{group}={name}", choices, meant=meant)
    if group == "model" and not meant:  # `gpt2-large` is a name on the Hub
        message += f"; a folder or a name on the Hub: {find_path_options(group, name)}"
    return f"{message}; {group}=? describes them"


def is_path_or_repository(name: str) -> bool:
    """Whether the name of an unknown choice is a folder or a file, or the name of a repository of the Hub."""
    return "/" in name or name.startswith("~") or Path(name).exists()


def find_path_options(group: str, path: str) -> str:
    """The options by which a path is given to a config group; empty for a group without such options."""
    is_hub_name = re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) is not None and not Path(path).exists()
    form = HUB_FORMS.get(group) if is_hub_name else None
    return (form or PATH_FORMS.get(group, "")).format(path)


def explain_unparsed(error: hydra_errors.OverrideParseException) -> str:
    """The message for an argument that Hydra cannot parse."""
    # Hydra's lines are the cause, the argument, the position in it and a page of its documentation.
    other_starts = ("Error parsing", "See ", "^")
    lines = [line.strip() for line in error.message.splitlines()]
    cause = " ".join(line for line in lines if line and not line.startswith(other_starts))
    if cause.startswith("LexerNoViableAltException"):  # and the argument again
        cause = "it has characters outside Hydra's grammar"
    return f"{error.override} is invalid: {cause}. Allowed: {describe_allowed_form(str(error.override))}"


def explain_unknown_key(cause: omegaconf_errors.OmegaConfBaseException, override: str) -> str:
    """The message for a key that the config does not have, with where it is an option. `override` is the
    whole key of the command line: the error names its first part that does not exist."""
    key = str(cause.full_key)
    node: Any = cause.parent_node
    section = key.rpartition(".")[0]
    names = [str(name) for name in node or () if name != "hydra"]
    options = [join(section, name) for name in names] or [section]  # a value, which has no options

    choices = list_choices_with(key, section)
    if choices:
        return describe_unknown_name(key, options, cause=f"it is an option of {section}={','.join(choices)}")
    root: Any = OmegaConf.to_container(node._get_root()) if node is not None else {}
    meant = find_option_elsewhere(override, root)
    if meant:
        return describe_unknown_name(override, options, meant=meant)
    other_group = describe_option_of_other_group(key, section)
    if other_group:
        return describe_unknown_name(key, options, cause=other_group)

    message = describe_unknown_name(key, options)
    is_open = section in OPEN_SECTIONS or "." in section
    if is_open and "Did you mean" not in message:
        message = f"{message}; to add it: +{key}=VALUE"
        if section in FULL_MAPPINGS:
            message += f"; to replace all: ~{section} '+{section}={{…}}'"
    return message


def explain_composition(error: ConfigCompositionException) -> str:
    """The message for choices that cannot be composed; empty for an error of another kind."""
    match = OVERRIDE_WITHOUT_DEFAULT.search(str(error))
    if match is not None:
        config_name, group = match.groups()
        if "@" in group:
            missing = "its first line is not # @package _global_"
            return f"{config_name} is invalid: {missing}. Allowed: this line, then defaults: and keys"
        return f"override /{group} in {config_name}: {describe_unknown_name(group, CONFIG_GROUPS)}"
    return match_message(str(error), COMPOSITION_MESSAGES)


def match_message(text: str, messages: Mapping[str, str]) -> str:
    """Our message for one of Hydra's, by the pattern that it begins with; empty if it begins with none."""
    for pattern, message in messages.items():
        match = re.match(pattern, text)
        if match is not None:
            return message.format(*match.groups())
    return ""


def describe_allowed_form(override: str) -> str:
    """What is allowed instead of an argument that Hydra cannot parse. A value with signs that it takes in
    quotes only is shown in them, and in those that keep the shell from removing them."""
    key, equals, value = override.partition("=")
    if not equals or not NEEDS_QUOTES.search(value):
        return "key=value"
    if value[0] in "[{":
        return "key=value, with such texts in quotes within the list or the keys"
    if value[0] in "'\"":  # a quote without its end, or with text after it
        value = value.strip(value[0])
    argument = f"{key}={QuotedString(value, Quote.double).with_quotes()}"
    return f"key=value, with the value in quotes: {shlex.quote(argument)}"


def list_choices_with(key: str, section: str) -> list[str]:
    """The choices of a group that have an option."""
    if not section:
        return []
    name = key.rpartition(".")[2]
    return [
        path.stem for path in sorted((CONF / section).glob("*.yaml")) if name in list_choice_options(path)
    ]


def list_choice_options(path: Path) -> set[str]:
    """The options of a choice, by its YAML file: its own, and those of files that its defaults put in the
    same place."""
    content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    names = {str(name) for name in content if name != "defaults"}
    for default in content.get("defaults", []):
        if isinstance(default, str):
            default = {HERE: default}
        for group, choice in default.items():
            folder, _, package = str(group).rpartition("@")
            part = path.parent / folder / f"{choice}.yaml"
            if package == HERE and part.is_file():
                names |= list_choice_options(part)
    return names


def find_option_elsewhere(key: str, root: Mapping[str, Any]) -> str:
    """The option of another section of a config that a user may have meant by an unknown `key`: one of the
    same name, or the one for which another library uses this name, with how they differ; else empty."""
    name = key.rpartition(".")[2]
    leaves: list[str] = [leaf for leaf, _ in flatten(root) if not leaf.startswith("hydra.")]
    foreign = foreign_names.OPTIONS.get(name)
    if foreign is not None and foreign.option in [*leaves, *root]:
        return f"{foreign.option} ({foreign.difference})" if foreign.difference else foreign.option
    same_name = [leaf for leaf in leaves if "." in leaf and leaf.rpartition(".")[2] == name]
    return min(same_name, key=lambda leaf: leaf.count("."), default="")


def describe_option_of_other_group(key: str, section: str) -> str:
    """Where an unknown key is an option, in words, if it is one of choices of another group; else empty. The
    keys of a mapping within a section are the user's own."""
    name = key.rpartition(".")[2]
    if not section or "." in section:
        return ""
    for group in SEARCHED_GROUPS:
        other_key = join(group, name)
        choices = list_choices_with(other_key, group)
        if choices:
            return f"{other_key} is an option of {group}={abbreviate(choices, limit=MAX_LISTED_CHOICES)}"
    return ""


def list_group_choices(group: str) -> list[str]:
    if GlobalHydra.instance().is_initialized():
        return GlobalHydra.instance().config_loader().get_group_options(group)
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@contextmanager
def readable_errors(code: int = 1) -> Iterator[None]:
    """Bad input ends in one line and an exit code; in a traceback only with HYDRA_FULL_ERROR=1."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("cpt: interrupted; run the same command again to continue")
    except BrokenPipeError:  # cpt.core.output
        raise
    except Exception as error:
        raise_preemption(error)
        # In this order: a loader that the system killed for its memory is out of memory, not lost.
        line = describe_oom(error) or describe_lost_loader(error) or describe_full_disk(error)
        if not line and isinstance(error, INPUT_ERRORS):
            line = find_reason(error)
        if not line or os.environ.get("HYDRA_FULL_ERROR"):
            raise
        print(f"cpt: {redact_text(line)}", file=sys.stderr, flush=True)

        # Another process holds the folder's lock: nothing has failed, and later the same command continues.
        if isinstance(error.__cause__, Timeout):
            code = GO_ON
        # Not sys.exit: the processes of a distributed run must end together, whatever they wait for.
        if is_one_of_several():
            os._exit(code)
        sys.exit(code)


def raise_preemption(error: BaseException | None) -> None:
    """Raises the Preempted that an error comes from: a compiled library that a signal stops while it is
    imported raises `ImportError: initialization failed` from it, and what imports the library may raise an
    error of its own."""
    while error is not None:
        if isinstance(error, Preempted):
            raise error
        error = error.__cause__ or error.__context__


def describe_oom(error: BaseException | None) -> str:
    """The message for a failed allocation, wherever it is in the chain of causes; empty for any other error.
    Python raises SystemError for one within an error."""
    while error is not None:
        if isinstance(error, MemoryError | SystemError) or FAILED_ALLOCATION.search(str(error)):
            advice = "rerun the same command to resume, with more memory or less memory use: docs/plan.md"
            return f"out of memory ({find_reason(error)}); {advice}"
        error = error.__cause__ or error.__context__
    return ""


def describe_lost_loader(error: BaseException | None) -> str:
    """The message for a process of a data loader that ended, wherever it is in the chain of causes; empty for
    any other error."""
    while error is not None:
        match = LOST_LOADER.search(str(error)) if isinstance(error, RuntimeError) else None
        if match is not None:
            cause = match[0].splitlines()[0].rstrip(".")
            advice = "rerun the same command to resume, with trainer.num_workers=0 if it happens again"
            return f"a loader process ended ({cause}); {advice}"
        error = error.__cause__ or error.__context__
    return ""


def describe_full_disk(error: BaseException | None) -> str:
    """The message for a write to a full disk, beyond a quota or beyond the size that a file may have,
    wherever it is in the chain of causes, with the path, if it is known, and how much room there is; empty
    for any other error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM_ERRNOS:
            advice = "free some and run the same command again"
            if error.errno == errno.EFBIG:
                advice = "raise the limit, or choose another disk, and run the same command again"
            # `writing` may have added the room already: it is shown once.
            if error.filename is None:
                room = explain_write_error(error, Path.cwd()).strerror
                if error.errno != errno.EFBIG:
                    room = f"{room} in {Path.cwd()}"
                return f"a file cannot be written: {room}; {advice}"
            with_path = explain_write_error(error, Path(os.fsdecode(error.filename)))
            return f"{with_path.filename} cannot be written: {with_path.strerror}; {advice}"
        error = error.__cause__ or error.__context__
    return ""
