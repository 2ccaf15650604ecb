"""Words of SentencePiece's tokenizers that are remembered: the same ids as without, where a text is cut."""

import json
import re
import struct
from functools import cache
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from cpt.data import words
from cpt.data.cutting import BLANKS_LOST, cuts_of
from cpt.data.spaces import _BESIDE, APART, AT_RUNS, AT_SINGLE, BEFORE_EACH, LOST, MARK, RUNS
from cpt.data.words import Quick, Words
from tests.data.test_words import ASKEW, CHARACTERS

JOINING = [
    "\u0600",
    "\u0600 ",
    " \u0301",
    "a\u0301",
    " \u200d",
    "\u0903",
    "\u3099",
    "\u1100\u1161",
    "\U0001f1e9",
]
MARKED = [
    *(MARK, " ", "  ", "\n", "\t", "a", " a", "b a", "ab ab", "  b", f"a{MARK}", f"{MARK} {MARK}b"),
    "<tool>",
]
ATOMS = st.sampled_from([*ASKEW, *JOINING, *MARKED]) | st.sampled_from(MARKED)
TEXTS = st.lists(ATOMS | st.characters(codec="utf-8"), max_size=14).map("".join)
CHANGES = {  # as nmt_nfkc's, and some that are worse
    **dict.fromkeys(("\t", "\n", "\r", "\xa0", "\u200b", "\u3000", "a\u0301", "\u0903"), " "),
    **{"\x01": "", "\u2122": "TM", "\u00a8": " \u0308", "e\u0301": "\u00e9", " \u0301": "y", "\u0600": "x"},
}


def charsmap(changes):
    """A normaliser that changes these strings, or bytes, as SentencePiece writes it: a double array with 256
    places for each node, and what they become."""
    trie = {}
    for key, new in changes.items():
        node = trie
        for byte in key if isinstance(key, bytes) else key.encode():
            node = node.setdefault(byte, {})
        node[0] = new
    units, ends, waiting = [0] * 512, b"", [(0, 256, trie)]
    while waiting:
        at, base, node = waiting.pop()
        units[at] |= (at ^ base) << 10
        for byte, below in node.items():
            if byte == 0:
                units[at] |= 1 << 8
                units[base] = len(ends) | 1 << 31
                ends += below.encode() + b"\0"
            else:
                units[base + byte] = byte
                waiting.append((base + byte, len(units), below))
                units += [0] * 256
    return normalizers.Precompiled(struct.pack(f"<{len(units) + 1}I", 4 * len(units), *units) + ends)


def normalising(*steps):
    return normalizers.Sequence(list(steps))


def metaspace(scheme="always", split=True, mark=MARK):
    return pre_tokenizers.Metaspace(mark, scheme, split)


def parting(*more):
    return pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), *more])


def framed(model, pre_tokenizer, normalizer, added=()):
    made = Tokenizer(model)
    if pre_tokenizer:
        made.pre_tokenizer = pre_tokenizer
    if normalizer:
        made.normalizer = normalizer
    made.add_special_tokens(["<s>", "<unk>"])
    made.add_tokens(list(added))
    ids = [("<s>", made.token_to_id("<s>"))]
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    return made


def by_pieces(pre_tokenizer, normalizer=None, added=()):
    """Pieces as Unigram has them; some characters are unknown, and some pieces go across spaces."""
    known = sorted({*"abxyzTM\u00e9\u0301.1K\n ", *"".join(ASKEW[::2])} - {MARK})
    pieces = [("<unk>", 0.0), (MARK, -2.0), ("ab", -1.5), (f"a{MARK}", -1.0), (f"a{MARK}b", -0.5)]
    pieces += [(each, -3.0) for each in known] + [(f"{MARK}{each}", -2.5) for each in known]
    return framed(models.Unigram(pieces, 0, False), pre_tokenizer, normalizer, added)


MERGED = [("a", "b"), (MARK, "a"), (MARK, MARK), (f"{MARK}a", "b"), (f"{MARK}{MARK}", f"{MARK}a"), ("b", ".")]
FALLING = [f"<0x{number:02X}>" for number in range(256)]


