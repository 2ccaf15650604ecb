"""Check the files of a Hugging Face checkpoint before hours of reading text: weights, tokenizer and head."""

import json
import logging
import re
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from peft import PeftConfig
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from cpt.adapters.export import PARTS_INDEX
from cpt.core import tokenizer_files
from cpt.core.errors import find_reason
from cpt.core.exceptions import DamagedFileError, InvalidOptionError, format_value
from cpt.core.messages import abbreviate, count_noun
from cpt.core.processes import is_first_process
from cpt.core.schema import Int, fits
from cpt.models import loading
from cpt.models.extended_tokenizer import check_fit
from cpt.models.quantization import (
    MXFP4,
    OF_BITSANDBYTES,
    describe_stored,
    drop_quantization,
    read_stored_config,
)
from cpt.models.stored_weights import (
    check_report,
    check_unscaled,
    compare_weights,
    find_weight_files,
    has_other_head,
    list_weight_names,
    log_unused,
    read_stored_weights,
    restore_plain_shapes,
)
from cpt.models.tokenizer_faults import tokenizer_error
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
ADAPTER_WEIGHTS = (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)  # of peft, in the order in which it looks
SHARD = re.compile(r"-\d+-of-\d+\.")  # in the name of a file
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt")
TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt")  # of files with fixed names
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
        check_generation_config(folder)
        check_tokenizer_files(folder, key="model.name_or_path")

    with naming_cause(f"the tokenizer of model.name_or_path={name_or_path}"):
        tokenizer = loading.load_tokenizer(name_or_path)
    if not resize:
        check_entries(config.get_text_config().vocab_size, tokenizer, checkpoint=name_or_path)
    adapter = loading.find_adapter(name_or_path)
    if adapter is not None:
        check_adapter(adapter, checkpoint=name_or_path)
    if is_first_process():
        log_ignored_settings(name_or_path, config)
        if adapter is not None:
            log.info("Merging the adapter %s into the model of %s", adapter.name, folder)
        log_modules(folder)
    return config, tokenizer


def check_stored_form(name_or_path: str, config: PretrainedConfig) -> None:
    """Raises ValueError for weights that are stored in a form which cannot be trained; logs one that can."""
    if getattr(config, "quantization_config", None) == {}:  # with which transformers loads nothing
        raise InvalidOptionError(
            "model.name_or_path",
            name_or_path,
            reason="quantization_config in its config.json is empty",
            allowed="config.json without it",
        )
    stored = describe_stored(config)
    storage = read_stored_config(config).get("bnb_4bit_quant_storage", "uint8")
    if stored in OF_BITSANDBYTES and storage != "uint8":
        raise InvalidOptionError(
            "model.name_or_path",
            name_or_path,
            reason=f"its weights in {stored} are stored as {storage} (bnb_4bit_quant_storage in config.json)",
            allowed="the same model with bnb_4bit_quant_storage=uint8, or in 16 or 32 bits",
        )
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
    except Exception as error:  # each tokenizer class raises other errors for bad files
        allowed = "null, or a folder or a name on the Hub, of a tokenizer with added tokens"
        raise tokenizer_error("model.tokenizer", name, error, allowed=allowed) from error

    check_fit(tokenizer, own_tokenizer, name=name, checkpoint=checkpoint)
    if is_first_process():
        rows = config.get_text_config().vocab_size
        log_extension(tokenizer, own_tokenizer, name=name, checkpoint=checkpoint, rows=rows)
    return tokenizer


def check_weight_files(folder: Path, config: PretrainedConfig) -> None:
    """Raises ValueError for a folder without weights that transformers loads, or with damaged ones. Files
    that it would not load are not checked: a download of one format leaves parts of others."""
    names = list_weight_names(config)
    present_names = [name for name in names if (folder / name).is_file()]
    if not present_names:
        raise InvalidOptionError(
            "model.name_or_path",
            folder,
            reason=describe_weights(folder, names),
            allowed=f"a folder with {', '.join(names)}",
        )

    loaded_path = folder / present_names[0]
    paths = [loaded_path]
    if loaded_path.name.endswith(".index.json"):
        paths = list_shards(loaded_path)
    for path in paths:
        check_weight_file(path)
    if len(present_names) > 1 and is_first_process():
        unused_names = ", ".join(present_names[1:])
        log.info("Loading %s of %s, as transformers does, and not %s", loaded_path.name, folder, unused_names)


def check_weight_file(path: Path) -> None:
    """Raises ValueError for a file of weights that is damaged."""
    if path.suffix == ".safetensors":
        check_safetensors(path)
    else:
        check_pickle(path)


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


def list_shards(index_path: Path) -> list[Path]:
    """The files that an index of weights names. Raises ValueError for a damaged index, and for a file that
    the folder lacks."""
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index_path} is truncated or damaged (no JSON); {ADVICE}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"{index_path} is truncated or damaged (no weight_map of names and files); {ADVICE}")
    if not isinstance(index.get("metadata"), dict):  # which transformers reads
        raise ValueError(f"{index_path} is truncated or damaged (no metadata with values); {ADVICE}")

    paths = [index_path.parent / shard for shard in sorted(set(weight_map.values()))]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is missing, which {index_path.name} names; {ADVICE}")
    return paths


