"""Files as others leave them: names of splits, suffixes, links, damage, and what is about the data only."""

import bz2
import gzip
import json
import logging
import lzma
import os
import shlex
import shutil
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from datasets.data_files import SPLIT_KEYWORDS
from hydra.core.override_parser.overrides_parser import OverridesParser

from cpt.cli import keep_text
from cpt.data.corpus import make_corpus
from cpt.data.sources import readers
from cpt.data.sources.base import GENERAL
from cpt.data.sources.files import SPLIT_WORDS, find_split, format_ignore
from cpt.data.sources.readers import read_file_rows
from tests.data.sources.test_sources import open_hub, open_texts, read_documents, read_texts


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def format_lines(*documents):
    return "".join(json.dumps({"text": text}) + "\n" for text in documents)


def test_the_words_of_splits_are_those_of_datasets():
    expected = {}
    for split, words in SPLIT_KEYWORDS.items():
        name = "valid" if str(split) == "validation" else str(split)
        expected |= dict.fromkeys(words, name)
    assert expected == dict(SPLIT_WORDS)


def test_what_files_are_taken_as_is_in_one_line(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cpt")
    for name in ("books.jsonl", "wiki.train.jsonl", "wiki.eval.jsonl", "dev/wiki.jsonl", "train-dev.jsonl"):
        write(tmp_path / "a" / name, format_lines(name))
    assert {text: split for split, text in read_documents(tmp_path)}["train-dev.jsonl"] == "valid"
    line = next(message for message in caplog.messages if message.startswith("Reading 5 files of a"))
    assert "1 as test (like wiki.eval.jsonl), 2 as train (like wiki.train.jsonl), 2 as valid" in line
    assert "1 of train have no split in the name" in line and "1 have several splits" in line


def test_a_domain_whose_files_are_all_held_out_by_their_names_is_refused_before_it_is_read(tmp_path, caplog):
    write(tmp_path / "a" / "x.test.txt", "One.\n")
    write(tmp_path / "test" / "x.txt", "One.\n")
    with pytest.raises(
        ValueError, match=r"a has no file to train on, but 1 file held out by name, .*x.test.txt \(test\)"
    ):
        open_texts(tmp_path).check(["a"])
    open_texts(tmp_path).check(["test"])
    assert "named as held-out text, as domains of their own: test" in caplog.text


def test_a_link_to_what_is_not_mounted_is_no_missing_domain(tmp_path):
    write(tmp_path / "a" / "x.txt", "One.\n")
    (tmp_path / "law").symlink_to(tmp_path / "disk" / "law")
    with pytest.raises(ValueError, match=r"law is a link to .*disk/law, which does not.*ignore=\[law\]"):
        open_texts(tmp_path)
    assert open_texts(tmp_path, ignore=["law"]).names == ["a"]
    (tmp_path / "law").rename(tmp_path / GENERAL)
    with pytest.raises(ValueError, match="general is a link to .*, which does not exist"):
        open_texts(tmp_path)


def test_text_in_no_domain_and_hidden_folders_are_named(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cpt")
    for name in ("a/x.txt", "a/.part/x.txt", "law.JSONL", "README.md", ".old/x.txt"):
        write(tmp_path / name, "One.\n")
    open_texts(tmp_path).check(["a"])
    assert read_texts(tmp_path) == ["One."]
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels[f"Ignoring 1 text file of {tmp_path} in no domain's folder: law.JSONL"] == "WARNING"
    assert levels[f"Ignoring files of {tmp_path} in no domain's folder: README.md"] == "INFO"
    assert levels[f"Ignoring hidden folders of {tmp_path}: .old"] == "INFO"
    assert levels["Leaving out files of a: 1 hidden (.part)"] == "INFO"


def test_options_that_a_message_shows_are_read_as_they_are_meant(tmp_path):
    names = ["a b", "a, b (1)", 'say "x"', "3.10", "1e3", "null", "it's", "é"]
    names += ["[x]", "a{b}", "~x", "a=b", "*.docx", "a\\"]
    (argument,) = shlex.split(format_ignore(names))
    (override,) = OverridesParser.create().parse_overrides([keep_text(argument)])
    assert override.value() == names

    for name in ("3.10", "a, b (1)", "it's"):
        write(tmp_path / "x, (y)" / name / "a.txt", "One.")
        with pytest.raises(ValueError, match="domains.root=") as error:
            open_texts(tmp_path / "x, (y)" / name)
        arguments = shlex.split(str(error.value).partition("as a domain ")[2])
        overrides = OverridesParser.create().parse_overrides(list(map(keep_text, arguments)))
        assert [override.value() for override in overrides] == [str(tmp_path / "x, (y)"), [name]]


def test_a_folder_of_one_domain_in_place_of_the_folder_of_all_is_refused(tmp_path):
    """Only its sub-folders would be read, as domains."""
    root = tmp_path / "hand book"
    for name in ("a.txt", "b.md"):
        write(root / name, "One.\n" * 30)
    with pytest.raises(
        ValueError, match=r"no sub-folder of a domain, but 2 text files \(a.txt, b.md\)"
    ) as error:
        open_texts(root)
    order = shlex.quote('order=["hand book"]')
    assert f"domains.root={tmp_path} {order}" in str(error.value)
    with pytest.raises(ValueError, match=f"there is no folder .*Did you mean {root}"):
        open_texts(tmp_path / "handbook")

    write(root / "old" / "a.txt", "Two.\n" * 30)
    with pytest.raises(
        ValueError, match="^domains.root=.*2 text files .* 300 bytes in no sub-folder, 150 in sub-"
    ):
        open_texts(root).check(["old"])
    open_texts(root, ignore=["b.md"]).check(["old"])
    # Text of other domains and general text count as well.
    write(root / GENERAL / "a.txt", "Two.\n" * 30)
    open_texts(root).check(["old"])


@pytest.mark.parametrize(
    ("option", "reason"), [("general", " has no folder general"), (None, "domains.general=null")]
)
def test_the_default_general_text_is_logged(option, reason, tmp_path, caplog):
    caplog.set_level(logging.INFO, "cpt")
    write(tmp_path / "a" / "x.txt", "One.\n")
    open_texts(tmp_path, general=option).check(["a"])
    (line,) = [message for message in caplog.messages if message.startswith("General text: ")]
    assert "docstrings of Python's standard library and numpy" in line and reason in line

    write(tmp_path / "General" / "x.txt", "One.\n")
    caplog.clear()
    open_texts(tmp_path, general=option).check(["a"])
    advice = "domains.general=General makes it the general text"
    assert (advice in caplog.text) == (option is not None)

    write(tmp_path / GENERAL, "One.\n")
    with pytest.raises(
        ValueError, match=r"general=general is invalid: .*general is no folder. Allowed: a folder"
    ):
        open_texts(tmp_path).check(["a"])
    (tmp_path / GENERAL).unlink()
    write(tmp_path / GENERAL / "x.txt", "One.\n")
    caplog.clear()
    open_texts(tmp_path).check(["a"])
    assert not [message for message in caplog.messages if message.startswith("General text: ")]


def test_why_no_folder_has_the_general_text_is_true_of_each_folder(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cpt")
    for name in ("data/law", "data/General", GENERAL):
        write(tmp_path / name / "x.txt", "One.\n")
    open_texts(tmp_path, ignore=[GENERAL], folder="data").check(["law"])
    assert f"numpy (domains.ignore leaves out {tmp_path / GENERAL})" in caplog.text

    shutil.rmtree(tmp_path / GENERAL)
    caplog.clear()
    open_texts(tmp_path, folder="data").check(["law"])  # domains.general=General would be no folder of root
    assert f"numpy ({tmp_path} has no folder general)" in caplog.text


def test_a_folder_below_root_without_domains_is_named(tmp_path):
    write(tmp_path / "law" / "x.txt", "One.\n")
    for folder, reason in (
        ("law", "it has no sub-folder of a domain, but 1 text"),
        ("lwa", "there is no fold"),
    ):
        with pytest.raises(ValueError, match=f"is invalid with domains.folder={folder}: {reason}") as raised:
            open_texts(tmp_path, folder=folder)
        assert "Did you mean" not in str(raised.value)
        assert (f"domains.root={tmp_path} domains.folder=. " in str(raised.value)) == (folder == "law")


def test_patterns_that_leave_out_nothing_are_named(tmp_path, caplog):
    for name in ("a/x.txt", "a/old/y.txt", "a/z.md", "b/x.txt", "c/x.txt"):
        write(tmp_path / name, "One.\n")
    matching = ["*.md", "a/old", "old", "b"]
    open_texts(tmp_path, ignore=matching).check(["a", "c"])
    assert "No effect of domains.ignore" not in caplog.text
    open_texts(tmp_path, ignore=[*matching, "y.text", "*.pdf"]).check(["a", "c"])
    expected = (
        "No effect of domains.ignore=[y.text,*.pdf]: no file or folder of these domains has such a name"
    )
    assert caplog.messages[-1] == expected


def test_options_for_kinds_of_files_that_are_not_there_are_named(tmp_path, caplog):
    write(tmp_path / "plain" / "x.txt", "One.\n")
    write(tmp_path / "table" / "x.jsonl", '{"body": "One."}\n')
    columns = {"table": "body"}
    for options, order in (
        ({"column": "body"}, ["plain", "table"]),
        ({"columns": columns, "document": "line"}, ["plain", "table"]),
        ({"columns": columns | {"plain": "body"}}, ["table"]),
        ({}, ["plain"]),
    ):
        open_texts(tmp_path, **options).check(order)
    assert "No effect" not in caplog.text

    for options, order, message in (
        ({"column": "body"}, ["plain"], "domains.column: none of the texts that it applies to is in a table"),
        (
            {"column": "body", "columns": columns},
            ["table"],
            "domains.column: none of the texts that it applies to",
        ),
        ({"columns": columns | {"plain": "body"}}, ["plain"], "domains.columns on plain: no tables there"),
        ({"columns": columns, "document": "line"}, ["table"], "domains.document=line: no text is in a .txt"),
    ):
        caplog.clear()
        open_texts(tmp_path, **options).check(order)
        (line,) = [line for line in caplog.messages if "No effect" in line]
        assert line.startswith(f"No effect of {message}")


@pytest.mark.parametrize("num_files", [3, 30])  # with few, documents are searched for in the first
def test_files_in_another_encoding_are_named_together(num_files, tmp_path):
    for number in range(num_files):
        write(tmp_path / "a" / f"{number:02}.txt", "One.\n")
    write(tmp_path / "a" / "00.txt", "Gr\xfc\xdfe\n".encode("latin-1"))
    write(tmp_path / "a" / "02.txt", "hello world\n".encode("utf-16"))
    with pytest.raises(
        ValueError, match=r"00.txt is not UTF-8: line 1, byte 3 .*either: 1 file \(02.txt\)"
    ) as error:
        read_documents(tmp_path)
    assert "iconv -f WINDOWS-1252 -t UTF-8 00.txt" in str(error.value)
    with pytest.raises(ValueError, match=r"00.txt is not UTF-8: .*either: 1 file \(02.txt\)"):
        open_texts(tmp_path).check(["a"])  # before libraries are loaded


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("name", ["x.JSONL.GZ", "x.ndjson.xz", "x.Json.bz2", "X.TXT.bz2", "x.tsv", "X.Md"])
def test_suffixes_of_any_case_and_packing(name, tmp_path):
    if "tsv" in name:
        content = "text\nOne.\n"
    elif "js" in name.lower():
        content = format_lines("One.")
    else:
        content = "One."
    _, suffix = os.path.splitext(name)
    compress = PACKERS.get(suffix.lower(), bytes)
    write(tmp_path / "a" / name, compress(content.encode()))
    assert read_texts(tmp_path) == ["One."]


@pytest.mark.parametrize(
    "name", ["b.txt.gz", "b.JSONL.BZ2", "b.md.xz", "b.jsonl.zst", "b.parquet", "b.arrow"]
)
def test_a_file_of_0_bytes_that_would_have_a_header_is_refused_before_anything_is_read(name, tmp_path):
    write(tmp_path / "a" / "a.jsonl", format_lines("One."))
    write(tmp_path / "a" / name, "")
    with pytest.raises(ValueError, match=f"{name} is damaged: it has 0 bytes"):
        open_texts(tmp_path).check(["a"])


@pytest.mark.parametrize("suffix", list(PACKERS))
def test_files_of_several_compressed_streams_are_read_to_their_end(suffix, tmp_path):
    first = PACKERS[suffix](b"One.\n")
    second = PACKERS[suffix](b"Two.\nThree.\n")
    path = tmp_path / "a" / f"x.txt{suffix}"
    padding = b"" if suffix == ".bz2" else bytes(4)
    write(path, first + padding + second + padding)
    assert read_texts(tmp_path) == ["One.", "Two.", "Three."]

    damaged = b"?" + second[1:]
    for further in (damaged, second[:-3], b"no stream"):
        path.write_bytes(first + further)
        with pytest.raises(ValueError, match=f"x.txt{suffix} cannot be read: "):
            read_documents(tmp_path)


@pytest.mark.parametrize("name", ["cut.jsonl.xz", "cut.jsonl.bz2", "cut.jsonl.gz"])
def test_a_packed_file_that_is_cut_is_refused(name, tmp_path):
    raw = format_lines(*(str(number * 7919) for number in range(3000))).encode()
    _, suffix = os.path.splitext(name)
    compress = PACKERS[suffix]
    write(tmp_path / "a" / name, compress(raw)[:-50])
    with pytest.raises(ValueError, match=f"{name} cannot be read: "):
        read_documents(tmp_path)


def test_delimiters_at_the_ends_of_all_lines_are_columns_without_a_name(tmp_path):
    write(tmp_path / "a" / "x.csv", "id,text,,\n1,One.,,\n2,Two.,,\n")
    assert read_texts(tmp_path) == ["One.", "Two."]
    write(tmp_path / "a" / "x.csv", "id,text,text\n1,One.,a\n")
    with pytest.raises(ValueError, match="x.csv has a column twice: id, text, text"):
        read_documents(tmp_path)


def test_an_array_on_each_line_is_a_row_each_and_one_on_many_lines_is_all_rows(tmp_path):
    path = tmp_path / "x.jsonl"
    write(path, "\n[1]\n\n[2, 3]\n")
    assert list(read_file_rows(path)) == [(f"{path}, line 2", [1]), (f"{path}, line 4", [2, 3])]
    for text in ("[1,\n2]\n", "[\n1\n,2]", "\n\n[1, 2]\n\n"):
        write(path, text)
        assert list(read_file_rows(path)) == [(f"{path}, value 1", 1), (f"{path}, value 2", 2)]
    write(path, "[1]\n[2\n")
    with pytest.raises(ValueError, match="x.jsonl, line 2 is not JSON: Expecting ',' delimiter"):
        list(read_file_rows(path))
    write(tmp_path / "a" / "x.jsonl", '["One."]\n["Two."]\n')
    with pytest.raises(ValueError, match=r"x.jsonl, line 1 has no column 'text'; it has \['One."):
        read_documents(tmp_path)


def test_a_column_that_is_there_twice_is_refused_where_it_is_read(tmp_path):
    table = pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["id", "id", "text"])
    (tmp_path / "a").mkdir()
    pq.write_table(table, tmp_path / "a" / "x.parquet")
    write(tmp_path / "a" / "y.jsonl", '{"id": 1, "id": 2, "meta": {"a": 1, "a": 2}, "text": "d"}\n')
    assert read_texts(tmp_path) == ["c", "d"]
    with pytest.raises(ValueError, match="x.parquet has a column twice: id, id, text"):
        read_documents(tmp_path, column="id")
    (tmp_path / "a" / "x.parquet").unlink()
    with pytest.raises(ValueError, match=r"y.jsonl, line 1 has the column 'id' twice"):
        read_documents(tmp_path, column="id")


LINE_ENDS = {
    "old mac": ("a a\rb b\rc c\r", ["a a", "b b", "c c"]),
    "mac and unix, joined": ("a a\rb b\rc c\nd d\r\n\r\ne e", ["a a", "b b", "c c", "d d", "e e"]),
    "converted twice": ("a a\r\r\nb b\r\r\n", ["a a", "b b"]),
    "no line ends": ("a\x0bb\x0cc\x85d\u2028e\u2029f", ["a\x0bb\x0cc\x85d\u2028e\u2029f"]),
}


@pytest.mark.parametrize("name", LINE_ENDS)
@pytest.mark.parametrize("chunk", [1, 4, 1 << 20])
def test_lines_end_as_in_python(name, chunk, tmp_path, monkeypatch):
    content, expected = LINE_ENDS[name]
    write(tmp_path / "a" / "x.txt", content)
    lines = list(readers.read_lines(tmp_path / "a" / "x.txt"))
    monkeypatch.setattr(readers, "CHUNK", chunk)
    assert list(readers.read_lines(tmp_path / "a" / "x.txt")) == lines
    assert read_texts(tmp_path, document="line") == expected
    write(tmp_path / "b" / "x.jsonl", format_lines("One.", "Two.").replace("\n", "\r"))
    assert read_texts(tmp_path, "b") == ["One.", "Two."]


def test_byte_order_marks_of_joined_files_are_removed_and_counted(tmp_path, caplog):
    write(tmp_path / "a" / "x.txt", "\ufeffone\n\ufefftwo\nth\ufeffree\n")
    write(
        tmp_path / "a" / "y.jsonl",
        "\ufeff" + format_lines("four", "\ufefffive") + "\ufeff" + format_lines("six"),
    )
    write(tmp_path / "a" / "z.csv", "\ufefftext,id\nseven,1\n\ufefftext,id\neight,2\n")
    expected = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    assert read_texts(tmp_path, document="line") == expected
    assert "5 byte order marks removed (first in x.txt)" in caplog.text
    assert "1 repeated line of column names left out (first in z.csv)" in caplog.text
    caplog.clear()
    write(tmp_path / "b" / "x.txt", "\ufeffone\ntwo\n")
    assert read_texts(tmp_path, "b", document="line") == ["one", "two"] and "mark" not in caplog.text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"One.\nTwo." + bytes(4096), "line 2 has 4,096 NULs"),
        (b"One.\n" + bytes(3), "line 2 has 3 NULs"),
        ("\n\nhello world\n".encode("utf-16-le"), "looks like UTF-16|control characters"),
        ("Привет, мир. Это текст.\n".encode("utf-16-le"), "control characters"),
        ("नमस्ते दुनिया यह पाठ है यह पाठ है\n".encode("utf-16-be"), "control characters|not UTF-8"),
        ("hello world\n".encode("utf-32-le"), "NULs or other control"),
        ("hello world\n".encode("utf-16"), "is not UTF-8"),
        (bytes(range(1, 32)) * 3, "control characters"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", "pointer of Git LFS"),
    ],
)
def test_what_is_damaged_or_no_utf8_is_refused(content, reason, tmp_path):
    write(tmp_path / "a" / "x.txt", content)
    with pytest.raises(ValueError, match=reason):
        read_documents(tmp_path, document="line")


