"""Published claims tested on the runs of a study (das6_mini.py, standard_cl_mini.py).

A claim is a difference of two groups in one measure, over the pairs of order and seed that both have. It held
if the sign-flip test gives p <= 0.05 in the direction claimed, after Holm's correction for the claims of its
table; "opposite" if in the other."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cpt.evaluation.statistics import MAX_EXACT_PAIRS, SIGNIFICANCE_LEVEL, Difference, compare_pairs
from cpt.evaluation.task_metrics import build_score_array, pick_final
from cpt.reporting.contrasts import PairedContrast, correct_differences, read_contrasts
from cpt.reporting.load_runs import MeasuredRun, Pair
from cpt.reporting.sections import RunGroup, RunSection

NOT_EXCLUDED = "less than that is not excluded"
NUM_END_DOMAINS = 2  # how many first and last domains are compared (MIGU, Table 4)
Values = Mapping[Pair, float]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`better` is 1 where the group should be above the other, -1 below, 0 where the two should be equal."""

    text: str
    of: str
    against: str  # another group; empty: zero
    measure: str
    better: int
    show: Callable[[float], str]
    min_difference: float = 0.0  # how large a difference must be, with its interval


def format_points(value: float) -> str:
    return f"{100 * value:+.2f} points"


def format_nats(value: float) -> str:
    return f"{value:+.4f} nats"


def format_perplexity(value: float) -> str:
    return f"{value:+.2f}"


DAS = "das (contrast_every=1, contrast_samples=1)"  # the paper's form
ON_GRADIENTS = DAS.replace("(", "(apply_to=gradient, ")
UNCONTRASTED = "das (apply_to=gradient, contrast=0)"
ON_TEXT = (
    Claim(
        text="DAS beats NCL in macro-F1 (Ke et al. 2023; MIGU's run of it: +0.23)",
        of=DAS, against="ncl", measure="endtask/MF1", better=1, show=format_points,
    ),
    Claim(
        text="DAS beats NCL in accuracy (MIGU's run of it: +0.30)",
        of=DAS, against="ncl", measure="endtask/Acc", better=1, show=format_points,
    ),
    Claim(
        text="DAS forgets less than NCL (FG)",
        of=DAS, against="ncl", measure="FG/nats", better=-1, show=format_nats,
    ),
    Claim(
        text="DAS has negative forgetting (FG < 0)",
        of=DAS, against="", measure="FG/nats", better=-1, show=format_nats,
    ),
    Claim(
        text="MIGU beats NCL in macro-F1 (Du et al. 2024: +0.37)",
        of="migu", against="ncl", measure="endtask/MF1", better=1, show=format_points,
    ),
    Claim(
        text="MIGU beats NCL in accuracy (+0.42)",
        of="migu", against="ncl", measure="endtask/Acc", better=1, show=format_points,
    ),
    Claim(
        text="MIGU beats NCL in final perplexity (not claimed)",
        of="migu", against="ncl", measure="LC/perplexity", better=-1, show=format_perplexity,
    ),
    Claim(
        text="DAS gains accuracy on the first two domains (Du et al., Table 4: +0.61)",
        of=DAS, against="ncl", measure="early", better=1, show=format_points,
    ),
    Claim(
        text="DAS loses accuracy on the last two domains (-0.91)",
        of=DAS, against="ncl", measure="late", better=-1, show=format_points,
    ),
    Claim(
        text="DAS has a higher loss than NCL just after training, last two domains",
        of=DAS, against="ncl", measure="late loss", better=1, show=format_nats,
    ),
    Claim(
        text="MIGU does not lose accuracy on the last two domains (+0.34)",
        of="migu", against="ncl", measure="late", better=1, show=format_points,
    ),
    Claim(
        text="AdamW cancels masks on gradients: lower loss just after training than with masks on updates",
        of=ON_GRADIENTS, against=DAS, measure="CPT/nats", better=-1, show=format_nats,
    ),
    Claim(
        text="the same without the contrastive loss: loss just after training as NCL",
        of=UNCONTRASTED, against="ncl", measure="CPT/nats", better=0, show=format_nats,
    ),
    Claim(
        text="the same without the contrastive loss: forgetting as NCL",
        of=UNCONTRASTED, against="ncl", measure="FG/nats", better=0, show=format_nats,
    ),
)  # fmt: skip

