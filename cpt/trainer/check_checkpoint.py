"""Check the files of a Hugging Face checkpoint before hours of reading text: weights, tokenizer and head."""

import json
import logging
import re
import zipfile
from pathlib import Path

from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cpt.adapters.export import PARTS_INDEX
from cpt.core.errors import find_reason
from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.messages import abbreviate, count_noun
from cpt.core.processes import is_first_process
from cpt.models import loading
from cpt.models.extended_tokenizer import check_fit
from cpt.models.quantization import MXFP4, OF_BITSANDBYTES, describe_stored, drop_quantization
from cpt.models.stored_weights import (
    as_in_full,
    check_report,
    compare_weights,
    find_weight_files,
    has_other_head,
    log_unused,
    read_stored_weights,
    weight_names,
)
from cpt.models.vocabulary import check_entries, log_extension
from cpt.trainer.lightning import naming_cause
from cpt.trainer.skeleton import build_skeleton

log = logging.getLogger(__name__)
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".gguf",
    ".onnx",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".npz",
)
SHARD = re.compile(r"-\d+-of-\d+\.")  # in the name of a file
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt")
GIT_LFS_POINTER = b"version "  # first bytes of the text that Git LFS has in place of a file
ADVICE = "copy or download it again"


def read_checkpoint(name_or_path: str, *, resize: bool) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """The config and the own tokenizer of a checkpoint: a folder, or a name on the Hub.

    Raises ValueError for a damaged or incomplete checkpoint, and for an embedding that is too small for the
    tokenizer, unless it is to be resized."""
    config = loading.load_config(name_or_path)
    check_stored_form(name_or_path, config)
    folder = Path(name_or_path)
    if folder.is_dir():  # else a name on the Hub
        check_weight_files(folder, config)
        check_tokenizer_files(folder, key="model.name_or_path")

    with naming_cause(f"the tokenizer of model.name_or_path={name_or_path}"):
        tokenizer = loading.load_tokenizer(name_or_path)
    if not resize:
        check_entries(config.get_text_config().vocab_size, tokenizer, checkpoint=name_or_path)
    adapter = loading.find_adapter(name_or_path)
    if is_first_process():
        log_ignored_outputs(name_or_path)
        if adapter is not None:
            log.info("Merging the adapter %s into the model of %s", adapter.name, folder)
        log_modules(folder)
    return config, tokenizer


def check_stored_form(name_or_path: str, config: PretrainedConfig) -> None:
    """Raises ValueError for weights that are stored in a form which cannot be trained; logs one that can."""
    stored = describe_stored(config)
    if stored in ("", *OF_BITSANDBYTES):
        return
    if stored != MXFP4:
        raise InvalidOptionError(
            "model.name_or_path",
            name_or_path,
            reason=f"its weights are quantized ({stored})",
            allowed="the same model in 16 or 32 bits, with model.quantization=nf4 or int8 for less memory; "
            "weights in nf4, fp4, int8 (bitsandbytes) or mxfp4",
        )
    if is_first_process():
        log.info("Dequantizing the weights of %s, which are stored in mxfp4", name_or_path)


