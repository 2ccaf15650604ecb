"""A run's model for others to load: a plain Hugging Face model, and beside it what each domain adds to it.

FOLDER/                    config.json, model.safetensors: the plain model
FOLDER/parts.json          the names of the parts in order, what attaches them and with which options
FOLDER/parts/law.safetensors
"""

import importlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from cpt.adapters.bank import Scope
from cpt.core.files import replacing
from cpt.models.loading import skeleton

INDEX = "parts.json"
TRUSTED = ("cpt.adapters.",)  # of whose modules a file may have an `attach…` called
MOVED = {  # where functions stand now that files of version 0.1 name
    "cpt.adapters.attach": "cpt.adapters.bottleneck.attach_bottlenecks",
    "cpt.adapters.attach_plugins": "cpt.adapters.plugin.attach_plugins",
    "cpt.prompts.attach": "cpt.adapters.prompt.attach_prompt",
}


def export_parts(
    folder: Path | str,
    model: PreTrainedModel,
    parts: Mapping[str, Mapping[str, Tensor]],
    *,
    attach: Callable[..., Scope] | None,
    options: Mapping[str, Any],
) -> str:
    """Writes a model without what was attached to it, and the part of each domain by the domain's name; gives
    the Python expression that loads it with the last one. Without parts, it is a plain model alone.

    `attach(model, **options)` makes of a plain model one that takes the parts; it is a function of a module.
    Where it is None the parts are weights that the plain model has, and the last of them is put into it. What
    was in the folder is replaced. Raises ValueError where the options are no JSON, the function can not be
    found by its name, or the model lacks weights of a plain one."""
    folder = Path(folder)
    index = {
        "attach": path_of_function(attach) if attach else None,
        "options": as_json(options),
        "parts": list(parts),
    }
    last = parts[index["parts"][-1]] if parts and attach is None else {}
    plain = plain_weights(model, last)
    for old in (folder / INDEX, folder / "parts"):
        remove(old)
    model.save_pretrained(folder, state_dict=plain)
    if not parts:
        return f"transformers.{type(model).__name__}.from_pretrained({quote_name(str(folder))})"
    (folder / "parts").mkdir()
    for name, part in parts.items():
        save_file({key: own_weights(value) for key, value in part.items()}, file_of(folder, name))
    with replacing(folder / INDEX) as partial:
        partial.write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return f"cpt.adapters.export.load({quote_name(str(folder))}, domain={quote_name(index['parts'][-1])})"


def quote_name(text: str) -> str:
    """A text as a Python literal."""
    return json.dumps(text, ensure_ascii=False)


def load(folder: Path | str, domain: str | None = None) -> PreTrainedModel:
    """The model of an exported folder with the part of a domain, None for the last, in eval mode and the type
    that it was saved in.

    Raises ValueError for a folder without parts, for a domain that has none, and where parts.json names a
    function that is not of a trusted package."""
    folder = Path(folder)
    kind = architecture(folder)
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} has no {INDEX}; allowed: {kind.__name__}.from_pretrained")
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    name = index["parts"][-1] if domain is None else domain
    if name not in index["parts"]:
        raise ValueError(f"domain={name} has no part in {folder}; allowed: {', '.join(index['parts'])}")
    model = kind.from_pretrained(folder)
    if index["attach"] is not None:
        load_attach(index["attach"])(model, **index["options"])
    part = load_file(file_of(folder, name))
    _, unknown = model.load_state_dict(part, strict=False)
    if unknown:
        raise ValueError(f"the part of {name} in {folder} has weights that the model lacks: {unknown[0]}")
    return model.eval()


def own_weights(tensor: Tensor) -> Tensor:
    """A copy with storage of its own, as safetensors wants it."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def plain_weights(model: PreTrainedModel, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that a model of this class and configuration has by itself, some of them changed, under the
    names that peft has not changed."""
    state = model.state_dict()
    # By address, so that what is tied to a changed weight changes with it.
    changes = {state[name].data_ptr(): own_weights(value) for name, value in changed.items()}
    present = {
        name.replace(".base_layer.", "."): changes.get(value.data_ptr(), value)
        for name, value in state.items()
    }
    wanted = skeleton(model).state_dict()
    lacking = [name for name in wanted if name not in present]
    if lacking:
        raise ValueError(f"{type(model).__name__} has lost weights of a plain one: {', '.join(lacking[:3])}")
    return {name: present[name] for name in wanted}


def architecture(folder: Path) -> type[PreTrainedModel]:
    """The class that a folder's configuration names."""
    names = AutoConfig.from_pretrained(folder, trust_remote_code=False).architectures or [""]
    kind = getattr(transformers, names[0], None)
    if kind is None:
        raise ValueError(f"{folder}/config.json: architectures={names}; allowed: a class of transformers")
    return kind


def file_of(folder: Path, name: str) -> Path:
    """The file of a part; what of a domain's name is no letter or digit is escaped."""
    escaped = re.sub(r"[^\w .-]", lambda character: quote(character[0], safe=""), name)
    return folder / "parts" / f"{escaped}.safetensors"


def as_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options, checked to come back the same."""
    try:
        back = json.loads(json.dumps(dict(options)))
    except TypeError as error:
        raise ValueError(f"options={options}; allowed: what JSON can hold ({error})") from error
    if back != dict(options):
        raise ValueError(f"options={options}; allowed: what JSON gives back the same, not {back}")
    return back


def path_of_function(function: Callable[..., Any]) -> str:
    """Where a function is found, module.name."""
    path = f"{function.__module__}.{function.__qualname__}"
    if "." in function.__qualname__:
        raise ValueError(f"attach={path}; allowed: a function of a module")
    return path


def load_attach(path: str) -> Callable[..., Any]:
    """The function of a dotted path; raises ValueError for one that does not attach parts. A folder may come
    from others, and what else cpt has would do what they want: `make_entry` calls whatever it is told."""
    module, _, name = MOVED.get(path, path).rpartition(".")
    allowed = f"functions of {', '.join(TRUSTED)}* that are called attach…"
    if not (f"{module}.".startswith(TRUSTED) and name.startswith("attach")):
        raise ValueError(f"{INDEX} names {path}; allowed: {allowed}")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        found = None
    if not callable(found):
        raise ValueError(f"{INDEX} names {path}, which is not there; allowed: {allowed}")
    return found


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
