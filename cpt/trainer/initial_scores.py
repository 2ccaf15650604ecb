"""What is measured in a run, and on what: the scores that it starts with."""

import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import cpt
from cpt.core.exceptions import format_value
from cpt.core.messages import count_noun
from cpt.core.processes import count_cores
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.sources.base import CONCAT
from cpt.data.text_checks import compute_unknown_share
from cpt.evaluation.scores import Scores
from cpt.trainer.auto import Machine
from cpt.trainer.base_model import Base
from cpt.trainer.compile_choice import AUTO, BLOCKS, NOTHING
from cpt.trainer.plan import Plan
from cpt.trainer.run_dir import list_checkpoint_files

PACKAGES = ("torch", "lightning", "transformers", "datasets")


def make_initial_scores(
    plan: Plan, machine: Machine, corpora: Corpora, base: Base, data: DomainSequence
) -> Scores:
    """Scores without rows. Raises ValueError for a text of which nothing would be scored."""
    objective = base.objective.scoring
    num_scored = count_scored_tokens(plan, base, data)
    check_validation_texts(base, data)
    return Scores(
        domains=list(data.held_out),
        tokens=[int(objective.scorable(text.sizes()).sum()) for text in data.held_out.values()],
        bytes=[text.bytes for text in data.held_out.values()],
        scored=list(num_scored.values()),
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
            "objective": base.objective_name,
        },
        texts={
            name: describe_text(name, corpora, data, score_on=plan.source.score_on) for name in data.held_out
        },
        conditions=find_loss_conditions(plan, corpora, base, data),
        base=find_base_origin(plan, base),
        similarity=describe_similarity(plan),
        config_hash=plan.config_hash,
        numerics=find_numerics(machine, base) | describe_speed(plan, machine),
        versions=find_versions(),
    )


def find_numerics(machine: Machine, base: Base) -> dict[str, str]:
    """The precision, the implementation of attention, the devices, and what the base is quantized to, if it
    is."""
    numerics = {
        "precision": str(machine.precision),
        "attention": machine.attn_implementation,
        "device": name_devices(machine),
    }
    quantization = base.find_quantization()
    if quantization != "none":
        numerics["quantization"] = quantization
    return numerics


