"""Give a domain back: what a finished run would be without it, by the forms in which runs keep domains.

left out     each domain has modules of its own, and no other domain was trained with its text or from its
             modules: they are removed. The modules of other domains keep their bits.
subtracted   what the stage of the domain added to the weights is taken out of the last ones, theta_n - tau_k
             (negation of a task vector, Ilharco et al., ICLR 2023). Later domains were trained with it in
             place: approximate.
continued    the run before the domain, from the file of that stage, learns the domains that followed again.
             Exact: it is a run that never had the domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cpt.adapters import lora
from cpt.adapters.domain_store import DomainParams, Router
from cpt.core.exceptions import InvalidOptionError
from cpt.core.tensors import upcast
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualMethod
from cpt.methods.experts import CopyingMethod
from cpt.methods.lora import IncLoRA, LoRA
from cpt.methods.merge import Merge, MergeLoRA
from cpt.models.fsdp import named_weights
from cpt.trainer.checkpoint import check_stage, restore_stage
from cpt.trainer.plan import Plan, why_not_extendable
from cpt.trainer.run_dir import RunDir

FORMS = ("left_out", "subtracted", "continued")
ADDITIVE_RULES = ("task_arithmetic", "dare", "average")  # of merges, whose terms can be taken out again
REMEDY = "restore it from a backup"
KEEP_STAGES = "save_all_stages=true keeps them"


@dataclass(frozen=True, kw_only=True)
class Withdrawal:
    """A domain of a finished run, and why a form cannot give it back; "" of a form that can."""

    run: RunDir
    scores: Scores
    plan: Plan
    domain: str
    why_not: dict[str, str]  # by form

    @property
    def number(self) -> int:
        """Of the domain's stage, from 1."""
        return list(self.scores.run["order"]).index(self.domain) + 1

    @property
    def is_last(self) -> bool:
        return self.number == len(self.scores.run["order"])

    @property
    def remaining(self) -> list[str]:
        return [name for name in self.scores.run["order"] if name != self.domain]

    @property
    def possible_forms(self) -> list[str]:
        """The best first: exact ones without training, then an approximate one, then training."""
        order = ["left_out", "continued", "subtracted"] if self.is_last else list(FORMS)
        return [form for form in order if not self.why_not[form]]


def find_withdrawal(
    run: RunDir, scores: Scores, plan: Plan, module: ContinualMethod, *, domain: str
) -> Withdrawal:
    """Loads the last stage into the module, which says where its modules came from. Raises ValueError for a
    domain that the run has not learned, and for one that it has learned alone."""
    order = list(scores.run["order"])
    if domain not in order:
        raise InvalidOptionError("DOMAIN", domain, allowed=", ".join(order))
    if len(order) == 1:
        raise InvalidOptionError(
            "DOMAIN",
            domain,
            reason="the run has learned nothing else",
            allowed="another run: its base is left",
        )
    number = order.index(domain) + 1
    last = len(scores.rows) - 1
    has_last_stage = run.stage_path(last).exists()
    if has_last_stage:
        restore_module(module, run, last)
    missing = "" if has_last_stage else "the file of the last stage was removed"
    return Withdrawal(
        run=run,
        scores=scores,
        plan=plan,
        domain=domain,
        why_not={
            "left_out": missing or why_not_left_out(plan, module, number=number, num_domains=len(order)),
            "subtracted": missing or why_not_subtracted(module, run, number=number, last=last),
            "continued": why_not_continued(plan, run, scores, number=number),
        },
    )


def restore_module(module: ContinualMethod, run: RunDir, number: int) -> None:
    """Loads the state after a stage from its file. Raises ValueError for a damaged one."""
    path = run.stage_path(number)
    check_stage(path, remedy=REMEDY)
    restore_stage(module, path, stores_on_disk=False)


# Left out.


