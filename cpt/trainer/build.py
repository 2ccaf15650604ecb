"""Build the pieces of a run from a plan: the method with its model, its data, its empty scores."""

import logging
import platform
from collections import Counter
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from transformers import PreTrainedModel

import cpt
from cpt.adapters.domain_store import find_domain_params
from cpt.adapters.lora import adapter_reach
from cpt.core.exceptions import format_value
from cpt.core.naming import list_choices
from cpt.core.processes import is_first_process
from cpt.core.randomness import key
from cpt.core.tensors import NamedTensors
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.packing import Packed, balance
from cpt.data.sources.base import CONCAT, GENERAL, TEXT
from cpt.data.text_checks import check_training_text, report_texts, unknown_share
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.models.block_attention import MASKABLE
from cpt.models.memory import COMPILE_OPTIONS, checkpoint_activations, pad_head
from cpt.models.objectives import Objective
from cpt.models.stored_weights import format_names
from cpt.models.trial import try_model
from cpt.models.units import find_blocks
from cpt.models.weights import Snapshot
from cpt.optim.rounding import lost_update_share
from cpt.optim.state import CarriedState
from cpt.trainer.auto import Machine
from cpt.trainer.base_model import Base
from cpt.trainer.options import BF16, FP16_MIXED, Precision
from cpt.trainer.plan import Plan
from cpt.trainer.run_dir import checkpoint_files

log = logging.getLogger(__name__)
# Optimizers whose step is about as large as the learning rate.
ADAM_LIKE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
PACKAGES = ("torch", "lightning", "transformers", "datasets")


def read_corpora(plan: Plan) -> Corpora:
    cache, workers = Path(plan.run.cache_dir), plan.data.preprocessing_num_workers
    return Corpora.read(plan.source, plan.order, cache=cache, workers=workers)


def build_method(plan: Plan, machine: Machine, start: Base) -> ContinualMethod:
    """The method with the base model; its random numbers depend on the seed alone."""
    options = plan.trainer
    torch.manual_seed(key(plan.run.seed, "method") % 2**63)
    model = start.model()
    pad_head(model)
    if machine.attn_implementation != "auto":
        model.set_attn_implementation(machine.attn_implementation)
    if machine.attn_implementation in ("auto", *MASKABLE):  # others run on GPUs only
        checkpoint = plan.model.name_or_path
        source = "model.config" if checkpoint is None else f"model.name_or_path={checkpoint}"
        try_model(model, start.objective, start.objective_name, length=start.length, source=source)
    module = plan.method.make(build_context(plan, model, start.objective, precision=machine.precision))
    module.auxiliary_models.update(module.aux_models())
    if plan.carry != "none":
        module.optimizer_state = CarriedState()
    if getattr(plan.lr_scheduler, "branches", False):
        module.weights_before_decay = Snapshot(module.model, persistent=True)
    if options.offload_method_state:
        for each in module.modules():
            if isinstance(each, NamedTensors):
                each.offload()
    if options.gradient_checkpointing:
        checkpoint_activations(module.model)
    if options.compile:
        for _, block in find_blocks(module.model):  # each on its own: they are alike, so that one is compiled
            block.compile(**COMPILE_OPTIONS)
    return module


def build_context(
    plan: Plan, model: PreTrainedModel, objective: Objective, *, precision: Precision
) -> MethodContext:
    """What every method gets in addition to its own options."""
    arguments = dict(plan.optim.arguments)
    if "fused" in arguments and precision in FP16_MIXED:
        arguments["fused"] = False  # it would scale gradients back itself, after they are clipped
    return MethodContext(
        model=model,
        objective=objective,
        length=plan.model.max_seq_length,
        masks=[mask.make() for mask in plan.masks],
        replay=plan.replay,
        freeze=plan.freeze,
        optimizer=partial(plan.optim.load(), **arguments),
        schedule=(lambda at: plan.lr_scheduler(at.joined)) if plan.carry == "all" else plan.lr_scheduler,
        seed=plan.run.seed,
    )