def by_merges(
    pre_tokenizer=None, normalizer=None, *, merges=MERGED, lacking=("\u00e9",), added=(), **options
):
    """Merges as Llama 2 has them; characters that it does not know are bytes, of which some are lacking."""
    falling = set(FALLING) - {f"<0x{byte:02X}>" for byte in "".join(lacking).encode()}
    parts = {*"ab.", MARK, *(part for pair in merges for part in (*pair, "".join(pair)))}
    vocabulary = {name: number for number, name in enumerate(sorted({"<unk>"} | falling | parts))}
    told = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} | options
    return framed(models.BPE(vocabulary, merges, **told), pre_tokenizer, normalizer, added)


TO_MARK = normalizers.Replace(" ", MARK)
PREPENDED = normalising(normalizers.Prepend(MARK), TO_MARK)
STRIPPED = normalizers.Strip(left=False, right=True)


def one_of_runs(by=" "):
    return normalizers.Replace(Regex(" {2,}"), by)


OF_GEMMA = pre_tokenizers.Split(" ", "merged_with_previous")
TOOL = AddedToken("<tool>", special=False, normalized=False)
KINDS = {  # and by which pattern they are cut
    "t5": (APART, lambda: by_pieces(parting(metaspace()), charsmap(CHANGES))),
    "t5, no mark": (APART, lambda: by_pieces(parting(metaspace("never")), charsmap(CHANGES), [TOOL])),
    "t5, more changes": (
        APART,
        lambda: by_pieces(
            parting(metaspace()),
            normalising(
                charsmap(CHANGES), STRIPPED, one_of_runs(), normalizers.NFKC(), normalizers.Lowercase()
            ),
        ),
    ),
    "t5, no charsmap": (BLANKS_LOST, lambda: by_pieces(parting(metaspace()))),
    "mt5": (
        AT_RUNS,
        lambda: by_pieces(metaspace(), normalising(charsmap(CHANGES), STRIPPED, one_of_runs(MARK))),
    ),
    "nllb": (AT_RUNS, lambda: by_pieces(metaspace("first"), normalising(charsmap(CHANGES), one_of_runs()))),
    "xglm": (AT_SINGLE, lambda: by_pieces(metaspace("first"), charsmap(CHANGES))),
    "stripped": (AT_SINGLE, lambda: by_pieces(metaspace(), normalizers.Strip(), [TOOL])),
    "pieces": (BEFORE_EACH, lambda: by_pieces(metaspace("first"))),
    "pieces, no mark": (BEFORE_EACH, lambda: by_pieces(metaspace("never"))),
    "pieces of merges": (BEFORE_EACH, lambda: by_merges(metaspace(), merges=[*MERGED, ("a", MARK)])),
    "llama 2": (RUNS, lambda: by_merges(normalizer=PREPENDED)),
    "llama 2, a mark": (RUNS, lambda: by_merges(metaspace("first", split=False), added=[TOOL])),
    "llama 2, no mark": (RUNS, lambda: by_merges(metaspace("never", split=False))),
    "mistral": (RUNS, lambda: by_merges(metaspace("always", split=False), fuse_unk=False, lacking="b\u0301")),
    "gemma": (RUNS, lambda: by_merges(OF_GEMMA, TO_MARK)),
}


def remembering(backend):
    """What is compared, and the pattern; nothing where it is not cut."""
    written = backend.to_str()
    cuts = cuts_of(written)
    return (Quick(written), Words(written, cuts), cuts.part) if cuts else None


@cache
def of_kind(kind):
    return remembering(KINDS[kind][1]())


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(TEXTS, max_size=5))
@example(
    texts=["", " ", "a", " a", f"{MARK}a", "a b", "a  b ", "ab \u0301a", "\u0600 a b", "\n", "a\nb\r\nc\td"]
)
@example(
    texts=["\u0600ab a\u0301b", "a\u0301 a a", "  \u00a8 a", "ab\u00e9 \u00e9 \u00e9\nb", "aa  aa \xa0 bb"]
)
@settings(max_examples=100, deadline=None)
def test_the_ids_are_those_of_the_whole_text(kind, texts):
    whole, remembered, part = of_kind(kind)
    expected = KINDS[kind][0]
    assert part == (expected if isinstance(expected, str) else "|".join(expected))
    assert remembered(texts) == whole(texts)
    assert remembered(texts) == whole(texts)  # from memory


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@settings(max_examples=25, deadline=None)
def test_a_long_text_is_looked_up_in_turn(kind, text):
    whole, remembered, _ = of_kind(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "LONG", 3)
        patch.setattr(words, "AT_ONCE", 2)
        assert remembered([text, "a", text]) == whole([text, "a", text])


