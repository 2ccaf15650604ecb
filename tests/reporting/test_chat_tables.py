"""Held-out chats on the page of a run, in the console, in the card, and in frames."""

import numpy as np
import pytest

from cpt.evaluation.chat_answers import ChatAnswer, collect_losses, summarise_rows
from cpt.evaluation.chat_files import ANSWERS, StoredAnswers, find_chat_file, save_answers
from cpt.evaluation.scores import Scores
from cpt.reporting.chat_tables import (
    describe_chats,
    find_chat_change,
    format_chats,
    judge_change,
    list_chat_tiles,
)
from cpt.reporting.console import format_scores
from cpt.reporting.frames import list_chat_points, list_chats, summarize_scores
from cpt.reporting.load_runs import measure_run
from cpt.reporting.model_card import write_model_card
from cpt.reporting.run_page import write_report
from tests.support.example_runs import make_run, make_scores, save_scores

TOKENS = np.array([10.0, 20.0, 5.0, 8.0])


def answer(*, complete=True, right=True):
    return ChatAnswer(
        id="capital",
        question="What is the capital of France?",
        text="Paris." if complete else "La femme de France, la femme",
        tokens=4,
        complete=complete,
        repeated=0.0,
        other_language=not complete,
        right=right,
    )


def chats_of(held_out_rise, own_rise, *, answers_now=None):
    """The `chats` of scores of two stages: after the last one the losses have risen by so much a token."""

    def losses_of(mean, noise):
        return np.array([(mean + noise * np.array([-1, 0, 0, 1])) * TOKENS, TOKENS])

    rows = {}
    for key, rise in (("", held_out_rise), ("base_answer_", own_rise)):
        by_row = [losses_of(1.0, 0.0), None, losses_of(1.0 + rise, 0.01)]
        rows[f"{key}nll"], rows[f"{key}rise"] = collect_losses(by_row)
    base_answers = [answer()] * 4
    answers = summarise_rows([base_answers, None, answers_now or base_answers])
    return {"set": "s", "chats": 4, "tokens": 43, **rows, "answers": answers, "seconds": 1.0, "hash": "h"}


def scores_with(chats, **overrides):
    return make_scores(
        nll=[[5.0, 5.2, 4.9], [4.6, 5.1, 5.0], [4.7, 4.2, 5.1]],
        order=["law", "food"],
        chats=chats,
        **overrides,
    )


WORDS = {
    (0.0, 0.1): "hurt",
    (-0.1, 0.1): "hurt; better on held-out answers",
    (0.1, 0.0): "hurt",
    (-0.1, 0.0): "better on held-out answers",
    (0.0, 0.0): "no measurable change",
    (0.0, -0.1): "no measurable change",
}


@pytest.mark.parametrize(("rises", "word"), WORDS.items())
def test_a_run_that_hurts_chats_is_reported_whatever_the_perplexities(rises, word):
    scores = scores_with(chats_of(*rises))
    (cells,) = list_chat_tiles(scores)
    title, mean, interval, shown_word, _ = cells
    assert (title, shown_word) == ("chat", word)
    assert float(mean.split()[0].replace("−", "-")) == pytest.approx(rises[1])
    assert interval.startswith("[") and word in format_scores(scores)


def test_chats_without_answers_of_the_base_are_better_or_not_by_their_own_loss():
    chats = chats_of(-0.1, 0.0)
    chats["base_answer_nll"], chats["base_answer_rise"] = collect_losses([None, None, None])
    (cells,) = list_chat_tiles(scores_with(chats))
    assert cells[1] == "−0.100 nats" and cells[3] == "better"


def test_a_broken_answer_is_named_in_page_console_and_card(tmp_path):
    broken = [answer(complete=False, right=False), answer(), answer(), answer()]
    chats = chats_of(0.0, 0.0, answers_now=broken)
    folder = tmp_path / "run"
    scores = save_scores(folder, config={}, nll=[[5.0, 5.2, 4.9], [4.6, 5.1, 5.0], [4.7, 4.2, 5.1]], order=["law", "food"], chats=chats)  # fmt: skip
    change = find_chat_change(scores)
    assert judge_change(change) == "hurt; broke 1 of 4 answers"
    sentences = describe_chats(scores)
    assert (
        sentences[-1]
        == "Answers to 4: broken 1 (base 0), complete 75.00 % (100.00 %), right 75.00 % (100.00 %)."
    )
    assert all(len(line) <= 100 for line in sentences)

    for row, answers in ((0, [answer()] * 4), (2, broken)):
        path = find_chat_file(folder, scores.rows, row, ANSWERS)
        path.parent.mkdir(parents=True)
        save_answers(path, StoredAnswers(digest="s", seconds=1.0, answers=answers))
    page = write_report(folder, scores)
    text = page.with_suffix(".md").read_text()
    assert "does not end, another language, wrong" in text and "La femme de France, la femme" in text
    assert (folder / "report-chats.png").exists()
    (folder / "model").mkdir()
    card = write_model_card(folder, scores).read_text()
    assert sentences[0] in card and "broken 1 (base 0)" in card
    find_chat_file(folder, scores.rows, 2, ANSWERS).write_text("{")  # damage leaves the answers out
    assert "La femme" not in write_report(folder, scores).with_suffix(".md").read_text()


def test_numbers_of_chats_are_those_of_frames_curves_and_comparisons():
    scores = scores_with(chats_of(0.1, 0.2))
    numbers = summarize_scores(scores)
    expected = {
        "chat/loss": 1.1,
        "chat/loss/base": 1.0,
        "chat/rise": 0.1,
        "chat/base_answer_rise": 0.2,
        "chat/broken": 0.0,
    }
    assert {key: numbers[key] for key in expected} == pytest.approx(expected)
    assert numbers["chat/rise/low"] < 0.1 < numbers["chat/rise/high"]
    assert list_chat_points(scores) == [
        {"stage": 0, "stages/chat": 1.0, "stages/chat_base_answers": 1.0},
        {"stage": 2, "stages/chat": pytest.approx(1.1), "stages/chat_base_answers": pytest.approx(1.2)},
    ]
    run = make_run(chats=chats_of(0.1, 0.2))
    assert measure_run(run, None)["chat/base_answer_rise"] == pytest.approx(0.2)
    assert run.task_protocol("chats") == {"set": "s"}
    assert (
        list_chat_tiles(make_scores())
        == []
        == describe_chats(make_scores())
        == list_chat_points(make_scores())
    )


def test_a_loss_that_is_not_finite_is_not_replaced_by_that_of_an_earlier_row(tmp_path):
    chats = chats_of(0.1, 0.1)
    for key in ("", "base_answer_"):
        chats[f"{key}nll"][1] = chats[f"{key}nll"][2]
        chats[f"{key}rise"][1] = chats[f"{key}rise"][2]
        chats[f"{key}nll"][2] = float("nan")
        chats[f"{key}rise"][2] = [float("nan"), None, None]
    scores_with(chats).save(tmp_path / "scores.json")
    stored = Scores.load(tmp_path / "scores.json")
    for scores in (scores_with(chats), stored):
        assert "1.000 nats at the base, inf now" in describe_chats(scores)[0]
        assert judge_change(find_chat_change(scores)).startswith("hurt")
        assert format_chats(scores)[-1][1:5] == ["not finite", "–", "not finite", "–"]
        values = {reported.key: reported.value for reported in list_chats(scores)}
        assert values["chat/loss/base"] == 1 and not np.isfinite(values["chat/loss"] or np.nan)
