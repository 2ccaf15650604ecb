"""Every kind of file and layout gives its documents, and every wrong one an error that names it."""

import csv
import gzip
import io
import json
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, load_dataset
from hydra.utils import instantiate
from omegaconf import OmegaConf

from cpt.core.exceptions import InvalidOptionError
from cpt.data.corpus import SPLITS, make_corpus
from cpt.data.sources import hub
from cpt.data.sources.base import GENERAL, make_stamp
from cpt.data.sources.docstrings import extract_prose
from cpt.data.sources.hub import Hub
from cpt.data.sources.m2d2 import NOT_DOMAINS
from cpt.data.sources.texts import Texts
from tests.conftest import ROOT
from tests.support.data_fixtures import HELD_OUT

DOCUMENTS = ['One, "quoted".', "Zwei\nZeilen, ä 🙂", "form\x0cfeed\u2028and\x85others", "NA", "x" * 10**5]
PACK = {".gz": gzip.compress, ".zst": lambda raw: pa.compress(raw, codec="zstd", asbytes=True)}


def open_texts(
    root,
    *,
    folder=".",
    columns=None,
    column="text",
    document="auto",
    general="general",
    ignore=(),
    on_bad_example="stop",
    orders=None,
    **options,
):
    """The domains in the sub-folders of `root`."""
    return Texts(
        root=str(root),
        folder=folder,
        columns=columns,
        column=column,
        document=document,
        general=general,
        ignore=ignore,
        on_bad_example=on_bad_example,
        orders=orders,
        held_out=HELD_OUT,
        score_on="test",
        **options,
    )


def open_hub(entry, *, streaming=True, on_bad_example="stop"):
    """The domain "news", of a data set that is loaded as the entry says."""
    return Hub(
        catalogue={"news": entry},
        column="text",
        streaming=streaming,
        general=None,
        on_bad_example=on_bad_example,
        orders=None,
        held_out=HELD_OUT,
        score_on="test",
    )


