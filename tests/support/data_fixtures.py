"""What the tests of the data side share: texts, tokenizers of every style, and packed rows made by hand."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cpt.data import corpus, packing
from cpt.data.packing import Packed
from cpt.data.sources.base import TextOptions
from cpt.data.text_format import make_text_format
from cpt.data.token_rows import COLUMNS, ArrowRows
from cpt.models.loading import train_tokenizer

HELD_OUT = {"valid": 0.1, "test": 0.2, "seed": 0}
TEXT_SOURCE = {  # of a source that stands for a real one
    "form": lambda name: "text",
    "class_limit": None,
    "skipped": {},
    "text_packing": "concat",
    "members": lambda name: [name],
}
SHARED = {"orders": None, "held_out": HELD_OUT, "score_on": "test"}
SYLLABLES = ["ba", "de", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "va", "we", "xi", "yo", "zu"]


def make_prose(count: int, *, seed: int = 0, words: tuple[int, int] = (1, 40)) -> list[str]:
    generator = random.Random(seed)
    texts = []
    for number in range(count):
        num_words = generator.randint(*words)
        text = ["".join(generator.choices(SYLLABLES, k=generator.randint(1, 4))) for _ in range(num_words)]
        texts.append(" ".join([*text, f"{number}."]))
    return texts


def framed_tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(iter(make_prose(50)), vocabulary=330, objective="masked")


def tokenizer_with_template(template: str, **tokens: str) -> PreTrainedTokenizerFast:
    backend = framed_tokenizer().backend_tokenizer
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


def bare_tokenizer() -> PreTrainedTokenizerFast:
    """As GPT-2: nothing around a document, no padding token; a separator that must not come too."""
    return tokenizer_with_template("$A", eos_token="</s>", sep_token="<s>")


def bos_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_with_template("<s> $A", bos_token="<s>", eos_token="</s>")


def eos_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_with_template("$A </s>", eos_token="</s>", pad_token="<pad>")


def sep_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_with_template("$A", sep_token="</s>")


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """As BERT: lower-cased word pieces between [CLS] and [SEP]; "q" and a lone "a" are unknown."""
    letters = sorted(set("".join(SYLLABLES)) - {"a"}) + list("0123456789.,[]<>/")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [f"##{letter}" for letter in [*letters, "a"]]
    words = list(dict.fromkeys([*special, *letters, *pieces, *SYLLABLES]))
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, words.index(token)) for token in ("[CLS]", "[SEP]")]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def unframed_wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """The same with nothing around a document: all that ends one is [SEP]."""
    tokenizer = wordpiece_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return tokenizer


TOKENIZERS = {
    "framed": framed_tokenizer,
    "wordpieces": wordpiece_tokenizer,
    "wordpieces_without_frame": unframed_wordpiece_tokenizer,
    "bare": bare_tokenizer,
    "opened": bos_tokenizer,
    "closed": eos_tokenizer,
    "separated": sep_tokenizer,
}


def write_corpus(
    folder: Path, texts: list[str], *, split: str = "train", name: str = "a", other_text: str = "some {} text"
) -> corpus.Corpus:
    """A corpus of these documents in one split, and of one other document in each other split."""
    other_splits = [name for name in corpus.SPLITS if name != split]
    documents = [(split, text) for text in texts]
    documents += [(other_split, other_text.format(other_split)) for other_split in other_splits]
    source = SimpleNamespace(
        **TEXT_SOURCE, held_out=HELD_OUT, fingerprint=lambda name: [texts, split, other_text]
    )
    source.read = lambda name: iter(documents)
    return corpus.make_corpus(source, name, cache=folder)


def pack(folder: Path, texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Packed:
    text_format = make_text_format(tokenizer, TextOptions())
    return packing.pack(
        write_corpus(folder, texts), "train", format=text_format, length=length, name="a", cache=folder
    )


def make_rows(
    count: int, *, length: int = 8, last: int | None = None, special: tuple[int, ...] = (0, 1), seed: int = 0
) -> Packed:
    """Rows of random ids from 0 to 49, the last one `last` tokens long; each document has five tokens."""
    sizes = [length] * (count - 1) + [last or length]
    generator = np.random.default_rng(seed)
    ids = [generator.integers(0, 50, size).tolist() for size in sizes]
    documents = []
    for number, size in enumerate(sizes):
        start = number * length
        documents.append([(start + position) // 5 for position in range(size)])
    text_tokens = [len([token for token in row if token not in special]) for row in ids]
    rows = Dataset.from_dict(
        {"ids": ids, "documents": documents, "text_tokens": text_tokens}, features=COLUMNS
    )
    return Packed(ArrowRows(rows), length, 49, documents=sum(sizes) // 5 + 1, bytes=4 * sum(sizes))


def list_ids(packed: Packed) -> list[list[int]]:
    """The token ids of each row."""
    return packed.rows.ids(np.arange(len(packed))).split()


def list_documents(packed: Packed) -> list[list[int]]:
    """The document of each token of each row."""
    return packed.rows.documents(np.arange(len(packed))).split()


def fake_trainer(*, rank: int = 0, world: int = 1, step: int = 0) -> SimpleNamespace:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    return SimpleNamespace(
        global_rank=rank,
        is_global_zero=rank == 0,
        world_size=world,
        global_step=step,
        strategy=strategy,
    )
