"""Resolve `auto`: the precision by what the device can do, attention by what is fastest."""

import logging
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from cpt.models import loading
from cpt.models.memory import dropout_rates, drops_attention
from cpt.trainer.plan import Plan
from cpt.trainer.run_folder import RunFolder

log = logging.getLogger(__name__)
BF16 = ("bf16-mixed", "bf16", "bf16-true")
SHORT = 512  # tokens of a sequence up to which eager attention is faster in 16 bits (benchmarks/attention.py)


def resolve_precision(plan: Plan, place: RunFolder, device: torch.device) -> Plan:
    """The plan with a precision and an attention implementation; logs what it chose and why.

    `trainer.precision=auto` is bf16-mixed on a GPU with bf16 and 32-true elsewhere; a run that is resumed on
    another device keeps the precision that its scores.json records."""
    options, config = plan.trainer, configuration_of(plan)
    if device.type == "cuda" and not options.deterministic:
        log.info(
            "on a GPU sums are taken in no fixed order: after a resume the last digits may differ; "
            "bitwise reproducible, slower: trainer.deterministic=true"
        )
    if options.precision == "auto":
        recorded = scores.numerics.get("precision") if (scores := place.scores()) else None
        able = device.type == "cuda" and torch.cuda.is_bf16_supported()
        chosen = recorded or ("bf16-mixed" if able else "32-true")
        why = "as recorded in scores.json" if recorded else f"the default on this device ({device.type})"
        log.info("trainer.precision=auto: %s, %s", chosen, why)
        options = replace(options, precision=chosen)
    elif device.type == "cuda" and options.precision == "32-true":
        log.info(
            "trainer.precision=32-true: on an H100 steps in bf16-mixed were 2.5 to 3 times as fast "
            "(docs/performance.md); trainer.precision=auto chooses it"
        )
    log_dropout(plan, config, device)
    if options.attention == "auto" and device.type == "cpu":
        drops = options.quick_dropout and drops_attention(config)
        if drops or (options.precision in BF16 and plan.model.length <= SHORT):
            why = f"in 16 bits is faster than torch's own (sdpa) in rows of up to {SHORT} tokens"
            if drops:
                why = "draws its dropout quickly, as torch's own (sdpa) does not"
            log.info("trainer.attention=auto: eager, which on a CPU %s", why)
            options = replace(options, attention="eager")
    return replace(plan, trainer=options)


def log_dropout(plan: Plan, config: PretrainedConfig, device: torch.device) -> None:
    """Logs where trainer.quick_dropout would make steps shorter, or has no effect."""
    quick = plan.trainer.quick_dropout
    rates = {name: rate for name, rate in dropout_rates(config).items() if rate > 0}
    if quick and (device.type != "cpu" or not rates):
        reason = "the model has no dropout" if not rates else "a GPU draws dropout quickly anyway"
        log.info("trainer.quick_dropout=true has no effect: %s", reason)
    elif quick and plan.trainer.attention not in ("auto", "eager") and drops_attention(config):
        log.info(
            "trainer.attention=%s draws its dropout itself; trainer.quick_dropout=true acts on the rest",
            plan.trainer.attention,
        )
    elif not quick and device.type == "cpu" and rates and not plan.trainer.compile:
        log.info(
            "torch draws dropout (%s) slowly on a CPU; trainer.quick_dropout=true: a shorter step, "
            "other masks (docs/performance.md)",
            ", ".join(f"{name}={rate:g}" for name, rate in rates.items()),
        )


def configuration_of(plan: Plan) -> PretrainedConfig:
    """The transformers config of the plan's model."""
    given = plan.model.checkpoint
    return loading.configuration(given) if given else loading.AutoConfig.for_model(**dict(plan.model.config))