def write_packed(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(PACK.get(path.suffix, bytes)(raw))


def read_documents(root, name="a", **options):
    return list(open_texts(root, **options).read(name))


def read_texts(root, name="a", **options):
    return [text for _, text in read_documents(root, name, **options)]


def format_lines(documents, column="text"):
    return "".join(json.dumps({"id": 1, column: text, "meta": None}) + "\n\n" for text in documents)


def format_lines_with_mark(documents, column):
    return "\ufeff" + format_lines(documents, column)


def format_csv(documents, column):
    file = io.StringIO(newline="")
    csv.writer(file).writerows([["id", column], *enumerate(documents)])
    return file.getvalue()


def format_array(documents, column):
    return " " + json.dumps([{column: text} for text in documents], indent=1)


def format_parquet(documents, column):
    file = io.BytesIO()
    pq.write_table(pa.table({column: documents}), file, row_group_size=2)
    return file.getvalue()


FORMATS = {
    "a.jsonl": format_lines,
    "a.jsonl.gz": format_lines,
    "a.jsonl.zst": format_lines,
    "lines.json": format_lines_with_mark,
    "array.json": format_array,
    "a.csv": format_csv,
    "a.csv.gz": format_csv,
    "a.parquet": format_parquet,
}


def test_the_option_that_leaves_out_a_domain_is_known(tmp_path):
    for name in ("law", "food", "cs_l1", "cs.AI", "web"):
        write_packed(tmp_path / name / "a.txt", "text\n")
    source = open_texts(tmp_path, ignore=("la*",), general="web", only="[cl]*", by="fine")
    assert source.domains == ["cs.AI"]
    assert source.find_exclusion("law") == "domains.ignore=[la*]"
    assert source.find_exclusion("web") == "domains.general=web"
    assert source.find_exclusion("cs_l1") == "domains.by=fine"
    assert source.find_exclusion("food") == "domains.only=[cl]*"
    for name in ("cs.AI", "cs.CL", "", "..", "x" * 5000, "\0"):  # used, and unknown
        assert source.find_exclusion(name) == ""


def test_every_kind_of_table_gives_its_documents_without_the_empty_ones_of_the_column_asked_for(tmp_path):
    for name, format_table in FORMATS.items():
        write_packed(tmp_path / name / name, format_table(DOCUMENTS, "body"))
        assert read_texts(tmp_path, name, column="body") == DOCUMENTS, name
    write_packed(
        tmp_path / "a" / "a.jsonl", '{"text": null}\n{"text": ""}\n{"text": " \\n"}\n{"text": "b", "n": 1}\n'
    )
    write_packed(tmp_path / "a" / "b.csv", 'text,id\n"",1\n" ",2\n\nc,3\n')
    write_packed(tmp_path / "a" / "c.parquet", format_parquet([None, "", "d"], "text"))
    write_packed(tmp_path / "a" / "d.csv", "")
    write_packed(tmp_path / "a" / "h.json", '\n\n[{"text": "One."},\n{"text": "Two."}]')
    assert read_texts(tmp_path) == [*"bcd", "One.", "Two."]

    # A domain can have a column of its own.
    write_packed(tmp_path / "law" / "a.jsonl", format_lines(["d"], "body"))
    source = open_texts(tmp_path, columns={"law": "body"})
    assert list(source.read("law")) == [("train", "d")]
    assert source.fingerprint("law") != open_texts(tmp_path).fingerprint("law")


PLAIN = "\ufeffOne.\r\nMore.\r\n\r\n  \r\nTwo.\n\n\nThree.\x0cStill\u2028three."
UNITS = {
    "file": ["One.\nMore.\n\n  \nTwo.\n\n\nThree.\x0cStill\u2028three."],
    "paragraph": ["One.\nMore.", "Two.", "Three.\x0cStill\u2028three."],
    "line": ["One.", "More.", "Two.", "Three.\x0cStill\u2028three."],
}


SPLIT_OF = {
    "train": "train.jsonl training-2.jsonl contest.jsonl evaluations.jsonl latest/devices.jsonl",
    "valid": "validation.jsonl val.jsonl dev_3.jsonl dev.jsonl.gz law-valid.jsonl web.dev.jsonl dev/a.jsonl",
    "test": "test.jsonl test-00000-of-00002.jsonl data/test.jsonl test/train.jsonl train/test.jsonl "
    "my.test.jsonl news_TEST.jsonl testing.jsonl eval.jsonl evaluation-1.jsonl a/my_test2/x.jsonl",
}


def test_what_a_document_of_a_text_file_is_and_its_split_by_its_name(tmp_path):
    for end in ("txt", "txt.gz", "txt.zst"):
        write_packed(tmp_path / end / f"b.{end}", PLAIN)
        write_packed(tmp_path / end / "a.txt", "")  # an empty file says nothing of paragraphs
        for document, expected in [*UNITS.items(), ("auto", UNITS["paragraph"])]:
            assert read_texts(tmp_path, end, document=document) == expected
    for split, names in SPLIT_OF.items():
        for number, name in enumerate(names.split()):
            write_packed(tmp_path / f"{split}{number}" / name, '{"text": "b"}\n')
            assert read_documents(tmp_path, f"{split}{number}") == [(split, "b")]


def test_files_are_read_in_order_with_whatever_names_they_have_and_streamed(tmp_path):
    names = ["[1].txt", "a b.txt", "a%20b::c.txt", "a*?.txt", "sub/deep/x.txt"]
    for name in reversed(names):
        write_packed(tmp_path / "a" / name, f"{name}\n")
    for hidden in (".b.txt", ".cache/c.txt", "readme.md"):
        write_packed(tmp_path / "a" / hidden, "hidden\n")
    assert read_texts(tmp_path, ignore=["*.md"]) == names
    write_packed(tmp_path / "b" / "a.txt", b"One.\nTwo.\n\xff\n")
    documents = open_texts(tmp_path, document="line").read("b")
    assert [next(documents), next(documents)] == [("train", "One."), ("train", "Two.")]
    with pytest.raises(ValueError, match="line 3, byte 1"):
        next(documents)


LATIN = '{"text": "b"}\n{"text": "\xe9"}\n'.encode("latin-1")
PACKED = gzip.compress("".join(f'{{"text": "{number * 7919}"}}\n' for number in range(3000)).encode())
BROKEN = {  # what is said after the path of the file
    "latin.jsonl.gz": (gzip.compress(LATIN), "is not UTF-8: line 2, byte 11"),
    "no.jsonl": ('{"text": "b"}\n{"body": "b", "id": 1}\n', ", line 2 has no column 'text'"),
    "half.jsonl": ('{"text": "b"}\n{"text"\n', ", line 2 is not JSON"),
    "wide.csv": ("id,text\n1,b\n2,b, and c\n", ", line 3 has 3 values"),
    "utf16.txt": ("hello\n\nworld\n".encode("utf-16-le"), "is not UTF-8: it looks like UTF-16"),
    "short.jsonl.gz": (PACKED[:-900], "cannot be read: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_on_one_line(tmp_path, name):
    content, reason = BROKEN[name]
    path = tmp_path / "a" / name
    path.parent.mkdir()
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError) as error:
        read_documents(tmp_path)
    message = str(error.value)
    assert str(path) in message and reason in message and "\n" not in message


def test_a_sub_folder_with_text_is_a_domain_and_what_is_no_text_is_named_and_may_be_left_out(tmp_path):
    for name in ("zoo", "b.c", "1", "ä b", "general", ".git", "data"):
        write_packed(tmp_path / name / "train.txt", "One.\n")
    write_packed(tmp_path / "loose.txt", "One.\n")
    assert open_texts(tmp_path).names == ["1", "b.c", "data", "zoo", "ä b"]
    assert list(open_texts(tmp_path, general="zoo").read(GENERAL)) == [("train", "One.")]
    write_packed(tmp_path / "1" / "deep" / "a.jsonl.lz4", b"?")
    write_packed(tmp_path / "1" / "deep" / "b.pdf", b"?")
    write_packed(tmp_path / "b.c" / "odd [1].docx", b"?")
    write_packed(tmp_path / "b.c" / "~$old (2)", b"?")

    # All kinds of all domains, in addition to those that are left out already.
    message = r"a.jsonl.lz4 and 3 more \(1 .lz4, 1 .pdf, 1 .docx, 1 ~\$old \(2\)\) are not files of text"
    option = r"""'domains.ignore=\[\*.lz4,\*.pdf,\*.docx,"~\$old \(2\)"\]'$"""
    with pytest.raises(ValueError, match=f"{message}.*{option}"):
        open_texts(tmp_path).check(["1", "b.c"])
    (tmp_path / "b.c" / "~$old (2)").unlink()
    with pytest.raises(ValueError, match=r"ignore=\[\*.lz4,\*.docx,odd\*,\*.pdf\]'$"):
        open_texts(tmp_path, ignore=["*.lz4", "*.docx", "odd*"]).check(["1", "b.c"])
    (tmp_path / "b.c" / "odd [1].docx").unlink()
    source = open_texts(tmp_path, ignore=["*.jsonl.lz4", "*.pdf"])
    source.check(source.names)
    assert [text for _, text in source.read("1")] == ["One."]


def test_the_fingerprint_is_that_of_the_files(tmp_path):
    path = tmp_path / "a" / "a.txt"
    fingerprints = set()

    def count_fingerprints(**options):
        fingerprints.add(json.dumps(open_texts(tmp_path, **options).fingerprint("a")))
        return len(fingerprints)

    write_packed(path, "One.\n")
    assert count_fingerprints() == 1
    # Files of other domains are no part of it.
    write_packed(tmp_path / "b" / "b.txt", "One.\n")
    assert count_fingerprints() == 1
    # Time, size and name of a file are.
    os.utime(path, ns=(1, 1))
    assert [count_fingerprints(), count_fingerprints(column="body")] == [2, 3]
    path.write_text("Longer.\n")
    os.utime(path, ns=(1, 1))
    assert count_fingerprints() == 4
    path.rename(path.with_name("test.txt"))
    assert count_fingerprints() == 5

    (tmp_path / "b" / "gone.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"gone.txt is a link to nothing"):
        open_texts(tmp_path).fingerprint("b")


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for split in ("train", "validation", "test"):
        write_packed(
            tmp_path / "news" / f"{split}.jsonl", format_lines([f"{split} {number}" for number in range(3)])
        )
    return tmp_path / "news"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["saved", "json", "parquet"])
def test_saved_folders_and_data_files_are_read(kind, streaming, dataset, monkeypatch):
    monkeypatch.chdir(dataset.parent)
    loaded = load_dataset("news")
    loaded.save_to_disk("saved")
    for name, split in loaded.items():
        split.to_parquet(f"{name}.parquet")
        split.to_json(f"{name}.json")
    if kind == "saved":
        entry = {"path": "saved"}
        changed_file = "saved/dataset_dict.json"
    else:
        files = {name: f"{name}.{kind}" for name in loaded}
        files["train"] = [files["train"]]  # a list is allowed, too
        entry = {"path": kind, "data_files": files}
        changed_file = f"train.{kind}"
    source = open_hub(entry, streaming=streaming)
    documents = list(source.read("news"))
    assert documents == list(open_hub({"path": str(dataset)}).read("news")) and len(documents) == 9
    fingerprint = source.fingerprint("news")
    os.utime(changed_file, (1, 1))
    assert source.fingerprint("news") != fingerprint


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_split_that_a_data_set_does_not_have_is_named_with_its_entry(is_saved, streaming, tmp_path):
    path = tmp_path / "saved"
    if is_saved:
        DatasetDict(train=Dataset.from_dict({"text": ["One."]})).save_to_disk(path)
    else:
        write_packed(path / "train.jsonl", '{"text": "One."}\n')
    source = open_hub({"path": str(path), "splits": {"valid": "nope"}}, streaming=streaming)
    expected = r"^domains\.catalogue\.news\.splits\.valid=nope is invalid: .* Allowed: train$"
    with pytest.raises(InvalidOptionError, match=expected):
        list(source.read("news"))


@pytest.mark.parametrize(
    "data_files",
    [
        5,
        True,
        "",
        [],
        {},
        [5],
        [None],
        [["a.json"]],
        {"train": None},
        {"train": []},
        {"train": [5]},
        {1: "a.json"},
    ],
)
def test_data_files_of_another_form_are_refused_at_once(data_files):
    with pytest.raises(
        ValueError, match=r"news\.data_files=.* is invalid\. Allowed: null, a file or a pattern"
    ):
        open_hub({"path": "json", "data_files": data_files})


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"train-1.jsonl": '{"text": null}', "train-2.jsonl": '{"text": "a"}'},
            "Couldn't cast array of type str",
        ),
        (
            {"train-1.jsonl": '{"text": "a"}', "train-2.jsonl": '{"text": "a", "b": 1}'},
            "column names don't match",
        ),
        (
            {"train.jsonl": '{"text": "a"}', "README.md": "---\nconfigs: [\n---\n"},
            "ParserError: .* flow node",
        ),
        ({"state.json": "{}", "dataset_info.json": "{}"}, "KeyError: '_data_files'"),
        ({"state.json": "[1]", "dataset_info.json": "{}"}, "TypeError: list indices"),
    ],
)
def test_a_data_set_that_the_library_does_not_read_is_reported_in_a_line(files, reason, streaming, tmp_path):
    """Its errors are of many classes; those of streamed rows are not wrapped."""
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    source = open_hub({"path": str(tmp_path)}, streaming=streaming)
    with pytest.raises(ValueError, match=f"^domains.catalogue.news.* is invalid: .*{reason}") as error:
        list(source.read("news"))
    assert "\n" not in str(error.value)


