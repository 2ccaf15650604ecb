"""What nobody meant, made by hypothesis: overrides, files of text, examples of end tasks, files of run
folders. Each check takes one such input, which is taken, or refused as a user is to see it. Anything else is
raised: what the command line would show as a traceback, or a line that does not name its file."""

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from cpt import status, verify
from cpt.cli import check_command_line
from cpt.core.errors import find_reason
from cpt.core.heartbeat import Heartbeat, utc_now
from cpt.data.sources.texts import Texts
from cpt.evaluation.finetune_tasks import plan_endtasks
from cpt.evaluation.scores import Scores
from cpt.reporting.console import format_scores
from cpt.trainer.plan import make_plan
from cpt.trainer.run_dir import RunDir
from tests.conftest import ROOT
from tests.support.data_fixtures import SHARED
from tests.support.endtask_fixtures import options, write_task
from tests.support.example_runs import save_scores

FORESEEN = (ValueError, OSError, HydraException, OmegaConfBaseException, YAMLError)
SETTINGS = {"name": "x", "seed": 0, "order": ["law"]}
ODD = st.sampled_from([0, -1, 1e400, 10**30, 1e-320, "null", "true", "nan", "${seed}", "${no.such}", "a/b"])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), ODD, st.text(max_size=12)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=4,
)


def check_refusal(error: BaseException, *names: str) -> None:
    """Raises AssertionError for an error that does not say in a line what it is about, by a name."""
    message = find_reason(error)
    assert message and "\n" not in message, repr(message)
    assert not names or any(name in message for name in names), f"{message!r} names none of {names}"


def keys_of(node: DictConfig, section: str = "") -> Iterator[str]:
    for name in node:
        key = f"{section}.{name}" if section else str(name)
        yield key
        inner = node._get_node(name)
        if isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_missing():
            yield from keys_of(inner, key)


@cache
def keys() -> tuple[str, ...]:
    return tuple(keys_of(compose("config")))


def to_argument(value: Any) -> str:
    """A value as somebody writes it on a command line, not always with its quotes."""
    if isinstance(value, list):
        return f"[{','.join(map(to_argument, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {to_argument(item)}" for key, item in value.items()) + "}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


SIGN = st.sampled_from(["", "", "", "", "+", "++", "~"])
KEY = st.one_of(st.deferred(lambda: st.sampled_from(keys())), st.text(min_size=1, max_size=8))
OVERRIDES = st.lists(
    st.builds(lambda sign, key, value: f"{sign}{key}={to_argument(value)}", SIGN, KEY, VALUES),
    min_size=1,
    max_size=3,
)


def check_overrides(overrides: list[str]) -> None:
    try:
        check_command_line(overrides)
        make_plan(compose("config", overrides=overrides))
    except FORESEEN as error:
        check_refusal(error)


ROW = st.one_of(
    st.fixed_dictionaries({"text": st.one_of(VALUES, st.text(min_size=40, max_size=60))}),
    st.dictionaries(st.sampled_from(["text", "label", "id", "", "x"]), VALUES, max_size=3),
    VALUES,
)


def as_parquet(rows: list[Any]) -> bytes:
    file = io.BytesIO()
    try:
        pq.write_table(pa.table({"text": pa.array(list(rows))}), file)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):  # no table is of these
        pq.write_table(pa.table({"text": ["one"]}), file)
    return file.getvalue()


def spoil(raw: bytes, changes: list[tuple[int, int]], cut: int | None) -> bytes:
    """Bytes of which some are changed, by position and new value, and only the first `cut` stay."""
    spoiled = bytearray(raw)
    if raw:
        for position, value in changes:
            spoiled[position % len(spoiled)] = value
    return bytes(spoiled[:cut])


ROWS = st.lists(ROW, max_size=5)
JSON = ROWS.map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
CHANGES = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3)
CUT = st.one_of(st.none(), st.none(), st.integers(0, 200))
CONTENT = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.builds(spoil, JSON | ROWS.map(as_parquet), CHANGES, CUT),
)


