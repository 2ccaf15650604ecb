"""From a plan to the pieces of a run: the method with its model, its data, its empty scores."""

import logging
import platform
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import cpt
from cpt.adapters.domain_store import domain_params
from cpt.core.randomness import key
from cpt.core.tensors import NamedTensors, offload
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.packing import Packed, balance
from cpt.data.replay import Generated, Mixture
from cpt.data.sources.base import CONCAT, GENERAL
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualModule, Shared
from cpt.models.memory import checkpoint_activations, compile_blocks, even_head
from cpt.models.objectives import Objective
from cpt.models.weights import Snapshot
from cpt.optim.state import CarriedState
from cpt.trainer.capping import tell_cap
from cpt.trainer.identity import checkpoint_files
from cpt.trainer.plan import Plan
from cpt.trainer.precision import BF16
from cpt.trainer.pretraining import Base
from cpt.trainer.raising import tell_end

log = logging.getLogger(__name__)
PACKAGES = ("torch", "lightning", "transformers", "datasets")


def read_corpora(plan: Plan) -> Corpora:
    """The texts of a plan, read once for all runs."""
    folder = Path(plan.run.cache_dir)
    return Corpora.read(plan.source, plan.order, cache=folder, workers=plan.data.workers)


def make_method(plan: Plan, start: Base) -> ContinualModule:
    """The method, with the base model in it; what it draws at random depends on the seed alone."""
    tell_unused_base(plan)
    tell_rate(plan)
    tell_packing(plan)
    torch.manual_seed(key(plan.run.seed, "method") % 2**63)
    module = plan.method.make(make_shared(plan, make_model(plan, start), start.objective))
    tell_rows(plan, module)
    tell_teacher(plan, module)
    module.beside.update(module.companions())
    if plan.carry != "none":
        module.carried = CarriedState()
    if getattr(plan.schedule, "branches", False):
        module.trunk = Snapshot(module.model, persistent=True)
    if plan.trainer.offload:
        offload(module)
    if plan.trainer.gradient_checkpointing:
        checkpoint_activations(module.model)
    if plan.trainer.compile:
        compile_blocks(module.model)
    return module


def make_model(plan: Plan, start: Base) -> PreTrainedModel:
    """The base model, with attention computed as the plan says, and its head as suits a GPU."""
    model = start.model()
    even_head(model)
    if plan.trainer.attention != "auto":
        model.set_attn_implementation(plan.trainer.attention)
    return model


def make_shared(plan: Plan, model: PreTrainedModel, objective: Objective) -> Shared:
    """What a run gives every method, beside its own options."""
    return Shared(
        model=model,
        objective=objective,
        length=plan.model.length,
        masks=[mask.make() for mask in plan.masks],
        replay=plan.replay,
        freeze=plan.freeze,
        optimizer=partial(plan.optim.load(), **optimizer_arguments(plan)),
        schedule=(lambda at: plan.schedule(at.joined)) if plan.carry == "all" else plan.schedule,
        seed=plan.run.seed,
    )


def optimizer_arguments(plan: Plan) -> dict[str, Any]:
    """What the optimizer is told. One that scales gradients back itself, as fused ones do, would have them
    clipped before that: in 16-mixed it is not fused."""
    scaled = plan.trainer.precision in ("16-mixed", "16", 16)
    fused = "fused" in plan.optim.arguments and scaled
    return {**plan.optim.arguments, **({"fused": False} if fused else {})}


def tell_unused_base(plan: Plan) -> None:
    """Logs that a checkpoint leaves the pre-training without effect, where the config has one."""
    given = plan.settings["model"]
    if given["checkpoint"] is not None and given["base"] is not None:
        log.info(
            "Ignoring model.base: model.checkpoint=%s is loaded, not pre-trained here", given["checkpoint"]
        )


def tell_rate(plan: Plan) -> None:
    """Tells, in a line, where a method's own rate has no effect."""
    if plan.lost_rate is not None:
        log.info(
            "optim.lr=%g is the learning rate as it stands: method.rate=%g of %s has no effect "
            "(model.lr=… would be multiplied by it)",
            plan.optim.arguments["lr"],
            plan.lost_rate,
            plan.names["method"],
        )


def tell_packing(plan: Plan) -> None:
    """Tells, in a line, where no samples meet that could share rows."""
    batch_size, parts = plan.budget.batch_size, plan.trainer.accumulate_grad_batches
    if plan.source.isolated and plan.source.encoding is not None and batch_size == parts:
        log.info(
            "domains.packing=isolated without effect: the samples of trainer.batch_size=%d come one by one "
            "(trainer.accumulate_grad_batches=%d)",
            batch_size,
            parts,
        )


def tell_rows(plan: Plan, module: ContinualModule) -> None:
    """Tells, in a line, where rows are not known before a backward pass."""
    parts = plan.trainer.accumulate_grad_batches
    if parts > 1 and any(mask.limits for mask in module.masks):
        log.info(
            "the mask's backend=backward without effect: parts of a step that are to come choose rows too "
            "(trainer.accumulate_grad_batches=%d)",
            parts,
        )