def test_a_path_on_this_machine_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_packed(tmp_path / "news" / "x.jsonl", json.dumps({"text": "One."}) + "\n")
    for path in ("news/x.jsonl", "~/news/x.jsonl", str(tmp_path / "news/x.jsonl")):
        reason = f"path={path} is invalid: it is a file. Allowed: {{path: json, data_files: {path}}}"
        with pytest.raises(InvalidOptionError, match=re.escape(reason)):
            open_hub({"path": path})
        documents = list(open_hub({"path": "json", "data_files": path}).read("news"))
        assert documents == [("train", "One.")]
    for path in ("./new", "~/new", "../new", str(tmp_path / "new")):
        with pytest.raises(InvalidOptionError, match=f"path={path} is invalid: there is no such folder"):
            open_hub({"path": path})
    open_hub({"path": "user/news"}), open_hub({"path": "./news"}), open_hub({"path": "."})


def test_a_network_that_fails_while_rows_are_read_is_no_fault_of_the_rows(monkeypatch):
    def read_rows(split):
        yield {"text": "One."}
        raise ConnectionError("the connection was closed")

    monkeypatch.setattr(hub, "open_set", lambda entry, streaming: (["train"], read_rows))
    with pytest.raises(ValueError, match="path=user/news is invalid: the connection was closed$"):
        list(open_hub({"path": "user/news"}).read("news"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_gives_its_splits_or_those_that_are_asked_for(streaming, dataset):
    entry = {"path": str(dataset)}
    expected = [("train", f"train {number}") for number in range(3)]
    expected += [("valid", f"validation {number}") for number in range(3)]
    expected += [("test", f"test {number}") for number in range(3)]
    assert list(open_hub(entry, streaming=streaming).read("news")) == expected

    # A part of a split is not streamed.
    entry["splits"] = {"train": "validation", "test": "train" if streaming else "train[:2]"}
    expected = [("train", f"validation {number}") for number in range(3)]
    expected += [("test", f"train {number}") for number in range(3 if streaming else 2)]
    assert list(open_hub(entry, streaming=streaming).read("news")) == expected


def test_no_file_of_a_large_set_is_opened_after_the_last_document(tmp_path, caplog):
    shard = [{"text": f"Document {number}."} for number in range(30)]
    Dataset.from_list(shard).to_parquet(tmp_path / "train-00000-of-00003.parquet")
    Dataset.from_list(shard).to_parquet(tmp_path / "train-00001-of-00003.parquet")
    write_packed(tmp_path / "train-00002-of-00003.parquet", "no parquet")
    entry = {"path": str(tmp_path), "max_documents": 40}
    caplog.set_level("INFO")
    documents = list(open_hub(entry, streaming=False).read("news"))
    assert documents == [("train", row["text"]) for row in [*shard, *shard[:10]]]
    assert "Read 40 documents of" in caplog.text
    assert open_hub(entry).fingerprint("news") != open_hub(entry | {"max_documents": 41}).fingerprint("news")
    with pytest.raises(ValueError, match="news.max_documents=0 is invalid. Allowed: null or a whole number"):
        open_hub(entry | {"max_documents": 0})


def test_a_part_of_a_split_that_is_streamed_is_refused_with_what_takes_its_place(dataset):
    entry = {"path": str(dataset), "splits": {"train": "train[:2]"}}
    message = r"domains.catalogue.news.splits.train=train\[:2\] is invalid: .*news.max_documents=N"
    with pytest.raises(ValueError, match=message):
        list(open_hub(entry, streaming=True).read("news"))
    with pytest.raises(ValueError, match=message):
        list(open_hub(entry | {"max_documents": 2}, streaming=False).read("news"))


@pytest.mark.parametrize("names", [["train", "dev", "validation"], ["all"]])
def test_splits_that_do_not_say_which_is_read_and_scripts_are_refused(names, tmp_path):
    DatasetDict({name: Dataset.from_dict({"text": [name]}) for name in names}).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match=f"has the splits {', '.join(names)}. Allowed: train, test, and one"):
        list(open_hub({"path": str(tmp_path)}).read("news"))
    write_packed(tmp_path / "news" / "news.py", "import datasets")
    with pytest.raises(ValueError, match="domains.catalogue.news.path=.* is invalid: Dataset scripts are"):
        list(open_hub({"path": str(tmp_path / "news")}).read("news"))


@pytest.mark.parametrize("named", [{}, {"name": "tax"}])
def test_a_configuration_that_is_missing_or_unknown_is_refused_with_the_entry_and_those_that_exist(
    named, tmp_path
):
    files = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("law", "art"))
    write_packed(tmp_path / "README.md", f"---\nconfigs:\n{files}---\n")
    for name in ("law", "art"):
        write_packed(tmp_path / f"{name}.jsonl", '{"text": "One."}\n')
    with pytest.raises(ValueError, match=r"domains.catalogue.news is invalid: .*\['law', 'art'\]"):
        list(open_hub({"path": str(tmp_path), **named}).read("news"))
    assert list(open_hub({"path": str(tmp_path), "name": "art"}).read("news")) == [("train", "One.")]