# MIGU: Du et al. 2024, tables 2 and 8, T5-large, orders 1 to 3; O-LoRA: Wang et al. 2023, table 1.
ON_TASKS = (
    Claim(
        text="JOINT beats NCL by 20 points or more (T5-large at the same rate: 80.0 against 22.2)",
        of="joint", against="ncl", measure="answers/AP", better=1, show=format_points, min_difference=0.2,
    ),
    Claim(
        text="MIGU beats fine-tuning (ncl; 78.8 against 75.7)",
        of="migu", against="ncl", measure="answers/AP", better=1, show=format_points,
    ),
    Claim(
        text="replay beats fine-tuning (77.4 against 75.7)",
        of="replay", against="ncl", measure="answers/AP", better=1, show=format_points,
    ),
    Claim(
        text="O-LoRA beats one LoRA for all tasks (76.6 against 67.9)",
        of="olora", against="lora", measure="answers/AP", better=1, show=format_points,
    ),
    Claim(
        text="O-LoRA beats IncLoRA (76.6 against 68.8)",
        of="olora", against="inclora", measure="answers/AP", better=1, show=format_points,
    ),
    Claim(
        text="O-LoRA with MIGU beats O-LoRA (76.6 against 75.8, or 76.6: table 2, table 8)",
        of="olora + migu", against="olora", measure="answers/AP", better=1, show=format_points,
    ),
    Claim(
        text="LoRA with MIGU beats LoRA (73.3 against 67.9)",
        of="lora + migu", against="lora", measure="answers/AP", better=1, show=format_points,
    ),
    Claim(
        text="EWC beats fine-tuning (O-LoRA's table: 50.3 against 28.5)",
        of="ewc (strength=5000)", against="ncl", measure="answers/AP", better=1, show=format_points,
    ),
    Claim(
        text="distillation beats fine-tuning (LwF, O-LoRA's table: 52.3 against 28.5)",
        of="kd", against="ncl", measure="answers/AP", better=1, show=format_points,
    ),
    Claim(
        text="DER++ beats replay (no claim of these papers)",
        of="derpp", against="replay", measure="answers/AP", better=1, show=format_points,
    ),
)  # fmt: skip
HEAD = ("claim", "difference [95 % interval]", "pairs", "p (Holm)", "p (t, Holm)", "result")


def read_measure(run: MeasuredRun, measure: str) -> float | None:
    """A measure of a run: one of the comparison's, or over the first or last domains."""
    if measure in ("early", "late"):
        return mean_accuracy(run, late=measure == "late")
    if measure == "late loss":
        losses = list(run.scores.diagonal.values())[-NUM_END_DOMAINS:]
        return sum(losses) / NUM_END_DOMAINS if losses else None
    return run.values.get(measure)


def mean_accuracy(run: MeasuredRun, *, late: bool) -> float | None:
    """Mean accuracy on the first or the last domains' tasks, by the last model; None where one has none."""
    endtasks = run.scores.endtasks
    order = run.scores.run["order"]
    names = order[-NUM_END_DOMAINS:] if late else order[:NUM_END_DOMAINS]
    if not endtasks or not {*names} <= {*endtasks["tasks"]}:
        return None
    by_task = dict(
        zip(endtasks["tasks"], pick_final(build_score_array(endtasks, "accuracy")).mean(-1), strict=True)
    )
    return float(sum(by_task[name] for name in names) / NUM_END_DOMAINS)


