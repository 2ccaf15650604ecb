"""Tokenizers learned from text."""

from collections.abc import Iterator, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SENTINELS = 100  # that a tokenizer gets which has none
SPECIAL = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}


def train_tokenizer(texts: Iterator[str], *, vocabulary: int, objective: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE (Radford et al. 2019) learned from texts, for a `masked`, `causal` or `span` model.

    Masked: a text becomes `<s> … </s>`. Causal: `<s> …`, since a prompt is not the end of a document; what
    packs documents ends them. The mask token takes the blank before it, as the words do that it stands for.
    Span: `… </s>`, and the last ids are those of sentinels.
    """
    if objective == "span":
        return train_with_sentinels(texts, vocabulary=vocabulary)
    names = tuple(SPECIAL)
    bpe, tokens = train_bpe(texts, vocabulary=vocabulary, names=names)
    bpe.post_processor = template(bpe, objective)
    tokens |= {"cls_token": tokens["bos_token"], "sep_token": tokens["eos_token"]}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **tokens)


def train_with_sentinels(texts: Iterator[str], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """As T5's: padding, end and unknown are the first ids, sentinels the last; nothing begins a text."""
    bpe, tokens = train_bpe(texts, vocabulary=vocabulary - SENTINELS, names=("pad", "eos", "unk"))
    bpe.post_processor = template(bpe, "span")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **tokens)
    add_sentinels(tokenizer)
    return tokenizer


def add_sentinels(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a tokenizer <extra_id_0> … <extra_id_99>, which of all ids is the first of them the last."""
    names = [f"<extra_id_{number}>" for number in reversed(range(SENTINELS))]
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names], special_tokens=True)


def sentinels(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of <extra_id_0>, <extra_id_1>, … as far as a tokenizer has them; mT5's are words of its
    vocabulary, with a blank before them."""
    known = tokenizer.get_vocab()
    found = []
    for number in range(len(known)):
        names = (f"<extra_id_{number}>", f"\u2581<extra_id_{number}>")
        own = next((known[name] for name in names if name in known), None)
        if own is None:
            break
        found.append(own)
    return found


def train_bpe(
    texts: Iterator[str], *, vocabulary: int, names: Sequence[str]
) -> tuple[Tokenizer, dict[str, AddedToken]]:
    """A byte-level BPE, and its special tokens, of SPECIAL the named, as transformers takes them."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokens = {
        f"{name}_token": AddedToken(SPECIAL[name], special=True, lstrip=name == "mask") for name in names
    }
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(tokens.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe, tokens


def template(bpe: Tokenizer, objective: str) -> processors.TemplateProcessing:
    """What stands around a text, and between two."""
    start, end = SPECIAL["bos"], SPECIAL["eos"]
    single, pair = {
        "masked": (f"{start} $A {end}", f"{start} $A {end} {end} $B {end}"),
        "causal": (f"{start} $A", f"{start} $A {end} {start} $B"),
        "span": (f"$A {end}", f"$A {end} $B {end}"),
    }[objective]
    ids = [(token, bpe.token_to_id(token)) for token in (start, end) if token in pair.split()]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
