"""The scores of a run as a tidy frame, one number a row, and its tables and points.

Run pages, comparisons, model cards and W&B take their numbers from `tidy_scores` and `summarize_scores`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import isfinite, isnan, nan
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame

from cpt.data.sources.base import GENERAL
from cpt.evaluation import task_metrics
from cpt.evaluation.metrics import UNITS, convert_units
from cpt.evaluation.scores import Scores

COST_UNITS = {
    "trained": "parameters",
    "stored": "bytes",
    "tokens": "tokens",
    "flops": "operations",
    "memory": "bytes",
    "skipped": "steps",
    "seconds_learn": "s",
    "seconds_score": "s",
    "seconds_endtasks": "s",
}
SECONDS = "seconds_"  # a cost with this prefix is the time of an activity: `activity_seconds` of `Scores`
SUMMARIZED = (
    "metric",
    "perplexity",
    "text",
    "task",
    "score",
    "chat",
    "divergence",
    "benchmark",
    "cost",
)  # kinds with a key
CURVE_NAMES = {"nats": "nats", "perplexity": "ppl", "bits_per_byte": "bits_per_byte"}  # of a text, by unit
MATRIX_HEADLINES = ("learned", "FG", "general_drift", "LC", "CPT")  # in all UNITS, with intervals
FURTHER_HEADLINES = (
    "cost/flops",
    "cost/tokens",
    "cost/seconds",
    "cost/memory",
    "cost/stored",
    "cost/stored_per_domain",
    "cost/trained",
    "endtask/MF1",
    "endtask/forget_rate",
    "answers/AP",
    "answers/BWT",
    "chat/rise",
    "chat/rise/low",
    "chat/rise/high",
    "chat/base_answer_rise",
    "chat/base_answer_rise/low",
    "chat/base_answer_rise/high",
    "chat/newly_broken",
    "divergence/just_trained",
    "divergence/just_trained/low",
    "divergence/just_trained/high",
    "divergence/general",
    "BWT_zs/nats",
    "FWT_zs/nats",
    "ZS/nats",
)
MAX_TASK_MEANS = 30  # of end tasks, answers and benchmarks: a table of runs has a column for each


class ReportedValue(NamedTuple):
    """A measured number; None in the fields that do not apply."""

    metric: str  # LC, perplexity, macro_f1, flops, ...
    value: float | None  # None or nan: not measured, or not finite
    unit: str = ""  # nats, perplexity, bits_per_byte, share (0..1), s, bytes, tokens, parameters, ...
    key: str | None = None  # its name in summaries (W&B, CSV)
    stage: int | None = None  # index of the row of the matrix, 0: the base model
    row: str | None = None  # name of that row
    text: str | None = None  # test text or task
    module: str | None = None  # that scored the text
    seed: int | None = None  # of a fine-tuning
    low: float | None = None  # 95 % interval
    high: float | None = None


ReportedValues = Iterator[ReportedValue]


def tidy_scores(scores: Scores, *kinds: str) -> DataFrame:
    """A row for each measured number, of all VALUE_KINDS or the given `kinds`: the column `kind` and those of
    `ReportedValue`."""
    rows = []
    for kind in kinds or VALUE_KINDS:
        for reported in list_values(scores, kind):
            rows.append((kind, *reported))
    frame = DataFrame(rows, columns=["kind", *ReportedValue._fields])
    return frame.astype({"stage": "Int64", "seed": "Int64", "value": float, "low": float, "high": float})


def summarize_scores(scores: Scores, kinds: Sequence[str] = SUMMARIZED) -> dict[str, float]:
    """The finite numbers by key: "LC/perplexity" with "/low" and "/high", "ppl/<text>/base", "own" (after the
    domain's own stage) and "final", "endtask/<task>/accuracy", "answers/AP", "benchmark/<task>",
    "cost/flops", "stage/<stage>/flops". Names between slashes are escaped."""
    numbers = {}
    for kind in kinds:
        for reported in list_values(scores, kind):
            if reported.key is None:
                continue
            with_interval = {
                f"{reported.key}": reported.value,
                f"{reported.key}/low": reported.low,
                f"{reported.key}/high": reported.high,
            }
            for key, value in with_interval.items():
                if value is not None and isfinite(value):
                    numbers[key] = float(value)
    return numbers


def choose_headlines(scores: Scores) -> dict[str, float]:
    """The numbers of a run that a table of runs shows: its optimized metric, MATRIX_HEADLINES in each of
    UNITS with their intervals, FURTHER_HEADLINES, means over all tasks, and benchmarks."""
    numbers = summarize_scores(scores)
    keys = [key for key in numbers if key.partition("/")[0] == "optimized_metric"]
    for metric in MATRIX_HEADLINES:
        for unit in UNITS:
            keys += [f"{metric}/{unit}", f"{metric}/{unit}/low", f"{metric}/{unit}/high"]
    keys += FURTHER_HEADLINES
    task_means = [key for key in numbers if re.fullmatch(r"(endtask|answers|benchmark)/[^/]+", key)]
    keys += task_means[:MAX_TASK_MEANS]

    distinct_keys = dict.fromkeys(keys)  # an ordered set
    return {key: numbers[key] for key in distinct_keys if key in numbers}


def escape_name(name: str) -> str:
    """The name as one component of a key."""
    return name.replace("%", "%25").replace("/", "%2F")


def list_metrics(scores: Scores) -> ReportedValues:
    """Every metric of the matrix in each of UNITS, and the optimized metric, which may be a list."""
    for name, metric in scores.metrics.items():
        for unit in UNITS:
            low, high = metric.get("interval", {}).get(unit, (None, None))
            yield ReportedValue(
                metric=name, value=metric[unit], unit=unit, key=f"{name}/{unit}", low=low, high=high
            )

    optimized = scores.optimized_metric
    if isinstance(optimized, list):
        for number, value in enumerate(np.array(optimized, dtype=float).tolist()):
            name = f"optimized_metric/{number}"
            yield ReportedValue(metric=name, value=value, key=name)
    else:
        value = float(np.array(optimized, dtype=float))  # None becomes nan
        yield ReportedValue(metric="optimized_metric", value=value, key="optimized_metric")


def list_matrix_losses(scores: Scores) -> ReportedValues:
    """Every cell of the matrix, in each of UNITS."""
    matrix_by_unit = convert_units(scores.matrix, layout=scores)
    cells_by_unit = {unit: matrix.tolist() for unit, matrix in matrix_by_unit.items()}
    for stage, row in enumerate(scores.rows):
        for column, text in enumerate(scores.domains):
            for unit, cells in cells_by_unit.items():
                yield ReportedValue(
                    metric="loss", value=cells[stage][column], unit=unit, stage=stage, row=row, text=text
                )


def list_perplexities(scores: Scores) -> ReportedValues:
    """The perplexity of each text under the base model, under the final model and, for the text of a learned
    domain, under the model just after that domain."""
    if not scores.rows:
        return
    perplexities = convert_units(scores.matrix, layout=scores)["perplexity"].tolist()
    for column, text in enumerate(scores.domains):
        stages = {"base": 0, "final": len(scores.rows) - 1}
        if text in scores.learned:
            stages["own"] = scores.rows.index(text)
        for stage_name, stage in stages.items():
            yield ReportedValue(
                metric=stage_name,
                value=perplexities[stage][column],
                unit="perplexity",
                key=f"ppl/{escape_name(text)}/{stage_name}",
                stage=stage,
                row=scores.rows[stage],
                text=text,
            )


def list_texts(scores: Scores) -> ReportedValues:
    """The sizes of each test text: its tokens, those that are scored, and its bytes."""
    sizes = zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True)
    for text, num_tokens, num_scored, num_bytes in sizes:
        key = f"text/{escape_name(text)}"
        for size_name, size in (("tokens", num_tokens), ("scored", num_scored), ("bytes", num_bytes)):
            yield ReportedValue(
                metric=size_name, value=size, unit=size_name, key=f"{key}/{size_name}", text=text
            )


def list_endtasks(scores: Scores) -> ReportedValues:
    """The score of every fine-tuning: row, task, metric, seed."""
    endtasks = scores.endtasks
    if not endtasks:
        return
    for metric in task_metrics.ENDTASK_METRICS:
        cube = task_metrics.build_score_array(endtasks, metric)
        for stage, task, seed in np.argwhere(np.isfinite(cube)).tolist():
            yield ReportedValue(
                metric=metric,
                value=cube[stage, task, seed],
                unit="share",
                stage=stage,
                row=scores.rows[stage],
                text=endtasks["tasks"][task],
                seed=endtasks["seeds"][seed],
            )


def list_task_means(scores: Scores) -> ReportedValues:
    """The means over all end tasks, and of each task, as means over seeds, its score in the last row in which
    it was measured, its score just after its own stage (`forward`), and the deviation over seeds (`sd`)."""
    endtasks = scores.endtasks
    if not endtasks:
        return
    for name, value in task_metrics.summarise_endtasks(endtasks, scores.rows).items():
        yield ReportedValue(metric=name, value=value, unit="share", key=f"endtask/{name}")
    yield ReportedValue(metric="seconds", value=endtasks["seconds"], unit="s", key="endtask/seconds")

    for metric in task_metrics.ENDTASK_METRICS:
        cube = task_metrics.build_score_array(endtasks, metric)
        means = task_metrics.average_seeds(cube)
        deviations = task_metrics.sd_over_seeds(cube)
        final = task_metrics.pick_final(means)
        just_learned = task_metrics.pick_just_learned(means, scores.rows, endtasks["tasks"])
        last_stages = task_metrics.find_last_measured(cube)
        for column, (task, stage) in enumerate(zip(endtasks["tasks"], last_stages, strict=True)):
            key = f"endtask/{escape_name(task)}/{metric}"
            row = None
            deviation = None
            if stage is not None:  # None: the task was not measured in any row
                row = scores.rows[stage]
                deviation = deviations[stage, column]
            yield ReportedValue(
                metric=metric,
                value=final[column],
                unit="share",
                key=key,
                stage=stage,
                row=row,
                text=task,
            )
            yield ReportedValue(
                metric=f"{metric}/forward",
                value=just_learned[column],
                unit="share",
                key=f"{key}/forward",
                row=task,
                text=task,
            )
            yield ReportedValue(
                metric=f"{metric}/sd",
                value=deviation,
                unit="share",
                key=f"{key}/sd",
                stage=stage,
                row=row,
                text=task,
            )


def list_answers(scores: Scores) -> ReportedValues:
    """Every measure of each task in each row in which it was evaluated."""
    for task, answers in scores.answers.get("tasks", {}).items():
        for measure, values in answers["measures"].items():
            for stage, value in enumerate(values):
                if value is not None:
                    yield ReportedValue(
                        metric=measure,
                        value=value,
                        unit="share",
                        stage=stage,
                        row=scores.rows[stage],
                        text=task,
                    )


def list_answer_means(scores: Scores) -> ReportedValues:
    """AP, LA, BWT, F, FWT, and the final value of every measure of each task."""
    for name, value in scores.answers.get("metrics", {}).items():
        low, high = scores.answers["intervals"].get(name, (None, None))
        yield ReportedValue(metric=name, value=value, unit="share", key=f"answers/{name}", low=low, high=high)

    final = {}
    for reported in list_answers(scores):
        final[reported.text or "", reported.metric] = reported  # a later row replaces an earlier one
    for (task, measure), reported in final.items():
        yield reported._replace(key=f"answers/{escape_name(task)}/{measure}")


def list_chats(scores: Scores) -> ReportedValues:
    """The loss on held-out chats and the measures of the answers by row, and their changes since the base.
    The last row in which they were measured has the plain key, the base `/base`."""
    yield from list_chat_loss_values(scores, "loss", nll_key="nll", rise_key="rise")
    yield from list_chat_loss_values(
        scores, "base_answer_loss", nll_key="base_answer_nll", rise_key="base_answer_rise"
    )
    yield from list_chat_answer_values(scores)


def list_chat_loss_values(scores: Scores, name: str, *, nll_key: str, rise_key: str) -> ReportedValues:
    """A loss on chats by row, called `name`, and its rise since the base; they are in `scores.chats` under
    these keys. A row whose loss is not finite has none, and a rise of nulls."""
    nll_by_row = scores.chats.get(nll_key, ())
    rise_by_row = scores.chats.get(rise_key, ())
    measured_by_row = []
    for nll, rise in zip(nll_by_row, rise_by_row, strict=True):
        measured_by_row.append(rise if nll is None else nll)
    for stage, measured in enumerate(measured_by_row):
        if measured is not None:
            key = choose_chat_key(name, stage, measured_by_row)
            yield make_chat_value(scores, stage, name, nll_by_row[stage], unit="nats", key=key)

    for stage, rise in enumerate(rise_by_row):
        if rise is not None:
            key = choose_chat_key(rise_key, stage, rise_by_row)
            mean, low, high = rise
            yield make_chat_value(scores, stage, rise_key, mean, unit="nats", key=key, low=low, high=high)


def list_chat_answer_values(scores: Scores) -> ReportedValues:
    """The measures of the answers to chats by row, their changes since the base, and how many answers are
    broken that the base gives well."""
    answers_by_row = scores.chats.get("answers", ())
    for stage, answers in enumerate(answers_by_row):
        if answers is None:
            continue
        for measure, value in answers["measures"].items():
            unit = "tokens" if measure == "tokens" else "share"
            key = choose_chat_key(measure, stage, answers_by_row)
            yield make_chat_value(scores, stage, measure, value, unit=unit, key=key)
        for measure, (mean, low, high) in answers["changes"].items():
            unit = "tokens" if measure == "tokens" else "share"
            name = f"{measure}/change"
            key = choose_chat_key(name, stage, answers_by_row)
            yield make_chat_value(scores, stage, name, mean, unit=unit, key=key, low=low, high=high)
        if answers["newly_broken"] is not None:
            key = choose_chat_key("newly_broken", stage, answers_by_row)
            yield make_chat_value(
                scores, stage, "newly_broken", answers["newly_broken"], unit="answers", key=key
            )


def choose_chat_key(measure: str, stage: int, values: Sequence[Any]) -> str | None:
    """The key of a measure in a row: that of the last row that was measured, or of the base; None between."""
    last = max(row for row, value in enumerate(values) if value is not None)
    if stage == last:
        return f"chat/{measure}"
    return f"chat/{measure}/base" if stage == 0 else None


def make_chat_value(
    scores: Scores,
    stage: int,
    metric: str,
    value: float | None,
    *,
    unit: str,
    key: str | None,
    low: float | None = None,
    high: float | None = None,
) -> ReportedValue:
    """A value of the held-out chats in the row of a stage."""
    return ReportedValue(
        metric=metric,
        value=value,
        unit=unit,
        key=key,
        stage=stage,
        row=scores.rows[stage],
        text="chats",
        low=low,
        high=high,
    )


def list_divergences(scores: Scores) -> ReportedValues:
    """KL(base || model) on each text in each row, and its mean over stages on the text just trained. The last
    row that has it on the general text has the key `divergence/general`."""
    rows = scores.divergence.get("kl", [])
    just_trained = scores.divergence.get("just_trained")
    if just_trained is not None:
        mean, low, high = just_trained
        yield ReportedValue(
            metric="just_trained", value=mean, unit="nats", key="divergence/just_trained", low=low, high=high
        )
    rows_with_general = [stage for stage, estimates in enumerate(rows) if GENERAL in estimates]
    for stage, estimates in enumerate(rows):
        for text, (mean, low, high) in estimates.items():
            is_last = text == GENERAL and stage == rows_with_general[-1]
            yield ReportedValue(
                metric="kl",
                value=mean,
                unit="nats",
                key="divergence/general" if is_last else None,
                stage=stage,
                row=scores.rows[stage],
                text=text,
                low=low,
                high=high,
            )


def list_benchmarks(scores: Scores) -> ReportedValues:
    """Each task of the lm-evaluation-harness by row; the interval is normal, 1.96 standard errors."""
    for name, task in scores.benchmarks.get("tasks", {}).items():
        last = task_metrics.find_last_value(task)
        if last is None:
            continue
        last_stage, _ = last
        for stage, (value, error) in enumerate(zip(task["values"], task["errors"], strict=True)):
            if value is None:
                continue

            # The last value has the key of the task itself.
            row = scores.rows[stage]
            key = f"benchmark/{escape_name(name)}"
            if stage != last_stage:
                key += "/base" if stage == 0 else f"/after/{escape_name(row)}"

            low = None
            high = None
            if error is not None:
                low = value - 1.96 * error
                high = value + 1.96 * error
            yield ReportedValue(
                metric=task["metric"],
                value=value,
                key=key,
                stage=stage,
                row=row,
                text=name,
                low=low,
                high=high,
            )


def list_costs(scores: Scores) -> ReportedValues:
    """Each of COST_UNITS for the whole run and for each stage. For the whole run, `stored` is that at its
    end, `memory` and `trained` are those of the largest stage, and the others are sums."""
    for name, unit in COST_UNITS.items():
        by_stage = list_stage_costs(scores, name)
        yield ReportedValue(
            metric=name, value=compute_total_cost(scores, name), unit=unit, key=f"cost/{name}"
        )
        for stage, (row, value) in enumerate(zip(scores.rows, by_stage, strict=False)):
            key = f"stage/{escape_name(row)}/{name}"
            yield ReportedValue(metric=name, value=value, unit=unit, key=key, stage=stage, row=row)
    yield ReportedValue(
        metric="stored_per_domain", value=scores.growth, unit="bytes", key="cost/stored_per_domain"
    )
    yield ReportedValue(metric="seconds", value=scores.seconds, unit="s", key="cost/seconds")


def list_stage_costs(scores: Scores, name: str) -> Sequence[float]:
    """One of COST_UNITS for each row of the matrix."""
    if name.startswith(SECONDS):
        seconds = scores.activity_seconds.get(name.removeprefix(SECONDS), {})
        return [seconds.get(row, 0.0) for row in scores.rows]
    if name == "tokens":
        return scores.tokens_read
    if name == "skipped":
        return scores.skipped_steps
    return getattr(scores, name)


def compute_total_cost(scores: Scores, name: str) -> float | None:
    """One of COST_UNITS for the whole run; None where it was not counted."""
    if name.startswith(SECONDS):
        return sum(scores.activity_seconds.get(name.removeprefix(SECONDS), {}).values())

    by_stage = list_stage_costs(scores, name)
    # A run of the base alone has read no tokens; of other runs 0 means that nothing was counted.
    is_zero_unknown = name == "memory" or (name in ("tokens", "flops") and len(scores.rows) != 1)
    if not by_stage or (is_zero_unknown and not any(by_stage)):
        return None
    if name == "stored":
        return by_stage[-1]
    if name in ("memory", "trained"):
        return max(by_stage)
    return sum(by_stage)


def list_modules(scores: Scores) -> ReportedValues:
    """The mean weight of each module in the score of a text, by row."""
    for stage, (row, texts) in enumerate(zip(scores.rows, scores.modules, strict=False)):
        for text, weights in texts.items():
            for module, weight in weights.items():
                yield ReportedValue(
                    metric="weight",
                    value=weight,
                    unit="share",
                    stage=stage,
                    row=row,
                    text=text,
                    module=module,
                )


def list_phases(scores: Scores) -> ReportedValues:
    """The seconds of each activity in each stage."""
    for activity, seconds_by_row in scores.activity_seconds.items():
        for row, seconds in seconds_by_row.items():
            yield ReportedValue(metric=activity, value=seconds, unit="s", row=row)


VALUE_KINDS: dict[str, Callable[[Scores], ReportedValues]] = {  # kind of value: what lists its values
    "metric": list_metrics,
    "perplexity": list_perplexities,
    "text": list_texts,
    "task": list_task_means,
    "cost": list_costs,
    "loss": list_matrix_losses,
    "endtask": list_endtasks,
    "answer": list_answers,
    "score": list_answer_means,
    "chat": list_chats,
    "divergence": list_divergences,
    "benchmark": list_benchmarks,
    "module": list_modules,
    "phase": list_phases,
}


def list_values(scores: Scores, kind: str) -> ReportedValues:
    """The values of one of VALUE_KINDS."""
    return VALUE_KINDS[kind](scores)


def find_matrices(scores: Scores) -> dict[str, DataFrame]:
    """The models (rows) on each text or task (columns): `perplexity`, and of `answers` and `endtasks` the
    share of each task in its own metric, a mean over seeds; nan where not measured."""
    with np.errstate(over="ignore"):
        perplexities = np.exp(scores.matrix)
    matrices = {"perplexity": label_matrix(perplexities, scores, scores.domains)}
    answers = scores.answers
    if answers.get("tasks"):
        matrices["answers"] = label_matrix(
            task_metrics.build_answer_matrix(answers), scores, list(answers["tasks"])
        )
    endtasks = scores.endtasks
    if endtasks:
        shares = task_metrics.average_seeds(task_metrics.select_headline_scores(endtasks))
        matrices["endtasks"] = label_matrix(shares, scores, endtasks["tasks"])
    return matrices


def label_matrix(values: np.ndarray, scores: Scores, columns: Sequence[str]) -> DataFrame:
    """A matrix of the first rows of a run."""
    return DataFrame(values, scores.rows[: len(values)], columns)


def tabulate(scores: Scores) -> dict[str, DataFrame]:
    """For W&B: `matrix` (perplexities) and `scores` (every number); None for what is not finite."""
    matrix = find_matrices(scores)["perplexity"]
    matrix.insert(0, "after", scores.rows, allow_duplicates=True)
    kinds = [kind for kind in VALUE_KINDS if kind != "loss"]
    kinds.append("loss")  # last, as W&B may cut some
    return {
        "matrix": replace_non_finite(matrix),
        "scores": replace_non_finite(tidy_scores(scores, *kinds)),
    }


def replace_non_finite(table: DataFrame) -> DataFrame:
    """The table with None for what is not finite."""
    finite = table.replace([np.inf, -np.inf], np.nan)
    return finite.astype(object).where(finite.notna(), None)


def average_so_far(scores: Scores, row: int) -> float:
    """The mean perplexity of a row over the domains learned so far; nan without any."""
    column_by_text = {text: column for column, text in enumerate(scores.domains)}
    learned = scores.rows[1 : row + 1]
    columns = [column_by_text[name] for name in learned if name in column_by_text]
    if not columns:
        return nan
    with np.errstate(over="ignore"):
        return float(np.exp(scores.row_losses(row)[columns]).mean())


def list_stage_points(scores: Scores, row: int) -> dict[str, float]:
    """The points of a row over `stage`: `ppl/TEXT`, `nats/TEXT`, `bits_per_byte/TEXT` and `stages/…`. In the
    last, `mean_perplexity` is over the domains learned so far, `tokens`, `flops` and `seconds` are sums so
    far, and the others are of the stage itself."""
    points: dict[str, float] = {"stage": row}
    for unit, losses in convert_units(scores.row_losses(row), layout=scores).items():
        for text, loss in zip(scores.domains, losses.tolist(), strict=True):
            if not isnan(loss):
                points[f"{CURVE_NAMES[unit]}/{escape_name(text)}"] = loss
    mean_perplexity = average_so_far(scores, row)
    if not isnan(mean_perplexity):
        points["stages/mean_perplexity"] = mean_perplexity

    points["stages/tokens"] = sum(list_stage_costs(scores, "tokens")[: row + 1])
    points["stages/flops"] = sum(list_stage_costs(scores, "flops")[: row + 1])
    points["stages/seconds"] = sum(list_stage_costs(scores, "seconds_learn")[: row + 1])
    for name in ("memory", "trained", "stored"):
        by_stage = list_stage_costs(scores, name)
        if row < len(by_stage):
            points[f"stages/{name}"] = by_stage[row]

    movements = scores.protected_movement  # inside the subspace, and of a random direction
    if row < len(movements) and movements[row]:
        points["stages/protected_movement"] = movements[row][0]
    return points


def list_chat_points(scores: Scores) -> list[dict[str, float]]:
    """The points of the losses on held-out chats and on the base's answers over `stage`."""
    points = []
    for stage in range(len(scores.rows)):
        point: dict[str, float] = {"stage": stage}
        for name, key in (("stages/chat", "nll"), ("stages/chat_base_answers", "base_answer_nll")):
            losses = scores.chats.get(key, [])
            if stage < len(losses) and losses[stage] is not None:
                point[name] = losses[stage]
        if len(point) > 1:
            points.append(point)
    return points


def list_divergence_points(scores: Scores) -> list[dict[str, float]]:
    """The points of the divergence from the base over `stage`: `kl/TEXT`, one for each row that has some."""
    points = []
    for stage, estimates in enumerate(scores.divergence.get("kl", [])):
        point: dict[str, float] = {"stage": stage}
        for text, (mean, _, _) in estimates.items():
            if mean is not None:
                point[f"kl/{escape_name(text)}"] = mean
        if len(point) > 1:
            points.append(point)
    return points


def list_task_points(scores: Scores) -> list[dict[str, float]]:
    """The points of the end tasks over `stage`, one for each row in which some were measured: `tasks/TASK`, a
    share of 1 in the task's own metric, a mean over seeds."""
    task_scores = find_matrices(scores).get("endtasks", DataFrame())  # [row, task]
    points = []
    for stage, (_, shares) in enumerate(task_scores.iterrows()):
        point: dict[str, float] = {"stage": stage}
        for task, share in shares.items():
            if isfinite(share):
                point[f"tasks/{escape_name(str(task))}"] = float(share)
        if len(point) > 1:
            points.append(point)
    return points
