"""From a checkpoint or a configuration to a Hugging Face model and its tokenizer, unmodified."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from cpt.objectives import Batch, Causal, Masked, Objective

AUTO = {"masked": AutoModelForMaskedLM, "causal": AutoModelForCausalLM}
SPECIAL = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}


def objective_name(wanted: str, config: PretrainedConfig) -> str:
    """`masked` or `causal`; for `auto`, what the checkpoint was saved as, else what its architecture is
    for."""
    if wanted not in (*AUTO, "auto"):
        raise ValueError(f"model.objective={wanted}; allowed: masked, causal, auto")
    saved = (config.architectures or [""])[0]
    possible = {
        "masked": type(config) in MODEL_FOR_MASKED_LM_MAPPING,
        "causal": type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not saved.endswith("ForMaskedLM"),
    }
    if saved.endswith(("ForCausalLM", "LMHeadModel")):
        possible["masked"] = False
    found = [name for name, can in possible.items() if can]
    if not found or (wanted != "auto" and wanted not in found):
        raise ValueError(
            f"model.objective={wanted} does not go with a {config.model_type} {saved or 'model'}; "
            f"allowed: {', '.join(found) or 'models with a masked or causal language-model head'}"
        )
    return found[0] if wanted == "auto" else wanted


def objective(name: str, tokenizer: PreTrainedTokenizerBase, *, mask_rate: float | None) -> Objective:
    """The objective by name."""
    return Masked(tokenizer, rate=mask_rate) if name == "masked" else Causal()


def configuration(checkpoint: str) -> PretrainedConfig:
    """A checkpoint's configuration; raises ValueError if there is no such checkpoint."""
    try:
        return AutoConfig.from_pretrained(checkpoint)
    except OSError as error:
        raise ValueError(
            f"model.checkpoint={checkpoint} is neither a folder nor a name that can be loaded: {error}"
        ) from error


def load(checkpoint: str | Path, objective: str) -> PreTrainedModel:
    """The model of a checkpoint in float32 and train mode, with the head that the objective needs."""
    return AUTO[objective].from_pretrained(checkpoint, dtype=torch.float32).train()


def load_tokenizer(checkpoint: str | Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


def build(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, objective: str, *, seed: int
) -> PreTrainedModel:
    """A new model of a configuration (`model_type` and its arguments) for a tokenizer."""
    fields = dict(config)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    ids |= {"cls_token_id": ids["bos_token_id"], "sep_token_id": ids["eos_token_id"]}
    full = AutoConfig.for_model(fields.pop("model_type"), vocab_size=len(tokenizer), **ids, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AUTO[objective].from_config(full)


def train_tokenizer(texts: Iterator[str], *, vocabulary: int, objective: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE (Radford et al. 2019) learned from texts, for a `masked` or a `causal` model.

    Masked: a text becomes `<s> … </s>`. Causal: `<s> …`, since a prompt is not the end of a document; what
    packs documents ends them. The mask token takes the blank before it, as the words do that it stands for.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokens = {f"{name}_token": AddedToken(token, special=True) for name, token in SPECIAL.items()}
    tokens["mask_token"] = AddedToken(SPECIAL["mask"], special=True, lstrip=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(tokens.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = template(bpe, objective)
    tokens |= {"cls_token": tokens["bos_token"], "sep_token": tokens["eos_token"]}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **tokens)


def template(bpe: Tokenizer, objective: str) -> processors.TemplateProcessing:
    """What stands around a text, and between two."""
    start, end = SPECIAL["bos"], SPECIAL["eos"]
    single, pair = {
        "masked": (f"{start} $A {end}", f"{start} $A {end} {end} $B {end}"),
        "causal": (f"{start} $A", f"{start} $A {end} {start} $B"),
    }[objective]
    ids = [(token, bpe.token_to_id(token)) for token in (start, end)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def positions_of(model: PreTrainedModel) -> int | None:
    """The longest sequence a model takes; None where its positions have no end.

    RoBERTa's learned positions start behind the padding id, so it takes fewer than it has.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            limit = module.num_embeddings - module.padding_idx - 1
    return limit if limit and limit > 0 else None


def check_length(length: int, model: PreTrainedModel) -> None:
    """Raises ValueError for samples longer than the model's positions."""
    limit = positions_of(model)
    if length < 2 or (limit is not None and length > limit):
        raise ValueError(
            f"model.length={length}; allowed: 2 to {limit}, the positions of this {model.config.model_type}"
        )


def outputs_at(
    model: PreTrainedModel, batch: Batch, *, weights: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [K, V] at the K scored positions of a batch, and the last hidden states [B, T, D] at all of
    them; with other `weights` by parameter name, those of the model with these.

    The body's output is cut down to the scored positions before the model's own head sees it: a hook for the
    one call, so that the head is computed nowhere else and the model stays as its authors wrote it."""
    hidden: list[Tensor] = []

    def cut(module: nn.Module, inputs: Any, output: Any) -> Any:
        hidden.append(output.last_hidden_state)
        output.last_hidden_state = hidden[0].flatten(0, 1).index_select(0, batch["positions"])[None]
        return output

    handle = body(model).register_forward_hook(cut)
    try:
        inputs = {**sequences(batch), **uncached(model)}
        output = model(**inputs) if weights is None else functional_call(model, dict(weights), kwargs=inputs)
        return output.logits[0], hidden[0]
    finally:
        handle.remove()


def logits_at(model: PreTrainedModel, batch: Batch, *, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Logits [K, V] at the K scored positions of a batch."""
    return outputs_at(model, batch, weights=weights)[0]


def token_nll(model: PreTrainedModel, batch: Batch, *, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Negative log-likelihood (nats) of the labels at the scored positions, [K]."""
    return nll_of(logits_at(model, batch, weights=weights), batch)


def nll_of(logits: Tensor, batch: Batch) -> Tensor:
    """The same from logits [K, V] at the scored positions."""
    labels = batch["labels"].flatten().index_select(0, batch["positions"])
    return functional.cross_entropy(logits.float(), labels, reduction="none")


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(one) || softmax(other)) over the last axis (nats), [K] from [K, F]."""
    one, other = one.float().log_softmax(-1), other.float().log_softmax(-1)
    return (one.exp() * (one - other)).sum(-1)


def encoded(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The last hidden states [B, T, D] of a batch; the head is not computed."""
    inner = body(model)
    return inner(**sequences(batch), **uncached(inner)).last_hidden_state


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Train or eval mode while it lasts; then every part is in its own mode again."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, before in modes:
            part.training = before


def sequences(batch: Batch) -> dict[str, Tensor]:
    """What of a batch a model takes."""
    return {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}


def body(model: PreTrainedModel) -> nn.Module:
    """The part of a model whose output its head takes; raises ValueError if there is none."""
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} has no body apart from its head")
    inner = getattr(model.base_model, "decoder", None)  # OPT's head takes the decoder within the body
    return inner if inner is not None and not model.config.is_encoder_decoder else model.base_model


def skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and configuration, as its authors wrote it and without storage."""
    with torch.device("meta"):
        return type(model)(deepcopy(model.config))


def uncached(model: PreTrainedModel) -> dict[str, bool]:
    """Switches off the key-value cache, which models with one fill even in training."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
