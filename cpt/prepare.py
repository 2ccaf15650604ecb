"""`python -m cpt.prepare LAYOUT RELEASED OUT`: data as its authors released it, in the layout that cpt reads.

Prints a table of what each text has and what was published, and a line for each difference and missing file.
Exit code 1 if a required file is missing or cannot be read."""

import argparse
import json
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from cpt.core.exceptions import InvalidOptionError
from cpt.core.files import replacing
from cpt.core.messages import count_noun
from cpt.core.output import run_program
from cpt.data.sources import hub, readers
from cpt.data.sources.files import find_splits_by_name
from cpt.data.sources.m2d2 import NOT_DOMAINS, parse_name
from cpt.data.sources.tasks import read_json, read_records, read_text_field

COUNTS = ("domains", "train", "valid", "test", "MB")  # columns of the table


class PreparedText(NamedTuple):
    """A text of OUT: its contents, the published numbers, and the released files that are missing."""

    name: str
    counts: Mapping[str, int]  # by COUNTS; empty where files are missing
    published: Mapping[str, int]
    missing: Sequence[Path] = ()
    required: bool = True


class ReleasedTask(NamedTuple):
    """An end task of DAS by its files, each with its split here. Its authors train on `train_files`, without
    the first examples of each class, which they move to their test set, `test_files`."""

    train_files: Mapping[str, str]
    test_files: Mapping[str, str]
    train_share: float  # of `train_files`, what would stay if all classes had enough examples
    num_classes: int
    published: tuple[int, int]  # train, test


def list_train_files(name: str, *, order: Sequence[str] = ("train", "dev", "test")) -> dict[str, str]:
    """The files of a product of Ding et al. (2008) that its authors train on, with their splits here: dev is
    dev, and train and test are train."""
    files = {}
    for file in order:  # which decides the first examples of each class
        files[f"absa/dat/{name}/{file}.json"] = "dev" if file == "dev" else "train"
    return files


def list_test_files(name: str) -> dict[str, str]:
    """The files of a product of Ding et al. (2008) that its authors test on, with their split here."""
    return {f"absa/dat/{name}/{file}.json": "test" for file in ("train", "dev", "test")}


def make_scientific_task(
    name: str, *, train_share: float, num_classes: int, published: tuple[int, int]
) -> ReleasedTask:
    """A task of classes of sentences: its authors release train, dev and test, and train on train alone."""
    return ReleasedTask(
        train_files={f"{name}/train.jsonl": "train"},
        test_files={f"{name}/test.jsonl": "test", f"{name}/dev.jsonl": "dev"},
        train_share=train_share,
        num_classes=num_classes,
        published=published,
    )


