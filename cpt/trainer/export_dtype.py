"""The type of exported weights (`export.dtype`): what was trained, rounded once."""

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import CONFIG_NAME

from cpt.core.exceptions import InvalidOptionError
from cpt.models.loading import load_config
from cpt.models.stored_weights import find_main_dtype, find_weight_files, read_stored_weights
from cpt.trainer.options import ExportOptions, Precision

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRAINED_DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}  # by precision; 32 bits of others


def find_export_dtype(options: ExportOptions, checkpoint: str | None, precision: Precision) -> torch.dtype:
    """The type of exported weights. `auto` is 16 bits where a checkpoint has most weights in them, and else
    as the weights are trained."""
    if options.dtype != "auto":
        return DTYPES[options.dtype]
    if checkpoint is not None:
        files = find_weight_files(checkpoint, load_config(checkpoint))
        stored_dtype = find_main_dtype(read_stored_weights(files))
        if stored_dtype in (torch.bfloat16, torch.float16):
            return stored_dtype
    return TRAINED_DTYPES.get(str(precision), torch.float32)


def name_dtype(dtype: torch.dtype) -> str:
    """`bfloat16` and so on."""
    return str(dtype).removeprefix("torch.")


def convert_files(folder: Path, dtype: torch.dtype) -> None:
    """Rounds the weights of an exported model in place, file by file. What is added to a plain model, as
    adapters in folders of their own, stays as it was trained. Raises ValueError for weights that are beyond
    the range of the type."""
    is_changed = False
    for path in sorted(folder.glob("*.safetensors")):
        is_changed |= convert_file(path, dtype)
    if not is_changed:
        return

    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    config["dtype"] = name_dtype(dtype)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
    for path in folder.glob("*.safetensors.index.json"):
        index = json.loads(path.read_text(encoding="utf-8"))
        shards = {folder / name for name in index["weight_map"].values()}
        index["metadata"]["total_size"] = sum(count_bytes(shard) for shard in shards)
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def convert_file(path: Path, dtype: torch.dtype) -> bool:
    """Rounds the floating-point tensors of a file; returns whether one had another type."""
    is_changed = False
    tensors: dict[str, Tensor] = {}
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
        for name in opened.keys():  # noqa: SIM118  (it is no mapping)
            tensor = opened.get_tensor(name)
            tensors[name] = tensor
            if tensor.is_floating_point() and tensor.dtype != dtype:
                tensors[name] = round_weights(tensor, name, dtype)
                is_changed = True
    if is_changed:
        partial = path.with_name(f"{path.name}.partial")
        save_file(tensors, partial, metadata)
        os.replace(partial, path)
    return is_changed


def round_weights(tensor: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """A finite tensor in another type. Raises ValueError for values beyond its range."""
    rounded = tensor.to(dtype)
    if not rounded.isfinite().all():
        raise InvalidOptionError(
            "export.dtype",
            name_dtype(dtype),
            reason=f"{name} has values beyond its range ({tensor.abs().max():.3g})",
            allowed="bfloat16, float32: the same command exports the trained model",
        )
    return rounded


def count_bytes(path: Path) -> int:
    """The bytes of the tensors in a file of safetensors."""
    with safe_open(path, "pt") as opened:
        return sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118