def tell_teacher(plan: Plan, module: ContinualModule) -> None:
    """Tells, in a line, where a teacher's own precision is the run's."""
    precision = plan.trainer.precision
    if getattr(module.options, "teacher", "run") != "run" and precision in BF16:
        log.info("method.teacher without effect: all is in 16 bits (trainer.precision=%s)", precision)


def tell_resting(plan: Plan, module: ContinualModule, device: torch.device) -> None:
    """Tells, in a line each, where a choice of what rests where changes nothing."""
    tell_parts(plan, module)
    if not plan.trainer.offload:
        return
    kept = [each for each in module.modules() if isinstance(each, NamedTensors)]
    if not any(not isinstance(each, CarriedState) for each in kept):
        log.info("trainer.offload=true without effect: %s keeps no weights that rest", plan.names["method"])
    elif device.type == "cpu":
        log.info("trainer.offload=true without effect: on a processor all is in the host's memory")


def tell_parts(plan: Plan, module: ContinualModule) -> None:
    """Tells, in a line, where nothing rests that could lie on disk."""
    if plan.parts.keep != "disk":
        return
    if not domain_params(module):
        log.info("parts.keep=disk without effect: %s keeps no parts that rest", plan.names["method"])
    elif plan.trainer.strategy == "fsdp":
        log.info("parts.keep=disk: with strategy=fsdp parts that are shared out stay in memory")


def make_sequence(plan: Plan, corpora: Corpora, start: Base, module: ContinualModule) -> DomainSequence:
    """The stages of a method over the domains of a plan."""
    options = plan.trainer
    domains = module.stages(plan.order)
    replay = module.replay
    learned = [part for domain in domains for part in domain.parts]

    def packed(name: str, split: str) -> Any:
        return corpora.packed(
            name, split, tokenizer=start.tokenizer, length=plan.model.length, seq2seq=start.seq2seq
        )

    train = {name: packed(name, "train") for name in learned}
    if (balanced := plan.source.balanced) is not False and train:
        train = balance(train, tokens=None if balanced is True else balanced)
    data = DomainSequence(
        domains,
        train=train | ({GENERAL: packed(GENERAL, "train")} if replay.general else {}),
        held_out={name: packed(name, plan.source.score_on) for name in (*plan.order, GENERAL)},
        objective=start.objective,
        budget=plan.budget,
        replay=replay,
        seed=plan.run.seed,
        accumulate=options.accumulate_grad_batches,
        eval_batch_size=options.eval_batch_size,
        probe_samples=options.probe_samples,
        workers=options.workers,
        eval_tokens=plan.cap,
        forms=make_forms(corpora, start, learned, replay),
        validation={name: packed(name, "valid") for name in (*plan.order, GENERAL)} if plan.watches else {},
    )
    tell_cap(plan, data)
    tell_end(plan)
    return data


def make_forms(corpora: Corpora, start: Base, learned: Sequence[str], replay: Mixture) -> dict[str, Packed]:
    """The domains' examples as they are written, where the model is to learn that; else nothing."""
    if not isinstance(replay, Generated) or corpora.encoding is None or not replay.past or not replay.forms:
        return {}
    encoder = corpora.encoder(start.tokenizer, start.length, seq2seq=start.seq2seq)
    return {name: corpora.forms(name, encoder, sign=replay.sign(name)) for name in learned}


def tell_similarity(plan: Plan) -> dict[str, Any]:
    """What decided the order of a plan; nothing where texts did not."""
    if plan.similarity is None:
        return {}
    return plan.similarity.tell(plan.order) | {"embedding": plan.source.embedding}


def tell_base(plan: Plan) -> dict[str, str]:
    """What the base is called elsewhere: a name on the hub with its revision; of a folder the last part of
    its path alone."""
    given = plan.model.checkpoint
    if given is None:
        return {"name": plan.names["model"], "origin": "built"}
    if Path(given).is_dir():
        return {"name": Path(given).resolve().name, "origin": "folder"}
    fetched = next(iter(checkpoint_files(given).values()), None)
    return {"name": given, "origin": "hub", **({"revision": fetched.parent.name} if fetched else {})}


def make_scores(plan: Plan, corpora: Corpora, start: Base, data: DomainSequence) -> Scores:
    """Scores without rows: what is measured, on what."""
    held_out, objective = data.held_out.values(), start.objective.scoring
    sizes = [text.sizes() for text in held_out]
    return Scores(
        domains=list(data.held_out),
        tokens=[int(objective.scorable(each).sum()) for each in sizes],
        bytes=[text.bytes for text in held_out],
        scored=[int(objective.scored(data.scored_sizes(name)).sum()) for name in data.held_out],
        run={
            "name": str(plan.run.name),
            "method": plan.names["method"],
            "mask": plan.names["mask"],
            "replay": plan.names["replay"],
            "variant": str(plan.run.variant),
            "model": plan.names["model"],
            "order": plan.order,
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
        base=tell_base(plan),
        similarity=tell_similarity(plan),
        config_digest=plan.config_digest,
        numerics={"precision": str(plan.trainer.precision), "attention": plan.trainer.attention},
        versions={
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in PACKAGES},
            "cpt": cpt.__version__,
        },
    )