def check_text(name: str, packed: str, content: bytes) -> None:
    """A domain of one such file, perhaps packed, is read, or refused with the file's name."""
    if packed and len(content) % 3 != 2:  # else it is not what its name says
        content = pa.compress(content, codec={".gz": "gzip", ".zst": "zstd"}[packed], asbytes=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "law" / f"all{name}{packed}"
        path.parent.mkdir()
        path.write_bytes(content)
        source = Texts(
            root=folder,
            folder=".",
            general=None,
            ignore=(),
            columns=None,
            column="text",
            document="auto",
            **SHARED,
        )
        try:
            source.check(["law"])
            for split, document in source.read("law"):
                assert isinstance(document, str) and split is not None
        except FORESEEN as error:
            check_refusal(error, str(path))


def check_task(kind: str, content: bytes) -> None:
    """An end task of which one file is such is read, or refused with the file's or the folder's name."""
    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder), "law", train=6, test=4, dev=2)
        task_folder = Path(folder) / "endtasks" / "law"
        (task_folder / "test.jsonl").unlink()
        (task_folder / f"test{kind}").write_bytes(content)
        try:
            plan_endtasks(options("texts", root=Path(folder)), ["law"], ["law"]).source.task("law")
        except FORESEEN as error:
            check_refusal(error, folder, "law")


def change_value(raw: bytes, value: Any, fraction: float) -> bytes:
    """A JSON or YAML file in which one value is another, at that fraction of all values in it."""
    text = raw.decode()
    starts = [position + 1 for position, sign in enumerate(text) if sign in ":[,"] or [1]
    start = starts[int(fraction * (len(starts) - 1))]
    end = start
    while end < len(text) and text[end] not in ",]}\n":
        end += 1
    return (text[:start] + json.dumps(value) + text[end:]).encode()


FILES = "scores.json progress.json config.yaml identity.json checksums.json documents"


def check_run(
    name: str, damage: str, value: Any, fraction: float, changes: list[tuple[int, int]], cut: int | None
) -> None:
    """A run of which one file is damaged, by a value or by bytes, is reported by each command that reads it."""
    out = contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO()))
    with tempfile.TemporaryDirectory() as top, out as stream, contextlib.redirect_stderr(stream):
        folder = Path(top) / "run"
        write_run(folder, finished=fraction < 0.5)
        path = folder / "documents" / "000.npz" if name == "documents" else folder / name
        raw = path.read_bytes()
        if damage == "value" and path.suffix in (".json", ".yaml"):
            path.write_bytes(change_value(raw, value, fraction))
        else:
            path.write_bytes(spoil(raw, changes, cut))

        verify.main([top])
        status.main([top])
        with contextlib.suppress(*FORESEEN):
            format_scores(Scores.load(folder / "scores.json"))
        with contextlib.suppress(*FORESEEN):
            run = RunDir(folder)
            run.check_config(SETTINGS)
            OmegaConf.load(run.config)
            run.find_damaged_outputs(full=True)
            run.check_documents(2)


def write_run(folder: Path, *, finished: bool) -> None:
    """Each of FILES, as a run of two rows writes it."""
    save_scores(folder, finished=finished)
    Heartbeat(state="running", began=utc_now()).write(folder)
    run = RunDir(folder)
    run.write_config(SETTINGS)
    manifest = {"version": 1, "order": ["law"], "texts": {}, "base": {}, "tokenizer": "0", "endtasks": {}}
    run.manifest.write_text(json.dumps(manifest))
    (folder / "checksums.json").write_text(json.dumps({"files": {"report.md": [3, "0"]}}))
    for row in range(2):
        run.save_documents(row, {"law": np.ones((2, 3))})


TEXTS = (".txt", ".md", ".jsonl", ".json", ".csv", ".parquet")
DAMAGES = st.sampled_from(["value", "bytes"])
AREAS = {
    "overrides": (check_overrides, (OVERRIDES,)),
    "texts": (check_text, (st.sampled_from(TEXTS), st.sampled_from(["", "", ".gz", ".zst"]), CONTENT)),
    "end tasks": (check_task, (st.sampled_from([".jsonl", ".csv", ".parquet", ".json"]), CONTENT)),
    "run folders": (
        check_run,
        (st.sampled_from(FILES.split()), DAMAGES, VALUES, st.floats(0, 1), CHANGES, CUT),
    ),
}


FEW = {"overrides": 12, "texts": 60, "end tasks": 40, "run folders": 30}  # the same inputs each time
MANY = [pytest.param(area, 2500, marks=pytest.mark.campaign) for area in AREAS]  # others each time


@pytest.mark.filterwarnings("ignore")  # what a library warns of is no traceback
@pytest.mark.parametrize(("area", "count"), [*FEW.items(), *MANY])
def test_what_nobody_meant_is_taken_or_refused_in_a_line(area, count):
    check_input, strategies = AREAS[area]
    is_fixed = count == FEW[area]

    @settings(
        max_examples=count,
        derandomize=is_fixed,
        phases=[Phase.generate] if is_fixed else list(Phase),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.tuples(*strategies))
    def check_drawn_input(arguments: tuple) -> None:
        check_input(*arguments)

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        check_drawn_input()
