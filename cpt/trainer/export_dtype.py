"""The type of exported weights (`export.dtype`): what was trained, rounded once."""

import json
import os
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import CONFIG_NAME

from cpt.core.exceptions import InvalidOptionError
from cpt.core.tensor_files import TensorWriter, open_tensors
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
    """Rounds the floating-point tensors of a file, one at a time; returns whether one had another type."""
    layout: dict[str, Tensor] = {}  # of the rounded file
    is_changed = False
    with open_tensors(path) as opened:
        for name in opened.keys():  # noqa: SIM118  (it is not a mapping)
            tensor = opened.get_tensor(name)
            layout[name] = torch.empty_like(tensor, device="meta")
            if tensor.is_floating_point() and tensor.dtype != dtype:
                check_range(tensor, name, dtype)
                layout[name] = layout[name].to(dtype)
                is_changed = True
        if not is_changed:
            return False

        partial = path.with_name(f"{path.name}.partial")
        with TensorWriter(partial, layout, opened.metadata()) as writer:
            for name, rounded in layout.items():
                writer.write(name, opened.get_tensor(name).to(rounded.dtype))
    os.replace(partial, path)
    return True


def check_range(tensor: Tensor, name: str, dtype: torch.dtype) -> None:
    """Raises ValueError for a finite tensor with values beyond the range of another type."""
    if not tensor.to(dtype).isfinite().all():
        raise InvalidOptionError(
            "export.dtype",
            name_dtype(dtype),
            reason=f"{name} has values beyond its range ({tensor.abs().max():.3g})",
            allowed="bfloat16, float32: the same command exports the trained model",
        )


def count_bytes(path: Path) -> int:
    """The bytes of the tensors in a file of safetensors."""
    with open_tensors(path) as opened:
        return sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118
