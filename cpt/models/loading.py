"""From a checkpoint or a configuration to a Hugging Face model and its tokenizer, unmodified. Code that a
checkpoint brings is refused, and nobody is asked whether to run it."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from cpt.data.collate import Sharing
from cpt.data.packing import padding_id
from cpt.models.answers import Answers, CausalAnswers, Seq2SeqAnswers
from cpt.models.growth import untie_head
from cpt.models.objectives import Causal, Masked, Objective
from cpt.models.span import Span
from cpt.models.tokenizers import SPECIAL, sentinels

AUTO = {"masked": AutoModelForMaskedLM, "causal": AutoModelForCausalLM, "span": AutoModelForSeq2SeqLM}
SEQ2SEQ = ("span",)  # objectives of models with two stacks


def objective_name(wanted: str, config: PretrainedConfig) -> str:
    """`masked`, `causal` or `span`; for `auto`, what the checkpoint was saved as, else what its architecture
    is for: `span` of encoder and decoder."""
    if wanted not in (*AUTO, "auto"):
        raise ValueError(f"model.objective={wanted}; allowed: {', '.join(AUTO)}, auto")
    saved = (config.architectures or [""])[0]
    both = config.is_encoder_decoder and not saved.endswith("ForCausalLM")
    possible = {
        "masked": type(config) in MODEL_FOR_MASKED_LM_MAPPING and not both,
        "causal": type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        and not saved.endswith("ForMaskedLM")
        and not both,
        "span": type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and both,
    }
    if saved.endswith(("ForCausalLM", "LMHeadModel")):
        possible["masked"] = False
    found = [name for name, can in possible.items() if can]
    if not found or (wanted != "auto" and wanted not in found):
        raise ValueError(
            f"model.objective={wanted} does not go with a {config.model_type} {saved or 'model'}; "
            f"allowed: {', '.join(found) or 'models with a language-model head'}"
        )
    return found[0] if wanted == "auto" else wanted


def objective(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    mask_rate: float | None,
    mean_span: float | None = None,
    start: int | None = None,
) -> Objective:
    """The objective by name; `start` is what a decoder begins with, None for the padding, as T5's does."""
    if name != "span":
        return Masked(tokenizer, rate=mask_rate) if name == "masked" else Causal()
    if tokenizer.pad_token_id is None or tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} has no padding or no end; allowed: one that has both"
        )
    return Span(
        rate=mask_rate,
        mean=mean_span,
        sentinels=sentinels(tokenizer),
        end=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        start=tokenizer.pad_token_id if start is None else start,
    )


def check_answers(name: str, *, isolated: bool) -> None:
    """Raises ValueError for an objective whose models cannot answer, or not with samples that share rows."""
    if name == "masked":
        raise ValueError(
            "model.objective=masked does not go with domains of examples: a masked model writes no answers; "
            "allowed: a causal model, like model=tiny_gpt2, or one with two stacks"
        )
    if name in SEQ2SEQ and isolated:
        raise ValueError(
            "domains.packing=isolated does not go with a model of two stacks; allowed: "
            "domains.packing=none, or a causal model, like model=tiny_gpt2"
        )


def check_text(name: str, *, isolated: bool) -> None:
    """Raises ValueError for an objective whose models cannot keep the documents of a row apart."""
    if name in SEQ2SEQ and isolated:
        raise ValueError(
            "domains.packing=isolated does not go with a model of two stacks; allowed: "
            "domains.packing=concat, per_document, or a model of one stack, like model=tiny_roberta"
        )


def answers_objective(
    name: str,
    raw: Objective,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    *,
    isolated: bool = False,
) -> Answers:
    """The objective of domains of examples: their answers; `raw` is that of raw text. With `isolated`,
    samples share rows."""
    check_answers(name, isolated=isolated)
    pad = padding_id(tokenizer)
    if name in SEQ2SEQ:
        start = getattr(config, "decoder_start_token_id", None)
        return Seq2SeqAnswers(raw, pad=pad, start=pad if start is None else start)
    return CausalAnswers(raw, pad=pad, sharing=sharing_of(config) if isolated else None)


def sharing_of(config: PretrainedConfig) -> Sharing:
    """How samples share rows for a model: of D features, whose attention to T tokens takes 4 T D operations
    at a place, and whose linear maps take 24 D^2 (Kaplan et al., arXiv 2001.08361, table 1)."""
    text = config.get_text_config()
    return Sharing(6 * text.hidden_size, getattr(text, "max_position_embeddings", None))


def configuration(checkpoint: str) -> PretrainedConfig:
    """A checkpoint's configuration; raises ValueError if there is no such checkpoint."""
    try:
        return AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.checkpoint={checkpoint} is neither a folder nor a name that can be loaded: {error}"
        ) from error


def load_model(checkpoint: str | Path, objective: str) -> PreTrainedModel:
    """The model of a checkpoint in float32 and train mode, with the head that the objective needs; an adapter
    in its folder, as `method.exported=peft` writes it, is merged."""
    model = AUTO[objective].from_pretrained(checkpoint, dtype=torch.float32, trust_remote_code=False)
    if adapter := find_adapter(checkpoint):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).merge_and_unload().requires_grad_(True)
    return model.train()


def find_adapter(checkpoint: str | Path) -> Path | None:
    """The folder of the only adapter that a checkpoint has; raises ValueError if it has several."""
    found = [path.parent for path in sorted(Path(checkpoint).glob("adapters/*/adapter_config.json"))]
    if len(found) > 1:
        raise ValueError(
            f"{checkpoint} has {len(found)} adapters, and a model starts with one. Allowed: a copy with "
            "one of them merged: peft.PeftModel.from_pretrained(…).merge_and_unload().save_pretrained(…)"
        )
    return found[0] if found else None


def load_tokenizer(checkpoint: str | Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)


def build(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, objective: str, *, seed: int
) -> PreTrainedModel:
    """A new model of a configuration (`model_type` and its arguments) for a tokenizer."""
    fields, known = dict(config), tokenizer.get_vocab()
    ids = {f"{name}_token_id": known[token] for name, token in SPECIAL.items() if token in known}
    if objective == "span":
        ids |= {"decoder_start_token_id": ids["pad_token_id"]}
    else:
        ids |= {"cls_token_id": ids["bos_token_id"], "sep_token_id": ids["eos_token_id"]}
    full = AutoConfig.for_model(fields.pop("model_type"), vocab_size=len(tokenizer), **ids, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AUTO[objective].from_config(full)
        if fields.get("tie_word_embeddings") is False:
            untie_head(model)  # transformers 5 ties that of every T5
        return model


def positions_of(model: PreTrainedModel) -> int | None:
    """The longest sequence a model takes; None where its positions have no end.

    RoBERTa's learned positions start behind the padding id, so it takes fewer than it has.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            limit = module.num_embeddings - module.padding_idx - 1
    return limit if limit and limit > 0 else None


def check_length(length: int, model: PreTrainedModel, objective: Objective) -> None:
    """Raises ValueError for samples longer than the model's positions, or than the sentinels suffice for."""
    longest = objective.longest
    if longest is not None and length > longest:
        raise ValueError(
            f"model.length={length}; allowed: 2 to {longest}, for which the tokenizer's sentinels suffice"
        )
    limit = positions_of(model)
    if length < 2 or (limit is not None and length > limit):
        raise ValueError(
            f"model.length={length}; allowed: 2 to {limit}, the positions of this {model.config.model_type}"
        )


def skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and configuration, as its authors wrote it and without storage."""
    with torch.device("meta"):
        return type(model)(deepcopy(model.config))
