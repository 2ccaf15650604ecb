"""How a run computes where its config leaves that open (`auto`): in which precision, and how attention.

A precision is chosen by the time that a block of this very model takes here; a file of the run's folder
remembers it, so that a run goes on as it began, elsewhere too."""

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from cpt.core.files import replace as write_whole
from cpt.core.processes import is_first_process
from cpt.models import loading
from cpt.models.forward import hidden_states
from cpt.models.quick_dropout import draw_quickly, dropout_rates, drops_attention
from cpt.training.options import TrainerOptions
from cpt.training.plan import Plan
from cpt.training.run_folder import RunFolder

log = logging.getLogger(__name__)
CHOICES = ("32-true", "bf16-mixed")
COARSE = ("bf16-mixed", "bf16", "bf16-true")
GAIN = 1.1  # times as fast as 32-true, which bf16-mixed must at least be
SECONDS = 2.0  # of measuring
MOST = 4096  # tokens of a measured step
ENTRIES = 512  # of the vocabulary of the block that is measured
ROUNDS = 3  # at least, of which the first is not counted
SHORT = 512  # tokens of a row up to which eager attention is faster in 16 bits (benchmarks/attention.py)
WAIT = 600  # seconds that other processes wait for the first one's choice


def settle_numerics(plan: Plan, place: RunFolder, device: torch.device, *, remember: bool = True) -> Plan:
    """The plan with a precision, and with a way to compute attention where transformers' own is slow; told in
    a line each. Raises ValueError where what the folder remembers is damaged."""
    options = plan.trainer
    if device.type == "cuda":
        tell_of_gpu(options)
    if options.precision == "auto":
        options = replace(options, precision=choose_precision(plan, place, device, remember=remember))
    tell_of_dropout(plan, device)
    if options.attention == "auto" and (found := suit_attention(plan, options, device)):
        why = f"in 16 bits is faster than torch's own (sdpa) in rows of up to {SHORT} tokens"
        if plan.trainer.quick_dropout and drops_attention(configuration_of(plan)):
            why = "draws its dropout quickly, as torch's own (sdpa) does not"
        log.info("trainer.attention=auto: %s, which on a processor %s", found, why)
        options = replace(options, attention=found)
    return replace(plan, trainer=options)


def tell_of_gpu(options: TrainerOptions) -> None:
    """What the defaults cost on a GPU, a line each."""
    if not options.deterministic:
        log.info(
            "on a GPU sums are taken in no fixed order: where a run goes on its last digits may differ; "
            "the same bits, slower: trainer.deterministic=true"
        )
    if options.precision == CHOICES[0]:
        log.info(
            "trainer.precision=32-true: on an H100 steps in bf16-mixed were 2.5 to 3 times as fast "
            "(docs/performance.md); auto: measured here"
        )


def tell_of_dropout(plan: Plan, device: torch.device) -> None:
    """Where dropout could be drawn quickly, or cannot, a line."""
    config, quick = configuration_of(plan), plan.trainer.quick_dropout
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
            "torch draws dropout (%s) slowly on a processor; trainer.quick_dropout=true: a shorter step, "
            "other masks (docs/performance.md)",
            ", ".join(f"{name}={rate:g}" for name, rate in rates.items()),
        )


def choose_precision(plan: Plan, place: RunFolder, device: torch.device, *, remember: bool) -> str:
    """What the run began with; of a new one, what is fast enough here to be worth its coarser numbers."""
    path = place.path / "precision"
    if not is_first_process() and remember:
        wait_for(path)
    if path.exists():
        begun = path.read_text(encoding="utf-8")
        if begun not in CHOICES:
            raise ValueError(
                f"{path} is damaged; write the precision into it that the run began with: "
                f"{' or '.join(CHOICES)}"
            )
        log.info("trainer.precision=auto: %s, as this run began", begun)
        return begun
    chosen = measure_precision(plan, device)
    if remember:
        write_whole(path, chosen)
    return chosen


def wait_for(path: Path) -> None:
    """Returns when the first process has written a file. Raises ValueError where it does not."""
    end = time.monotonic() + WAIT
    while not path.exists():
        if time.monotonic() > end:
            raise ValueError(
                f"{path} was not written by the first process for {WAIT} s; allowed: a precision by name"
            )
        time.sleep(0.1)


def measure_precision(plan: Plan, device: torch.device) -> str:
    """The faster of the choices, by steps of one block; says what it took."""
    began = time.perf_counter()
    step, tokens = make_step(plan, device)
    taken: dict[str, list[float]] = {name: [] for name in CHOICES}
    while len(taken[CHOICES[-1]]) < ROUNDS or time.perf_counter() - began < SECONDS:
        for name in CHOICES:
            taken[name].append(clock(lambda name=name: step(name), device))
    plain, mixed = (statistics.median(taken[name][1:]) for name in CHOICES)
    chosen = CHOICES[plain / mixed >= GAIN]
    log.info(
        "trainer.precision=auto: %s; a step of one block, %d tokens, is %.2f times as fast in bf16-mixed as "
        "in 32-true here (measured for %.1f s; bf16-mixed from %.1f on)",
        chosen,
        tokens,
        plain / mixed,
        time.perf_counter() - began,
        GAIN,
    )
    return chosen


def make_step(plan: Plan, device: torch.device) -> tuple[Callable[[str], None], int]:
    """A training step of a block of the model, in a precision by name, and its tokens."""
    model = make_block(plan, device)
    length = plan.model.length
    rows = max(1, min(plan.trainer.batch_size // plan.trainer.accumulate_grad_batches, MOST // length))
    ids = (torch.arange(rows * length, device=device) * 7919 % (ENTRIES - 1) + 1).view(rows, length)

    def step(precision: str) -> None:
        chosen = suit_attention(plan, replace(plan.trainer, precision=precision), device)
        with attending(model, chosen), draw_quickly(plan.trainer.quick_dropout):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision != CHOICES[0]):
                hidden: Tensor = hidden_states(model, {"input_ids": ids})
            hidden.float().square().mean().backward()
            model.zero_grad()

    return step, rows * length


def make_block(plan: Plan, device: torch.device) -> PreTrainedModel:
    """A model like that of the plan, of one block and few tokens, with random weights; other random numbers
    stay as they are."""
    config = configuration_of(plan)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 1, ENTRIES, 0
    kind = loading.objective_name(plan.model.objective, config)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        return loading.AUTO[kind].from_config(config).train()


def configuration_of(plan: Plan) -> PretrainedConfig:
    """The configuration of the plan's model."""
    given = plan.model.checkpoint
    return loading.configuration(given) if given else loading.AutoConfig.for_model(**dict(plan.model.config))


@contextmanager
def attending(model: PreTrainedModel, implementation: str | None) -> Iterator[None]:
    """Computes attention so while it lasts; None: as ever."""
    before = model.config._attn_implementation
    if implementation is not None:
        model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        if implementation is not None:
            model.set_attn_implementation(before)


def clock(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of some work, on a GPU with what it has begun."""
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def suit_attention(plan: Plan, options: TrainerOptions, device: torch.device) -> str | None:
    """`eager` where torch's own attention is slow: its backward pass on a processor in 16 bits, of short
    rows, and where it would drop without quick_dropout. None: as transformers has it."""
    if options.attention != "auto":
        return options.attention
    slow = options.precision in COARSE and plan.model.length <= SHORT
    slow |= options.quick_dropout and drops_attention(configuration_of(plan))
    return "eager" if slow and device.type == "cpu" else None
