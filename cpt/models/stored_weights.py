"""The weights that a checkpoint stores, compared with the parameters of its model. Only names and shapes are
read, so that a large checkpoint is checked in a second, before texts are read; of a head that may be tied or
not, the values."""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from cpt.core.errors import find_reason
from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import abbreviate, count_noun

log = logging.getLogger(__name__)
ONE_MODEL = "weights and config.json of one model"
ADAPTER = re.compile(r"\.lora_(A|B|embedding_A|embedding_B)\.|\.modules_to_save\.")
# What wraps a module adds this to the names of its tensors.
WRAPPERS = re.compile(
    r"(^|(?<=\.))(_orig_mod|module|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\."
)


# What bitsandbytes and mxfp4 store of a weight in addition to its few bits.
QUANTIZATION_STATISTICS = re.compile(
    r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)$"
    r"|\.(SCB|weight_format)$|_proj_scales$"
)
PACKED_EXPERTS = "_blocks"  # of mxfp4
SCALE_SUFFIXES = ("_scale_inv", "_scale")  # of the scales of a matrix in 8 bits, after the name of the matrix


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a checkpoint on the meta device, and the name of the file of each."""

    tensors: dict[str, Tensor]
    files: dict[str, str]

    def file_of(self, parameter: str) -> str:
        """The file that stores a parameter, by its name with or without the prefix of the body."""
        for name, file in self.files.items():
            if parameter == name or parameter.endswith(f".{name}") or name.endswith(f".{parameter}"):
                return file
        return self.list_files()

    def list_files(self) -> str:
        """The names of the files, the first of many."""
        return abbreviate(sorted({*self.files.values()}))


@dataclass(frozen=True)
class WeightsReport:
    """How the stored tensors differ from a model's parameters, by the names of the model."""

    missing: list[str]
    unused: list[str]
    mismatched: list[tuple[str, torch.Size, torch.Size]]  # a name, its stored shape, and the model's
    # Stored matrices of other parts, which the class skips by name, like those of an image encoder.
    left_out: list[str]


def list_weight_names(config: PretrainedConfig) -> list[str]:
    """The names of files, one of which transformers loads, in its order."""
    declared = getattr(config, "transformers_weights", None)
    if declared is not None:
        return [declared]
    return [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME]


def find_weight_files(checkpoint: str, config: PretrainedConfig) -> list[Path]:
    """The files of weights that transformers loads of a folder or of a name on the Hub, from which they are
    downloaded. Raises ValueError for a model without them."""
    # In the order in which transformers looks for them; an index names the shards.
    supported = f"a model with {', '.join(list_weight_names(config))}"
    for name in list_weight_names(config):
        try:
            file = cached_file(
                checkpoint,
                name,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_gated_repo=False,
            )
            if file is not None and name.endswith(".index.json"):
                shards, _ = get_checkpoint_shard_files(checkpoint, file)
                return [Path(shard) for shard in shards]
        except OSError as error:  # of the Hub
            raise InvalidOptionError(
                "model.name_or_path",
                checkpoint,
                reason=f"{name} was not loaded from the Hub ({find_reason(error)})",
                allowed=supported,
            ) from error
        if file is not None:
            return [Path(file)]
    raise InvalidOptionError("model.name_or_path", checkpoint, reason="it has no weights", allowed=supported)


def read_stored_weights(files: Iterable[Path]) -> StoredWeights:
    """Names and shapes of the tensors in `files`. Raises ValueError for a damaged file."""
    tensors = dict[str, Tensor]()
    file_names = dict[str, str]()
    for path in files:
        try:
            stored = load_state_dict(str(path), map_location="meta")
        except Exception as error:  # safetensors and torch have exceptions of their own
            raise ValueError(
                f"{path} is truncated or damaged ({find_reason(error)}); copy or download it again"
            ) from error
        for name, tensor in stored.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"{path} is invalid: {name} is no tensor but a {type(tensor).__name__}. "
                    "Allowed: the state_dict of a model alone, as save_pretrained writes it"
                )
            tensors[name] = tensor
            file_names[name] = path.name
    return StoredWeights(tensors, file_names)


def find_main_dtype(stored: StoredWeights) -> torch.dtype:
    """The type that most numbers of a checkpoint have, without those that it stores in few bits."""
    counts = Counter[torch.dtype]()
    for tensor in stored.tensors.values():
        if tensor.is_floating_point():
            counts[tensor.dtype] += tensor.numel()
    return counts.most_common(1)[0][0]


def find_matrix_dtypes(stored: StoredWeights) -> set[torch.dtype]:
    """The types in which the matrices of a checkpoint are stored."""
    return {tensor.dtype for tensor in stored.tensors.values() if tensor.ndim == 2}


