"""What is wrong with the files of a tokenizer that its class does not take: the words of the class are about
its own code."""

import json
from pathlib import Path

from cpt.core.errors import find_reason
from cpt.core.exceptions import InvalidOptionError, format_value

DEFINITION = "tokenizer.json"
CONFIG = "tokenizer_config.json"
JSON_FILES = (DEFINITION, CONFIG, "special_tokens_map.json", "added_tokens.json")
VERBATIM = "PreTrainedTokenizerFast"  # the class that takes tokenizer.json as it is
REMEDY = ". Allowed: "  # what comes after it in a message
ADVICE = "the whole file; copy or download it again"


def describe_fault(folder: Path, error: Exception) -> str:
    """Which file of a tokenizer in a folder is the cause of an error of its class, and what is allowed in it;
    empty if the files do not tell."""
    contents: dict[str, dict[str, object]] = {}  # by file
    for name in JSON_FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return f"its {name} is no JSON{REMEDY}{ADVICE}"
        if not isinstance(content, dict):
            return f"its {name} has a {type(content).__name__}, not keys with values{REMEDY}{ADVICE}"
        contents[name] = content

    class_name = contents.get(CONFIG, {}).get("tokenizer_class")
    if class_name is not None and not isinstance(class_name, str):
        return f"its {CONFIG} has tokenizer_class={format_value(class_name)}{REMEDY}the name of a class, null"
    if DEFINITION not in contents:
        return ""
    model = contents[DEFINITION].get("model")
    if not isinstance(model, dict):
        return f"its {DEFINITION} has no model{REMEDY}{ADVICE}"
    if class_name is None or not isinstance(error, TypeError):
        return ""
    kind = model.get("type", "model")
    return (
        f"its {CONFIG} has tokenizer_class={class_name}, which does not take the {kind} of its {DEFINITION} "
        f"({find_reason(error)}){REMEDY}tokenizer_class={VERBATIM}, which takes any"
    )


def tokenizer_error(key: str, name: str, error: Exception, *, allowed: str) -> InvalidOptionError:
    """The error of an option `key=name` whose tokenizer cannot be read: with what the error says is allowed,
    else with `allowed`."""
    absent = "" if Path(name).exists() else "no such folder, and not loaded from the Hub: "
    reason, _, remedy = find_reason(error).rstrip(".").partition(REMEDY)
    return InvalidOptionError(key, name, reason=f"{absent}{reason}", allowed=remedy or allowed)