@pytest.mark.parametrize("text", ["%PDF\x00\x01\x02\x03\x04 obj" * 9, "\x00", "\x00" * 500 + "\n"])
def test_a_row_of_control_characters_is_no_text(text, tmp_path):
    """In JSON these are escapes, which the bytes of the file do not show."""
    write(tmp_path / "a" / "x.jsonl", format_lines("One.", text, "Two\x00."))
    with pytest.raises(ValueError, match="x.jsonl, line 2: column 'text' has .* control character"):
        read_documents(tmp_path)
    assert read_texts(tmp_path, on_bad_example="skip") == ["One.", "Two\x00."]


def test_a_row_that_is_nested_too_deeply_is_one_bad_row(tmp_path):
    nested = '{"text": "a", "more": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
    write(tmp_path / "a" / "x.jsonl", format_lines("One.") + nested + format_lines("Two."))
    with pytest.raises(ValueError, match="x.jsonl, line 2 is not JSON: maximum recursion depth"):
        read_documents(tmp_path)
    assert read_texts(tmp_path, on_bad_example="skip") == ["One.", "Two."]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ('id,text\n1,"one"\n2,"a \\"quoted\\" text"\n', "line 3"),
        ('id,text\n1,"one\n2,"two"\n', "lines 2 to 3"),
        ('id,text\n1,one\n2,"two\n3,three\n', "lines 3 to 4"),
        ('"id"s,text\n1,One.\n', "line 1"),
        ('id,"text\n1,One.\n', "lines 1 to 2"),
    ],
)
def test_quotes_that_no_table_has_are_reported_with_their_lines(content, lines, tmp_path):
    write(tmp_path / "a" / "x.csv", content)
    with pytest.raises(
        ValueError, match=f"x.csv, {lines} cannot be read as a row .* Allowed: texts with del"
    ):
        read_documents(tmp_path)