def read_tokenizer(
    name: str, own_tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, *, checkpoint: str
) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer=name`, which adds tokens to the checkpoint's own; logs how many.
    Raises ValueError where it cannot be read or does not fit."""
    if Path(name).is_dir():  # else a name on the Hub
        check_tokenizer_files(Path(name), key="model.tokenizer")
    try:
        tokenizer = loading.load_tokenizer(name)
    except Exception as error:  # whatever a class raises for files that it does not take
        absent = "" if Path(name).exists() else "no such folder, and not loaded from the Hub: "
        raise InvalidOptionError(
            "model.tokenizer",
            name,
            reason=f"{absent}{find_reason(error).rstrip('.')}",
            allowed="null, or a folder or a name on the Hub, of a tokenizer with added tokens",
        ) from error

    check_fit(tokenizer, own_tokenizer, name=name, checkpoint=checkpoint)
    if is_first_process():
        rows = config.get_text_config().vocab_size
        log_extension(tokenizer, own_tokenizer, name=name, checkpoint=checkpoint, rows=rows)
    return tokenizer


def check_weight_files(folder: Path, config: PretrainedConfig) -> None:
    """Raises ValueError for a folder without weights that transformers loads, or with damaged files of
    them."""
    for path in sorted(folder.glob("*.safetensors")):
        check_safetensors(path)
    for path in sorted(folder.glob("*.bin")):
        check_pickle(path)
    for path in sorted(folder.glob("*.index.json")):
        check_shards(path)

    if not any((folder / name).is_file() for name in weight_names(config)):
        raise InvalidOptionError(
            "model.name_or_path",
            folder,
            reason=describe_weights(folder),
            allowed=f"a folder with {', '.join(weight_names(config))}",
        )


def check_safetensors(path: Path) -> None:
    """Raises ValueError for a damaged file; only its header is read."""
    try:
        with safe_open(path, "pt"):
            pass
    except Exception as error:  # safetensors has its own exception, which is not an OSError
        raise ValueError(f"{path} is truncated or damaged ({find_reason(error)}); {ADVICE}") from error


def check_pickle(path: Path) -> None:
    """Raises ValueError for a file that is empty, truncated or a pointer of Git LFS; unpickles nothing."""
    with path.open("rb") as file:
        first_bytes = file.read(8)
    is_archive = first_bytes.startswith(b"PK")
    is_truncated = is_archive and not zipfile.is_zipfile(path)
    if first_bytes in (b"", GIT_LFS_POINTER) or is_truncated:
        raise ValueError(f"{path} is truncated or damaged; {ADVICE}")


def check_shards(index_path: Path) -> None:
    """Raises ValueError for a damaged index, and for a file that it names and the folder lacks."""
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
        shards = set(index["weight_map"].values())
    except (ValueError, KeyError) as error:
        raise ValueError(f"{index_path} is truncated or damaged; {ADVICE}") from error

    for shard in sorted(shards):
        shard_path = index_path.parent / shard
        if not shard_path.is_file():
            raise ValueError(f"{shard_path} is missing, which {index_path.name} names; {ADVICE}")


def describe_weights(folder: Path) -> str:
    """What a folder has instead of weights that transformers loads."""
    file_names = sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    shards = [name for name in file_names if SHARD.search(name)]
    if shards:
        return f"it has no index of its {len(shards)} shards, like {shards[0]}"
    if file_names:
        return f"it has no weights that transformers loads, only {abbreviate(file_names)}"
    return "it has no weights"


def check_tokenizer_files(folder: Path, *, key: str) -> None:
    """Raises ValueError if the folder of an option `key` has no tokenizer: transformers would make an empty
    one."""
    for pattern in TOKENIZER_FILES:
        if any(folder.glob(pattern)):
            return
    raise InvalidOptionError(
        key,
        folder,
        reason="it has no tokenizer",
        allowed=f"a folder with the files of one, {', '.join(TOKENIZER_FILES)}",
    )


def log_ignored_outputs(name_or_path: str) -> None:
    """Logs the settings of outputs in config.json that cpt replaces."""
    ignored_outputs = loading.find_ignored_outputs(name_or_path)
    if ignored_outputs:
        settings = ", ".join(f"{name}={format_value(value)}" for name, value in ignored_outputs.items())
        log.info("Ignoring %s in the config.json of %s", settings, name_or_path)


def log_modules(folder: Path) -> None:
    """Logs which of its per-domain modules a model has, if an earlier run saved it with several."""
    index_path = folder / PARTS_INDEX
    if not index_path.is_file():
        return
    index = json.loads(index_path.read_text(encoding="utf-8"))
    domains = index["parts"]
    attached = f"with those of {domains[-1]}"
    if index["attach"] is None:
        attached = "without any of them"
    log.warning(
        "Modules of %s are for %s; it starts %s: %s",
        folder,
        ", ".join(domains),
        attached,
        "cpt.adapters.export.load gives others",
    )


def check_stored_weights(
    name_or_path: str, config: PretrainedConfig, objective: str, *, head_steps: int | None
) -> bool:
    """Whether the head is apart from the embedding though config.json ties them (`has_other_head`).

    Raises ValueError for weights that differ from what config.json describes, and for a checkpoint without a
    language-model head, unless `head_steps` says for how many steps one is trained (0: it stays random). Logs
    what is not used."""
    files = find_weight_files(name_or_path, config)
    stored_weights = read_stored_weights(files)
    model = build_skeleton(config, objective, source=f"model.name_or_path={name_or_path}")
    if describe_stored(config):
        stored_weights = as_in_full(stored_weights, model)

    report = compare_weights(type(model), drop_quantization(config), stored_weights, checkpoint=name_or_path)
    head_names = loading.find_head_parameters(model)
    check_report(
        report,
        stored_weights,
        head=head_names,
        needs_head=head_steps is None,
        checkpoint=name_or_path,
    )

    if is_first_process():
        log_unused(report, stored_weights, name_or_path)
        if any(name in head_names for name in report.missing):
            start = "starts with random weights"
            if head_steps:
                start = f"is trained for {count_noun(head_steps, 'step')}"
            log.info("The language-model head, which %s lacks, %s", name_or_path, start)
    return has_other_head(model, files, stored_weights)