FEW = st.text(st.sampled_from(" \n\ta\u0301\u0600\u200b!"), min_size=1, max_size=2)
NEW = st.sampled_from(["", " ", "\n", "a", "x", MARK, "\u0301", "\xa0", "\x85", " a", "a "])
NEAR = st.lists(st.sampled_from([*" \n\ta!", " ", "a", "\u0301", "\u0600", "\u200b", "\r\n"]), max_size=9)
AROUND = {
    "words": (parting(metaspace()), lambda made: made),
    "words, composed": (parting(metaspace()), lambda made: normalising(made, normalizers.BertNormalizer())),
    "marks": (metaspace(), lambda made: made),
    "marks, stripped": (metaspace(), lambda made: normalising(made, STRIPPED)),
    "runs": (metaspace(), lambda made: normalising(made, one_of_runs())),
    "runs, stripped": (metaspace("first"), lambda made: normalising(made, STRIPPED, one_of_runs(MARK))),
}


@pytest.mark.parametrize("kind", AROUND)
@given(changes=st.dictionaries(FEW, NEW, max_size=3), texts=st.lists(NEAR.map("".join), max_size=6))
@example(changes={"\u0600": " ", "a\u0301": " "}, texts=["\u0600a b", "a a\u0301 b", "b a\u0600a b"])
@settings(max_examples=300, deadline=None)
def test_whatever_a_charsmap_changes(kind, changes, texts):
    pre_tokenizer, normalizer = AROUND[kind]
    found = remembering(by_pieces(pre_tokenizer, normalizer(charsmap(changes))))
    assert found is None or found[1](texts) == found[0](texts)


@st.composite
def merging(draw):
    """Merges, each of what there is by then."""
    parts, found = ["a", "b", MARK, "<unk>", "<0x0A>", "<0xC3>"], []
    for _ in range(draw(st.integers(1, 6))):
        pair = draw(st.tuples(st.sampled_from(parts), st.sampled_from(parts)))
        parts, found = [*parts, "".join(pair)], [*found, pair]
    return list(dict.fromkeys(found))


@given(
    merges=merging(),
    unknown=st.sampled_from([None, "<unk>", MARK, "a"]),
    fuse=st.booleans(),
    ignore=st.booleans(),
    lacking=st.sampled_from(["", "\n", "\u00e9", "c"]),
    texts=st.lists(st.text(f"ab\n\u00e9c {MARK}", max_size=9), max_size=8),
)
@settings(max_examples=400, deadline=None)
def test_whatever_is_merged(merges, unknown, fuse, ignore, lacking, texts):
    options = {"unk_token": unknown, "fuse_unk": fuse, "ignore_merges": ignore}
    found = remembering(by_merges(normalizer=PREPENDED, merges=merges, lacking=lacking, **options))
    across = any(right.startswith(MARK) and not left.endswith(MARK) for left, right in merges)
    if across or ignore or unknown == MARK:
        assert found is None
    assert found or across or ignore or unknown == MARK or (unknown is None and lacking)
    assert found is None or found[1](texts) == found[0](texts)


def changed(backend, **options):
    told = json.loads(backend.to_str())
    return json.dumps(told | {"model": told["model"] | options})


def vocabulary(**options):
    told = json.loads(by_merges(normalizer=PREPENDED).to_str())["model"]["vocab"]
    return {name: number for name, number in (told | options).items() if number is not None}


def unlike(**changes):
    return by_pieces(parting(metaspace()), charsmap(CHANGES | changes))


