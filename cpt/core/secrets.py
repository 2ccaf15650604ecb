"""What of a config is not shown: secrets, by the names of their keys and by their form, and values that come
from environment variables."""

import functools
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

from cpt.core.files import write_atomically

HIDDEN = "(hidden)"  # replaces a secret
NO_DEFAULT = object()
# The last words of a key, joined by _: `slackToken` and `X-Slack-Token` are slack_token.
SECRET_ENDS = (
    "password",
    "passwd",
    "passphrase",
    "passcode",
    "pwd",
    "pw",
    "pat",
    "jwt",
    "otp",
    "creds",
    "cred",
    "credential",
    "credentials",
    "apikey",
    "cookie",
    "cookies",
    "authorization",
    "bearer",
    "dsn",
    "webhook",
    "webhooks",
    "webhook_url",
    "webhook_uri",
    "hook_url",
    "sas_url",
    "signed_url",
    "presigned_url",
    "connection_string",
    "conn_string",
    "conn_str",
    "basic_auth",
    "http_auth",
)
# Words before `_key`; `label_key` and the like name a column.
KEY_WORDS = (
    "api",
    "access",
    "private",
    "account",
    "secret",
    "storage",
    "signing",
    "encryption",
    "subscription",
    "ssh",
    "auth",
    "shared",
    "master",
    "service",
    "client",
    "license",
    "deploy",
    "hmac",
    "sas",
    "webhook",
    "openai",
    "anthropic",
    "wandb",
    "hf",
    "hub",
    "comet",
    "neptune",
    "aws",
    "azure",
    "gcp",
    "app",
    "session",
)
# Words before `_token` in the vocabulary of tokenizers and models.
TOKEN_WORDS = (
    "pad",
    "padding",
    "bos",
    "eos",
    "unk",
    "sep",
    "cls",
    "mask",
    "special",
    "separator",
    "start",
    "stop",
    "end",
    "begin",
    "prefix",
    "suffix",
    "middle",
    "image",
    "audio",
    "video",
    "boi",
    "eoi",
    "sentinel",
    "newline",
    "per",
    "new",
    "added",
    "word",
    "sub",
    "text",
    "extra",
    "first",
    "last",
    "max",
    "min",
    "num",
    "next",
    "target",
    "document",
    "doc",
    "turn",
    "system",
    "user",
    "assistant",
    "think",
    "tool",
    "call",
    "summary",
    "domain",
    "language",
    "lang",
    "fim",
    "each",
    "by",
    "split",
    "decoder",
    "forced",
    "content",
)
SECRET_WORD = re.compile(r"secret|passw(or)?d")  # in any place of a key
# By the form of a value: name and password before a host, parameters, and keys of well-known services.
IN_ADDRESS = re.compile(r"(\w://)(?:[^/\s@]*:(?!\d+/)\S*@|[^/\s]+@)")
WITHOUT_SCHEME = re.compile(r"(?<![\w:/@])([\w.+-]+):[^\s@/:]+@(?=[\w-]+(\.[\w-]+)+)")
PARAMETER = re.compile(r"([\w.-]+)=([^\s;&,\"')\]}]+)")
SERVICE_KEYS = re.compile(
    r"\b(gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z]{30,}|xox[abeoprs]-[\w-]{10,}"
    r"|sk-[\w-]{20,}|AKIA[0-9A-Z]{16})"
)
WEBHOOKS = re.compile(
    r"(https://(?:hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks"
    r"|api\.telegram\.org|[\w.-]*webhook\.office\.com)/)[^\s\"']+"
)
FROM_VARIABLE = re.compile(r"\$\{oc\.env:([\w.-]+)\}#([0-9a-f]{8})")
FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:[\w.-]+\}(?:\$\{oc\.env:[\w.-]+\})*#([0-9a-f]{8})")


@functools.lru_cache(maxsize=10_000)  # the few keys of a config are asked for many times
def is_secret(key: str) -> bool:
    """Whether the value of a key is a secret, by the end of its last part."""
    name = key.rpartition(".")[2]
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").replace(" ", "_").lower()
    if SECRET_WORD.search(name):
        return True
    words = name.strip("_").split("_")
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "token":
        return before not in TOKEN_WORDS
    if words[-1] == "tokens":
        return before in ("access", "api", "auth", "bearer", "bot", "refresh")
    if words[-1] in ("key", "keys"):
        return before in KEY_WORDS
    return any(name == end or name.endswith(f"_{end}") for end in SECRET_ENDS)