def test_fine_leaves_the_coarse_ones_out_and_a_coarse_domain_has_the_text_of_its_fine_ones(tmp_path):
    for name in ("cs.AI", "cs.CL", "cs_l1", "math.AG", "math.AC", "hep-th", GENERAL):
        write_packed(tmp_path / name / "all.txt", "".join(f"{name} {number}.\n" for number in range(40)))
    fine = ["cs.AI", "cs.CL", "hep-th", "math.AC", "math.AG"]
    assert open_texts(tmp_path, by="fine").domains == fine
    assert open_texts(tmp_path).domains == sorted([*fine, "cs_l1"])
    source = open_texts(tmp_path, by="coarse")
    assert source.domains == ["cs", "hep-th", "math"] and source.members("cs") == ["cs.AI", "cs.CL"]
    source.check_domains(source.domains)

    corpus = make_corpus(source, "cs", cache=tmp_path / ".cache")
    coarse_texts = []
    for split in SPLITS:
        coarse_texts += corpus.documents(split)["text"]
    fine_texts = [text for _, text in [*source.read("cs.AI"), *source.read("cs.CL")]]
    assert sorted(coarse_texts) == sorted(fine_texts) and len(coarse_texts) == 80
    stamp = make_stamp(source, "cs")
    (tmp_path / "cs.CL" / "more.txt").write_text("one more line\n")
    assert make_stamp(source, "cs") != stamp and stamp.startswith("cs-")

    # Folders that M2D2 names as no domains are refused where fine ones are asked for.
    write_packed(tmp_path / NOT_DOMAINS[0] / "all.txt", "One.\n")
    with pytest.raises(ValueError, match="is in M2D2's list"):
        _ = open_texts(tmp_path, by="fine").domains
    assert NOT_DOMAINS[0] in open_texts(tmp_path).domains
    assert open_texts(tmp_path, by="fine", ignore=[*NOT_DOMAINS]).domains == fine

    # Only some are left, and named orders are of them.
    assert open_texts(tmp_path, only=["math.AC", "hep-th"]).domains == ["hep-th", "math.AC"]
    assert open_texts(tmp_path, only="/(cs|math)\\.A./").domains == ["cs.AI", "math.AC", "math.AG"]
    orders = [["cs.CL", "math.AG", "cs.AI"]]
    assert open_texts(tmp_path, orders=orders, only="cs.*").named_orders == [["cs.CL", "cs.AI"]]


