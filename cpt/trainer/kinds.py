"""Whether a kind of model goes with what a plan asks of it: to answer, to chat, to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpt.data.chats import check_template
from cpt.models import loading
from cpt.models.options import ModelOptions

if TYPE_CHECKING:
    from cpt.trainer.plan import Plan


def check_kind(plan: Plan, objective: str) -> None:
    """Raises ValueError for a model whose objective does not go with what it is asked."""
    options = plan.model
    answers = plan.source.encoding is not None
    loading.check_packing(objective, isolated=plan.source.isolated, answers=answers)
    if plan.source.chats:
        check_chats(options, objective)
    if objective == "masked" and plan.probe is not None:
        raise ValueError(
            f"probe=lm_eval asks a model to go on with a text, and model={options.name} fills masks; "
            "allowed: probe=none, or a causal model like model=tiny_gpt2"
        )
    if objective != "causal" and plan.mixture.generates and plan.source.encoding is None:
        fills = "masks" if objective == "masked" else "spans"
        raise ValueError(
            f"replay=generated asks a model to write text, and model={options.name} fills {fills}; allowed: "
            "replay=past, or a causal model like model=tiny_gpt2"
        )


def check_chats(options: ModelOptions, objective: str) -> None:
    """Raises ValueError for a model that takes no chats: one with two stacks, one without a template."""
    if objective in loading.SEQ2SEQ:
        raise ValueError(
            f"model={options.name} does not go with chats, as it has two stacks; allowed: a causal model, or "
            "examples with a question and an answer (domains.format=…)"
        )
    tokenizer = loading.load_tokenizer(options.checkpoint) if options.checkpoint else None
    if tokenizer is None or not tokenizer.chat_template:
        which = "a tokenizer that is learned here" if tokenizer is None else f"that of {options.checkpoint}"
        raise ValueError(
            f"model={options.name} does not go with chats: {which} has no chat template; allowed: "
            "model=checkpoint of an instruction-tuned model, or examples with a question and an answer "
            "(domains.format=…)"
        )
    check_template(tokenizer)
