"""What a text takes on disk as token ids, and how it is read: by other processes, in blocks, without open files."""

import os
import pickle
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cpt.data import number_files, packing, stored_tokens
from cpt.data.corpora import Corpora
from cpt.data.number_files import NumberWriter, find_smallest_type, map_numbers, narrow_numbers
from cpt.data.sources.base import TextOptions
from cpt.data.text_format import make_text_format
from tests.support.data_fixtures import (
    bare_tokenizer,
    bos_tokenizer,
    list_documents,
    list_ids,
    make_prose,
    wordpiece_tokenizer,
    write_corpus,
)


def pack_prose(folder, *, tokenizer=None, texts=None, length=16, packing_name="concat", is_causal=True):
    tokenizer = tokenizer or bare_tokenizer()
    return packing.pack(
        write_corpus(folder, texts or make_prose(60)),
        "train",
        format=make_text_format(tokenizer, TextOptions(), is_causal=is_causal),
        length=length,
        name="a",
        cache=folder,
        packing=packing_name,
    )


def count_bytes(folder):
    """Bytes of the numbers in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".json")


def large_tokenizer():
    """A word-level vocabulary with an id beyond 65,535."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "[SEP]": 1, "ba": 70_000}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", sep_token="[SEP]")


@pytest.mark.parametrize(("make_tokenizer", "id_bytes"), [(bare_tokenizer, 2), (large_tokenizer, 4)])
def test_a_text_takes_an_id_per_token_and_a_further_length_almost_nothing(tmp_path, make_tokenizer, id_bytes):
    tokenizer = make_tokenizer()
    texts = [f"{text} ba" for text in make_prose(60)]
    short = pack_prose(tmp_path, tokenizer=tokenizer, texts=texts, length=64)
    long = pack_prose(tmp_path, tokenizer=tokenizer, texts=texts, length=128)
    assert short.rows.tokens.folder == long.rows.tokens.folder
    (tokens,) = (tmp_path / "tokens").glob("*[0-9a-f]")
    num_tokens = short.facts["tokens"]
    assert count_bytes(tokens) == num_tokens * id_bytes + 60 * find_smallest_type(num_tokens).itemsize

    # Of each row its position, its size and its tokens of text are stored.
    for packed in (short, long):
        row_bytes = find_smallest_type(num_tokens).itemsize + 2
        assert count_bytes(packed.rows.folder) == row_bytes * len(packed)
        assert sum(list_ids(packed), []) == sum(list_ids(short), [])
    if id_bytes == 4:
        assert max(map(max, list_ids(short))) == 70_000


def test_an_id_beyond_the_vocabulary_is_an_error(tmp_path, monkeypatch):
    tokenizer = bare_tokenizer()
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: {"a": 0})
    monkeypatch.setattr(type(tokenizer), "added_tokens_decoder", {})
    with pytest.raises(ValueError, match=r"gives the id \d+, which is beyond its vocabulary"):
        pack_prose(tmp_path, tokenizer=tokenizer)


@pytest.mark.parametrize("packing_name", ["concat", "document_mask", "none"])
def test_rows_do_not_depend_on_how_many_documents_are_read_at_once(tmp_path, monkeypatch, packing_name):
    tokenizer = wordpiece_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    texts = ["", *make_prose(20), "", " ".join(make_prose(30, seed=3)), *make_prose(20, seed=4), ""]
    texts = [f"{text} {'x' * number}" if text else "" for number, text in enumerate(texts)]
    unblocked = pack_prose(tmp_path / "1", texts=texts, packing_name=packing_name)
    for block in (1, 50):
        monkeypatch.setattr(stored_tokens, "BLOCK", block)
        blocks = list(unblocked.rows.tokens.blocks())
        assert len(blocks) > 10 and all(len(part.ids) == part.sizes.sum() for part in blocks)
        assert max(len(part.sizes) for part in blocks[1:]) <= max(2, block)
        packed = pack_prose(tmp_path / str(block), texts=texts, packing_name=packing_name)
        assert list_ids(packed) == list_ids(unblocked) and list_documents(packed) == list_documents(unblocked)
        assert packed.facts == unblocked.facts
    assert unblocked.rows.tokens.documents_at(np.arange(unblocked.facts["tokens"])).tolist() == sorted(
        sum(list_documents(unblocked), [])
    )


def test_another_process_gets_the_paths_of_rows_and_not_their_tokens(tmp_path):
    texts = Corpora({"a": write_corpus(tmp_path, make_prose(400))}, tmp_path)
    text_format = make_text_format(bos_tokenizer(), TextOptions(), is_causal=True)
    packed = texts.packed("a", "train", format=text_format, length=16, packing="document_mask")
    rows = packed.rows.select(np.arange(3, 20)).select(np.array([4, 2, 9]))
    expected = rows.ids(np.arange(3)).split(), rows.lengths.tolist(), rows.inserted.tolist()
    assert rows.documents(np.array([1])).split() == [list_documents(packed)[5]]

    pickled = pickle.dumps(rows)
    assert len(pickled) < 1500 < 2 * packed.facts["tokens"]
    unpickled = pickle.loads(pickled)
    assert expected == (
        unpickled.ids(np.arange(3)).split(),
        unpickled.lengths.tolist(),
        unpickled.inserted.tolist(),
    )


def test_reading_rows_keeps_no_file_open(tmp_path):
    packed = pack_prose(tmp_path, packing_name="document_mask")
    num_open = len(os.listdir("/proc/self/fd"))
    read_rows = packed.ids(np.arange(3)), packed.document_of(np.arange(3)), packed.sharing
    assert len(os.listdir("/proc/self/fd")) == num_open and read_rows


def test_tokens_that_were_removed_are_made_again_under_the_same_rows(tmp_path):
    packed = pack_prose(tmp_path)
    expected = list_ids(packed)
    modified = (packed.rows.folder / "facts.json").stat().st_mtime_ns
    shutil.rmtree(packed.rows.tokens.folder)
    remade = pack_prose(tmp_path)
    assert list_ids(remade) == expected
    assert (remade.rows.folder / "facts.json").stat().st_mtime_ns == modified


def test_numbers_are_stored_in_the_smallest_type(tmp_path, monkeypatch):
    maxima = [0, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32]
    types = [find_smallest_type(maximum).name for maximum in maxima]
    assert types == ["uint8", "uint8", "uint16", "uint16", "uint32", "uint32", "int64"]

    monkeypatch.setattr(number_files, "NARROWED", 3)
    for maximum, name in ((7, "uint8"), (2**32, "int64")):
        folder = tmp_path / name
        folder.mkdir()
        with NumberWriter(folder, "ends", np.dtype(np.int64)) as writer:
            writer.write(np.arange(5))
            writer.write(np.array([5, 6, maximum]))
        narrow_numbers(folder, "ends", maximum)
        assert [path.name for path in folder.iterdir()] == [f"ends.{name}"]
        assert map_numbers(folder, "ends").tolist() == [0, 1, 2, 3, 4, 5, 6, maximum]
    with NumberWriter(tmp_path, "none", np.dtype(np.uint16)) as writer:
        writer.write(np.zeros(0))
    assert map_numbers(tmp_path, "none").tolist() == []


def test_numbers_that_a_stopped_start_left_in_another_type_are_replaced(tmp_path):
    (tmp_path / "ends.uint8").write_bytes(bytes([1, 2]))
    with NumberWriter(tmp_path, "ends", np.dtype(np.int64)) as writer:
        writer.write(np.array([3, 300]))
    assert map_numbers(tmp_path, "ends").tolist() == [3, 300]