LLAMA, ALL_BYTES = by_merges(normalizer=PREPENDED), by_merges(normalizer=PREPENDED, lacking="")
OTHERS = {  # of which nothing is known, or that what is cut is not the whole
    "a mark before the first word only": lambda: by_pieces(parting(metaspace("first"))).to_str(),
    "another mark": lambda: by_pieces(metaspace(mark="_")).to_str(),
    "another mark of words": lambda: by_pieces(parting(metaspace(mark="_"))).to_str(),
    "pieces that go on over marks": lambda: by_pieces(metaspace(split=False)).to_str(),
    "marks that are split again": lambda: by_pieces(
        pre_tokenizers.Sequence([metaspace(), pre_tokenizers.Digits()])
    ).to_str(),
    "ends of lines that are lost": lambda: unlike(**{"\n": ""}).to_str(),
    "both ends of lines that are lost": lambda: by_pieces(
        parting(metaspace()), charsmap({"\r\n": ""})
    ).to_str(),
    "a blank that is none": lambda: unlike(**{"\t": "x"}).to_str(),
    "a blank of another kind": lambda: unlike(**{"\t": "\x85"}).to_str(),
    "graphemes that are changed before": lambda: by_pieces(
        parting(metaspace()), normalising(normalizers.NFKC(), charsmap(CHANGES))
    ).to_str(),
    "marks for runs, and words": lambda: by_pieces(
        parting(metaspace()), normalising(charsmap(CHANGES), one_of_runs(MARK))
    ).to_str(),
    "other changes after a charsmap": lambda: by_pieces(
        metaspace(), normalising(charsmap(CHANGES), normalizers.NFKC())
    ).to_str(),
    "a charsmap after others": lambda: by_pieces(
        metaspace(), normalising(one_of_runs(MARK), charsmap({MARK: "_"}))
    ).to_str(),
    "a letter that is changed": lambda: by_pieces(metaspace(), charsmap({"a": " "})).to_str(),
    "a space that is changed": lambda: by_pieces(metaspace(), charsmap({" ": "x"})).to_str(),
    "a charsmap and no mark": lambda: by_pieces(metaspace("never"), charsmap(CHANGES)).to_str(),
    "a charsmap and no split": lambda: by_merges(metaspace(split=False), charsmap(CHANGES)).to_str(),
    "a charsmap and no pre-tokenizer": lambda: by_merges(
        normalizer=normalising(charsmap(CHANGES), TO_MARK)
    ).to_str(),
    "a charsmap and nothing else": lambda: by_pieces(None, charsmap(CHANGES)).to_str(),
    "a split at spaces that are stripped": lambda: by_merges(OF_GEMMA, STRIPPED).to_str(),
    "signs alone of graphemes": lambda: by_pieces(
        pre_tokenizers.BertPreTokenizer(), charsmap(CHANGES)
    ).to_str(),
    "spaces that stay": lambda: by_merges(normalizer=normalizers.Prepend(MARK)).to_str(),
    "another beginning": lambda: by_merges(
        normalizer=normalising(normalizers.Prepend("a"), TO_MARK)
    ).to_str(),
    "two beginnings": lambda: by_merges(
        normalizer=normalising(normalizers.Prepend(MARK), PREPENDED)
    ).to_str(),
    "another content": lambda: by_merges(normalizer=normalizers.Replace(" ", "_")).to_str(),
    "another pattern": lambda: by_merges(normalizer=normalizers.Replace(Regex(" +"), MARK)).to_str(),
    "another split": lambda: by_merges(pre_tokenizers.Split("a", "merged_with_previous"), TO_MARK).to_str(),
    "a split of all else": lambda: by_merges(
        pre_tokenizers.Split(" ", "merged_with_previous", invert=True), TO_MARK
    ).to_str(),
    "merges across": lambda: by_merges(normalizer=PREPENDED, merges=[*MERGED, ("a", MARK)]).to_str(),
    "merges as strings": lambda: changed(
        LLAMA, merges=[f"{MARK} a", f"a {MARK}"], vocab=vocabulary(**{f"a{MARK}": 400})
    ),
    "merges that are ignored": lambda: changed(LLAMA, ignore_merges=True),
    "a prefix": lambda: changed(LLAMA, continuing_subword_prefix="##"),
    "a suffix": lambda: changed(LLAMA, end_of_word_suffix="</w>"),
    "characters that are lost": lambda: changed(LLAMA, unk_token=None),
    "no bytes for what is not known": lambda: changed(ALL_BYTES, byte_fallback=False, unk_token=None),
    "an unknown token that is unknown": lambda: changed(ALL_BYTES, unk_token="[UNK]"),
    "one id of two": lambda: changed(LLAMA, vocab=vocabulary(**{MARK: vocabulary()["a"]})),
    "no mark": lambda: changed(LLAMA, vocab=vocabulary(**{MARK: None}), merges=[]),
    "an added word of a changed text": lambda: by_merges(normalizer=PREPENDED, added=["ab"]).to_str(),
    "dropout": lambda: changed(LLAMA, dropout=0.1),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_known_is_not_cut(other):
    assert cuts_of(OTHERS[other]()) is None
    assert cuts_of(changed(LLAMA)) and cuts_of(unlike().to_str())


def test_merges_may_be_strings_and_no_token_be_the_unknown_one():
    told = changed(LLAMA, merges=[" ".join(pair) for pair in MERGED])
    assert cuts_of(told).part == cuts_of(changed(ALL_BYTES, unk_token=None)).part == "|".join(RUNS)


def shown(text):
    """X, V or Y for each grapheme that begins with a space, a sign of ASCII or another character."""
    kinds = {b" ": "X"} | {bytes([byte]): "Y" for byte in range(0xC2, 0xF5)}
    kinds |= {bytes([byte]): "V" for byte in range(ord("!"), 0x7F)}
    return charsmap(kinds).normalize_str(text)


def test_no_grapheme_goes_across_a_cut():
    beside = re.findall(f"[{_BESIDE}]", "".join(CHARACTERS))
    letters = [each for each in beside if each not in f"{LOST}\x00\x02"]
    assert len(letters) > 30_000 and not {"\u0301", "\u0600", "\u200d", "\u0903"}.intersection(letters)
    alone = shown("\x02".join(letters)).split("\x02")
    assert shown("\x02".join(f" {each}" for each in letters)).split("\x02") == [f"X{each}" for each in alone]
    assert shown("\x02".join(f"{each} " for each in letters)).split("\x02") == [f"{each}X" for each in alone]
    assert shown("a \u0301\x02\u0600 a") == "VX\x02YV"  # it would be seen
    ascii, signs = [chr(each) for each in range(1, 127) if each != 2], map(chr, range(ord("!"), 127))
    pairs = [*product(ascii, signs)]
    assert shown("\x02".join(map("".join, pairs))).split("\x02") == [f"{shown(each)}V" for each, _ in pairs]


def test_an_end_of_a_line_or_a_tab_is_a_grapheme():
    letters = [each for each in CHARACTERS if each not in "\r\n\x00\x02"]
    for blank in "\t\n\r":
        told = charsmap({blank: "X"} | {bytes([byte]): "Y" for byte in range(0xC2, 0xF5)})
        alone = told.normalize_str("\x02".join(letters)).split("\x02")
        found = told.normalize_str("\x02".join(f"{each}{blank}{each}" for each in letters)).split("\x02")
        assert [*map(len, alone)].count(1) > 0.99 * len(alone)
        assert [each for each, own in zip(found, alone, strict=True) if each != f"{own}X{own}"] == []


def test_what_is_cut_where():
    def parts(pattern, text):
        found = re.finditer(pattern if isinstance(pattern, str) else "|".join(pattern), text)
        return [each[0] for each in found]

    assert parts(APART, "a b\n\u0301c \u0301d e\u0600 f  \u0600g\u00e9 h") == [
        *("a", "b", "\u0301c \u0301d", "e\u0600 f", " \u0600g\u00e9", "h")
    ]
    assert parts(RUNS, f" a  b{MARK} c\n ") == [" a", "  b", f"{MARK} c\n", " "]
    assert parts(BEFORE_EACH, f" a  b{MARK} c\n ") == [" a", " ", " b", MARK, " c\n", " "]
    text = "  a b  cd e\u0301 f \u00e9 gh\ni "
    assert parts(AT_SINGLE, text) == ["  a", "b  cd e\u0301 f \u00e9 gh\ni "]
    assert parts(AT_RUNS, text) == ["  a", "b", "cd e\u0301 f \u00e9 gh\ni "]
