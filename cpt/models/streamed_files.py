"""Models that are written tensor by tensor, in the files of transformers' `save_pretrained`."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from cpt.core.tensor_files import TensorWriter

MAX_SHARD_SIZE = "50GB"  # of save_pretrained
PATTERN = "model{suffix}.safetensors"
METADATA = {"format": "pt"}
ReadWeight = Callable[[str], Tensor]  # of a weight by its name in the model


def can_stream(skeleton: PreTrainedModel) -> bool:
    """Whether each tensor of the files comes from one weight of the model, so that weights can be converted
    one by one. `skeleton`: the model without storage."""
    weights = find_weights(skeleton)
    shapes_one_by_one = dict[str, torch.Size]()
    for name, weight in weights.items():
        for stored_name, tensor in revert_weight_conversion(skeleton, {name: weight}).items():
            shapes_one_by_one[stored_name] = tensor.shape
    converted_together = revert_weight_conversion(skeleton, weights)
    return shapes_one_by_one == {name: tensor.shape for name, tensor in converted_together.items()}


def find_weights(skeleton: PreTrainedModel) -> dict[str, Tensor]:
    """The weights that files have, by their names in the model, without storage: only the first of tied
    weights, and none that transformers does not save."""
    state = skeleton.state_dict()
    for name in skeleton._keys_to_ignore_on_save or ():
        state.pop(name, None)
    weights: dict[str, Tensor] = remove_tied_weights_from_state_dict(state, skeleton)
    return weights


def write_model(folder: Path, skeleton: PreTrainedModel, read_weight: ReadWeight) -> None:
    """Writes the configuration of a model without storage, and its weights. Each weight is read twice: first
    for its type, which is at the start of a file, and then for its values."""
    skeleton.save_pretrained(folder, state_dict={})  # the configuration alone

    # By name in the files: tensors without storage, and the name of the weight that each comes from.
    layout = dict[str, Tensor]()
    sources = dict[str, str]()
    for name in find_weights(skeleton):
        for stored_name, tensor in revert_weight_conversion(skeleton, {name: read_weight(name)}).items():
            layout[stored_name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            sources[stored_name] = name

    shards = split_torch_state_dict_into_shards(
        layout, filename_pattern=PATTERN, max_shard_size=MAX_SHARD_SIZE
    )
    for file_name, stored_names in shards.filename_to_tensors.items():
        # A weight may be stored as several tensors, as fused experts are, which may be in two shards.
        stored_by_source = defaultdict[str, list[str]](list)
        for stored_name in stored_names:
            stored_by_source[sources[stored_name]].append(stored_name)
        shard_layout = {stored_name: layout[stored_name] for stored_name in stored_names}
        with TensorWriter(folder / file_name, shard_layout, METADATA) as writer:
            for name, names_of_weight in stored_by_source.items():
                tensors = revert_weight_conversion(skeleton, {name: read_weight(name)})
                for stored_name in names_of_weight:
                    writer.write(stored_name, tensors[stored_name])
    if shards.is_sharded:
        write_index(folder, shards, num_parameters=skeleton.num_parameters())


def write_index(folder: Path, shards: StateDictSplit, *, num_parameters: int) -> None:
    """Writes the index of the tensors by shard, as `save_pretrained` does."""
    metadata = {"total_parameters": num_parameters, **shards.metadata}
    index = {"metadata": metadata, "weight_map": shards.tensor_to_filename}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
