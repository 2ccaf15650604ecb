"""What is logged of a model before it is trained, and training text that is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cpt.data import packing
from cpt.data.datamodule import Domain, DomainSequence
from cpt.data.sources.base import CONCAT, DOCUMENT_MASK, NONE, TextOptions
from cpt.data.text_format import make_text_format
from cpt.models.objectives import Causal
from cpt.trainer import build, common_settings
from cpt.trainer.build import check_row_repeats, check_training_texts
from cpt.trainer.plan import make_plan
from tests.support.data_fixtures import bare_tokenizer, write_corpus


def pack_texts(folder, texts, tokenizer, *, packed_as, separator):
    text_format = make_text_format(tokenizer, TextOptions(separator=separator))
    return packing.pack(
        write_corpus(folder, texts),
        "train",
        format=text_format,
        length=16,
        name="a",
        cache=folder,
        packing=packed_as,
    )


@pytest.mark.parametrize(("packed_as", "is_refused"), [(NONE, True), (DOCUMENT_MASK, True), (CONCAT, False)])
def test_training_text_without_a_scored_token_is_refused(packed_as, is_refused, tmp_path):
    tokenizer = bare_tokenizer()
    start = SimpleNamespace(objective=Causal(), tokenizer=tokenizer)
    start.objective.isolated = packed_as == DOCUMENT_MASK
    one_token = pack_texts(tmp_path / "1", ["a", "b", "e"], tokenizer, packed_as=packed_as, separator="none")
    two_tokens = pack_texts(tmp_path / "2", ["a", "b d"], tokenizer, packed_as=packed_as, separator="none")
    check_training_texts({"food": two_tokens}, start)
    texts = {"food": two_tokens, "law": one_token}
    if not is_refused:
        check_training_texts(texts, start)
        return
    with pytest.raises(ValueError, match="^the training text of law has no token that is scored. Allowed: "):
        check_training_texts(texts, start)
    with pytest.raises(ValueError, match="of law has no token that is scored"):
        check_training_texts({"law": replace(one_token, rows=one_token.rows.select([]))}, start)


def test_processes_with_other_values_of_an_option_are_refused(small, monkeypatch):
    plan = make_plan(small("seed=3"))

    def gather_two(value):
        is_settings = isinstance(value, dict)
        return [value, value | {"seed": 4, "domains.only": ["law"]}] if is_settings else [value, "other"]

    common_settings.check_same_settings(plan)
    monkeypatch.setattr(common_settings, "gather_objects", gather_two)
    with pytest.raises(
        ValueError, match=r"^seed is invalid: it is 3 in one process and 4 in another\. Allowed"
    ):
        common_settings.check_same_settings(plan)


def test_processes_may_read_texts_in_other_folders(small, monkeypatch):
    plan = make_plan(small("seed=3"))
    hashes = []
    monkeypatch.setattr(common_settings, "gather_objects", lambda value: hashes.append(value) or [value])
    common_settings.check_same_settings(plan)
    assert "root" in plan.settings["domains"]
    moved_plan = replace(
        plan, settings=plan.settings | {"domains": plan.settings["domains"] | {"root": "other"}}
    )
    common_settings.check_same_settings(moved_plan)
    copied = replace(
        plan, settings=plan.settings | {"model": plan.settings["model"] | {"name_or_path": "copy"}}
    )
    common_settings.check_same_settings(copied)
    assert hashes[0] == hashes[1] == hashes[2]


class Stages(list):
    """The stages of a run whose texts have 25 and 30 rows."""

    train = {"law": range(25), "food": range(30)}
    count_rows = DomainSequence.count_rows

    def __init__(self, *stages, batch_size):
        super().__init__(Domain(" and ".join(texts), 0, texts) for texts in stages)
        self.budget = SimpleNamespace(batch_size=batch_size)


def test_a_batch_that_reads_each_row_a_hundred_times_is_refused():
    check_row_repeats(Stages(("law",), ("food",), batch_size=2500))
    check_row_repeats(Stages(("food", "law"), batch_size=5500))
    check_row_repeats(Stages(batch_size=10**9))
    with pytest.raises(ValueError) as raised:
        check_row_repeats(Stages(("food",), ("law",), batch_size=10**9))
    assert str(raised.value) == (
        "trainer.batch_size=1000000000 is invalid for food: a step would read each of its 30 rows 33,333,333 "
        "times. Allowed: 3000 or less; at 30 a step reads each row once"
    )
    with pytest.raises(ValueError, match="for food and law: a step would read each of its 55 rows 100 times"):
        check_row_repeats(Stages(("food", "law"), batch_size=5501))


def test_of_a_run_that_an_earlier_version_began_no_batch_is_refused(
    small, start, tmp_path, monkeypatch, capsys, caplog
):
    caplog.set_level("INFO", logger="cpt")
    options = ("order=[law]", "trainer.steps=1", "trainer.batch_size=2048", "optim.lr=0")
    start(small(*options), tmp_path / "run")
    assert "optim.lr=0: no step changes a weight" in caplog.messages
    assert "Fewer rows than a batch (trainer.batch_size=2048): law, of which" in caplog.text

    monkeypatch.setattr(build, "MAX_REPEATS", 0)
    for plan in ("false", "json"):
        with pytest.raises(ValueError, match="^trainer.batch_size=.* is invalid for law: a step would read"):
            start(small(*options, f"plan={plan}"), tmp_path / "new")
    capsys.readouterr()
    start(small(*options, "plan=json"), tmp_path / "run")
    assert json.loads(capsys.readouterr().out)["left"] == "nothing"
    (tmp_path / "run/report.html").unlink()  # is written again
    start(small(*options), tmp_path / "run")
    assert (tmp_path / "run/report.html").exists()