def why_not_left_out(plan: Plan, module: ContinualMethod, *, number: int, num_domains: int) -> str:
    """Why the modules of a domain cannot be removed without a trace; "" if they can."""
    method = plan.names["method"]
    domain_params = module.domain_params
    has_own_modules = type(domain_params) is DomainParams and type(module.router) is Router
    if not has_own_modules or module.scope is None:
        return f"method={method} keeps no modules that are of one domain alone"
    assert domain_params is not None
    if not set(module.scope.names) <= set(domain_params.names):
        return f"method={method} trains weights that all domains share"
    if number == num_domains:
        return ""

    # Later domains were trained after it: something of it may be in their modules.
    if plan.mixture.past_ratio:
        return "later domains were trained with replay of its text"
    if plan.masks:
        return "a mask kept statistics of it while later domains were trained"
    if plan.carry != "none":
        return f"optim.state_across_domains={plan.carry} took moments of its steps into the next domain"
    if plan.observer.is_active:
        return "the budget of later domains depended on it"
    if plan.monitor.stop is not None and plan.monitor.past:
        return f"monitor.stop={plan.monitor.stop:g} ends stages of later domains by the loss on its text"
    if isinstance(module, CopyingMethod):
        if is_source(module.sources, number - 1):
            return "the modules of a later domain began as a copy of its own"
    elif getattr(plan.method.options, "start", "") == "previous":
        return "method.start=previous: the modules of the next domain began as a copy of its own"
    return ""


def is_source(sources: Tensor, index: int) -> bool:
    """Whether later modules are copies of those of a domain; `sources` [domains] says what each was copied
    from.

    >>> is_source(torch.tensor([-1, 0, 1]), 1)
    True
    """
    return index in sources[index + 1 :].tolist()


def remove_domain_modules(module: ContinualMethod, *, index: int, num_domains: int) -> None:
    """Removes the modules of the domain with this index in the order; those of later domains move up. The
    model has the modules of the last domain that is left."""
    domain_params = module.domain_params
    assert domain_params is not None
    remaining = {}
    for stored_name, tensor in domain_params.named().items():
        number, _, name = stored_name.partition(":")
        owner = int(number)  # the index of the domain that has the tensor
        if owner == index:
            continue
        new_owner = owner - 1 if owner > index else owner
        remaining[f"{new_owner}:{name}"] = tensor
    domain_params.clear()
    domain_params.update(remaining)

    num_remaining = num_domains - 1
    domain_params.load_into(module.model, num_remaining - 1)

    if isinstance(module, CopyingMethod):
        module.sources = drop_source(module.sources, index)
        if index == num_domains - 1:
            module.perplexities = module.perplexities[:0]  # they are of the domain that is gone


def drop_source(sources: Tensor, index: int) -> Tensor:
    """The sources of the domains that are left, by their new indices.

    >>> drop_source(torch.tensor([-1, 0, 0, 2]), 1)
    tensor([-1,  0,  1])
    """
    remaining = torch.cat([sources[:index], sources[index + 1 :]])
    return torch.where(remaining > index, remaining - 1, remaining)


# Subtracted.


def why_not_subtracted(module: ContinualMethod, run: RunDir, *, number: int, last: int) -> str:
    """Why what a domain added to the weights cannot be taken out again; "" if it can."""
    if has_separate_adapters(module) and not module.saved_names:
        return ""  # the last stage has the adapter of each domain
    if isinstance(module, Merge | MergeLoRA):
        if module.options.rule not in ADDITIVE_RULES:
            return f"method.rule={module.options.rule} is no sum over domains"
    elif not isinstance(module, IncLoRA):
        return "its weights are not a sum over domains"
    missing = [stage for stage in (number - 1, number) if stage > 0 and not run.stage_path(stage).exists()]
    if missing:
        return f"no file of stage {missing[0]} ({KEEP_STAGES})"
    return ""


@torch.no_grad()
def subtract(module: ContinualMethod, start: ContinualMethod, run: RunDir, *, number: int, last: int) -> None:
    """Takes what the stage of a domain added out of the weights of a module that has the last stage; `start`
    is a module as at construction, into which earlier stages are loaded."""
    if isinstance(module, IncLoRA) and has_separate_adapters(module):
        remove_pair(module, number - 1, num_domains=last)
        if not module.saved_names:
            return

    # theta_k - theta_{k-1}, in at least 32 bits.
    before = read_merged(start, run, number - 1)
    after = read_merged(start, run, number)
    weights = find_merged(module)
    for name, weight in weights.items():
        current = upcast(weight)
        task_vector = after[name] - before[name]
        if isinstance(module, Merge | MergeLoRA) and module.options.rule == "average":
            # A model that joins a mean moves it by (theta_k - mean) / n, n with the model itself. So theta_k
            # follows from the means, and is taken out of the last one.
            num_models = int(module.options.base) + number  # n
            domain_weights = before[name] + num_models * task_vector  # theta_k
            num_last_models = int(module.options.base) + last
            reduced = (num_last_models * current - domain_weights) / (num_last_models - 1)
        else:
            reduced = current - task_vector
        weight.copy_(reduced)
    lora.reset_magnitudes(module.model)  # DoRA's norms, of a method that has some, are of the new weights