def test_the_delimiter_that_excel_declares_is_taken(tmp_path):
    write(tmp_path / "a" / "x.csv", "\ufeffsep=;\r\nid;text\r\n1;One, two.\r\n")
    assert read_texts(tmp_path) == ["One, two."]
    write(tmp_path / "a" / "x.csv", "sep=\t\r\nid\ttext\r\n1\tOne, two.\r\n")
    assert read_texts(tmp_path) == ["One, two."]
    write(tmp_path / "a" / "x.csv", "sep=;\nid;text\n1;One.\n2\n")
    with pytest.raises(ValueError, match="x.csv, line 4 has 1 value"):
        read_documents(tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_row_of_a_table_that_is_not_utf8_is_one_bad_row(suffix, tmp_path):
    values = [b"One."] * 149 + [b"caf\xe9", b"Two."]
    binary = pa.array(values, pa.binary())
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), len(values), binary.buffers())})
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / f"x.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(ValueError, match=f"x.{suffix}, row 150 is not UTF-8: .* Allowed: text in UTF-8"):
        read_documents(tmp_path)
    assert read_texts(tmp_path, on_bad_example="skip") == ["One."] * 149 + ["Two."]


def test_rare_control_characters_are_text(tmp_path):
    pages = "N\bNA\bAM\bME\bE\x1b[1m of a page\x00 with a NUL in it, form feed\x0c.\n"
    write(tmp_path / "a" / "x.txt", pages)
    assert read_texts(tmp_path, document="line") == [pages.rstrip("\n")]


