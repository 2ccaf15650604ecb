"""Resolve `auto`: the precision by what the device can do, the attention by what is fastest on it."""

import logging
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from cpt.models.quick_dropout import dropout_rates, drops_attention
from cpt.trainer.options import TrainerOptions

log = logging.getLogger(__name__)
BF16 = ("bf16-mixed", "bf16", "bf16-true")
SHORT = 512  # tokens of a sequence up to which eager attention is faster in 16 bits (benchmarks/attention.py)


def resolve_precision(
    options: TrainerOptions,
    config: PretrainedConfig,
    device: torch.device,
    *,
    length: int,
    stored: str | None,
) -> TrainerOptions:
    """The options with a precision and an attention implementation for rows of `length` tokens.

    `trainer.precision=auto` is what a resumed run has `stored` in its scores.json; else bf16-mixed on a GPU with
    bf16, and 32-true elsewhere."""
    on_gpu, on_cpu = device.type == "cuda", device.type == "cpu"
    quick, attention = options.quick_dropout, options.attention
    if on_gpu and not options.deterministic:
        log.info(
            "on a GPU sums are taken in no fixed order: after a resume the last digits may differ; "
            "bitwise reproducible, slower: trainer.deterministic=true"
        )
    if options.precision == "auto":
        able = on_gpu and torch.cuda.is_bf16_supported()
        chosen = stored or ("bf16-mixed" if able else "32-true")
        why = "as recorded in scores.json" if stored else f"the default on this device ({device.type})"
        log.info("trainer.precision=auto: %s, %s", chosen, why)
        options = replace(options, precision=chosen)
    elif on_gpu and options.precision == "32-true":
        log.info(
            "trainer.precision=32-true: on an H100 steps in bf16-mixed were 2.5 to 3 times as fast "
            "(docs/performance.md); trainer.precision=auto chooses it"
        )
    rates = [f"{name}={rate:g}" for name, rate in dropout_rates(config).items() if rate > 0]
    drops = quick and drops_attention(config)
    if quick and (not on_cpu or not rates):
        why = "the model has no dropout" if not rates else "a GPU draws dropout quickly anyway"
        log.info("trainer.quick_dropout=true has no effect: %s", why)
    elif drops and attention not in ("auto", "eager"):
        log.info(
            "trainer.attention=%s draws its dropout itself; trainer.quick_dropout=true acts on the rest",
            attention,
        )
    elif not quick and on_cpu and rates and not options.compile:
        log.info(
            "torch draws dropout (%s) slowly on a CPU; trainer.quick_dropout=true: a shorter step, "
            "other masks (docs/performance.md)",
            ", ".join(rates),
        )
    if attention == "auto" and on_cpu and (drops or (options.precision in BF16 and length <= SHORT)):
        why = f"in 16 bits is faster than torch's own (sdpa) in rows of up to {SHORT} tokens"
        if drops:
            why = "draws its dropout quickly, as torch's own (sdpa) does not"
        log.info("trainer.attention=auto: eager, which on a CPU %s", why)
        options = replace(options, attention="eager")
    return options
