"""Build the pieces of a run from a plan: the method with its model, its data, its empty scores."""

import logging
import platform
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import cpt
from cpt.adapters.bank import banks_of
from cpt.core.randomness import key
from cpt.core.rules import show
from cpt.core.tensors import NamedTensors, offload
from cpt.data.balancing import balance
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.packing import Packed
from cpt.data.replay import Generated
from cpt.data.sources.base import CONCAT, GENERAL
from cpt.evaluation.policy import AUTO
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualModule, Shared
from cpt.models.economy import checkpoint_activations, compile_blocks, even_head
from cpt.models.objectives import Objective
from cpt.models.snapshots import Snapshot
from cpt.optim.carry import CarriedState
from cpt.trainer.base_model import Base
from cpt.trainer.extend import why_end_is_final
from cpt.trainer.manifest import checkpoint_files
from cpt.trainer.plan import Plan
from cpt.trainer.precision import BF16

log = logging.getLogger(__name__)
PACKAGES = ("torch", "lightning", "transformers", "datasets")
SHOWN = 3  # texts that a message names


def build_method(plan: Plan, start: Base) -> ContinualModule:
    """The method with the base model; its random numbers depend on the seed alone."""
    options = plan.trainer
    torch.manual_seed(key(plan.run.seed, "method") % 2**63)
    model = start.model()
    even_head(model)
    if options.attention != "auto":
        model.set_attn_implementation(options.attention)
    module = plan.method.make(build_shared(plan, model, start.objective))
    module.beside.update(module.companions())
    if plan.carry != "none":
        module.carried = CarriedState()
    if getattr(plan.schedule, "branches", False):
        module.trunk = Snapshot(module.model, persistent=True)
    if options.offload:
        offload(module)
    if options.gradient_checkpointing:
        checkpoint_activations(module.model)
    if options.compile:
        compile_blocks(module.model)
    return module


def build_shared(plan: Plan, model: PreTrainedModel, objective: Objective) -> Shared:
    """What every method gets in addition to its own options."""
    arguments = dict(plan.optim.arguments)
    if "fused" in arguments and plan.trainer.precision in ("16-mixed", "16", 16):
        arguments["fused"] = False  # it would scale gradients back itself, after they are clipped
    return Shared(
        model=model,
        objective=objective,
        length=plan.model.length,
        masks=[mask.make() for mask in plan.masks],
        replay=plan.replay,
        freeze=plan.freeze,
        optimizer=partial(plan.optim.load(), **arguments),
        schedule=(lambda at: plan.schedule(at.joined)) if plan.carry == "all" else plan.schedule,
        seed=plan.run.seed,
    )


def log_ineffective(plan: Plan, module: ContinualModule, device: torch.device) -> None:
    """Logs each option that is set and changes nothing in this run."""
    options, name, given = plan.trainer, plan.names["method"], plan.settings["model"]
    parts, rate = options.accumulate_grad_batches, plan.ignored_rate
    kept = [each for each in module.modules() if isinstance(each, NamedTensors)]
    isolated = plan.source.isolated and plan.source.encoding is not None
    teacher = getattr(module.options, "teacher", "run") != "run"
    is_sharded, stores = plan.trainer.strategy == "fsdp", banks_of(module)
    final = why_end_is_final(plan) if plan.run.keep_end else ""
    offloads = any(not isinstance(each, CarriedState) for each in kept)
    found = {
        f"Ignoring model.base: model.checkpoint={given['checkpoint']} is loaded, not pre-trained here": (
            given["checkpoint"] is not None and given["base"] is not None
        ),
        f"optim.lr={plan.optim.arguments.get('lr')} is the learning rate as it stands: method.rate={rate} of "
        f"{name} has no effect (model.lr=… would be multiplied by it)": rate not in (None, 1),
        f"domains.packing=isolated without effect: the samples of trainer.batch_size={plan.budget.batch_size} "
        f"come one by one (trainer.accumulate_grad_batches={parts})": (
            isolated and plan.budget.batch_size == parts
        ),
        "the mask's backend=backward without effect: later parts of a step choose rows too "
        f"(trainer.accumulate_grad_batches={parts})": parts > 1 and any(m.limits for m in module.masks),
        f"method.teacher without effect: all is in 16 bits (trainer.precision={options.precision})": (
            teacher and options.precision in BF16
        ),
        f"parts.keep=disk without effect: {name} stores no modules of earlier domains": (
            plan.parts.keep == "disk" and not stores
        ),
        "parts.keep=disk: with strategy=fsdp modules that are sharded stay in memory": (
            plan.parts.keep == "disk" and stores and is_sharded
        ),
        f"trainer.offload=true without effect: {name} keeps no weights to offload": (
            options.offload and not offloads
        ),
        "trainer.offload=true without effect: on a CPU all is in the host's memory": (
            options.offload and offloads and device.type == "cpu"
        ),
        f"keep_end=true without effect: {final}": bool(final),
    }
    for message in (message for message, holds in found.items() if holds):
        log.info("%s", message)