def redact(value: Any, key: str = "") -> Any:
    """A config for display: values whose key or form is that of a secret are hidden."""
    if isinstance(value, Mapping):
        return {name: redact(entry, str(name)) for name, entry in value.items()}
    if isinstance(value, list):
        return [redact(entry, key) for entry in value]
    if value is None or isinstance(value, bool):
        return value
    if is_secret(key):
        return HIDDEN
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """A text without the secrets that its form shows: `name=secret`, `https://name:secret@host`."""

    def hide_parameter(match: re.Match[str]) -> str:
        is_shown = HIDDEN.startswith(match[2]) or not is_secret(match[1])
        return match[0] if is_shown else f"{match[1]}={HIDDEN}"

    text = IN_ADDRESS.sub(rf"\1{HIDDEN}@", text)
    text = WITHOUT_SCHEME.sub(rf"\1:{HIDDEN}@", text)
    text = WEBHOOKS.sub(rf"\1{HIDDEN}", text)
    text = SERVICE_KEYS.sub(HIDDEN, text)
    return PARAMETER.sub(hide_parameter, text)


def redact_override(override: str) -> str:
    """A `key=value` of a command line, as it is shown."""
    key, equals, value = override.partition("=")
    return f"{key}{equals}{redact(value, key)}" if equals else override


def redact_file(path: Path) -> None:
    """Hides secrets in a YAML file that Hydra has written, with the config and the command line. A missing
    file, or one without secrets, is left unchanged."""
    if not path.exists():
        return
    tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    redacted = redact(redact_overrides(tree))
    if redacted != tree:
        write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(redacted)))


def redact_overrides(tree: Any) -> Any:
    """A config in which every text in a list is shown as an override."""
    if isinstance(tree, Mapping):
        return {key: redact_overrides(value) for key, value in tree.items()}
    if isinstance(tree, list):
        entries: list[Any] = []
        for entry in tree:
            entries.append(redact_override(entry) if isinstance(entry, str) else redact_overrides(entry))
        return entries
    return tree


def fingerprint(value: Any) -> str:
    """By which another value of an environment variable is noticed: eight hexadecimal digits."""
    return hashlib.blake2b(str(value).encode(errors="replace"), digest_size=4).hexdigest()


def is_same_setting(first: Any, second: Any) -> bool:
    """Whether two values of shown configs are the same, where one may be hidden as from the environment."""
    first_print = find_stored_fingerprint(first)
    second_print = find_stored_fingerprint(second)
    if first_print is None and second_print is None:
        return bool(first == second)
    if first_print is None:
        first_print = fingerprint(first)
    if second_print is None:
        second_print = fingerprint(second)
    return first_print == second_print


def find_stored_fingerprint(value: Any) -> str | None:
    """The fingerprint in a value that is hidden as from the environment; None for another value."""
    match = FROM_ENVIRONMENT.fullmatch(str(value))
    return match[1] if match else None


def find_set_variable(value: str) -> str | None:
    """The environment variable that a hidden text came from, if it is set to the same text now; None of
    another text, and of one that was a part of a value."""
    match = FROM_VARIABLE.fullmatch(value)
    if match is None:
        return None
    name, stored_fingerprint = match.groups()
    is_same = name in os.environ and fingerprint(redact_text(os.environ[name])) == stored_fingerprint
    return name if is_same else None


# The environment variables that `collecting_variables` has seen; None outside of it.
collected_variables: ContextVar[list[str] | None] = ContextVar("collected_variables", default=None)


def read_environment_variable(name: str, default: Any = NO_DEFAULT) -> str | None:
    """OmegaConf's resolver `oc.env`, which also collects the names of the variables that are set."""
    names = collected_variables.get()
    if names is not None and name in os.environ:
        names.append(name)
    if default is NO_DEFAULT:
        return oc.env(name)
    return oc.env(name, default)


@contextmanager
def collecting_variables() -> Iterator[list[str]]:
    """Yields a list to which the name of an environment variable is added each time that `${oc.env:NAME}`
    reads it inside the context."""
    names: list[str] = []
    token = collected_variables.set(names)
    try:
        yield names
    finally:
        collected_variables.reset(token)


def hide_environment(node: Any, names: Sequence[str] = ()) -> Any:
    """A config in Python's own types, resolved, but texts that come from environment variables as
    `${oc.env:NAME}#fingerprint`; `names` are the variables that the whole of it comes from. Numbers are
    shown. Raises MissingMandatoryValue for a value that is missing."""
    if isinstance(node, DictConfig):
        return {str(key): hide_item(node, key, names) for key in node}
    if isinstance(node, ListConfig):
        return [hide_item(node, index, names) for index in range(len(node))]
    if isinstance(node, Mapping):  # plain ones are made by a resolver
        return {str(key): hide_environment(value, names) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [hide_environment(value, names) for value in node]
    if names and isinstance(node, str):
        references = "".join(f"${{oc.env:{name}}}" for name in dict.fromkeys(names))
        return f"{references}#{fingerprint(redact_text(node))}"
    return node


def hide_item(node: Any, key: Any, names: Sequence[str]) -> Any:
    """`hide_environment` of one value: `key` is a key of a mapping or an index of a list, `names` are the
    variables that the whole `node` comes from."""
    with collecting_variables() as names_of_item:
        value = node[key]  # resolved here
    return hide_environment(value, [*names, *names_of_item])


OmegaConf.register_new_resolver("oc.env", read_environment_variable, replace=True)