def test_the_layout_of_das6(tmp_path):
    domains = ["restaurant", "acl", "ai", "phone", "pubmed", "camera"]
    for folder in [*(f"corpora/{name}" for name in domains), "general"]:
        for split in ("test", "train", "valid"):
            write_packed(
                tmp_path / "das6" / folder / f"{split}.jsonl.gz", format_lines([f"{folder} {split}"])
            )
    settings = OmegaConf.load(ROOT / "conf" / "domains" / "das6.yaml")
    settings.root = str(tmp_path / "das6")
    del settings["name"]
    source = instantiate(settings, _convert_="all")
    assert source.names == sorted(domains)
    assert all(sorted(order) == sorted(domains) for order in source.orders)
    for name, folder in (("ai", "corpora/ai"), (GENERAL, "general")):
        splits = ("test", "train", "valid")
        assert list(source.read(name)) == [(split, f"{folder} {split}") for split in splits]


NUMPYDOC = r"""Return the shortest path between two nodes
    of a graph that may be `directed`; see :func:`~networkx.algorithms.bfs` and
    :class:`the graph class <networkx.Graph>` for the *structures* that ``G[u]`` walks over [2]_.

    Parameters
    ----------
    G : NetworkX graph that holds all of the nodes, edges and attributes of it
        The graph in which the path is searched, its edges may carry weights.

    =====  =====================================
    Alpha  This row of the table is not a sentence.
    =====  =====================================

    >>> for node in shortest_path(nx.path_graph(4), 0, 3): print(node in the_graph)
    The output of this example is printed on one line.

    References
    ----------
    .. [2] Dijkstra, A note on two problems in connexion with graphs,
    """


def test_prose_is_the_sentences_of_a_docstring_and_nothing_else():
    assert extract_prose(NUMPYDOC) == [
        "Return the shortest path between two nodes of a graph that may be directed; see bfs and the graph "
        "class for the structures that G[u] walks over [2].",
        "The graph in which the path is searched, its edges may carry weights.",
    ]
    assert (
        extract_prose("```python\n\nThis is what the code prints and not a sentence of the text.\n\n```")
        == []
    )
