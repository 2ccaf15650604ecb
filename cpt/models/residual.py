"""The instruction residual: what instruction tuning has changed of a base, added to weights that were trained
further from that base on raw text.

    theta = theta_run + w (theta_instruct - theta_base)      for each tensor

Jindal et al. 2024 (arXiv 2410.10739, at w = 1). The same sum is a chat vector (Huang et al., ACL
2024, arXiv 2310.04799), Shadow-FT, which adds theta_run - theta_base to the tuned model (Wu et al. 2025,
arXiv 2505.12716), and task arithmetic (Ilharco et al., ICLR 2023) with w as the lambda of a second vector.

Embedding and head are added by token where the vocabularies differ. Tensors are read one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from cpt.core.errors import find_reason
from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import abbreviate, count_noun
from cpt.models.loading import load_config, load_tokenizer
from cpt.models.stored_weights import (
    StoredWeights,
    find_weight_files,
    format_shape,
    read_stored_weights,
    read_tensor,
)
from cpt.models.vocabulary import count_entries

NO_ROW = -1  # of a token that a model does not have
MAX_SHARD_BYTES = 2 << 30  # of the tensors of a written file, which are in memory together


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model, whose tensors are read one at a time."""

    option: str  # of the command line: RUN, --instruct or --base
    name: str  # a folder, or a name on the Hub
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    stored: StoredWeights  # names and shapes
    paths: Mapping[str, Path]  # of the files, by their names

    def read(self, name: str) -> Tensor:
        return read_tensor(self.paths[self.stored.files[name]], name)


def open_checkpoint(option: str, name: str) -> Checkpoint:
    """Reads the config, the tokenizer, and the names and shapes of the tensors of a model. Raises ValueError
    for what is not a checkpoint, has no tokenizer, or is stored in few bits."""
    try:
        config = load_config(name)
        files = find_weight_files(name, config)
    except InvalidOptionError as error:  # which names an option of a run
        raise InvalidOptionError(option, name, reason=error.reason, allowed=error.allowed) from error
    stored = read_stored_weights(files)
    for key, tensor in stored.tensors.items():
        is_mask = tensor.dtype == torch.bool or key.endswith(".bias")  # of attention, which old files have
        if tensor.dtype.itemsize == 1 and not is_mask:
            raise InvalidOptionError(
                option, name, reason=f"{key} is stored in few bits", allowed="weights in 16 or 32 bits"
            )
    return Checkpoint(
        option=option,
        name=name,
        config=config,
        tokenizer=open_tokenizer(option, name),
        stored=stored,
        paths={path.name: path for path in files},
    )


