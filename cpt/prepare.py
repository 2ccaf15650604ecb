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

from cpt.core.files import replacing
from cpt.core.output import run_program
from cpt.data.sources import hub, readers
from cpt.data.sources.base import NOT_DOMAINS, parse_name
from cpt.data.sources.files import splits_by_name
from cpt.data.sources.tasks import read_json, read_records, text_field

COUNTS = ("domains", "train", "valid", "test", "MB")  # columns of the table


class PreparedText(NamedTuple):
    """A text of OUT: what it has, what was published of this, and the released files that are missing."""

    name: str
    found: Mapping[str, int]  # by COUNTS
    published: Mapping[str, int]
    missing: Sequence[Path] = ()
    required: bool = True


class ReleasedTask(NamedTuple):
    """An end task of DAS by its files, each with its split here. Its authors train on `pool`, without the
    first examples of each class, which they move to `rest`, their test set."""

    pool: Mapping[str, str]
    rest: Mapping[str, str]
    kept: float  # share of `pool` that would stay if all classes had enough examples
    classes: int
    published: tuple[int, int]  # train, test


def product_files(name: str, *, own: str = "", order: str = "train dev test") -> dict[str, str]:
    """The files of a product of Ding et al. (2008), with the split `own`, or train and dev."""
    splits = {each: own or ("dev" if each == "dev" else "train") for each in order.split()}
    return {f"absa/dat/{name}/{each}.json": split for each, split in splits.items()}


def scientific_task(name: str, kept: float, classes: int, published: tuple[int, int]) -> ReleasedTask:
    pool, rest = {f"{name}/train.jsonl": "train"}, {f"{name}/{each}.jsonl": each for each in ("test", "dev")}
    return ReleasedTask(pool, rest, kept, classes, published)


