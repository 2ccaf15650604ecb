"""Small tokenizers of kinds whose model, or whose Python code, finds special tokens in a text by itself."""

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "river", "stone", "##s", "r", "s", "[", "]", "##e"]


def bert_legacy(folder, **options):
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return BertTokenizerLegacy(str(folder / "vocab.txt"), **options)


def unigram(**options):
    """As T5's: its model has the special tokens among the pieces of text."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in "abs</>"]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names | options)


def word_level():
    vocabulary = {word: number for number, word in enumerate(["<end>", "<unk>", "red", "green"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")


def lower_words():
    """Changes texts to lower case, by which also <END> becomes its end of sequence."""
    tokenizer = word_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def merged_end():
    """A BPE whose merges make its end of sequence, as if it had been trained on text with it."""
    merges = [("<", "e"), ("n", "d"), ("<e", "nd"), ("<end", ">"), ("r", "e"), ("re", "d")]
    entries = ["<unk>", *"<end>r", *("".join(merge) for merge in merges)]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