def describe_speed(plan: Plan, machine: Machine) -> dict[str, str]:
    """What is compiled, if `trainer.compile=auto` decided it, and the number of samples in a forward pass of
    training, if `trainer.micro_batch` set or chose it."""
    described = {}
    if plan.trainer.compile == AUTO:
        described["compile"] = BLOCKS if machine.compiles_blocks else NOTHING
    if plan.settings["trainer"].get("micro_batch") is not None:
        num_shares = machine.world_size * plan.trainer.accumulate_grad_batches
        described["micro_batch"] = str(plan.budget.batch_size // num_shares)
    return described


def name_devices(machine: Machine) -> str:
    """`4 × NVIDIA H200`, `2 CPU cores`, or the kind of another device."""
    if machine.device.type == "cpu":
        return count_noun(count_cores(), "CPU core")
    name = machine.device.type
    if machine.device.type == "cuda":
        name = torch.cuda.get_device_name(machine.device)
    return f"{machine.world_size} × {name}" if machine.world_size > 1 else name


def find_versions() -> dict[str, str]:
    """The versions of Python, of the libraries that decide the numbers, and of cpt."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        versions[package] = metadata.version(package)
    versions["cpt"] = cpt.__version__
    return versions


def count_scored_tokens(plan: Plan, base: Base, data: DomainSequence) -> dict[str, int]:
    """The tokens of each held-out text that contribute to its loss. Raises ValueError if a text has none."""
    num_scored = {}
    for name in data.held_out:
        num_scored[name] = int(base.objective.scoring.scored(data.scored_sizes(name)).sum())
    for name, count in num_scored.items():
        if count == 0:
            raise ValueError(
                f"the {plan.source.score_on} text of {name} has no token that is scored. "
                f"Allowed: longer text that the tokenizer {base.tokenizer.name_or_path} knows, "
                "a larger eval.max_tokens"
            )
    return num_scored


def check_validation_texts(base: Base, data: DomainSequence) -> None:
    """Raises ValueError if a text that the monitor compares has no scored token."""
    for name, text in data.validation.items():
        if not base.objective.scoring.scored(text.sizes()).any():
            raise ValueError(
                f"the validation text of {name} has no token that is scored. "
                "Allowed: longer text that the tokenizer knows, monitor.every=null"
            )


def describe_text(name: str, corpora: Corpora, data: DomainSequence, *, score_on: str) -> dict[str, Any]:
    """The facts of a text for scores.json. Where there are any, also `skipped`, the number of examples that
    could not be used by kind, `unknown`, the share of unknown tokens by split, and `special_tokens`, how many
    the text spells by split."""
    corpus_facts = corpora.by_name[name].facts
    described = {}
    for key, fact in corpus_facts.items():
        if key != "skipped":
            described[key.replace("digest", "hash")] = fact

    packed_texts = [texts[name] for texts in (data.train, data.validation, data.held_out) if name in texts]
    skipped_while_read = corpus_facts.get("skipped", {})
    skipped_while_packed = [text.skipped for text in packed_texts]
    skipped = count_skipped([skipped_while_read, *skipped_while_packed])
    if skipped:
        described["skipped"] = skipped

    splits = {score_on: data.held_out[name]}
    if name in data.train:
        splits["train"] = data.train[name]
    unknown = {
        split: compute_unknown_share(text) for split, text in splits.items() if compute_unknown_share(text)
    }
    if unknown:
        described["unknown"] = unknown
    spelled = {split: text.facts["spelled"] for split, text in splits.items() if text.facts.get("spelled")}
    if spelled:
        described["special_tokens"] = spelled
    return described


def count_skipped(facts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, int]:
    """How many examples were skipped, by kind; `facts` are several `BadExamples.facts`."""
    counts: Counter[str] = Counter()
    for by_kind in facts:
        for kind, entry in by_kind.items():
            counts[kind] += entry["count"]
    return dict(counts)


def find_loss_conditions(plan: Plan, corpora: Corpora, base: Base, data: DomainSequence) -> dict[str, Any]:
    """What a loss depends on besides the model and the texts."""
    conditions: dict[str, Any] = {
        "score_on": plan.source.score_on,
        "tokenizer": corpora.tokenizer_digest(base.tokenizer)[:8],
        "max_seq_length": base.length,
        "mlm_probability": plan.model.mask_rate if base.objective_name != "causal" else None,
        "scored": base.objective.scoring.scores,
    }
    if base.objective_name == "span":
        conditions["mean_span"] = plan.model.span_length
    if corpora.packing != CONCAT:
        conditions["packing"] = corpora.packing
    conditions.update(base.text_format.conditions)
    if data.sampled_texts:
        conditions["cap"] = data.eval_tokens
    return conditions


def find_base_origin(plan: Plan, base: Base) -> dict[str, Any]:
    """Where the base comes from (`name`; `origin`: built, folder or hub; the hub's `revision`), how it was
    `adapted`, in words, and the domains that it has `learned` in earlier runs."""
    checkpoint = plan.model.name_or_path
    if checkpoint is None:
        facts: dict[str, Any] = {"name": plan.names["model"], "origin": "built"}
    elif Path(checkpoint).is_dir():
        facts = {"name": Path(checkpoint).resolve().name, "origin": "folder"}
    else:
        facts = {"name": checkpoint, "origin": "hub"}
        paths = list(list_checkpoint_files(checkpoint).values())
        if paths:
            facts["revision"] = paths[0].parent.name

    adaptations = []
    if plan.model.num_hidden_layers is not None:
        adaptations.append(f"the first {count_noun(plan.model.num_hidden_layers, 'block')}")
    if plan.model.rope_parameters is not None:
        adaptations.append(f"RoPE {format_value(plan.model.rope_parameters)}")
    if checkpoint is not None and plan.model.pretraining is not None:
        steps = plan.model.pretraining.head_steps
        if steps:
            adaptations.append(f"head trained for {count_noun(steps, 'step')} on general text")
        else:
            adaptations.append("head as it is, or random")
    if plan.model.tokenizer is not None:
        source = Path(plan.model.tokenizer)
        source_name = source.resolve().name if source.is_dir() else plan.model.tokenizer
        adaptations.append(f"{len(base.tokenizer)} entries of the tokenizer {source_name}")
    quantization = base.find_quantization()
    if quantization != "none":
        adaptations.append(f"linear layers in {quantization}")
    if adaptations:
        facts["adapted"] = "; ".join(adaptations)

    if plan.resolved["init_from"] is not None:
        earlier_scores = Scores.load(Path(plan.resolved["init_from"]) / "scores.json")
        learned = [*earlier_scores.base.get("learned", []), *earlier_scores.run["order"]]
        facts["learned"] = list(dict.fromkeys(learned))  # a domain may have been learned twice
    return facts


def describe_similarity(plan: Plan) -> dict[str, Any]:
    """The similarity of the domains' texts, if it decided their order."""
    if not plan.similarity:
        return {}
    return {**plan.similarity.reorder(plan.order).to_json(), "embedding": "tfidf"}