def open_tokenizer(option: str, name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint. Raises ValueError for one without."""
    try:
        return load_tokenizer(name)
    except Exception as error:  # whatever a class raises for files that it does not take
        raise InvalidOptionError(
            option,
            name,
            reason=f"its tokenizer is not loaded: {find_reason(error).rstrip('.')}",
            allowed="a model with the files of its tokenizer",
        ) from error


@dataclass(frozen=True)
class VocabularyTables:
    """The names of a model's tensors with a row for each token. A head that is tied to the embedding has the
    embedding's rows."""

    embedding: str
    head: str  # "" without one
    names: frozenset[str]  # of all, with the head's bias
    prefix: str  # of the body, which some files leave out of the names


def find_tables(config: PretrainedConfig) -> VocabularyTables:
    """The names of the vocabulary's tensors in the model of a config.json, which is built without storage."""
    model_class: type[PreTrainedModel] = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        model = model_class(config)
    names_by_module = {module: name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tensors = [embedding.weight]
    if head is not None:
        tensors.append(head.weight)
        if getattr(head, "bias", None) is not None:
            tensors.append(head.bias)

    # A tied tensor has several names, of which files have one.
    ids = {id(tensor) for tensor in tensors}
    names = [
        name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in ids
    ]
    return VocabularyTables(
        embedding=f"{names_by_module[embedding]}.weight",
        head="" if head is None else f"{names_by_module[head]}.weight",
        names=frozenset(names),
        prefix=f"{model.base_model_prefix}.",
    )


def find_stored_name(checkpoint: Checkpoint, name: str, tables: VocabularyTables) -> str | None:
    """The name that a tensor of the run has in another checkpoint: with or without the prefix of the body. A
    head that the checkpoint ties and does not store has the name of the embedding. None without a tensor."""
    for candidate in (name, tables.prefix + name, name.removeprefix(tables.prefix)):
        if candidate in checkpoint.stored.tensors:
            return candidate
    if name == tables.head:
        return find_stored_name(checkpoint, tables.embedding, tables)
    return None


# Rows by token.


@dataclass(frozen=True)
class RowMap:
    """The rows that each token of the new embedding has in the three models, each [R]; NO_ROW where one lacks
    the token."""

    run: Tensor
    base: Tensor
    instruct: Tensor

    @property
    def is_summed(self) -> Tensor:
        return (self.run >= 0) & (self.base >= 0) & (self.instruct >= 0)

    @property
    def is_added(self) -> Tensor:
        """Whether a row is of a token that only the instruct model has, [R]."""
        return (self.run < 0) & (self.instruct >= 0)


@dataclass(frozen=True)
class NewVocabulary:
    """The tokens of the new model."""

    is_of_instruct: bool  # else the run's tokenizer is kept
    has_all_of_instruct: bool  # whether each token of the tuned model has its id: its chat template fits
    num_left_out: int  # tokens of the tuned model without a row
    rows: RowMap | None  # None: all three vocabularies are one

    @property
    def num_summed(self) -> int:
        return 0 if self.rows is None else int(self.rows.is_summed.sum())

    @property
    def num_added(self) -> int:
        return 0 if self.rows is None else int(self.rows.is_added.sum())


def contains_ids(vocabulary: Mapping[str, int], tokens: Mapping[str, int]) -> bool:
    """Whether each of some tokens is in a vocabulary, with the same id.

    >>> contains_ids({"a": 0, "b": 1}, {"a": 0})
    True
    """
    return all(vocabulary.get(token) == token_id for token, token_id in tokens.items())


def join_vocabularies(
    run: Checkpoint, base: Checkpoint, instruct: Checkpoint, tables: VocabularyTables
) -> NewVocabulary:
    """The tuned model's vocabulary if it has all tokens of the run with the same ids, else the run's. Raises
    ValueError for a checkpoint without an embedding."""
    vocabularies = [checkpoint.tokenizer.get_vocab() for checkpoint in (run, base, instruct)]
    run_ids, base_ids, instruct_ids = vocabularies
    num_rows = []  # of the embeddings: more than tokens where a table is padded
    for checkpoint in (run, base, instruct):
        name = find_stored_name(checkpoint, tables.embedding, tables)
        if name is None:
            raise missing_tensor_error(checkpoint, tables.embedding)
        num_rows.append(len(checkpoint.stored.tensors[name]))

    is_of_instruct = contains_ids(instruct_ids, run_ids)
    new_ids = instruct_ids if is_of_instruct else run_ids
    num_new_rows = num_rows[0]
    if is_of_instruct:
        num_new_rows = max(num_new_rows, count_entries(instruct.tokenizer))

    is_one_vocabulary = run_ids == base_ids == instruct_ids and len(set(num_rows)) == 1
    rows = None
    if not is_one_vocabulary:
        maps = []
        for vocabulary, size in zip(vocabularies, num_rows, strict=True):
            maps.append(map_rows(new_ids, vocabulary, num_new_rows=num_new_rows, num_rows=size))
        run_map, base_map, instruct_map = maps
        keep_rows_without_token(run_map, num_rows=num_rows[0], new_ids=new_ids)
        rows = RowMap(run_map, base_map, instruct_map)
    return NewVocabulary(
        is_of_instruct=is_of_instruct,
        has_all_of_instruct=contains_ids(new_ids, instruct_ids),
        num_left_out=len(set(instruct_ids) - set(new_ids)),
        rows=rows,
    )


def map_rows(
    new_ids: Mapping[str, int], vocabulary: Mapping[str, int], *, num_new_rows: int, num_rows: int
) -> Tensor:
    """The row that each row of the new table has in a table of `num_rows`, by their tokens, [num_new_rows].

    >>> map_rows({"a": 0, "b": 1}, {"b": 0}, num_new_rows=3, num_rows=1)
    tensor([-1,  0, -1])
    """
    rows = torch.full((num_new_rows,), NO_ROW)
    for token, new_id in new_ids.items():
        row = vocabulary.get(token, NO_ROW)
        if row < num_rows and new_id < num_new_rows:
            rows[new_id] = row
    return rows


def keep_rows_without_token(run_map: Tensor, *, num_rows: int, new_ids: Mapping[str, int]) -> None:
    """Maps the rows that pad the run's table, and that no token has, to themselves."""
    has_token = torch.zeros(len(run_map), dtype=torch.bool)
    has_token[[token_id for token_id in new_ids.values() if token_id < len(run_map)]] = True
    is_padding = ~has_token
    is_padding[num_rows:] = False
    run_map[is_padding] = torch.arange(len(run_map))[is_padding]


# The sum.


def add_residual(run: Tensor, base: Tensor, instruct: Tensor, weight: float) -> Tensor:
    """run + weight (instruct - base) in at least 32 bits, rounded to the run's type.

    >>> add_residual(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([7.0]), 0.5)
    tensor([3.])
    """
    wide = torch.promote_types(run.dtype, torch.float32)
    residual = instruct.to(wide) - base.to(wide)
    return (run.to(wide) + weight * residual).to(run.dtype)


def add_rows(run: Tensor, base: Tensor, instruct: Tensor, weight: float, rows: RowMap) -> Tensor:
    """The new table [R, …]: the sum for tokens of all three models, the run's row for its other tokens, and
    the tuned model's for tokens that the run lacks; 0 where no model has a row."""
    table = run.new_zeros((len(rows.run), *run.shape[1:]))
    is_of_run = rows.run >= 0
    table[is_of_run] = run[rows.run[is_of_run]]
    is_added = rows.is_added
    table[is_added] = instruct[rows.instruct[is_added]].to(run.dtype)
    is_summed = rows.is_summed
    table[is_summed] = add_residual(
        run[rows.run[is_summed]], base[rows.base[is_summed]], instruct[rows.instruct[is_summed]], weight
    )
    return table


def check_tensors(run: Checkpoint, base: Checkpoint, instruct: Checkpoint, tables: VocabularyTables) -> None:
    """Raises ValueError for models of other architectures or shapes, and for tensors of the tuned model that
    the run lacks and whose residual would be lost. Embedding and head may have other numbers of rows."""
    for checkpoint in (base, instruct):
        if checkpoint.config.model_type != run.config.model_type:
            raise InvalidOptionError(
                checkpoint.option,
                checkpoint.name,
                reason=f"it is a {checkpoint.config.model_type}",
                allowed=f"a {run.config.model_type}, as the run's model",
            )
        for name, tensor in run.stored.tensors.items():
            stored_name = find_stored_name(checkpoint, name, tables)
            if stored_name is None:
                raise missing_tensor_error(checkpoint, name)
            shape = checkpoint.stored.tensors[stored_name].shape
            is_table = name in tables.names
            is_same = shape[1:] == tensor.shape[1:] if is_table else shape == tensor.shape
            if not is_same:
                raise InvalidOptionError(
                    checkpoint.option,
                    checkpoint.name,
                    reason=f"{name} is {format_shape(shape)}, in the run {format_shape(tensor.shape)}",
                    allowed="a model of the same sizes",
                )

    lost = list(find_lost(run, base, instruct, tables))
    if lost:
        raise InvalidOptionError(
            instruct.option,
            instruct.name,
            reason=f"the run's model lacks {count_noun(len(lost), 'tensor')} of it: {abbreviate(lost)}",
            allowed="a model with the tensors of the run's",
        )


def check_residual(run: Checkpoint, base: Checkpoint, instruct: Checkpoint, tables: VocabularyTables) -> None:
    """Raises ValueError for a tuned model with the weights of its base: nothing would be added."""
    for name in run.stored.tensors:
        base_tensor = base.read(str(find_stored_name(base, name, tables)))
        instruct_tensor = instruct.read(str(find_stored_name(instruct, name, tables)))
        if not torch.equal(base_tensor, instruct_tensor):
            return
    raise InvalidOptionError(
        base.option,
        base.name,
        reason=f"{instruct.option} has the same weights, so that nothing would be added",
        allowed="the model that the tuned one was trained from",
    )


def missing_tensor_error(checkpoint: Checkpoint, name: str) -> InvalidOptionError:
    return InvalidOptionError(
        checkpoint.option,
        checkpoint.name,
        reason=f"it has no tensor {name}, which the run's model has",
        allowed="a model with the tensors of the run's",
    )


def find_lost(
    run: Checkpoint, base: Checkpoint, instruct: Checkpoint, tables: VocabularyTables
) -> Iterator[str]:
    """Yields the tensors of the tuned model that the run lacks. A stored head that the config ties to the
    embedding is left out, and so are tensors equal to the base's."""
    used_names = {find_stored_name(instruct, name, tables) for name in run.stored.tensors}
    is_tied = bool(getattr(instruct.config.get_text_config(), "tie_word_embeddings", False))
    for name in instruct.stored.tensors:
        if name in used_names or (is_tied and name in tables.names):
            continue
        is_unchanged = name in base.stored.tensors and torch.equal(base.read(name), instruct.read(name))
        if not is_unchanged:
            yield name


def sum_tensors(
    run: Checkpoint,
    base: Checkpoint,
    instruct: Checkpoint,
    *,
    weight: float,
    tables: VocabularyTables,
    rows: RowMap | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the new model, one at a time, after `check_tensors`. Tensors of whole numbers are
    the run's. Raises ValueError for sums beyond the range of the run's type."""
    for name in run.stored.tensors:
        tensor = run.read(name)
        if not tensor.is_floating_point():
            yield name, tensor
            continue
        base_tensor = base.read(str(find_stored_name(base, name, tables)))
        instruct_tensor = instruct.read(str(find_stored_name(instruct, name, tables)))
        if rows is not None and name in tables.names:
            total = add_rows(tensor, base_tensor, instruct_tensor, weight, rows)
        else:
            total = add_residual(tensor, base_tensor, instruct_tensor, weight)
        if not total.isfinite().all():
            raise InvalidOptionError(
                "--weight",
                weight,
                reason=f"{name} is not finite in {total.dtype}",
                allowed="a smaller weight",
            )
        yield name, total


def write_weight_files(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, max_bytes: int) -> int:
    """Writes tensors as the weights of a folder: in files of up to `max_bytes` each, or of a single larger
    tensor, and with an index if there are several files. Only the tensors of one file are in memory. Returns
    the number of tensors."""
    names_by_shard: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    total_bytes = 0

    def write_shard() -> None:
        save_file(shard, shard_path(folder, len(names_by_shard)), {"format": "pt"})
        names_by_shard.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > max_bytes:
            write_shard()
            shard_bytes = 0
        shard[name] = tensor.contiguous()
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    write_shard()
    name_shards(folder, names_by_shard, total_bytes)
    return sum(map(len, names_by_shard))


def shard_path(folder: Path, number: int) -> Path:
    """The path of a file of weights while the number of files, which is part of its name, is not known."""
    return folder / f"shard-{number}.safetensors"


def name_shards(folder: Path, names_by_shard: Sequence[Sequence[str]], total_bytes: int) -> None:
    """Renames the files of weights as transformers expects them."""
    if len(names_by_shard) == 1:
        shard_path(folder, 0).rename(folder / SAFE_WEIGHTS_NAME)
        return
    files = {}
    for number, names in enumerate(names_by_shard):
        file_name = f"model-{number + 1:05d}-of-{len(names_by_shard):05d}.safetensors"
        shard_path(folder, number).rename(folder / file_name)
        files.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