# UIC-Liu-Lab/ContinualLM at 57e498c: the files of dataloader/data.py, sizes and counts of its README
CORPORA = {
    "restaurant": ("yelp_restaurant.txt", 758),
    "acl": ("acl_anthology.txt", 867),
    "ai": ("ai_corpus.txt", 507),
    "phone": ("absa/post_train/phone.txt", 724),
    "pubmed": ("format_pubmed_small.txt", 989),
    "camera": ("absa/post_train/camera.txt", 319),
}
PHONE, CAMERA = "Bing5Domains/Nokia6610", "Bing5Domains/CanonG3"
TESTED = ("Bing5Domains/NikonCoolpix4300", "Bing9Domains/CanonPowerShotSD500", "Bing9Domains/CanonS100")
ENDTASKS = {
    "restaurant": ReleasedTask(
        {"SemEval14-res/train.json": "train"}, {"SemEval14-res/test.json": "test"}, 1.0, 3, (3452, 1120)
    ),
    "acl": scientific_task("citation_intent", 0.9, 6, (1520, 421)),
    "ai": scientific_task("sciie", 0.7, 7, (2260, 2388)),
    "phone": ReleasedTask(
        product_files(PHONE), product_files("Bing9Domains/Nokia6600", own="test"), 0.7, 2, (239, 553)
    ),
    "pubmed": scientific_task("chemprot", 0.5, 13, (2667, 7398)),
    "camera": ReleasedTask(
        product_files(CAMERA, order="train test dev"),
        {file: split for name in TESTED for file, split in product_files(name, own="test").items()},
        *(0.8, 2, (230, 626)),
    ),
}
HELD_OUT = 5  # percent of the lines that the authors keep from training
# cmnfriend/O-LoRA at 07117e1: examples of train and test, as its logs count them
STANDARD = {"TC/dbpedia": (14000, 7600), "TC/yahoo": (10000, 7600), "TC/agnews": (4000, 7600)}
STANDARD |= {"SC/amazon": (5000, 7600)}
LONG = {"SC/yelp": (5000, 7600), "SC/IMDB": (2000, 7600), "SC/SST-2": (2000, 872), "NLI/CB": (250, 56)}
LONG |= {"NLI/MNLI": (3000, 7600), "NLI/RTE": (2000, 277), "QQP/QQP": (2000, 7600), "WiC/WiC": (2000, 638)}
LONG |= {"BoolQA/BoolQA": (2000, 3270), "MultiRC/MultiRC": (2000, 4848), "COPA/COPA": (400, 100)}
TRACE = ("C-STANCE", "FOMC", "MeetingBank", "Py150", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten")
OF_TRACE = (5000, 2000)
# machelreid/m2d2 at b469b06: fine domains of its list of names by coarse domain
FINE_COUNTS = {"Culture_and_the_arts": 7, "General_referece": 2, "Health_and_fitness": 6}
FINE_COUNTS |= {"History_and_events": 3, "Human_activites": 2, "Mathematics_and_logic": 3}
FINE_COUNTS |= {"Natural_and_physical_sciences": 4, "Philosophy_and_thinking": 2}
FINE_COUNTS |= {"Religion_and_belief_systems": 3, "Society_and_social_sciences": 2}
FINE_COUNTS |= {"Technology_and_applied_sciences": 4, "astro-ph": 7, "cond-mat": 10, "cs": 40, "econ": 3}
FINE_COUNTS |= {"eess": 4, "math": 32, "nlin": 5, "physics": 22, "q-bio": 11, "q-fin": 9, "stat": 6}
WITHOUT_CLASSES, ARCHIVES = "archives without classes", 27  # alg-geom, hep-th, …
M2D2_SPLITS = ("train", "valid", "test")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpt.prepare", description=__doc__.split("\n\n")[0])
    parser.add_argument("layout", choices=LAYOUTS, metavar="LAYOUT", help=", ".join(LAYOUTS))
    parser.add_argument("released", type=Path, metavar="RELEASED", help="folder of the released files")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, for domains.root")
    given = parser.parse_args(arguments)
    try:
        released, out = given.released.resolve(), given.out.resolve()
        if not released.is_dir():
            raise ValueError(f"RELEASED={given.released} is invalid: no such folder. Allowed: a folder")
        if out.is_relative_to(released) or released.is_relative_to(out):
            raise ValueError(f"OUT={given.out} is invalid: it overlaps RELEASED. Allowed: another folder")
        texts = list(LAYOUTS[given.layout](released, out))
    except (ValueError, OSError) as error:
        print(f"cpt: {' '.join(str(error).split())}", file=sys.stderr)
        return 1

    lines, rows = [], []
    for text in texts:
        for name, count in text.published.items() if text.found else ():
            if text.found.get(name, 0) != count:
                lines.append(f"Differs: {text.name}: {name} {text.found.get(name, 0):,}, published {count:,}")
        kind = "Missing" if text.required else "Missing, optional"
        lines += [f"{kind}: {path}" for path in text.missing]
        found = {name: f"{text.found[name]:,.0f}" for name in COUNTS if name in text.found}
        counts = ", ".join(f"{name} {count:,}" for name, count in text.published.items())
        rows.append({"text": text.name, **found, "published": counts})
    frame = pd.DataFrame(rows).fillna("–")
    failed = not any(text.found for text in texts) or any(t.missing and t.required for t in texts)
    ended = "incomplete" if failed else "ready"
    table = frame[["text", *(name for name in COUNTS if name in frame), "published"]].to_string(index=False)
    print(table, *lines, f"{given.out}: {ended}, {len(lines)} differences", sep="\n")
    return int(failed)


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Writes the lines that are not blank. Gives their number."""
    count = 0
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for line in lines:
            if not line.isspace():
                file.write(line.rstrip("\n") + "\n")
                count += 1
    return count


def prepare_das6(folder: Path, out: Path) -> Iterator[PreparedText]:
    for domain, (file, megabytes) in CORPORA.items():
        path = folder / file
        found = split_corpus(path, out / "corpora" / domain) if path.exists() else {}
        if found:
            sizes = [round(path.stat().st_size / unit) for unit in (10**6, 2**20)]  # the README has MB
            found["MB"] = megabytes if megabytes in sizes else sizes[0]
        yield PreparedText(f"corpora/{domain}", found, {"MB": megabytes}, [path] * (not found))
    for domain, task in ENDTASKS.items():
        missing = [folder / file for file in (*task.pool, *task.rest) if not (folder / file).exists()]
        found = {} if missing else split_endtask(folder, task, out / "endtasks" / domain)
        published = dict(zip(("train", "test"), task.published, strict=True))
        yield PreparedText(f"endtasks/{domain}", found, published, missing)


def split_corpus(path: Path, out: Path) -> dict[str, int]:
    """The authors hold out the first lines and never use them; here these are halved into valid and test."""
    held_out = round(sum(1 for _ in readers.lines(path)) * HELD_OUT / 100)
    lines = readers.lines(path)
    sizes = {"valid": held_out // 2, "test": held_out - held_out // 2, "train": None}
    return {split: write_lines(out / f"{split}.txt", islice(lines, size)) for split, size in sizes.items()}


def split_endtask(folder: Path, task: ReleasedTask, out: Path) -> dict[str, int]:
    """Writes the files of an end task with the field `das_split`. Gives the examples by it."""
    files, seen, pooled = defaultdict(list), Counter[str](), []
    for file, split in task.pool.items():
        pooled += [(split, example) for example in read_labelled(folder / file)]
    most = int(len(pooled) * (1 - task.kept) // task.classes)
    for split, example in pooled:
        seen[example["label"]] += 1
        files[split].append(example | {"das_split": "test" if seen[example["label"]] <= most else "train"})
    for file, split in task.rest.items():
        files[split] += [example | {"das_split": "test"} for example in read_labelled(folder / file)]
    for split, examples in files.items():
        write_lines(out / f"{split}.jsonl", (json.dumps(each, ensure_ascii=False) for each in examples))
    return Counter(example["das_split"] for examples in files.values() for example in examples)


def read_labelled(path: Path) -> Iterator[dict[str, Any]]:
    """The examples of a file of DAS: a text and its label a line, or an object of aspects in sentences."""
    columns = {"text": "text", "label": "label"}
    rows: Iterable[tuple[str, Any]] = ()
    if path.suffix == ".jsonl":
        rows = readers.json_rows(path)
    elif isinstance(whole := read_json(path), Mapping):
        columns = {"text": "sentence", "text_pair": "term", "label": "polarity"}
        rows = ((f"{path}, {name}", row) for name, row in whole.items())
    else:
        raise ValueError(f"{path} is no object. Allowed: {{NAME: {{sentence, term, polarity}}, …}}")
    for number, (where, row) in enumerate(rows):
        fields = {name: text_field(row, column, where, "LAYOUT=das6") for name, column in columns.items()}
        yield {"id": f"{path.parent.name}-{path.stem}-{number}", "text_pair": "", **fields}


def prepare_standard_cl(folder: Path, out: Path) -> Iterator[PreparedText]:
    for task, counts in (STANDARD | LONG).items():
        text = copy_task(folder / task, out / task, "cl_benchmark", counts, more=("labels.json",))
        yield text._replace(name=task, required=task in STANDARD or bool(text.found))


def prepare_trace(folder: Path, out: Path) -> Iterator[PreparedText]:
    for task in TRACE:
        yield copy_task(folder / task, out / task, "trace", OF_TRACE)


def copy_task(
    folder: Path, out: Path, layout: str, counts: tuple[int, int], more: Sequence[str] = ()
) -> PreparedText:
    """Reads the files of train and test through, and copies them with `more`."""
    published, found = dict(zip(("train", "test"), counts, strict=True)), {}
    paths = {split: folder / f"{split}.json" for split in published} | {name: folder / name for name in more}
    missing = [path for path in paths.values() if not path.exists()] if folder.exists() else [folder]
    for name, path in paths.items():
        if path.exists():
            if name in published:
                found[name] = sum(1 for _ in read_records(path, layout, {}))
            with replacing(out / path.name) as partial:
                shutil.copyfile(path, partial)
    return PreparedText(folder.name, found, published, missing)


def prepare_m2d2(released: Path, out: Path) -> Iterator[PreparedText]:
    known, groups = {**FINE_COUNTS, WITHOUT_CLASSES: ARCHIVES}, defaultdict[str, list[Path]](list)
    for path in sorted(path for path in released.iterdir() if path.is_dir()):
        if path.name not in NOT_DOMAINS and path.name[0] != ".":
            coarse, _ = parse_name(path.name)
            groups[coarse if coarse in known else WITHOUT_CLASSES].append(path)
    if not groups:
        raise ValueError(f"RELEASED={released} is invalid: it has no folder. Allowed: a folder per domain")
    for coarse, published in known.items():
        found, missing = Counter[str](domains=0), []
        for path in groups[coarse]:
            found["domains"] += parse_name(path.name)[1] is not None
            splits = read_domain(path)
            missing += [path / f"{split}.txt" for split in M2D2_SPLITS if split not in splits]
            for split, lines in splits.items():
                found[split] += write_lines(out / path.name / f"{split}.txt", lines)
        yield PreparedText(coarse, found, {"domains": published}, missing)


def read_domain(folder: Path) -> dict[str, Iterable[str]]:
    """The documents of each split: lines of its files, or of those in SPLIT/, or of a saved data set."""
    if not any((folder / name).is_file() for name in hub.SAVED):
        paths = [*folder.glob("SPLIT/*.txt"), *folder.glob("*.txt")]
        return {path.stem: readers.lines(path) for path in paths if path.stem in M2D2_SPLITS}
    names, load = hub.open_set({"path": str(folder)}, streaming=False)
    splits: dict[str, Iterable[str]] = {}
    for split, (name, *_) in splits_by_name(names).items():
        texts = readers.texts_of(((str(folder), row) for row in load(name)), "text")
        splits[split] = (text.replace("\n", " ") for text in texts)
    return splits


LAYOUTS = {
    "das6": prepare_das6,
    "standard_cl": prepare_standard_cl,
    "m2d2": prepare_m2d2,
    "trace": prepare_trace,
}

if __name__ == "__main__":
    run_program(main)