def build_data(plan: Plan, corpora: Corpora, start: Base, module: ContinualModule) -> DomainSequence:
    """The stages of a method over the domains of a plan."""
    options, replay, source = plan.trainer, module.replay, plan.source
    domains = module.stages(plan.order)
    learned = [part for domain in domains for part in domain.parts]

    def packed(name: str, split: str) -> Packed:
        return corpora.packed(
            name, split, tokenizer=start.tokenizer, length=plan.model.length, seq2seq=start.seq2seq
        )

    train = {name: packed(name, "train") for name in learned}
    if source.balanced is not False and train:
        train = balance(train, tokens=None if source.balanced is True else source.balanced)
    forms: dict[str, Packed] = {}  # the examples as text, where a model learns to write them for replay
    if isinstance(replay, Generated) and corpora.encoding is not None and replay.past and replay.forms:
        encoder = corpora.encoder(start.tokenizer, start.length, seq2seq=start.seq2seq)
        forms = {name: corpora.forms(name, encoder, sign=replay.sign(name)) for name in learned}
    return DomainSequence(
        domains,
        train=train | ({GENERAL: packed(GENERAL, "train")} if replay.general else {}),
        held_out={name: packed(name, source.score_on) for name in (*plan.order, GENERAL)},
        objective=start.objective,
        budget=plan.budget,
        replay=replay,
        seed=plan.run.seed,
        accumulate=options.accumulate_grad_batches,
        eval_batch_size=options.eval_batch_size,
        probe_samples=options.probe_samples,
        workers=options.workers,
        eval_tokens=plan.cap,
        forms=forms,
        validation={name: packed(name, "valid") for name in (*plan.order, GENERAL)} if plan.watches else {},
    )


def log_eval_cap(plan: Plan, data: DomainSequence) -> None:
    """Logs of which texts a part is scored, and where a resumed run has another cap than a new one would
    have, if that makes a difference."""
    texts = data.held_out
    tokens = {name: int(text.row_lengths.sum()) for name, text in texts.items()}
    usual = plan.evaluation.cap or 0
    if plan.evaluation.tokens == AUTO and plan.cap != usual and max(tokens.values(), default=0) > usual:
        log.info(
            "eval.tokens=%s, as the run was begun: what it scores stays what it was; a new run would score "
            "%s tokens of each text at most",
            show(plan.cap),
            f"{usual:,}",
        )
    read = {name: int(texts[name].row_lengths[data.scored_rows(name)].sum()) for name in data.cut}
    if read:
        told = [f"{name} {count:,} of {tokens[name]:,}" for name, count in read.items()]
        log.info(
            "eval.tokens=%s: of %d of %d texts a part is scored, the same rows after every stage (%s%s; of "
            "all texts %s of %s tokens); eval.tokens=null scores all, in a run of its own",
            show(plan.cap),
            len(read),
            len(texts),
            ", ".join(told[:SHOWN]),
            f"; and {len(told) - SHOWN} more" * (len(told) > SHOWN),
            f"{sum((tokens | read).values()):,}",
            f"{sum(tokens.values()):,}",
        )


def base_origin(given: str | None, name: str) -> dict[str, str]:
    """Where the base is from: `name` of a new model, the folder's name of a local checkpoint, or a name on the
    Hub with its revision."""
    if given is None:
        return {"name": name, "origin": "built"}
    if Path(given).is_dir():
        return {"name": Path(given).resolve().name, "origin": "folder"}
    fetched = next(iter(checkpoint_files(given).values()), None)
    return {"name": given, "origin": "hub", **({"revision": fetched.parent.name} if fetched else {})}


def empty_scores(plan: Plan, corpora: Corpora, start: Base, data: DomainSequence) -> Scores:
    """Scores without rows: what is measured, on what."""
    objective, names, order = start.objective.scoring, plan.names, plan.order
    similarity: dict[str, Any] = {}
    if plan.similarity is not None:
        similarity = plan.similarity.tell(order) | {"embedding": plan.source.embedding}
    return Scores(
        domains=list(data.held_out),
        tokens=[int(objective.scorable(text.sizes()).sum()) for text in data.held_out.values()],
        bytes=[text.bytes for text in data.held_out.values()],
        scored=[int(objective.scored(data.scored_sizes(name)).sum()) for name in data.held_out],
        run={
            "name": str(plan.run.name),
            **{group: names[group] for group in ("method", "mask", "replay")},
            "variant": str(plan.run.variant),
            "model": names["model"],
            "order": order,
            "seed": plan.run.seed,
            "finished": False,
            "objective": start.objective_name,
        },
        texts={name: dict(corpora.by_name[name].facts) for name in data.held_out},
        conditions={
            "score_on": plan.source.score_on,
            "tokenizer": corpora.tokenizer_digest(start.tokenizer)[:8],
            "length": start.length,
            "mask_rate": plan.model.mask_rate if start.objective_name != "causal" else None,
            "scored": objective.scores,
            **({"mean_span": plan.model.mean_span} if start.objective_name == "span" else {}),
            **({"packing": corpora.packing} if corpora.packing != CONCAT else {}),
            **({"cap": data.eval_tokens} if data.cut else {}),
        },
        base=base_origin(plan.model.checkpoint, names["model"]),
        similarity=similarity,
        config_digest=plan.config_digest,
        numerics={"precision": str(plan.trainer.precision), "attention": plan.trainer.attention},
        versions={
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in PACKAGES},
            "cpt": cpt.__version__,
        },
    )