# UIC-Liu-Lab/ContinualLM at 57e498c: the files of dataloader/data.py, sizes and counts of its README
CORPORA = {
    "restaurant": ("yelp_restaurant.txt", 758),
    "acl": ("acl_anthology.txt", 867),
    "ai": ("ai_corpus.txt", 507),
    "phone": ("absa/post_train/phone.txt", 724),
    "pubmed": ("format_pubmed_small.txt", 989),
    "camera": ("absa/post_train/camera.txt", 319),
}
PHONE = "Bing5Domains/Nokia6610"
CAMERA = "Bing5Domains/CanonG3"
TESTED = ("Bing5Domains/NikonCoolpix4300", "Bing9Domains/CanonPowerShotSD500", "Bing9Domains/CanonS100")
ENDTASKS = {
    "restaurant": ReleasedTask(
        train_files={"SemEval14-res/train.json": "train"},
        test_files={"SemEval14-res/test.json": "test"},
        train_share=1.0,
        num_classes=3,
        published=(3452, 1120),
    ),
    "acl": make_scientific_task("citation_intent", train_share=0.9, num_classes=6, published=(1520, 421)),
    "ai": make_scientific_task("sciie", train_share=0.7, num_classes=7, published=(2260, 2388)),
    "phone": ReleasedTask(
        train_files=list_train_files(PHONE),
        test_files=list_test_files("Bing9Domains/Nokia6600"),
        train_share=0.7,
        num_classes=2,
        published=(239, 553),
    ),
    "pubmed": make_scientific_task("chemprot", train_share=0.5, num_classes=13, published=(2667, 7398)),
    "camera": ReleasedTask(
        train_files=list_train_files(CAMERA, order=("train", "test", "dev")),
        test_files=list_test_files(TESTED[0]) | list_test_files(TESTED[1]) | list_test_files(TESTED[2]),
        train_share=0.8,
        num_classes=2,
        published=(230, 626),
    ),
}
HELD_OUT = 5  # percent of the lines that the authors keep from training
# cmnfriend/O-LoRA at 07117e1: examples of train and test, as its logs count them
STANDARD = {
    "TC/dbpedia": (14000, 7600),
    "TC/yahoo": (10000, 7600),
    "TC/agnews": (4000, 7600),
    "SC/amazon": (5000, 7600),
}
LONG = {
    "SC/yelp": (5000, 7600),
    "SC/IMDB": (2000, 7600),
    "SC/SST-2": (2000, 872),
    "NLI/CB": (250, 56),
    "NLI/MNLI": (3000, 7600),
    "NLI/RTE": (2000, 277),
    "QQP/QQP": (2000, 7600),
    "WiC/WiC": (2000, 638),
    "BoolQA/BoolQA": (2000, 3270),
    "MultiRC/MultiRC": (2000, 4848),
    "COPA/COPA": (400, 100),
}
TRACE = ("C-STANCE", "FOMC", "MeetingBank", "Py150", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten")
TRACE_COUNTS = (5000, 2000)  # examples of train and test, of each task
# machelreid/m2d2 at b469b06: fine domains of its list of names by coarse domain
FINE_COUNTS = {
    "Culture_and_the_arts": 7,
    "General_referece": 2,
    "Health_and_fitness": 6,
    "History_and_events": 3,
    "Human_activites": 2,
    "Mathematics_and_logic": 3,
    "Natural_and_physical_sciences": 4,
    "Philosophy_and_thinking": 2,
    "Religion_and_belief_systems": 3,
    "Society_and_social_sciences": 2,
    "Technology_and_applied_sciences": 4,
    "astro-ph": 7,
    "cond-mat": 10,
    "cs": 40,
    "econ": 3,
    "eess": 4,
    "math": 32,
    "nlin": 5,
    "physics": 22,
    "q-bio": 11,
    "q-fin": 9,
    "stat": 6,
}
WITHOUT_CLASSES = "archives without classes"  # alg-geom, hep-th, …
NUM_WITHOUT_CLASSES = 27
M2D2_SPLITS = ("train", "valid", "test")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpt.prepare", description=__doc__.split("\n\n")[0])
    parser.add_argument("layout", choices=LAYOUTS, metavar="LAYOUT", help=", ".join(LAYOUTS))
    parser.add_argument("released", type=Path, metavar="RELEASED", help="folder of the released files")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, for domains.root")
    options = parser.parse_args(arguments)
    try:
        texts = prepare_texts(options)
    except (ValueError, OSError) as error:
        print(f"cpt: {' '.join(str(error).split())}", file=sys.stderr)
        return 1

    print(tabulate_texts(texts).to_string(index=False))
    differences = list(describe_differences(texts))
    for line in differences:
        print(line)
    is_incomplete = any(text.missing and text.required for text in texts)
    has_failed = is_incomplete or not any(text.counts for text in texts)
    state = "incomplete" if has_failed else "ready"
    print(f"{options.out}: {state}, {count_noun(len(differences), 'difference')}")
    return int(has_failed)


def prepare_texts(options: argparse.Namespace) -> list[PreparedText]:
    """Writes the texts of the folder RELEASED into OUT, in the form that cpt reads; returns what was written.
    Raises ValueError for folders that cannot be read or written."""
    released = options.released.resolve()
    out = options.out.resolve()
    if not released.is_dir():
        raise InvalidOptionError("RELEASED", options.released, reason="no such folder", allowed="a folder")
    if out.is_relative_to(released) or released.is_relative_to(out):
        raise InvalidOptionError("OUT", options.out, reason="it overlaps RELEASED", allowed="another folder")
    return list(LAYOUTS[options.layout](released, out))


def tabulate_texts(texts: Sequence[PreparedText]) -> pd.DataFrame:
    """A row for each text, with the counts that were made and those that are published."""
    rows = []
    for text in texts:
        row = {"text": text.name}
        for column in COUNTS:
            if column in text.counts:
                row[column] = f"{text.counts[column]:,.0f}"
        row["published"] = ", ".join(f"{name} {count:,}" for name, count in text.published.items())
        rows.append(row)

    # A column that no text has is left out: each layout has some of COUNTS.
    frame = pd.DataFrame(rows).fillna("–")
    columns = [column for column in COUNTS if column in frame]
    return frame[["text", *columns, "published"]]


def describe_differences(texts: Sequence[PreparedText]) -> Iterator[str]:
    """A line for each count that is not the published one, and for each missing file."""
    for text in texts:
        if text.counts:
            for name, published_count in text.published.items():
                count = text.counts.get(name, 0)
                if count != published_count:
                    yield f"Differs: {text.name}: {name} {count:,}, published {published_count:,}"
        kind = "Missing" if text.required else "Missing, optional"
        for path in text.missing:
            yield f"{kind}: {path}"


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Writes the lines that are not blank. Returns their number."""
    count = 0
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for line in lines:
            if not line.isspace():
                file.write(line.rstrip("\n") + "\n")
                count += 1
    return count


def prepare_das6(folder: Path, out: Path) -> Iterator[PreparedText]:
    """Writes the six corpora and the end tasks of DAS; yields what was written and what is missing of
    each."""
    for domain, (file, megabytes) in CORPORA.items():
        path = folder / file
        counts: dict[str, int] = {}
        missing = [path]
        if path.exists():
            counts = split_corpus(path, out / "corpora" / domain)
            # The README does not say which megabytes it has: its number in either unit is no difference.
            sizes = [round(path.stat().st_size / unit) for unit in (10**6, 2**20)]
            counts["MB"] = megabytes if megabytes in sizes else sizes[0]
            missing = []
        yield PreparedText(f"corpora/{domain}", counts, {"MB": megabytes}, missing)

    for domain, task in ENDTASKS.items():
        paths = [folder / file for file in (*task.train_files, *task.test_files)]
        missing = [path for path in paths if not path.exists()]
        counts = {} if missing else split_endtask(folder, task, out / "endtasks" / domain)
        num_train, num_test = task.published
        published = {"train": num_train, "test": num_test}
        yield PreparedText(f"endtasks/{domain}", counts, published, missing)


def split_corpus(path: Path, out: Path) -> dict[str, int]:
    """The authors hold out the first lines and never use them; here these are halved into valid and test."""
    num_lines = sum(1 for _ in readers.read_lines(path))
    num_held_out = round(num_lines * HELD_OUT / 100)
    num_valid = num_held_out // 2
    sizes = {"valid": num_valid, "test": num_held_out - num_valid, "train": None}  # None: all that follow

    # One iterator for all splits: each takes up where the one before has ended.
    lines = readers.read_lines(path)
    return {split: write_lines(out / f"{split}.txt", islice(lines, size)) for split, size in sizes.items()}


def split_endtask(folder: Path, task: ReleasedTask, out: Path) -> dict[str, int]:
    """Writes the files of an end task with the field `das_split`. Returns the examples by it."""
    pool: list[tuple[str, dict[str, Any]]] = []
    for file, split in task.train_files.items():
        pool += [(split, example) for example in read_labelled(folder / file)]

    # The authors move the first examples of each class to their test set, of each class as many.
    num_moved = int(len(pool) * (1 - task.train_share) // task.num_classes)
    files: dict[str, list[dict[str, Any]]] = defaultdict(list)
    class_sizes = Counter[str]()  # of the examples so far
    for split, example in pool:
        class_sizes[example["label"]] += 1
        das_split = "test" if class_sizes[example["label"]] <= num_moved else "train"
        files[split].append(example | {"das_split": das_split})
    for file, split in task.test_files.items():
        files[split] += [example | {"das_split": "test"} for example in read_labelled(folder / file)]

    counts = Counter[str]()
    for split, examples in files.items():
        lines = (json.dumps(example, ensure_ascii=False) for example in examples)
        write_lines(out / f"{split}.jsonl", lines)
        counts.update(example["das_split"] for example in examples)
    return counts


def read_labelled(path: Path) -> Iterator[dict[str, Any]]:
    """The examples of a file of DAS: a text and its label a line, or an object of aspects in sentences.
    Raises ValueError for a file of another form."""
    columns = {"text": "text", "label": "label"}
    rows: Iterable[tuple[str, Any]]
    if path.suffix == ".jsonl":
        rows = readers.read_json_rows(path)
    else:
        content = read_json(path)
        if not isinstance(content, Mapping):
            raise ValueError(f"{path} is no object. Allowed: {{NAME: {{sentence, term, polarity}}, …}}")
        columns = {"text": "sentence", "text_pair": "term", "label": "polarity"}
        rows = ((f"{path}, {name}", row) for name, row in content.items())

    for number, (position, row) in enumerate(rows):
        fields = {
            name: read_text_field(row, column, position, "LAYOUT=das6") for name, column in columns.items()
        }
        yield {"id": f"{path.parent.name}-{path.stem}-{number}", "text_pair": "", **fields}


def prepare_standard_cl(folder: Path, out: Path) -> Iterator[PreparedText]:
    """Copies the tasks of the standard and the long benchmark; yields what was copied of each."""
    for task, counts in (STANDARD | LONG).items():
        text = copy_task(
            folder / task, out / task, "cl_benchmark", published_counts=counts, further_files=("labels.json",)
        )
        # The long sequence is optional as a whole, but a task of it that is there has to be complete.
        yield text._replace(name=task, required=task in STANDARD or bool(text.counts))


def prepare_trace(folder: Path, out: Path) -> Iterator[PreparedText]:
    for task in TRACE:
        yield copy_task(folder / task, out / task, "trace", published_counts=TRACE_COUNTS)


def copy_task(
    folder: Path,
    out: Path,
    layout: str,
    *,
    published_counts: tuple[int, int],
    further_files: Sequence[str] = (),
) -> PreparedText:
    """Reads the files of train and test through, and copies them with further ones."""
    num_train, num_test = published_counts
    published = {"train": num_train, "test": num_test}
    if not folder.exists():
        return PreparedText(folder.name, {}, published, [folder])

    paths = {split: folder / f"{split}.json" for split in published}
    for name in further_files:
        paths[name] = folder / name
    num_examples = {}
    missing = []
    for name, path in paths.items():
        if not path.exists():
            missing.append(path)
            continue
        if name in published:  # a split: a damaged file is an error here, not in a run
            num_examples[name] = sum(1 for _ in read_records(path, layout, {}))
        with replacing(out / path.name) as partial:
            shutil.copyfile(path, partial)
    return PreparedText(folder.name, num_examples, published, missing)


def prepare_m2d2(released: Path, out: Path) -> Iterator[PreparedText]:
    """Writes the domains of M2D2; yields for each coarse domain what was written and what is missing. Raises
    ValueError for a folder without domains."""
    published_counts = {**FINE_COUNTS, WITHOUT_CLASSES: NUM_WITHOUT_CLASSES}
    groups = defaultdict[str, list[Path]](list)  # the folders of each coarse domain
    for path in sorted(released.iterdir()):
        if path.is_dir() and path.name not in NOT_DOMAINS and path.name[0] != ".":
            coarse, _ = parse_name(path.name)
            groups[coarse if coarse in published_counts else WITHOUT_CLASSES].append(path)
    if not groups:
        raise InvalidOptionError(
            "RELEASED", released, reason="it has no folder", allowed="a folder per domain"
        )

    for coarse, published in published_counts.items():
        counts = Counter[str](domains=0)
        missing: list[Path] = []
        for path in groups[coarse]:
            _, fine = parse_name(path.name)
            if fine is not None:
                counts["domains"] += 1
            splits = read_domain(path)
            missing += [path / f"{split}.txt" for split in M2D2_SPLITS if split not in splits]
            for split, lines in splits.items():
                counts[split] += write_lines(out / path.name / f"{split}.txt", lines)
        yield PreparedText(coarse, counts, {"domains": published}, missing)


def read_domain(folder: Path) -> dict[str, Iterable[str]]:
    """The documents of each split: lines of its files, or of those in SPLIT/, or of a saved data set."""
    if not any((folder / name).is_file() for name in hub.SAVED_DATASET_FILES):
        paths = [*folder.glob("SPLIT/*.txt"), *folder.glob("*.txt")]
        return {path.stem: readers.read_lines(path) for path in paths if path.stem in M2D2_SPLITS}

    names, load = hub.open_set({"path": str(folder)}, streaming=False)
    splits: dict[str, Iterable[str]] = {}
    for split, split_names in find_splits_by_name(names).items():
        rows = ((str(folder), row) for row in load(split_names[0]))
        splits[split] = join_lines(readers.select_texts(rows, "text"))
    return splits


def join_lines(texts: Iterable[str]) -> Iterator[str]:
    """The texts, each on one line."""
    for text in texts:
        yield text.replace("\n", " ")


LAYOUTS = {
    "das6": prepare_das6,
    "standard_cl": prepare_standard_cl,
    "m2d2": prepare_m2d2,
    "trace": prepare_trace,
}

if __name__ == "__main__":
    run_program(main)
