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
from typing import Any, cast
from urllib.parse import quote

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from cpt.adapters.domain_store import Scope
from cpt.core.exceptions import InvalidOptionError
from cpt.core.files import replacing
from cpt.models.loading import make_skeleton
from cpt.models.narrow_layers import find_hidden_dtype
from cpt.models.quantization import find_quantized_layers

PARTS_INDEX = "parts.json"
TRUSTED_PACKAGES = ("cpt.adapters.",)  # packages whose `attach…` functions parts.json may name


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
    folder = Path(folder)
    names = list(parts)
    changed_weights: Mapping[str, Tensor] = {}
    if parts and attach is None:
        # The last part is in the plain model already: that is what `from_pretrained` alone loads.
        changed_weights = parts[names[-1]]
    weights = collect_plain_weights(model, changed_weights)

    # The index goes first and is written last: a folder that is only half written has none.
    (folder / PARTS_INDEX).unlink(missing_ok=True)
    if (folder / "parts").exists():
        shutil.rmtree(folder / "parts")
    model.save_pretrained(folder, state_dict=weights)
    quoted_folder = json.dumps(str(folder), ensure_ascii=False)
    if not parts:
        return f"transformers.{type(model).__name__}.from_pretrained({quoted_folder})"

    (folder / "parts").mkdir()
    for name, part in parts.items():
        tensors = {key: copy_storage(value) for key, value in part.items()}
        save_file(tensors, part_file(folder, name))
    index = {
        "attach": f"{attach.__module__}.{attach.__qualname__}" if attach else None,
        "options": dict(options),
        "parts": names,
    }
    with replacing(folder / PARTS_INDEX) as partial:
        partial.write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    quoted_name = json.dumps(names[-1], ensure_ascii=False)
    return f"cpt.adapters.export.load({quoted_folder}, domain={quoted_name})"


def collect_plain_weights(model: PreTrainedModel, changed_weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a model without adapters, in which some weights, by their names in the model, have other
    values."""
    state = model.state_dict()
    for name, layer in find_quantized_layers(model).items():
        state[f"{name}.weight"] = layer.plain_weight(find_hidden_dtype(model))
    # By address, so that weights tied to a changed one change with it.
    changes = {state[name].data_ptr(): copy_storage(values) for name, values in changed_weights.items()}

    values_by_name = {}
    for name, tensor in state.items():
        plain_name = name.replace(".base_layer.", ".")  # peft wraps a layer and calls it so
        values_by_name[plain_name] = changes.get(tensor.data_ptr(), tensor)
    # A model without adapters says which of these names are its own.
    return {name: values_by_name[name] for name in make_skeleton(model).state_dict()}


def load(folder: Path | str, domain: str | None = None) -> PreTrainedModel:
    """The model of an exported folder with the parameters of a domain, None for the last, in eval mode.
    Raises ValueError for a folder or domain without parts, and for a function that is not an `attach…` of one
    of the TRUSTED_PACKAGES."""
    folder = Path(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model_class = getattr(transformers, config.architectures[0])
    if not (folder / PARTS_INDEX).is_file():
        raise ValueError(f"{folder} has no {PARTS_INDEX}. Allowed: {model_class.__name__}.from_pretrained")
    index = json.loads((folder / PARTS_INDEX).read_text(encoding="utf-8"))
    name = index["parts"][-1] if domain is None else domain
    if name not in index["parts"]:
        raise InvalidOptionError("domain", name, allowed=", ".join(index["parts"]))

    model = model_class.from_pretrained(folder, trust_remote_code=False)
    # Before the part is loaded: it has the parameters of the attached modules.
    if index["attach"] is not None:
        attach = import_attach(index["attach"])
        attach(model, **index["options"])
    # Not strict: a part lacks what all domains share.
    _, unknown_names = model.load_state_dict(load_file(part_file(folder, name)), strict=False)
    if unknown_names:
        raise ValueError(
            f"the part of {name} in {folder} has weights that the model lacks: {unknown_names[0]}"
        )
    return model.eval()


def import_attach(path: str) -> Callable[..., Scope]:
    """The function of a dotted path. Raises ValueError for what is not an `attach…` of one of the
    TRUSTED_PACKAGES: a folder may come from anybody, and must not have any other function called."""
    module, _, name = path.rpartition(".")
    function = None
    if f"{module}.".startswith(TRUSTED_PACKAGES) and name.startswith("attach"):
        with suppress(ImportError):
            function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ValueError(
            f"attach={path} of {PARTS_INDEX} is invalid. "
            f"Allowed: functions of {', '.join(TRUSTED_PACKAGES)}* that are called attach…"
        )
    return cast(Callable[..., Scope], function)


def copy_storage(tensor: Tensor) -> Tensor:
    """A copy with storage of its own, as safetensors needs it."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def part_file(folder: Path, name: str) -> Path:
    """The file of a part; characters of its name that are not letters or digits are escaped."""
    escaped = re.sub(r"[^\w .-]", lambda character: quote(character[0], safe=""), name)
    return folder / "parts" / f"{escaped}.safetensors"