def values_by_pair(group: RunGroup, measure: str) -> Values:
    """A measure of a group's runs by order and seed, without runs that do not have it."""
    values = {run.pair: read_measure(run, measure) for run in group.runs}
    return {pair: value for pair, value in values.items() if value is not None}


def compare_for_claim(claim: Claim, section: RunSection) -> Difference | None:
    """The difference of the claim's two groups in its measure, over the pairs of order and seed that both
    have; the difference from zero where it has no second group. None where a group is missing, or no pair is
    common."""
    groups = {group.name: group for group in section.groups}
    if claim.of not in groups or (claim.against and claim.against not in groups):
        return None
    ours = values_by_pair(groups[claim.of], claim.measure)
    theirs = (
        values_by_pair(groups[claim.against], claim.measure) if claim.against else dict.fromkeys(ours, 0.0)
    )
    difference = compare_pairs(ours, theirs)
    return difference if difference.n else None


def judge_claim(claim: Claim, contrast: PairedContrast, *, num_tested: int) -> str:
    """What a difference says of a claim, one of those that were tested, by its corrected p-value."""
    lowest_p = num_tested * 2.0 ** (1 - contrast.n)
    bounds = (contrast.low * claim.better, contrast.high * claim.better)
    if (
        contrast.p_holm > SIGNIFICANCE_LEVEL
        and contrast.n <= MAX_EXACT_PAIRS
        and lowest_p > SIGNIFICANCE_LEVEL
    ):
        num_pairs = math.ceil(1 + math.log2(num_tested / SIGNIFICANCE_LEVEL))
        shortage = f"{num_pairs} pairs are needed for {num_tested} claims"
        if max(bounds) < 0:
            return f"opposite by its interval; for a test {shortage}"
        return f"not shown; {shortage}"
    if claim.better == 0:
        return "differs" if contrast.p_holm <= SIGNIFICANCE_LEVEL else "no difference shown"
    if contrast.p_holm > SIGNIFICANCE_LEVEL:
        return "not shown"
    if contrast.mean * claim.better < 0:
        return "opposite"

    is_large_enough = not claim.min_difference or min(bounds) >= claim.min_difference
    return "held" if is_large_enough else f"held in direction, {NOT_EXCLUDED}"


def tabulate_claims(section: RunSection, claims: Sequence[Claim]) -> list[list[str]]:
    """A line per claim that the runs can test; those on DAS by the paper's form, or by the default
    where that was not run: see `tell`."""
    if DAS not in {group.name for group in section.groups}:
        claims = [replace(claim, of="das") if claim.of == DAS else claim for claim in claims]
    tests = {claim: compare_for_claim(claim, section) for claim in claims}
    return tabulate_tests(
        {claim: difference for claim, difference in tests.items() if difference is not None}
    )


def tabulate_tests(tests: Mapping[Claim, Difference | None]) -> list[list[str]]:
    """A line per claim: text, difference with its interval, pairs, p-values, corrected for the claims that
    were tested, and the verdict."""
    names = {claim: str(number) for number, claim in enumerate(tests)}
    differences = {names[claim]: test for claim, test in tests.items() if test is not None}
    corrected = read_contrasts(correct_differences(differences))
    lines = []
    for claim, name in names.items():
        contrast = corrected.get(name)
        if contrast is None:
            lines.append([claim.text, "–", "0", "–", "–", "not run"])
            continue
        interval = ""
        if math.isfinite(contrast.low):
            interval = f" [{claim.show(contrast.low)}, {claim.show(contrast.high)}]"
        lines.append(
            [
                claim.text,
                claim.show(contrast.mean) + interval,
                str(contrast.n),
                format_p(contrast.p_holm),
                format_p(contrast.p_t_holm),
                judge_claim(claim, contrast, num_tested=len(corrected)),
            ]
        )
    return lines


def format_p(p: float) -> str:
    return "–" if math.isnan(p) else f"{p:.3g}"