def log_settings(plan: Plan, machine: Machine, module: ContinualMethod, data: DomainSequence) -> None:
    """Logs of how many texts a part is scored, and the options that are set and change nothing."""
    if data.sampled_texts:
        lengths = {name: text.row_lengths for name, text in data.held_out.items()}
        cut = {name: lengths[name][data.scored_rows(name)] for name in data.sampled_texts}
        read, total = (sum(int(each.sum()) for each in some.values()) for some in (lengths | cut, lengths))
        log.info(
            f"Scoring a part of {len(cut)} of {len(lengths)} texts, the same rows after every stage "
            f"(eval.max_tokens={format_value(data.eval_tokens)}, {read:,} of {total:,} tokens); "
            "eval.max_tokens=null scores all, in a run of its own"
        )
    options, name, model, rate = plan.trainer, plan.names["method"], plan.model, plan.ignored_rate
    tensors = [each for each in module.modules() if isinstance(each, NamedTensors)]
    offloads = any(not isinstance(each, CarriedState) for each in tensors)
    on_disk, is_sharded = plan.modules.storage == "disk", options.strategy == "fsdp"
    steps, micro = (plan.settings["model"]["pretraining"] or {}).get("steps"), options.accumulate_grad_batches
    is_single = plan.source.encoding is not None and plan.budget.batch_size == micro
    in_16 = getattr(module.options, "teacher", "run") != "run" and machine.precision in BF16
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    built = ("model.config.", "model.vocab_size")
    new = [key for key in list_choices(tuple(overrides)) if key.startswith(built)]
    reasons = {
        f"{', '.join(new)}: init_from is given": new and plan.settings["init_from"],
        f"model.pretraining.steps: {model.name_or_path} is given": model.name_or_path and steps,
        f"method.lr_multiplier={rate}: optim.lr is a number (model.lr=… is multiplied by it)": rate
        not in (None, 1),
        f"trainer.offload_method_state=true: {name} keeps no weights, or the device is a CPU": (
            options.offload_method_state and (not offloads or machine.device.type == "cpu")
        ),
        "domains.packing=document_mask: samples come one by one": plan.source.isolated and is_single,
        f"method.teacher: all is in 16 bits (trainer.precision={machine.precision})": in_16,
        "the mask's backend=backward: later micro-batches of a step select rows too": (
            micro > 1 and any(mask.limits for mask in module.masks)
        ),
        f"modules.storage=disk: {name} has no modules per domain, or they are sharded": (
            on_disk and (is_sharded or not find_domain_params(module))
        ),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        log.info("No effect of %s", reason)

    difference = module.describe_accumulation()
    if micro > 1 and difference:
        log.info("Accumulating gradients (trainer.accumulate_grad_batches=%d): %s", micro, difference)

    warn_of_lost_updates(plan, module, precision=machine.precision)
    warn_of_untrained_rows(plan, module)
    log_experts(module.model)


def log_experts(model: PreTrainedModel) -> None:
    """Logs what is not trained of a mixture of experts: the loss that balances its router, and experts that
    adapters do not reach."""
    if not is_first_process():
        return
    config = model.config.get_text_config()
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if getattr(config, "output_router_logits", False) and coefficient:
        log.warning(
            "Training without the load-balancing loss of the router (router_aux_loss_coef=%s), "
            "which the config.json of this %s asks for",
            coefficient,
            config.model_type,
        )

    reach = adapter_reach(model)
    if reach is not None and reach.unreached_experts:
        names = format_names([*reach.unreached_experts])
        message = "The adapters reach %.1f %% of the weights without embeddings: not the experts (%s)"
        log.warning(message, 100 * reach.adapted / reach.total, names)


def warn_of_lost_updates(plan: Plan, module: ContinualMethod, *, precision: Precision) -> None:
    """Logs which share of weights in bfloat16 an optimizer step of the peak rate does not change."""
    if precision != "bf16-true":
        return
    rate = plan.optim.arguments.get("lr")
    remedy = "trainer.precision=bf16-mixed has 32-bit weights; a larger optim.lr loses fewer updates"
    if rate is None or not issubclass(plan.optim.load(), ADAM_LIKE):
        log.warning(
            "trainer.precision=bf16-true: updates below about 1/512 of a weight are lost to rounding; %s",
            remedy,
        )
        return
    frozen = {id(parameter) for parameter in module.frozen}
    trained = [each for each in module.model.parameters() if id(each) not in frozen]
    share = lost_update_share(trained, rate=rate)
    log.warning(
        "trainer.precision=bf16-true: a step of optim.lr=%s is lost to rounding for %.0f %% of the trained "
        "weights, and for more of them as the rate decays; %s",
        format_value(rate),
        100 * share,
        remedy,
    )


def warn_of_untrained_rows(plan: Plan, module: ContinualMethod) -> None:
    """Logs where rows for new tokens are asked for and the method does not train them."""
    if not plan.model.resize or plan.names["method"] == "none":
        return
    table = module.model.get_input_embeddings().weight
    frozen = {id(parameter) for parameter in module.frozen}
    if id(table) in frozen or not table.requires_grad:
        log.warning(
            "Rows of new tokens (model.resize=true) are not trained by method=%s and stay at their initial "
            "values; a method that trains all weights does, or method=peft method.tuner=dora with "
            "modules_to_save or trainable_token_indices (docs/methods.md)",
            plan.names["method"],
        )


def build_data(
    plan: Plan, machine: Machine, corpora: Corpora, start: Base, module: ContinualMethod
) -> DomainSequence:
    """The stages of a method over the domains of a plan."""
    options, replay, source = plan.trainer, module.replay, plan.source
    domains = module.stages(plan.order)

    def packed(name: str, split: str) -> Packed:
        return corpora.packed(
            name, split, format=start.text_format, length=plan.model.max_seq_length, seq2seq=start.seq2seq
        )

    train = {part: packed(part, "train") for domain in domains for part in domain.texts}
    held_out = {name: packed(name, source.score_on) for name in (*plan.order, GENERAL)}
    raw_texts = {f"{name} train": text for name, text in train.items() if source.form(name) == TEXT}
    for name in raw_texts:
        check_training_text(name.removesuffix(" train"), raw_texts[name], start.text_format)
    raw_texts |= {
        f"{name} {source.score_on}": text for name, text in held_out.items() if source.form(name) == TEXT
    }
    report_texts(raw_texts, start.text_format, is_causal=start.objective_name == "causal")
    general = {GENERAL: packed(GENERAL, "train")} if replay.general_ratio else {}
    check_training_texts(train | general, start)
    if source.balanced is not False and train:
        train = balance(train, tokens=None if source.balanced is True else source.balanced)
    return DomainSequence(
        domains,
        train=train | general,
        held_out=held_out,
        objective=start.objective,
        budget=plan.budget,
        replay=replay,
        seed=plan.run.seed,
        accumulate=options.accumulate_grad_batches,
        eval_batch_size=options.eval_batch_size,
        importance_samples=options.importance_samples,
        workers=machine.num_workers,
        eval_tokens=plan.settings["eval"]["max_tokens"],
        validation={name: packed(name, "valid") for name in (*plan.order, GENERAL)}
        if plan.has_monitor
        else {},
    )


def check_training_texts(texts: Mapping[str, Packed], start: Base) -> None:
    """Raises ValueError for training text from which nothing would be learned, as documents of one token in
    sequences of their own."""
    objective = start.objective.scoring
    for name, text in texts.items():
        if len(text) and objective.scored(text.sizes()).any():
            continue
        reason = f"the training text of {name} has no token that is scored"
        allowed = f"longer text that the tokenizer {start.tokenizer.name_or_path} knows"
        raise ValueError(f"{reason}. Allowed: {allowed}")


def describe_text(name: str, corpora: Corpora, data: DomainSequence, *, score_on: str) -> dict[str, Any]:
    """The facts of a text for scores.json; where there are any, `skipped`, {kind: number} of examples that
    could not be used, and by split the share of unknown tokens and special tokens that the text spells."""
    described = {key.replace("digest", "hash"): fact for key, fact in corpora.by_name[name].facts.items()}
    skipped: Counter[str] = Counter()
    parts = [described.pop("skipped", {})]
    parts += [texts[name].skipped for texts in (data.train, data.validation, data.held_out) if name in texts]
    for part in parts:
        for kind, entry in part.items():
            skipped[kind] += entry["count"]

    splits = {score_on: data.held_out[name]}
    if name in data.train:
        splits["train"] = data.train[name]
    unknown = {split: unknown_share(text) for split, text in splits.items() if unknown_share(text)}
    spelled = {split: text.facts["spelled"] for split, text in splits.items() if text.facts.get("spelled")}

    if skipped:
        described["skipped"] = dict(skipped)
    if unknown:
        described["unknown"] = unknown
    if spelled:
        described["special_tokens"] = spelled
    return described


def empty_scores(plan: Plan, machine: Machine, corpora: Corpora, start: Base, data: DomainSequence) -> Scores:
    """Scores without rows: what is measured, on what."""
    objective, names, given = start.objective.scoring, plan.names, plan.model.name_or_path
    scored = {name: int(objective.scored(data.scored_sizes(name)).sum()) for name in data.held_out}
    if empty := next((name for name, count in scored.items() if not count), None):
        told = f"the {plan.source.score_on} text of {empty} has no token that is scored"
        known = f"the tokenizer {start.tokenizer.name_or_path} knows"
        allowed = f"longer text that {known}, a larger eval.max_tokens"
        raise ValueError(f"{told}. Allowed: {allowed}")
    for name, text in data.validation.items():  # which the monitor compares
        if not objective.scored(text.sizes()).any():
            told = f"the validation text of {name} has no token that is scored"
            raise ValueError(f"{told}. Allowed: longer text that the tokenizer knows, monitor.every=null")
    kind, similarity = start.objective_name, plan.similarity
    base: dict[str, Any] = {"name": given or names["model"], "origin": "hub" if given else "built"}
    if given is not None and Path(given).is_dir():
        base = {"name": Path(given).resolve().name, "origin": "folder"}
    elif given is not None and (fetched := checkpoint_files(given)):
        base["revision"] = next(iter(fetched.values())).parent.name
    adapted = [f"the first {plan.model.layers} blocks"] * (plan.model.layers is not None)
    if given is not None and plan.model.pretraining is not None:
        steps = plan.model.pretraining.head_steps
        trained = f"head trained for {steps} steps on general text"
        adapted.append(trained if steps else "head as it is, or random")
    base |= {"adapted": "; ".join(adapted)} if adapted else {}
    if plan.resolved["init_from"] is not None:
        earlier = Scores.load(Path(plan.resolved["init_from"]) / "scores.json")
        base["learned"] = list(dict.fromkeys([*earlier.base.get("learned", []), *earlier.run["order"]]))
    return Scores(
        domains=list(data.held_out),
        tokens=[int(objective.scorable(text.sizes()).sum()) for text in data.held_out.values()],
        bytes=[text.bytes for text in data.held_out.values()],
        scored=list(scored.values()),
        run={
            "name": str(plan.run.name),
            **{group: names[group] for group in ("method", "mask", "replay")},
            "variant": str(plan.run.variant),
            "model": names["model"],
            "order": plan.order,
            "seed": plan.run.seed,
            "finished": False,
            "objective": kind,
        },
        texts={
            name: describe_text(name, corpora, data, score_on=plan.source.score_on) for name in data.held_out
        },
        conditions={
            "score_on": plan.source.score_on,
            "tokenizer": corpora.tokenizer_digest(start.tokenizer)[:8],
            "length": start.length,
            "mask_rate": plan.model.mask_rate if kind != "causal" else None,
            "scored": objective.scores,
            **({"mean_span": plan.model.span_length} if kind == "span" else {}),
            **({"packing": corpora.packing} if corpora.packing != CONCAT else {}),
            **start.text_format.conditions,
            **({"cap": data.eval_tokens} if data.sampled_texts else {}),
        },
        base=base,
        similarity=similarity.to_json(plan.order) | {"embedding": "tfidf"} if similarity else {},
        config_hash=plan.config_hash,
        numerics={"precision": str(machine.precision), "attention": machine.attn_implementation},
        versions={"python": platform.python_version()}
        | {name: metadata.version(name) for name in PACKAGES}
        | {"cpt": cpt.__version__},
    )
