"""Tokenizers learned from text."""

from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    PreTrainedTokenizerFast,
)

SPECIAL = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}


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
