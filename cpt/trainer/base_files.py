"""What an exported model has of the files of its base, byte for byte: the tokenizer, if nothing was added to
it, and the options of generation."""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import GENERATION_CONFIG_NAME

from cpt.core.errors import find_reason
from cpt.core.messages import count_noun
from cpt.core.tokenizer_files import TOKENIZER_FILES
from cpt.models.loading import load_tokenizer
from cpt.models.tokenizer_faults import VERBATIM
from cpt.trainer.run_dir import list_checkpoint_files

log = logging.getLogger(__name__)

OF_LOADING = ("is_local", "local_files_only")  # how a tokenizer was loaded, which save_pretrained writes
AUTHORS_CODE = "auto_map"  # names Python code that is neither run nor exported
# Text on which normalizers, pre-tokenizers and added tokens differ.
ODD_TEXTS = (
    "The quick brown fox, 1234567890 times: don't!",
    "  two  spaces\tand a tab \n\n and lines\r\n",
    "Ångström cafe\u0301 ﬁn ½ Ⅷ İstanbul ẞ",  # composed and decomposed accents, ligatures, cases
    "漢字 かな 한국어 ไทย العربية עברית हिन्दी",
    "👩\u200d👩\u200d👧 \u200b\ufeff\x07 \u00a0",
    "def f(x):\n    return x**2  # <s> </s> <pad> [MASK] <|endoftext|>",
)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, *, base: str, folder: Path) -> None:
    """Writes a tokenizer into a folder: the files of the `base` (a folder, or a name on the Hub) if they give
    the same tokenizer, else what transformers saves. Raises ValueError where loading gives other ids."""
    source = find_source_folder(base)
    remove_files(tokenizer, folder)
    if source is not None and source.resolve() != folder.resolve():
        for path in list_tokenizer_files(tokenizer, source):
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        adapt_tokenizer_config(tokenizer, folder)
        if describe_difference(tokenizer, folder) is None:
            return

    remove_files(tokenizer, folder)
    tokenizer.save_pretrained(folder)
    change_tokenizer_config(folder)
    if describe_difference(tokenizer, folder) is not None and (folder / "tokenizer.json").is_file():
        # Other classes may build another normalizer.
        change_tokenizer_config(folder, tokenizer_class=VERBATIM)
    cause = describe_difference(tokenizer, folder)
    if cause is not None:
        raise ValueError(f"the tokenizer in {folder} is not that of training: {cause}")


@lru_cache(maxsize=64)  # a sweep starts many runs in one process
def is_read_otherwise(stored: Path, model_type: str) -> bool:
    """Whether transformers reads the tokenizer in a folder otherwise where it belongs to a model of a type.
    For some, as Qwen 2, it takes the entries alone, and splits text as the class of the type does."""
    tokenizer = load_tokenizer(stored)
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_model_type(folder, model_type)
        try:
            save_tokenizer(tokenizer, base="", folder=folder)
        except ValueError:
            return True
    return False


def load_of_model_type(stored: Path, model_type: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder as transformers reads it where it belongs to a model of a type: a new model
    has to be trained with the tokenizer that it is loaded with."""
    tokenizer = load_tokenizer(stored)
    if not is_read_otherwise(stored, model_type):
        return tokenizer
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_model_type(folder, model_type)
        tokenizer.save_pretrained(folder)
        tokenizer_of_type = load_tokenizer(folder)
    log.info(
        "Splitting text as %s of transformers does for a %s", type(tokenizer_of_type).__name__, model_type
    )
    tokenizer_of_type.name_or_path = str(stored)
    return tokenizer_of_type


def write_model_type(folder: Path, model_type: str) -> None:
    """Writes as much of a config.json as decides the class of a tokenizer."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")


def copy_generation_config(*, base: str, folder: Path) -> None:
    """Replaces the generation_config.json of transformers by that of the base, if it has one."""
    source = find_source_folder(base)
    if source is not None and (source / GENERATION_CONFIG_NAME).is_file():
        shutil.copyfile(source / GENERATION_CONFIG_NAME, folder / GENERATION_CONFIG_NAME)


def find_source_folder(base: str) -> Path | None:
    """The folder with the files of a checkpoint: itself, or that of the Hub's cache. None for a model that is
    not of a checkpoint."""
    if not base:
        return None
    if Path(base).is_dir():
        return Path(base)
    files = list_checkpoint_files(base)
    return files["config.json"].parent if "config.json" in files else None


def list_tokenizer_files(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Iterator[Path]:
    """The files of a tokenizer in a folder, each once."""
    paths: set[Path] = set()
    for pattern in [*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()]:
        paths.update(path for path in folder.glob(pattern) if path.is_file())
    yield from sorted(paths)


def remove_files(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    for path in list_tokenizer_files(tokenizer, folder):
        path.unlink()


def adapt_tokenizer_config(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Sets the longest text in a copied tokenizer_config.json if the tokenizer has another, as with scaled
    RoPE, and removes the name of code that is not copied; else leaves the file as it is."""
    path = folder / TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return
    stored = json.loads(path.read_text(encoding="utf-8"))
    config = dict(stored)
    if config.get("model_max_length") is not None:
        config["model_max_length"] = tokenizer.model_max_length
    config.pop(AUTHORS_CODE, None)
    if config != stored:
        write_config(path, config)


def change_tokenizer_config(folder: Path, *, tokenizer_class: str | None = None) -> None:
    """Removes from tokenizer_config.json how the tokenizer was loaded and code that is not saved, and sets
    its class."""
    path = folder / TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    for name in (*OF_LOADING, AUTHORS_CODE):
        config.pop(name, None)
    if tokenizer_class is not None:
        config["tokenizer_class"] = tokenizer_class
    write_config(path, config)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def describe_difference(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str | None:
    """What a tokenizer that is loaded from a folder does otherwise, or None."""
    try:
        loaded = load_tokenizer(folder)
    except Exception as error:  # whatever a class raises for files that it does not take
        return find_reason(error)
    if loaded.get_vocab() != tokenizer.get_vocab():
        return f"number of entries {len(loaded)}, not {len(tokenizer)}, or other ids"
    if loaded.special_tokens_map != tokenizer.special_tokens_map:
        return "other special tokens"
    if getattr(loaded, "chat_template", None) != getattr(tokenizer, "chat_template", None):
        return "another chat template"
    if loaded.model_max_length != tokenizer.model_max_length:
        return f"{count_noun(loaded.model_max_length, 'token')} at most, not {tokenizer.model_max_length:,}"
    for text in ODD_TEXTS:
        if loaded(text)["input_ids"] != tokenizer(text)["input_ids"]:
            return f"other ids for {text!r}"
    return None