def has_other_head(model: PreTrainedModel, files: Iterable[Path], stored: StoredWeights) -> bool:
    """Whether a checkpoint stores a head with other values than the embedding to which the model of its
    config.json ties it: transformers leaves both apart. Only these two tensors are read."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    names = {module: name for name, module in model.named_modules()}
    weight_names_of_both = [f"{names[embedding]}.weight", f"{names[head]}.weight"]
    if not all(name in stored.tensors for name in weight_names_of_both):
        return False

    paths = {path.name: path for path in files}
    tensors = [read_tensor(paths[stored.files[name]], name) for name in weight_names_of_both]
    return not torch.equal(*tensors)


def read_tensor(path: Path, name: str) -> Tensor:
    """A tensor of a file that `read_stored_weights` has read."""
    tensor: Tensor
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            tensor = file.get_tensor(name)
    else:
        tensor = torch.load(path, map_location="cpu", mmap=True, weights_only=True)[name]
    return tensor


def find_non_finite(files: Iterable[Path]) -> list[str]:
    """The names of the tensors in `files` that have NaN or infinite numbers. Safetensors are read one tensor
    at a time."""
    names = []
    for path in files:
        for name, tensor in read_tensors(path):
            # For numbers of 8 bits torch has no `isfinite`.
            numbers = tensor.half() if tensor.dtype.itemsize == 1 else tensor
            if tensor.is_floating_point() and not numbers.isfinite().all():
                names.append(name)
    return names


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a file by name."""
    if path.suffix != ".safetensors":
        yield from load_state_dict(str(path), map_location="cpu").items()
        return
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  (it is not a mapping)
            yield name, file.get_tensor(name)


def check_unscaled(stored: StoredWeights, *, checkpoint: str) -> None:
    """Raises ValueError for matrices in whole numbers, and for those in 8 bits with scales, of a checkpoint
    whose config.json has no `quantization_config`: transformers would load the numbers without the scales."""
    for name, tensor in stored.tensors.items():
        if tensor.dim() != 2 or not name.endswith("weight"):
            continue
        has_scales = any(f"{name}{suffix}" in stored.tensors for suffix in SCALE_SUFFIXES)
        is_scaled = tensor.dtype.itemsize == 1 and has_scales
        if tensor.is_floating_point() and not is_scaled:
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise InvalidOptionError(
            "model.name_or_path",
            checkpoint,
            reason=f"{name} is stored in {dtype}, and config.json has no quantization_config",
            allowed="the same model in 16 or 32 bits, or its config.json with quantization_config",
        )


def restore_plain_shapes(stored: StoredWeights, model: PreTrainedModel) -> StoredWeights:
    """The tensors of a quantized checkpoint as those of a plain one: without scales, and with the shapes that
    the model has where a tensor has as many numbers, two of 4 bits in a byte."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    prefix = f"{model.base_model_prefix}."  # of the body, which files may have or leave out
    tensors = dict[str, Tensor]()
    for stored_name, tensor in stored.tensors.items():
        if QUANTIZATION_STATISTICS.search(stored_name):
            continue
        name = stored_name.removesuffix(PACKED_EXPERTS)
        model_names = (name, prefix + name, name.removeprefix(prefix))
        shape = next((shapes[model_name] for model_name in model_names if model_name in shapes), None)
        has_packed_type = tensor.dtype in (torch.uint8, torch.int8)
        if shape is not None and has_packed_type and shape.numel() in (tensor.numel(), 2 * tensor.numel()):
            tensor = torch.empty(shape, device="meta")
        tensors[name] = tensor
    files = {stored_name.removesuffix(PACKED_EXPERTS): file for stored_name, file in stored.files.items()}
    return StoredWeights(tensors, {name: files[name] for name in tensors})


def compare_weights(
    model_class: type[PreTrainedModel], config: PretrainedConfig, stored: StoredWeights, *, checkpoint: str
) -> WeightsReport:
    """What transformers would report on loading: nothing is loaded, all tensors are on the meta device.
    `config` is that of the checkpoint. Raises ValueError for tensors that do not combine into those of the
    model."""
    # For a model of images and text, like Qwen3.5, the class may be that of its text decoder alone.
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    try:
        model, loading_info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=dict(stored.tensors),
            device_map="meta",
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except RuntimeError as error:
        raise InvalidOptionError(
            "model.name_or_path",
            checkpoint,
            reason=f"tensors of {stored.list_files()} do not combine into those of a {model_class.__name__}",
            allowed=ONE_MODEL,
        ) from error

    # A buffer that is not stored, like a table of positions, is computed by its module. Of tied parameters,
    # the first name stands for all, as in `loading.outside_body`.
    parameters = {name for name, _ in model.named_parameters()}
    missing = sorted(name for name in loading_info["missing_keys"] if name in parameters)
    return WeightsReport(
        missing=missing,
        unused=sorted(loading_info["unexpected_keys"]),
        mismatched=sorted(loading_info["mismatched_keys"]),
        left_out=find_left_out(model, stored),
    )


def find_left_out(model: PreTrainedModel, stored: StoredWeights) -> list[str]:
    """The names of stored matrices that the model's class skips without a report. Buffers of old
    checkpoints, which it skips too, are no matrices of floating-point numbers."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    names = []
    for name, tensor in stored.tensors.items():
        is_matrix = tensor.ndim == 2 and tensor.is_floating_point()
        if is_matrix and any(re.search(pattern, name) for pattern in patterns):
            names.append(name)
    return sorted(names)


