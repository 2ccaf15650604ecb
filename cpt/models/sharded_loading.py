"""A checkpoint that several processes load together: each reads its rows of every weight.

transformers makes a model without storage and then loads its tensors. In between it is sharded here, so that
of each tensor of the safetensors files a process reads the rows that it has. Weights that transformers
converts (fused experts) are read as a whole, block by block, and sharded before the next block is read."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from cpt.core.distributed import gather_objects, is_sharded, to_local
from cpt.core.processes import rank_and_world
from cpt.models.fsdp import Sharding, shard_model

Slices = Mapping[str, Any]  # by key in the files, what reads a part of a tensor


class UnshardableFilesError(Exception):
    """Files of which a process cannot read its rows alone; the message says why."""


@dataclass(frozen=True)
class VocabularyRows:
    """The rows of a vocabulary that files do not have: `set_rows` gives them to a model, which has storage
    for its embedding and its head alone. `are_new`: otherwise it only reads the rows that are there."""

    set_rows: Callable[[PreTrainedModel], None]
    are_new: bool


NO_NEW_ROWS = VocabularyRows(lambda model: None, are_new=False)


def make_sharded_class(
    model_class: type[PreTrainedModel],
    plain_class: type[PreTrainedModel],
    *,
    sharding: Sharding,
    rows: VocabularyRows,
) -> type[PreTrainedModel]:
    """A class whose `from_pretrained` makes a model of `model_class`, and returns it sharded, as one of the
    plain class. Raises UnshardableFilesError where files do not allow it."""

    def load(
        model: PreTrainedModel, state: None, files: list[str], load_config: Any, expected_keys: Any = None
    ) -> tuple[Any, Any]:
        model.__class__ = plain_class
        if not all(path.endswith(".safetensors") for path in files):
            raise UnshardableFilesError("they are not in safetensors")
        with ExitStack() as stack:
            slices = {}
            for path in files:
                file = stack.enter_context(safe_open(path, "pt"))
                for key in file.keys():  # noqa: SIM118  (it is not a mapping)
                    slices[key] = file.get_slice(key)
            loader = ShardLoader(model, slices, load_config)
            return loader.load(sharding, rows), None

    attributes = {"_load_pretrained_model": staticmethod(load), "__module__": plain_class.__module__}
    return type(plain_class.__name__, (model_class,), attributes)


class ShardLoader:
    """Loads the tensors of files into a model that has no storage yet. `load_config` is that of
    transformers."""

    def __init__(self, model: PreTrainedModel, slices: Slices, load_config: Any) -> None:
        self.model = model
        self.slices = dict(slices)
        self.load_config = load_config
        self.sources: dict[str, list[str]] = {}  # by name in the model, the keys in the files
        self.converted = set[str]()  # names of weights that transformers converts
        self.loaded = set[str]()  # names of weights before the model was sharded
        self.reports: list[Any] = []  # of transformers

        mapping = load_config.weight_mapping or []
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        state = model.state_dict()
        prefix = model.base_model_prefix
        for key in slices:
            name, converter = rename_source_key(key, renamings, converters, prefix, state)
            # As transformers does: a key that the model itself has is not renamed, only prefixed.
            if name not in state and key in state:
                name, converter = rename_source_key(key, [], [], prefix, state)
            self.sources.setdefault(name, []).append(key)
            if converter is not None:
                self.converted.add(name)

    def load(self, sharding: Sharding, rows: VocabularyRows) -> Any:
        """Shards the model and loads it; returns what transformers reports of the loading."""
        self.tie_weights()
        self.set_rows(rows)
        shard_model(self.model, sharding, prepare=self.load_converted)
        for parameter in self.model.parameters():
            if not to_local(parameter).is_meta:
                parameter._is_hf_initialized = True  # else transformers would draw it

        self.load_keys(self.slices)
        report = self.reports[-1]
        for earlier_report in self.reports[:-1]:
            report.mismatched_keys |= earlier_report.mismatched_keys
            report.conversion_errors.update(earlier_report.conversion_errors)
        report.missing_keys -= self.loaded
        self.check_missing(report.missing_keys)
        return report

    def load_keys(self, keys: Iterable[str]) -> Any:
        """Has transformers load some tensors of the files, which need no further loading. Returns its
        report."""
        slices = {key: self.slices[key] for key in keys}
        self.slices = {key: reader for key, reader in self.slices.items() if key not in slices}
        report, _ = type(self.model)._load_pretrained_model(self.model, slices, None, self.load_config)
        self.reports.append(report)
        return report

    def load_converted(self, block_name: str, block: nn.Module) -> None:
        """Loads the converted weights of a block, or those outside of all blocks, before it is sharded."""
        prefix = f"{block_name}." if block_name else ""
        keys: list[str] = []
        for name in sorted(self.converted):
            if name.startswith(prefix):
                keys.extend(key for key in self.sources[name] if key in self.slices)
        if keys:
            missing_names = self.load_keys(keys).missing_keys
            self.loaded |= set(self.model.state_dict()) - missing_names

    def tie_weights(self) -> None:
        """Ties weights before they are sharded, as transformers does once they are loaded: not those that the
        files have with different values."""
        for target, source in self.model.all_tied_weights_keys.items():
            if target in self.sources and source in self.sources:
                if not self.are_equal(target, source):
                    continue
                for key in self.sources.pop(target):
                    del self.slices[key]
            owner_name, _, name = target.rpartition(".")
            setattr(self.model.get_submodule(owner_name), name, self.model.get_parameter(source))

    def are_equal(self, first: str, second: str) -> bool:
        """Whether the files have the same values of two weights; each process compares a part."""
        first_slice = self.find_slice(first)
        second_slice = self.find_slice(second)
        shape = first_slice.get_shape()
        if shape != second_slice.get_shape():
            return False
        rank, world = rank_and_world()
        begin = shape[0] * rank // world
        end = shape[0] * (rank + 1) // world
        return all(gather_objects(torch.equal(first_slice[begin:end], second_slice[begin:end])))

    def find_slice(self, name: str) -> Any:
        """What reads a weight that the files have as it is. Raises UnshardableFilesError for other
        weights."""
        keys = self.sources.get(name, [])
        if not keys:
            raise UnshardableFilesError(f"they lack {name}")
        if name in self.converted or len(keys) > 1:
            raise UnshardableFilesError(f"{name} is not one tensor of them")
        return self.slices[keys[0]]

    def set_rows(self, rows: VocabularyRows) -> None:
        """Lets `rows` read the embedding and the head as the files have them, or enlarge and change these,
        which are then sharded as they are."""
        placeholders = self.find_tables()
        for name, parameter in placeholders.items():
            values = self.find_slice(name)[:]
            self.replace_parameter(name, nn.Parameter(values.to(parameter.dtype) if rows.are_new else values))
        rows.set_rows(self.model)

        if not rows.are_new:
            for name, parameter in placeholders.items():
                self.replace_parameter(name, parameter)
            return
        table_ids = {id(parameter) for parameter in self.find_tables().values()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) in table_ids:
                self.loaded.add(name)
                for key in self.sources.get(name, []):
                    self.slices.pop(key, None)

    def find_tables(self) -> dict[str, nn.Parameter]:
        """The weights with a row for each entry of the vocabulary, by name. Of tied weights, which have
        several names, the one that the files use is taken."""
        ids = set[int]()
        for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
            if module is not None:
                ids.update(id(parameter) for parameter in module.parameters(recurse=False))
        names: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) in ids and (id(parameter) not in names or name in self.sources):
                names[id(parameter)] = name
        return {name: self.model.get_parameter(name) for name in names.values()}

    def replace_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Gives a weight, under all names that it has, another parameter."""
        previous = self.model.get_parameter(name)
        for module in self.model.modules():
            for attribute, current in list(module.named_parameters(recurse=False)):
                if current is previous:
                    setattr(module, attribute, parameter)

    def check_missing(self, names: set[str]) -> None:
        """Raises UnshardableFilesError where a sharded weight is not in the files: transformers would draw
        other numbers than for a whole one."""
        missing_names = set(names)
        for target, source in self.model.all_tied_weights_keys.items():
            if target not in names or source not in names:
                missing_names -= {target, source}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name in sorted(missing_names):
            if is_sharded(parameters.get(name)):
                raise UnshardableFilesError(f"they lack {name}")
