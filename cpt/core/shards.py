"""Reads folders of sharded tensors, which torch.distributed.checkpoint writes, without running their code."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

INDEX = ".metadata"  # which rows of which tensor are where in the files
# The classes and functions that torch pickles in an index. BytesStorageMetadata is left out: it stands for
# any other object, which torch would unpickle.
INDEX_CLASSES = {
    "torch": ("Size",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",),
}


class IndexUnpickler(pickle.Unpickler):
    """Reads an index, and refuses a file with anything but an index in it."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "PosixPath" and module in ("pathlib", "pathlib._local"):
            return Path  # `pathlib._local` is where Python 3.13 has it
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def read_index(folder: Path) -> Metadata:
    """The index of a folder of shards, whose `state_dict_metadata` has the shapes and types of its tensors.
    Raises ValueError for a damaged one, and for one with other objects in it, which could execute code;
    OSError for one that cannot be read."""
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = IndexUnpickler(file).load()
    except OSError:
        raise
    except Exception as error:  # pickle raises many classes for a damaged file
        raise ValueError(f"{path} holds other things than an index of tensors; it is not used") from error
    if not isinstance(index, Metadata):
        raise ValueError(f"{path} is no index of tensors; it is not used")
    return index


class ShardReader(FileSystemReader):
    """Reads a folder of shards with `read_index`. FileSystemReader would unpickle whatever an index holds."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, with the id of this load, which FileSystemReader sets as well."""
        index = read_index(self.folder)
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index
