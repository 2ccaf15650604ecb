"""Export of a model with per-domain parameters: a plain Hugging Face model, and what each domain adds to it.

FOLDER/                    config.json, model.safetensors: the plain model
FOLDER/parts.json          the names of the parts in order, what attaches them and with which options
FOLDER/parts/law.safetensors
"""

import importlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from cpt.adapters.domain_store import Scope
from cpt.core.files import replacing
from cpt.models.loading import make_skeleton

PARTS_INDEX = "parts.json"
TRUSTED = ("cpt.adapters.",)  # packages of which parts.json may have an `attach…` called


def export_parts(
    folder: Path | str,
    model: PreTrainedModel,
    parts: Mapping[str, Mapping[str, Tensor]],
    *,
    attach: Callable[..., Scope] | None,
    options: Mapping[str, Any],
) -> str:
    """Writes a model without its adapters, and the parameters of each domain; returns the expression that
    loads it with the last one. `attach(model, **options)` adds the adapters; None: the parts are weights of
    the model."""
    folder, names, state = Path(folder), list(parts), model.state_dict()
    last = parts[names[-1]] if parts and attach is None else {}
    # By address, so that what is tied to a changed weight changes with it.
    changes = {state[name].data_ptr(): own_storage(value) for name, value in last.items()}
    plain = {name.replace(".base_layer.", "."): value for name, value in state.items()}  # peft's name
    present = {name: changes.get(value.data_ptr(), value) for name, value in plain.items()}
    wanted = make_skeleton(model).state_dict()
    (folder / PARTS_INDEX).unlink(missing_ok=True)
    if (folder / "parts").exists():
        shutil.rmtree(folder / "parts")
    model.save_pretrained(folder, state_dict={name: present[name] for name in wanted})
    shown = json.dumps(str(folder), ensure_ascii=False)
    if not parts:
        return f"transformers.{type(model).__name__}.from_pretrained({shown})"
    (folder / "parts").mkdir()
    for name, part in parts.items():
        save_file({key: own_storage(value) for key, value in part.items()}, part_file(folder, name))
    with replacing(folder / PARTS_INDEX) as partial:
        path = f"{attach.__module__}.{attach.__qualname__}" if attach else None
        index = {"attach": path, "options": dict(options), "parts": names}
        partial.write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return f"cpt.adapters.export.load({shown}, domain={json.dumps(names[-1], ensure_ascii=False)})"


def load(folder: Path | str, domain: str | None = None) -> PreTrainedModel:
    """The model of an exported folder with the parameters of a domain, None for the last, in eval mode.
    ValueError for a folder or domain without parts, and for a function that is not an `attach…` of a TRUSTED
    package."""
    folder = Path(folder)
    kind = getattr(transformers, AutoConfig.from_pretrained(folder, trust_remote_code=False).architectures[0])
    if not (folder / PARTS_INDEX).is_file():
        raise ValueError(f"{folder} has no {PARTS_INDEX}. Allowed: {kind.__name__}.from_pretrained")
    index = json.loads((folder / PARTS_INDEX).read_text(encoding="utf-8"))
    name = index["parts"][-1] if domain is None else domain
    if name not in index["parts"]:
        raise ValueError(f"domain={name} is invalid. Allowed: {', '.join(index['parts'])}")
    model = kind.from_pretrained(folder)
    if (path := index["attach"]) is not None:
        module, _, function = path.rpartition(".")
        attach = None
        if f"{module}.".startswith(TRUSTED) and function.startswith("attach"):
            with suppress(ImportError):
                attach = getattr(importlib.import_module(module), function, None)
        if not callable(attach):
            allowed = f"functions of {', '.join(TRUSTED)}* that are called attach…"
            raise ValueError(f"attach={path} of {PARTS_INDEX} is invalid. Allowed: {allowed}")
        attach(model, **index["options"])
    _, unknown = model.load_state_dict(load_file(part_file(folder, name)), strict=False)
    if unknown:
        raise ValueError(f"the part of {name} in {folder} has weights that the model lacks: {unknown[0]}")
    return model.eval()


def own_storage(tensor: Tensor) -> Tensor:
    """A copy with storage of its own, as safetensors needs it."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def part_file(folder: Path, name: str) -> Path:
    """The file of a part; characters of its name that are no letters or digits are escaped."""
    escaped = re.sub(r"[^\w .-]", lambda character: quote(character[0], safe=""), name)
    return folder / "parts" / f"{escaped}.safetensors"
