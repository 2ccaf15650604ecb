"""The two errors whose messages have a form: an option with a value that is not allowed, and a damaged file.

Both are ValueErrors, and `cpt.core.errors.readable_errors` prints their message as one line. This module
imports nothing of cpt, so that every other module can raise them."""

from collections.abc import Mapping
from typing import Any, Self


def format_value(value: Any) -> str:
    """A value as it is written on the command line.

    >>> format_value([None, True, "a"])
    '[null,true,a]'
    >>> format_value({"r": 4})
    '{r: 4}'
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {format_value(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


class MessageError(ValueError):
    """An error with a composed message, whose class and attributes stay when it is pickled or prefixed."""

    def with_message(self, message: str) -> Self:
        """The same error with another message, for example one that begins with a section of the config."""
        return restore_error(type(self), message, vars(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Attributes are sent to other processes as texts: a value need not be picklable."""
        texts = {name: format_value(value) for name, value in vars(self).items() if not name.startswith("_")}
        return restore_error, (type(self), str(self), texts)


def restore_error(kind: type[MessageError], message: str, attributes: dict[str, Any]) -> Any:
    """An error of a class with a message and attributes, without the arguments of its constructor."""
    error = kind.__new__(kind)
    error.args = (message,)
    vars(error).update(attributes)
    return error


class InvalidOptionError(MessageError):
    """`key=value is invalid: reason. Allowed: allowed`, on one line.

    `context` is what the value does not go with: `with …`, `for …` or `before …`; `meant` a value that was
    probably meant, and comes before what is allowed.

    >>> print(InvalidOptionError("model.num_hidden_layers", 4, reason="the model is new", allowed="null"))
    model.num_hidden_layers=4 is invalid: the model is new. Allowed: null
    >>> print(InvalidOptionError("model", "tiny_bert", context="for chats", allowed="model=tiny_gpt2"))
    model=tiny_bert is invalid for chats. Allowed: model=tiny_gpt2
    >>> print(InvalidOptionError("trainer.precision", "fp16", meant="16-mixed", allowed="auto, 16-mixed"))
    trainer.precision=fp16 is invalid. Did you mean 16-mixed? Allowed: auto, 16-mixed
    """

    def __init__(
        self, key: str, value: Any, *, reason: str = "", allowed: str, context: str = "", meant: str = ""
    ) -> None:
        self.key = key
        self.value = value
        self.reason = reason
        self.allowed = allowed
        self.context = context

        message = f"{key}={format_value(value)} is invalid"
        if context:
            message += f" {context}"
        if reason:
            message += f": {reason}"
        if meant:
            message += f". Did you mean {meant}? Allowed: {allowed}"
        else:
            message += f". Allowed: {allowed}"
        super().__init__(message)


class DamagedFileError(MessageError):
    """`path is damaged (reason); remedy`, on one line; without a reason, `path is damaged; remedy`.

    >>> print(DamagedFileError("base.pt", reason="no zip file", remedy="delete it to make it again"))
    base.pt is damaged (no zip file); delete it to make it again
    """

    def __init__(self, path: Any, *, reason: str = "", remedy: str) -> None:
        self.path = path
        self.reason = reason
        self.remedy = remedy

        message = f"{path} is damaged"
        if reason:
            message += f" ({reason})"
        super().__init__(f"{message}; {remedy}")