def check_adapter(adapter: Path, *, checkpoint: str) -> None:
    """Raises ValueError for an adapter of peft whose configuration or weights are damaged or missing."""
    names = [name for name in ADAPTER_WEIGHTS if (adapter / name).is_file()]
    if not names:
        raise loading.adapter_error(checkpoint, adapter, f"it has no {' or '.join(ADAPTER_WEIGHTS)}")
    check_weight_file(adapter / names[0])
    try:
        kind = PeftConfig.from_pretrained(str(adapter)).peft_type
    except Exception as error:  # of JSON, and of the class of its kind
        raise loading.adapter_error(checkpoint, adapter, find_reason(error)) from error
    if kind is None:
        raise loading.adapter_error(checkpoint, adapter, "adapter_config.json has no peft_type")


def describe_weights(folder: Path, names: Sequence[str]) -> str:
    """What a folder has instead of weights of these names, which transformers loads."""
    dangling_names = [name for name in names if (folder / name).is_symlink()]
    if dangling_names:
        return f"{dangling_names[0]} is a link to nothing"
    file_names = sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    shards = [name for name in file_names if SHARD.search(name)]
    if shards:
        return f"it has no index of its {count_noun(len(shards), 'shard')}, like {shards[0]}"
    if file_names:
        return f"it has no weights that transformers loads, only {abbreviate(file_names)}"
    return "it has no weights"


def check_generation_config(folder: Path) -> None:
    """Raises ValueError for a generation_config.json that is damaged, or whose eos is no id: transformers
    passes over the first, and the ends of turns that it has would be unknown."""
    path = folder / GENERATION_CONFIG_NAME
    if not path.is_file():  # most base models have none
        return
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is truncated or damaged ({find_reason(error)}); {ADVICE}") from error
    if not isinstance(values, dict):
        reason = f"it has a {type(values).__name__}, not keys with values"
        raise DamagedFileError(path, reason=reason, remedy=ADVICE)

    end = values.get("eos_token_id")
    ids = end if isinstance(end, list) else [end]
    if end is not None and not all(fits(token_id, Int) for token_id in ids):
        raise InvalidOptionError(
            "model.name_or_path",
            folder,
            reason=f"{GENERATION_CONFIG_NAME} has eos_token_id={format_value(end)}",
            allowed="a token id, a list of them, or null",
        )


def check_tokenizer_files(folder: Path, *, key: str) -> None:
    """Raises ValueError if the folder of an option `key` has no tokenizer: transformers would make an empty
    one."""
    check_file_kinds(folder, key=key)
    for pattern in TOKENIZER_FILES:
        if any(folder.glob(pattern)):
            return
    raise InvalidOptionError(
        key,
        folder,
        reason="it has no tokenizer",
        allowed=f"a folder with the files of one, {', '.join(TOKENIZER_FILES)}",
    )


def check_file_kinds(folder: Path, *, key: str) -> None:
    """Raises ValueError for a folder, or a link to nothing, in the place of a file of the tokenizer or of
    generation_config.json: transformers passes over it, as if the model had none. What has another suffix,
    like an earlier version of a file, is not read."""
    patterns = [GENERATION_CONFIG_NAME]
    for pattern in tokenizer_files.TOKENIZER_FILES:
        if not pattern.startswith("*"):  # files of any kind may have the names of these
            patterns.append(pattern)

    # Not by glob, which passes over links to nothing.
    for path in sorted([*folder.iterdir(), *folder.glob("*_chat_templates/*")]):
        name = str(path.relative_to(folder))
        is_read = path.suffix in TOKENIZER_SUFFIXES and any(fnmatch(name, pattern) for pattern in patterns)
        if not is_read or path.is_file():
            continue
        kind = "a link to nothing" if path.is_symlink() else "a folder"
        raise InvalidOptionError(
            key, folder, reason=f"its {name} is {kind}", allowed=f"a file there, or nothing; {ADVICE}"
        )


def log_ignored_settings(name_or_path: str, config: PretrainedConfig) -> None:
    """Logs the settings in config.json that cpt replaces, and the code that it does not run."""
    ignored_settings = loading.find_ignored_settings(name_or_path)
    if ignored_settings:
        settings = ", ".join(f"{name}={format_value(value)}" for name, value in ignored_settings.items())
        log.info("Ignoring %s in the config.json of %s", settings, name_or_path)
    if loading.names_authors_code(name_or_path):
        log.info(
            "Ignoring the Python code that the config.json of %s names (auto_map): the %s of transformers is "
            "trained and exported",
            name_or_path,
            config.model_type,
        )


def log_modules(folder: Path) -> None:
    """Logs which of its per-domain modules a model has, if an earlier run saved it with several."""
    index_path = folder / PARTS_INDEX
    if not index_path.is_file():
        return
    index = json.loads(index_path.read_text(encoding="utf-8"))
    domains = index["parts"]
    start = f"those of {domains[-1]}"
    if index["attach"] is None:
        start = "none of them"
    log.warning(
        "Starting with %s: %s has modules for %s; cpt.adapters.export.load attaches those of another domain",
        start,
        folder,
        ", ".join(domains),
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
        stored_weights = restore_plain_shapes(stored_weights, model)
    else:
        check_unscaled(stored_weights, checkpoint=name_or_path)

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