def has_separate_adapters(module: ContinualMethod) -> bool:
    """Whether the adapter of each domain is kept for itself, and merged into no weight."""
    return isinstance(module, IncLoRA) and module.options.adapter_storage == "separate"


def find_merged(module: ContinualMethod) -> dict[str, Tensor]:
    """The weights that the domains add to, by name: those with merged adapters, and modules that are trained
    fully."""
    weights = named_weights(module.model)
    if not isinstance(module, LoRA):
        return dict(weights)
    saved = {name: weights[name] for name in module.saved_names}
    if has_separate_adapters(module):
        return dict(saved)
    return {**module.adapted_weights(), **saved}


def read_merged(module: ContinualMethod, run: RunDir, number: int) -> dict[str, Tensor]:
    """The weights after a stage, with its adapters merged, in at least 32 bits; 0 is the base, as which the
    module was built."""
    if number > 0:
        restore_module(module, run, number)
    if isinstance(module, LoRA) and not has_separate_adapters(module):
        lora.merge_newest(module.model)
    return {name: upcast(weight).clone() for name, weight in find_merged(module).items()}


def remove_pair(module: IncLoRA, index: int, *, num_domains: int) -> None:
    """Sets B of a domain's adapter to 0 in all layers: its product is 0."""
    for layer in lora.find_lora_layers(module.model).values():
        _, newest_b = lora.get_factors(layer)
        if index == num_domains - 1:
            newest_b.zero_()
            continue
        # Along the rank, the earlier adapters in the order of their domains.
        _, earlier_b = lora.get_factors(layer, lora.EARLIER)
        width = newest_b.shape[1]
        earlier_b[:, index * width : (index + 1) * width] = 0


# Continued.


def why_not_continued(plan: Plan, run: RunDir, scores: Scores, *, number: int) -> str:
    """Why the run before the domain cannot learn what followed; "" if it can. Before the first domain is the
    base, with which a new run starts."""
    if number == 1:
        return ""
    reason = why_not_extendable(plan)
    if reason:
        return reason
    if scores.trains_from_base:
        return f"method={plan.names['method']} trains each domain from the base: a new run leaves it out"
    if find_run_with_stage(run, scores, number - 1) is None:
        return f"no file of stage {number - 1} ({KEEP_STAGES})"
    return ""


def find_run_with_stage(run: RunDir, scores: Scores, number: int) -> RunDir | None:
    """The run that has the file of a stage: the run itself, or one that it extends (`extend` of its config).
    None without one; a folder that has another run by now is not taken."""
    candidate = run
    while not candidate.stage_path(number).exists():
        folder = candidate.stored_config().get("extend")
        if folder is None:
            return None
        candidate = RunDir(Path(folder))
        candidate_scores = candidate.load_scores()
        if candidate_scores is None or not has_rows_of(scores, candidate_scores):
            return None
    return candidate


def has_rows_of(scores: Scores, earlier: Scores) -> bool:
    """Whether a run has the rows of an earlier one, with the same losses on the texts of both."""
    num_rows = len(earlier.rows)
    if scores.rows[:num_rows] != earlier.rows:
        return False
    for row in range(num_rows):
        losses = dict(zip(scores.domains, scores.nll[row], strict=True))
        for text, loss in zip(earlier.domains, earlier.nll[row], strict=True):
            if losses.get(text) != loss:
                return False
    return True


def list_kept_rows(scores: Scores, number: int, *, until_stage: bool) -> list[int]:
    """The rows of the matrix that are left without the row of a stage, `until_stage` without all after it."""
    end = number if until_stage else len(scores.rows)
    return [row for row in range(end) if row != number]


def is_constant(plan: Plan, scores: Scores, row: int, text: str, *, number: int) -> bool:
    """Whether a cell has the value that it would have without the modules of the domain of stage `number`:
    before that stage, and where the modules of one other domain, or the base, score the text."""
    if row < number:
        return True
    routing = getattr(plan.method.options, "routing", None)
    assert routing is not None  # methods with modules per domain have one
    is_learned = text in scores.rows[1 : row + 1]
    rule = routing.learned if is_learned else routing.unlearned
    return rule in ("domain", "base", "last")


def describe_forms(withdrawal: Withdrawal) -> Sequence[str]:
    """A line for each form."""
    lines = []
    for form in FORMS:
        name = form.replace("_", " ")
        kind = "approximate" if form == "subtracted" else "exact"
        reason = withdrawal.why_not[form]
        lines.append(f"{name:12}{'no: ' + reason if reason else kind}")
    return lines