def check_report(
    report: WeightsReport, stored: StoredWeights, *, head: list[str], needs_head: bool, checkpoint: str
) -> None:
    """Raises ValueError for a checkpoint that lacks parameters, those of the `head` only if it `needs_head`,
    or has them in other shapes."""
    # First what explains most: under a wrapper's names, all parameters seem to be missing.
    wrapper = find_wrapper(stored, report)
    if wrapper:
        accessors = "model.module, model._orig_mod, merge_and_unload()"
        files = stored.list_files()
        raise InvalidOptionError(
            "model.name_or_path",
            checkpoint,
            reason=f"{wrapper!r}, of a wrapper of the model, is in the names of tensors of {files}",
            allowed=f"weights saved of the model inside it ({accessors})",
        )

    if report.mismatched:
        name, stored_shape, shape = report.mismatched[0]
        stored_size = f"{format_shape(stored_shape)} in {stored.file_of(name)}"
        further = ""
        if len(report.mismatched) > 1:
            further = f", the first of {count_noun(len(report.mismatched), 'such tensor')}"
        raise InvalidOptionError(
            "model.name_or_path",
            checkpoint,
            reason=f"{name} is {stored_size}, but {format_shape(shape)} by config.json{further}",
            allowed=ONE_MODEL,
        )

    # Without a head a model can be used, as its head may be trained; without a part of the body it cannot.
    body_missing = [name for name in report.missing if name not in head]
    if body_missing:
        count = f"{count_noun(len(body_missing), 'tensor')} of those in config.json"
        raise InvalidOptionError(
            "model.name_or_path",
            checkpoint,
            reason=f"{stored.list_files()} lacks {count}: {abbreviate(body_missing)}",
            allowed=ONE_MODEL,
        )

    head_missing = [name for name in report.missing if name in head]
    if head_missing and needs_head:
        fault = f"no language-model head ({count_noun(len(head_missing), 'tensor')})"
        if len(head_missing) < len(head):
            fault = f"its language-model head lacks {abbreviate(head_missing)}"
        remedy = "model.pretraining.head_steps=500, which trains one on the general text, or 0, a random one"
        if len(head_missing) == 1:  # one matrix, which another model has as its embedding
            remedy += "; tie_word_embeddings=true in config.json if the head is the embedding"
        raise InvalidOptionError("model.name_or_path", checkpoint, reason=fault, allowed=remedy)


def find_wrapper(stored: StoredWeights, report: WeightsReport) -> str:
    """What is within the stored names of parameters that are missing, as `_orig_mod.` or `module.`; "" if
    none is missing, or these are stored under no other name."""
    if not report.missing:
        return ""
    missing_names = set(report.missing)
    other_names = [name for name in stored.tensors if name not in missing_names]
    adapter = find_first_match(ADAPTER, other_names)
    if adapter:
        return adapter.strip(".")
    wrapper = find_first_match(WRAPPERS, other_names)
    if wrapper:
        return wrapper

    # Lightning's and peft's prefixes are names that a model may have too: stored names are compared. They are
    # looked up by their endings, since a mixture of experts has tens of thousands of names.
    names_by_ending = defaultdict[str, list[str]](list)
    for name in other_names:
        ending = name
        while "." in ending:
            ending = ending.partition(".")[2]
            names_by_ending[ending].append(name)
    prefixes = Counter[str]()
    for missing in report.missing:
        for name in names_by_ending.get(missing, ()):
            prefixes[name.removesuffix(missing)] += 1
    if not prefixes:
        return ""
    prefix, count = prefixes.most_common(1)[0]
    return prefix if 2 * count >= len(report.missing) else ""


def find_first_match(pattern: re.Pattern[str], names: Iterable[str]) -> str:
    """The first text in some names that a pattern finds; "" for none."""
    for name in names:
        match = pattern.search(name)
        if match:
            return match.group()
    return ""


def log_unused(report: WeightsReport, stored: StoredWeights, checkpoint: str) -> None:
    """Logs the stored tensors that the model has no place for; a warning where they are blocks."""
    if report.left_out:
        left_out = f"{count_noun(len(report.left_out), 'matrix', 'matrices')} ({abbreviate(report.left_out)})"
        log.info("Training without %s of %s: the exported model does not have them", left_out, checkpoint)
    if not report.unused:
        return
    description = f"{count_noun(len(report.unused), 'tensor')} ({abbreviate(report.unused)})"
    unused_names = set(report.unused)
    used_names = {replace_block_numbers(name) for name in stored.tensors if name not in unused_names}
    if any(replace_block_numbers(name) in used_names for name in report.unused):
        log.warning("%s has more blocks than its config.json says: ignoring %s", checkpoint, description)
    else:
        log.info("Ignoring %s of %s: the model has no such parameters", description, checkpoint)


def replace_block_numbers(name: str) -> str:
    """A tensor's name with `N` for the numbers of its blocks: equal for the same tensor of each block."""
    return re.sub(r"\.\d+\.", ".N.", name)


def format_shape(shape: Iterable[int]) -> str:
    return " x ".join(str(size) for size in shape)