def test_files_about_the_data_are_left_out_beside_tables_and_named(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cpt")
    names = ["README.md", "LICENSE", "LICENSE.txt", "Notice-2.txt", "CITATION.cff", "dataset_infos.json"]
    for name in [*names, "data/README.md", "_SUCCESS"]:
        write(tmp_path / "a" / name, "{}")
    write(tmp_path / "a" / "data" / "train-00000-of-00001.jsonl", format_lines("One."))
    write(tmp_path / "a" / "noticeable.txt", "Two.")
    open_texts(tmp_path).check(["a"])
    assert read_texts(tmp_path) == ["One.", "Two."]
    assert "Leaving out files of a: 8 about the data (CITATION.cff, LICENSE" in caplog.text
    # A folder of text alone may be of such files: they stay, and are named.
    for name in ("README.md", "other/readme.md", "LICENSE"):
        write(tmp_path / "b" / name, "Three.")
    assert read_texts(tmp_path, "b") == ["Three.", "Three."]
    assert "no text of it: README.md, readme.md ('domains.ignore=[README.md,readme.md]' leaves" in caplog.text


def test_rare_blank_lines_and_shards_do_not_make_large_documents(tmp_path, caplog):
    rows = [f"document {number}" for number in range(90)]
    # A blank line after every 30 documents separates nothing, one after every 5 paragraphs.
    for name, size in (("rare", 30), ("usual", 5)):
        paragraphs = ["\n".join(rows[begin : begin + size]) for begin in range(0, 90, size)]
        write(tmp_path / name / "x.txt", "\n\n".join(paragraphs) + "\n")
    assert read_texts(tmp_path, "rare") == rows
    assert "of the first 90 lines blank ones separate only 3 parts" in caplog.text
    assert len(read_texts(tmp_path, "usual")) == 18

    # Each of many files is a document, unless they are the numbered shards of one text.
    for number in range(25):
        write(tmp_path / "shards" / f"part-{number:05}-of-00025.txt", "One.\nTwo.\n")
        write(tmp_path / "files" / f"part-{number:05}.txt", "One.\nTwo.\n")
    assert len(read_texts(tmp_path, "shards")) == 50 and len(read_texts(tmp_path, "files")) == 25


def test_the_same_file_by_two_links_is_counted(tmp_path, caplog):
    write(tmp_path / "a" / "x.txt", "One.\n")
    (tmp_path / "a" / "y.txt").symlink_to("x.txt")
    assert read_texts(tmp_path) == ["One.", "One."]
    assert "Reading 1 file of a more than once, through links (x.txt)" in caplog.text


def test_delimiters_of_tables(tmp_path):
    write(tmp_path / "a" / "a.csv", 'id;text\n1;"One; and, more."\n2;Two\n')
    write(tmp_path / "a" / "b.csv", "text\tid\nThree, four\t2\n")
    write(tmp_path / "a" / "c.tsv", "id\ttext, long\ttext\n1\t2\tFive\n")
    write(tmp_path / "a" / "d.csv", 'id,text;label,text\n1,2,"Six\r\nand"\n')
    assert read_texts(tmp_path) == ["One; and, more.", "Two", "Three, four", "Five", "Six\nand"]


def test_a_similar_column_is_suggested(tmp_path):
    write(tmp_path / "a" / "a.csv", "id,Text \n1,One\n")
    with pytest.raises(ValueError, match=r"has no column 'text'; it has id, Text .*Did you mean Text \?"):
        read_documents(tmp_path)


def test_what_reads_chats_is_named_where_text_is_expected(tmp_path):
    write(tmp_path / "a" / "a.jsonl", '{"messages": []}\n')
    with pytest.raises(
        ValueError, match=r"has messages .*Chats are read by domains=instructions, and by format"
    ):
        read_documents(tmp_path)


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "corpora" / "a" / "x.txt", "One.\n")
    write(tmp_path / "corpora" / "a" / "y.md", "Two.\n")
    assert read_texts("~/corpora", ignore=["a/y.md"]) == ["One."]


