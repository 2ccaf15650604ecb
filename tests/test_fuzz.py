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
from cpt.core.errors import reason
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


def refused(error: BaseException, *names: str) -> None:
    """Raises AssertionError for an error that does not say in a line what it is about, by a name."""
    said = reason(error)
    assert said and "\n" not in said, repr(said)
    assert not names or any(name in said for name in names), f"{said!r} names none of {names}"


def keys_of(node: DictConfig, at: str = "") -> Iterator[str]:
    for name in node:
        key = f"{at}.{name}" if at else str(name)
        yield key
        inner = node._get_node(name)
        if isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_missing():
            yield from keys_of(inner, key)


@cache
def keys() -> tuple[str, ...]:
    return tuple(keys_of(compose("config")))


def written(value: Any) -> str:
    """A value as somebody writes it on a command line, not always with its quotes."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {written(each)}" for key, each in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


SIGN = st.sampled_from(["", "", "", "", "+", "++", "~"])
KEY = st.one_of(st.deferred(lambda: st.sampled_from(keys())), st.text(min_size=1, max_size=8))
OVERRIDES = st.lists(
    st.builds(lambda sign, key, value: f"{sign}{key}={written(value)}", SIGN, KEY, VALUES),
    min_size=1,
    max_size=3,
)


def check_overrides(said: list[str]) -> None:
    try:
        check_command_line(said)
        make_plan(compose("config", overrides=said))
    except FORESEEN as error:
        refused(error)


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


def spoil(raw: bytes, places: list[tuple[int, int]], cut: int | None) -> bytes:
    changed = bytearray(raw)
    for place, value in places if raw else ():
        changed[place % len(changed)] = value
    return bytes(changed[:cut])


ROWS = st.lists(ROW, max_size=5)
JSON = ROWS.map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
PLACES = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3)
CUT = st.one_of(st.none(), st.none(), st.integers(0, 200))
CONTENT = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.builds(spoil, JSON | ROWS.map(as_parquet), PLACES, CUT),
)


def check_text(name: str, packed: str, content: bytes) -> None:
    """A domain of one such file, perhaps packed, is read, or refused with the file's name."""
    if packed and len(content) % 3 != 2:  # else it is not what its name says
        content = pa.compress(content, codec={".gz": "gzip", ".zst": "zstd"}[packed], asbytes=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "law" / f"all{name}{packed}"
        path.parent.mkdir()
        path.write_bytes(content)
        options = {"root": folder, "folder": ".", "general": None, "ignore": (), "columns": None}
        source = Texts(**options, column="text", document="auto", **SHARED)
        try:
            source.check(["law"])
            for split, document in source.read("law"):
                assert isinstance(document, str) and split is not None
        except FORESEEN as error:
            refused(error, str(path))


def check_task(kind: str, content: bytes) -> None:
    """An end task of which one file is such is read, or refused with the file's or the folder's name."""
    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder), "law", train=6, test=4, dev=2)
        place = Path(folder) / "endtasks" / "law"
        (place / "test.jsonl").unlink()
        (place / f"test{kind}").write_bytes(content)
        try:
            plan_endtasks(options("texts", root=Path(folder)), ["law"], ["law"]).source.task("law")
        except FORESEEN as error:
            refused(error, folder, "law")


def changed_text(raw: bytes, value: Any, at: float) -> bytes:
    text = raw.decode()
    begins = [place for place, sign in enumerate(text) if sign in ":[,"] or [0]
    place = begins[int(at * (len(begins) - 1))] + 1
    end = min((found for sign in ",]}\n" if (found := text.find(sign, place)) >= 0), default=len(text))
    return (text[:place] + json.dumps(value) + text[end:]).encode()


FILES = "scores.json progress.json config.yaml identity.json checksums.json documents"


def check_run(
    name: str, how: str, value: Any, at: float, places: list[tuple[int, int]], cut: int | None
) -> None:
    """Whatever a file of a run folder has become, it is told of in lines, by each command that reads it."""
    out = contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO()))
    with tempfile.TemporaryDirectory() as top, out as said, contextlib.redirect_stderr(said):
        run = Path(top) / "run"
        place = RunDir(run)
        save_scores(run, finished=at < 0.5)
        Heartbeat(state="running", began=utc_now()).write(run)
        place.write_config(SETTINGS)
        told = {"version": 1, "order": ["law"], "texts": {}, "base": {}, "tokenizer": "0", "endtasks": {}}
        place.manifest.write_text(json.dumps(told))
        (run / "checksums.json").write_text(json.dumps({"files": {"report.md": [3, "0"]}}))
        for row in range(2):
            place.save_documents(row, {"law": np.ones((2, 3))})
        path = run / "documents" / "000.npz" if name == "documents" else run / name
        raw, is_text = path.read_bytes(), path.suffix in (".json", ".yaml") and how == "value"
        path.write_bytes(changed_text(raw, value, at) if is_text else spoil(raw, places, cut))
        verify.main([top])
        status.main([top])
        with contextlib.suppress(*FORESEEN):
            format_scores(Scores.load(run / "scores.json"))
        with contextlib.suppress(*FORESEEN):
            place = RunDir(run)
            place.check_config(SETTINGS)
            OmegaConf.load(place.config)
            place.find_damaged_outputs(full=True)
            place.check_documents(2)


TEXTS = (".txt", ".md", ".jsonl", ".json", ".csv", ".parquet")
HOW = st.sampled_from(["value", "bytes"])
AREAS = {
    "overrides": (check_overrides, (OVERRIDES,)),
    "texts": (check_text, (st.sampled_from(TEXTS), st.sampled_from(["", "", ".gz", ".zst"]), CONTENT)),
    "end tasks": (check_task, (st.sampled_from([".jsonl", ".csv", ".parquet", ".json"]), CONTENT)),
    "run folders": (check_run, (st.sampled_from(FILES.split()), HOW, VALUES, st.floats(0, 1), PLACES, CUT)),
}


FEW = {"overrides": 12, "texts": 60, "end tasks": 40, "run folders": 30}
MANY = [pytest.param(area, 2500, marks=pytest.mark.campaign) for area in AREAS]  # others each time


@pytest.mark.filterwarnings("ignore")  # what a library warns of is no traceback
@pytest.mark.parametrize(("area", "count"), [*FEW.items(), *MANY])
def test_what_nobody_meant_is_taken_or_refused_in_a_line(area, count):
    check_input, parts = AREAS[area]
    how = {"derandomize": True, "phases": [Phase.generate]} if count == FEW[area] else {}

    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), **how
    )
    @given(st.tuples(*parts))
    def look(each: tuple) -> None:
        check_input(*each)

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        look()