def test_saved_data_sets_and_arrow_files(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cpt")
    saved = DatasetDict(
        train=Dataset.from_dict({"text": ["One.", "Two."]}), test=Dataset.from_dict({"text": ["T."]})
    )
    saved.save_to_disk(tmp_path / "a")
    cached = Dataset.from_dict({"text": ["Cached."]})
    cached.save_to_disk(tmp_path / "b")
    (tmp_path / "b" / "data-00000-of-00001.arrow").rename(tmp_path / "a" / "train" / "cache-1.arrow")
    assert read_documents(tmp_path) == [("test", "T."), ("train", "One."), ("train", "Two.")]
    assert "1 not part of a saved data set (cache-1.arrow)" in caplog.text
    with pytest.raises(ValueError, match="b/data-00000-of-00001.arrow is missing: .*state.json lists it"):
        open_texts(tmp_path).check(["b"])
    table = pa.table({"id": list(range(250)), "text": pa.array(map(str, range(250)), pa.large_string())})
    (tmp_path / "c").mkdir()
    with pa.ipc.new_file(tmp_path / "c" / "file.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=120)
    with pa.ipc.new_stream(tmp_path / "c" / "stream.ARROW", table.schema) as writer:
        writer.write_table(table)
    assert read_texts(tmp_path, "c") == [*map(str, range(250))] * 2


def test_split_of_paths_is_that_of_words_alone(tmp_path):
    assert find_split(Path("contest/attestation.txt")) is None and find_split(Path("Dev 2/x.txt")) == "valid"
    assert find_split(Path("training/x.txt")) == "train" and find_split(Path("train/dev/test.txt")) == "valid"


BAD_RECORDS = {
    "x.jsonl": format_lines("One.")
    + '{"text": "cut\n{"body": "b"}\n{"text": 7}\n[]\n'
    + format_lines("Two."),
    "x.csv": "id,text\n1,One.\n2,b,c\n3,Two.\n",
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_bad_records_stop_or_are_counted(name, tmp_path, caplog):
    write(tmp_path / "a" / name, BAD_RECORDS[name])
    with pytest.raises(ValueError, match=rf"{name}, line .*\(domains.on_bad_example=skip leaves it out\)"):
        read_documents(tmp_path)
    source = open_texts(tmp_path, on_bad_example="skip")
    assert [text for _, text in source.read("a")] == ["One.", "Two."]
    entry = source.skipped["a"]["a row that cannot be read"]
    assert entry["count"] == {"x.jsonl": 4, "x.csv": 1}[name] and f"{name}, line" in entry["first"]
    assert source.fingerprint("a") != open_texts(tmp_path).fingerprint("a")
    with pytest.raises(ValueError, match=r"on_bad_example=skip is invalid: all examples of a are bad"):
        read_documents(tmp_path, column="other", on_bad_example="skip")
    # Damage of a whole file is no bad record.
    write(tmp_path / "a" / "y.jsonl", format_lines("Three.").encode() + b"\xff\n")
    with pytest.raises(ValueError, match="y.jsonl is not UTF-8: line 2"):
        list(source.read("a"))


def test_skipped_records_are_in_the_facts_and_the_log_of_a_text(tmp_path, caplog):
    rows = [f"One of the documents, number {number}." for number in range(30)]
    write(tmp_path / "a" / "x.jsonl", format_lines(*rows) + "{\n")
    corpus = make_corpus(open_texts(tmp_path, on_bad_example="skip"), "a", cache=tmp_path / ".cache")
    assert corpus.facts["skipped"]["a row that cannot be read"]["count"] == 1
    assert "Skipping 1 example of a (on_bad_example=skip)" in caplog.text


def test_a_data_set_skips_rows_without_text_and_names_splits_that_are_not_read(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "cpt")
    rows = {"train": [1, 2], "test": [3, 4], "eval": [5, 6], "unsupervised": [7, 8]}
    splits = {split: Dataset.from_dict({"text": values}) for split, values in rows.items()}
    splits["train"] = Dataset.from_dict({"text": ["One.", "\ufeffTwo.", "", None]})
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match="column 'text' is not text: 3 .domains.on_bad_example=skip"):
        list(open_hub({"path": "~/saved"}).read("news"))
    source = open_hub({"path": "~/saved"}, on_bad_example="skip")
    assert list(source.read("news")) == [("train", "One."), ("train", "Two.")]
    assert source.skipped["news"]["a row that cannot be read"]["count"] == 2
    assert "Leaving out splits of" in caplog.text and "eval, unsupervised" in caplog.text
    assert "1 byte order mark removed" in caplog.text and "2 blank documents left out" in caplog.text


@pytest.mark.parametrize("suffix", [*PACKERS, ".zst"])
def test_a_packed_file_that_ends_early_is_named_before_it_is_read_whole(suffix, tmp_path):
    compress = PACKERS.get(suffix, partial(pa.compress, codec="zstd", asbytes=True))
    packed = compress(b"One line of text.\n" * 5000)
    write(tmp_path / "a" / f"x.txt{suffix}", packed[:-20])
    with pytest.raises(ValueError, match=f"x.txt{suffix}"):
        open_texts(tmp_path).check(["a"])


def test_an_arrow_stream_that_ends_between_two_batches_is_refused(tmp_path):
    table = pa.table({"text": [f"Line {number}." for number in range(500)]})
    path = tmp_path / "a" / "x.arrow"
    path.parent.mkdir()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
        end_of_batches = file.tell()
        writer.write_table(table, max_chunksize=100)
    assert len(read_texts(tmp_path)) == 1000
    path.write_bytes(path.read_bytes()[:end_of_batches])
    with pytest.raises(
        ValueError, match="x.arrow is damaged: its end is missing. Allowed: a complete .arrow"
    ):
        open_texts(tmp_path).check(["a"])


def test_a_table_that_is_compressed_as_a_whole_is_refused(tmp_path):
    pq.write_table(pa.table({"text": ["One."]}), tmp_path / "x.parquet")
    (tmp_path / "a").mkdir()
    packed = gzip.compress((tmp_path / "x.parquet").read_bytes())
    (tmp_path / "a" / "x.parquet.gz").write_bytes(packed)
    with pytest.raises(
        ValueError, match="x.parquet.gz is a .parquet file that is compressed as a whole, which"
    ):
        open_texts(tmp_path).check(["a"])


DATES = {
    "a second beyond the calendar": pa.array([2**40, 1], pa.timestamp("s")),
    "a day beyond the calendar": pa.array([2**30, 1], pa.date32()),
    "an unknown time zone": pa.array([1, 1], pa.timestamp("us", tz="Foo/Bar")),
}


@pytest.mark.parametrize("kind", DATES)
def test_a_row_with_a_date_that_python_does_not_have_is_named_or_skipped(kind, tmp_path):
    path = tmp_path / "x.arrow"
    table = pa.table({"text": ["One.", "Two."], "when": DATES[kind]})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(
        ValueError, match="x.arrow, row 1 has a date that cannot be read: .*Allowed: years 1 to"
    ):
        list(read_file_rows(path))
    errors = []
    rows = list(read_file_rows(path, reject=errors.append))
    assert len(rows) + len(errors) == 2 and errors
    assert [text for _, text in read_file_rows(path, columns=["text"])] == [
        {"text": "One."},
        {"text": "Two."},
    ]


def test_a_table_without_its_end_is_refused_before_anything_is_read(tmp_path):
    table = pa.table({"text": ["One."] * 500})
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    pq.write_table(table, tmp_path / "a" / "x.parquet")
    with pa.ipc.new_file(tmp_path / "b" / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "c").mkdir()
    with pa.ipc.new_stream(tmp_path / "c" / "x.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    for path in (tmp_path / "a" / "x.parquet", tmp_path / "b" / "x.arrow", tmp_path / "c" / "x.arrow"):
        content = path.read_bytes()
        for cut in (content[:-20], content[: len(content) // 2], content[:7]):
            path.write_bytes(cut)
            with pytest.raises(
                ValueError, match=f"{path.name} is damaged: its end is missing. Allowed: a comp"
            ):
                open_texts(tmp_path).check([path.parent.name])
        path.write_bytes(content)
        open_texts(tmp_path).check([path.parent.name])
