"""Runs every method on a small model of every family, and every family in every kind of pass; writes
docs/support.md with the results.

`python docs/site/support.py` runs what docs/support.json lacks (`--again`: all; `--methods`, `--families`:
some of it) and writes both files. A pair of method and family is two domains of two steps on a model of a few
thousand weights, evaluated and exported. An error message is stored as the user reads it."""

import argparse
import json
import logging
import os
import random
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS.parent))

from hydra import compose, initialize_config_dir  # noqa: E402

import cpt.core.naming  # noqa: E402, F401  (registers the resolvers)
from cpt.core.config import CONF  # noqa: E402
from cpt.core.errors import find_reason  # noqa: E402

CHOICE = re.compile(r"method=\w+ is invalid (with mask=\w+ )?for a [\w-]+: ")
RESULTS, PAGE = DOCS / "support.json", DOCS / "support.md"
WORDS = {
    "law": "the court finds that a party to this contract must pay damages under section four of the act",
    "food": "we ordered fresh pasta with basil and the waiter brought warm bread and a sweet lemon dessert",
    "general": "the house stands near a river and people walk along its quiet old streets every morning",
}
NUM_SENTENCES = 40  # of each text

ENCODER = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2"
DECODER = f"{ENCODER}, num_key_value_heads: 1, max_position_embeddings: 64"
EXPERTS = "num_experts: 4, num_experts_per_tok: 2"
LOCAL_EXPERTS = "num_local_experts: 4, num_experts_per_tok: 2"
LATENT_ATTENTION = (
    "num_key_value_heads: 2, q_lora_rank: 16, kv_lora_rank: 16, qk_rope_head_dim: 8, qk_nope_head_dim: 8, "
    "v_head_dim: 16"
)
ROUTED_EXPERTS = (
    "n_routed_experts: 4, num_experts_per_tok: 2, n_group: 2, topk_group: 1, n_shared_experts: 1, "
    "moe_intermediate_size: 24, first_k_dense_replace: 1"
)
STATE_SPACE = (
    "mamba_d_ssm: 32, mamba_n_heads: 4, mamba_d_head: 8, mamba_n_groups: 1, mamba_d_state: 8, "
    "mamba_chunk_size: 8"
)
T5 = "model_type: t5, d_model: 32, d_kv: 16, d_ff: 48, num_layers: 1, num_decoder_layers: 1, num_heads: 2"
# By the name of a column: the base of conf/model, and the arguments of the model that is made.
FAMILIES: dict[str, tuple[str, str]] = {
    "BERT": ("tiny_roberta", f"model_type: bert, {ENCODER}, max_position_embeddings: 64"),
    "RoBERTa": ("tiny_roberta", f"model_type: roberta, {ENCODER}, max_position_embeddings: 66"),
    "ModernBERT": ("tiny_modernbert", f"model_type: modernbert, {ENCODER}, max_position_embeddings: 64"),
    "MPNet": ("tiny_roberta", f"model_type: mpnet, {ENCODER}, max_position_embeddings: 66"),
    "DeBERTa v2": (
        "tiny_roberta",
        f"model_type: deberta-v2, {ENCODER}, max_position_embeddings: 64, relative_attention: true, "
        "pos_att_type: [c2p, p2c], position_buckets: 8",
    ),
    "GPT-2": ("tiny_gpt2", "model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 2, n_positions: 64"),
    "GPT-NeoX": ("tiny_gpt2", f"model_type: gpt_neox, {ENCODER}, max_position_embeddings: 64"),
    "Llama": ("tiny_gpt2", f"model_type: llama, {DECODER}"),
    "Llama, tied head": ("tiny_gpt2", f"model_type: llama, tie_word_embeddings: true, {DECODER}"),
    "Qwen 2": ("tiny_gpt2", f"model_type: qwen2, {DECODER}"),
    "Qwen 3": ("tiny_gpt2", f"model_type: qwen3, head_dim: 16, {DECODER}"),
    "Qwen 3 MoE": (
        "tiny_gpt2",
        f"model_type: qwen3_moe, head_dim: 16, moe_intermediate_size: 24, decoder_sparse_step: 1, {EXPERTS}, "
        f"{DECODER}",
    ),
    "Gemma 2": ("tiny_gpt2", f"model_type: gemma2, head_dim: 16, {DECODER}"),
    "Gemma 3": ("tiny_gpt2", f"model_type: gemma3_text, head_dim: 16, {DECODER}"),
    "Mistral": ("tiny_gpt2", f"model_type: mistral, {DECODER}"),
    "Ministral": ("tiny_gpt2", f"model_type: ministral3, head_dim: 16, {DECODER}"),
    "Mixtral": ("tiny_gpt2", f"model_type: mixtral, {LOCAL_EXPERTS}, {DECODER}"),
    "Phi 3 and 4": ("tiny_gpt2", f"model_type: phi3, {DECODER}"),
    "OLMo 2": ("tiny_gpt2", f"model_type: olmo2, {DECODER}"),
    "OLMo 3": ("tiny_gpt2", f"model_type: olmo3, {DECODER}"),
    "OLMoE": ("tiny_gpt2", f"model_type: olmoe, {EXPERTS}, {DECODER}"),
    "SmolLM 3": ("tiny_gpt2", f"model_type: smollm3, {DECODER}"),
    "Granite": ("tiny_gpt2", f"model_type: granite, {DECODER}"),
    "gpt-oss": ("tiny_gpt2", f"model_type: gpt_oss, head_dim: 16, {LOCAL_EXPERTS}, {DECODER}"),
    "DeepSeek V3": (
        "tiny_gpt2",
        f"model_type: deepseek_v3, {ENCODER}, max_position_embeddings: 64, {LATENT_ATTENTION}, "
        f"{ROUTED_EXPERTS}",
    ),
    "GLM 4": ("tiny_gpt2", f"model_type: glm4, head_dim: 16, {DECODER}"),
    "LFM 2": ("tiny_gpt2", f"model_type: lfm2, layer_types: [conv, full_attention], {DECODER}"),
    "Falcon H1": ("tiny_gpt2", f"model_type: falcon_h1, {STATE_SPACE}, {DECODER}"),
    "T5": ("tiny_t5", f"{T5}, feed_forward_proj: relu"),
    "T5 v1.1": ("tiny_t5", f"{T5}, feed_forward_proj: gated-gelu, tie_word_embeddings: false"),
}
SMALL = [
    "model.max_seq_length=16",
    "model.vocab_size=400",
    "model.pretraining.steps=2",
    "model.pretraining.batch_size=4",
    "trainer.steps=2",
    "trainer.batch_size=4",
    "trainer.eval_batch_size=16",
    "trainer.importance_samples=4",
    "domains=texts",
    "order=[law,food]",
    "logger=none",
    "trainer.accelerator=cpu",
]
FITTING = {
    "prompt": ["method.num_virtual_tokens=8"],  # the models have 48 positions for prompts
    "sdft": [
        "domains=tasks",
        "domains/template=bare",
        "answers=none",
        "method.prompt='of {demonstration} to'",  # shorter than the default, as 64 positions are
        "method.max_new_tokens=4",
    ],
}
NEED_EXAMPLES = ("sdft",)  # methods that train on questions with answers alone
# Options of method=ncl.
WITH_NCL = (
    "mask=migu",
    "mask=mofo",
    "replay=past",
    "loss=eaft",
    "loss=rho1",
    "loss=flow",
    "freeze.layers=1",
)

# Kinds of pass, with the settings of each; attention is that of trainer.attn_implementation=auto by default.
PASSES: dict[str, dict[str, Any]] = {
    "eager": {"attention": "eager"},
    "sdpa": {"attention": "sdpa"},
    "bf16": {"bf16": True},
    "compiled": {"compiled": True},
}
CHECKPOINTING = "checkpointing"
ISOLATED = "isolated"
Results = dict[str, dict[str, str]]  # by row and family: empty, or the line that says why not


def list_rows() -> list[str]:
    """What is tried: every method by its name, then options of method=ncl."""
    methods = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
    return [*methods, *WITH_NCL]


def write_texts(root: Path) -> Path:
    """Writes two domains and general text of made-up sentences; returns the folder."""
    for seed, (name, words) in enumerate(WORDS.items()):
        generator = random.Random(seed)
        lines = []
        for number in range(NUM_SENTENCES):
            sentence = " ".join(generator.choices(words.split(), k=generator.randint(8, 20)))
            lines.append(f"{sentence} {number}.\n")
        (root / name).mkdir(parents=True)
        (root / name / "all.txt").write_text("".join(lines))
    return root


def write_tasks(root: Path, texts: Path) -> Path:
    """Writes the two domains of `texts` as questions whether a sentence is long; returns the folder."""
    for name in WORDS:
        (root / name).mkdir(parents=True, exist_ok=True)
        sentences = (texts / name / "all.txt").read_text(encoding="utf-8").splitlines()
        if name == "general":
            (root / name / "all.txt").write_text("\n".join(sentences), encoding="utf-8")
            continue
        rows = []
        for text in sentences:
            label = "long" if len(text.split()) > 14 else "short"
            rows.append(json.dumps({"text": text, "label": label}))
        (root / name / "train.jsonl").write_text("\n".join(rows[:30]), encoding="utf-8")
        (root / name / "test.jsonl").write_text("\n".join(rows[30:]), encoding="utf-8")
    return root


def choose_folder(row: str, texts: Path) -> Path:
    """The folder of what a row trains on: the texts, or questions on them."""
    return write_tasks(texts.parent / "tasks", texts) if row in NEED_EXAMPLES else texts


def list_overrides(row: str, family: str) -> list[str]:
    """The options of the run of a pair, but for its folders."""
    base, config = FAMILIES[family]
    choice = row if row in WITH_NCL else f"method={row}"
    model = [f"model={base}", "~model.config", f"+model.config={{{config}}}"]
    return [*model, *SMALL, choice, *FITTING.get(row, [])]


def try_pair(row: str, family: str, *, texts: Path, cache: Path, folder: Path) -> str:
    """Empty where a method trains, evaluates and exports a family; else the line that says why not."""
    from cpt.train import train

    folders = [f"domains.root={choose_folder(row, texts)}", f"cache_dir={cache}"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=[*folders, *list_overrides(row, family)])
    try:
        train(cfg, run_dir=folder)
    except ValueError as error:
        return find_reason(error)
    except Exception as error:  # of a library, shown as what it is
        return f"{type(error).__name__}: {find_reason(error)}"
    is_exported = row == "none" or (folder / "model" / "config.json").exists()
    return "" if is_exported else "nothing was exported"


def make_family(family: str, *, attention: str | None) -> Any:
    """A new model of a family in evaluation mode, with an implementation of attention. Raises ValueError
    where the class has none of that name."""
    import torch
    from omegaconf import OmegaConf
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    base, fields = FAMILIES[family]
    arguments = OmegaConf.to_container(OmegaConf.create(f"{{{fields}}}"))
    arguments = {"vocab_size": 400, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, **arguments}
    config = AutoConfig.for_model(arguments.pop("model_type"), **arguments)
    auto_model = {"tiny_gpt2": AutoModelForCausalLM, "tiny_t5": AutoModelForSeq2SeqLM}
    torch.manual_seed(0)
    return (
        auto_model.get(base, AutoModelForMaskedLM).from_config(config, attn_implementation=attention).eval()
    )


def try_documents(
    family: str, *, attention: str | None = None, bf16: bool = False, compiled: bool = False
) -> str:
    """ISOLATED where documents that share a row do not see each other in such a pass, else why not.

    A document in the middle of a row is exchanged: the hidden states of the others must stay to the bit."""
    import torch

    from cpt.models.block_attention import make_inputs, try_isolation
    from cpt.models.forward import hidden_states
    from cpt.models.units import find_blocks

    is_causal = FAMILIES[family][0] == "tiny_gpt2"
    if FAMILIES[family][0] == "tiny_t5":
        return "domains.packing=document_mask is invalid for an encoder-decoder"
    try:
        model = make_family(family, attention=attention)
        try_isolation(model, are_documents=True, causal=is_causal)
    except (ValueError, ImportError) as error:
        return shorten(find_reason(error))
    if compiled:
        for _, block in find_blocks(model):
            block.compile()

    ids = torch.arange(3, 27)[None]
    segments = torch.tensor([[0] * 8 + [1] * 8 + [2] * 8])
    exchanged = ids.clone()
    exchanged[:, 8:16] += 100
    outputs = []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        for row in (ids, exchanged):
            batch: Any = {"input_ids": row, "segments": segments}
            inputs, _ = make_inputs(model, batch, causal=is_causal)
            outputs.append(hidden_states(model, inputs)[segments != 1])
    return ISOLATED if torch.equal(*outputs) else "documents see each other"


def shorten(message: str) -> str:
    """The first sentence of a message of transformers, which continues with how to ask for support."""
    return message.partition(" yet. Please")[0].replace(
        "an attention implementation through torch.nn.functional.scaled_dot_product_attention", "sdpa"
    )


def try_checkpointing(family: str) -> str:
    """Empty where gradients with activation checkpointing are those without; else the largest difference."""
    import torch

    from cpt.models.activation_checkpointing import checkpoint_activations
    from cpt.models.forward import cache_arguments

    ids = torch.arange(3, 27)[None]
    inputs = {"input_ids": ids}
    if FAMILIES[family][0] == "tiny_t5":
        inputs["decoder_input_ids"] = ids
    gradients = []
    for is_checkpointed in (False, True):
        model = make_family(family, attention="eager").train()
        try:
            if is_checkpointed:
                checkpoint_activations(model)
        except ValueError as error:
            return find_reason(error)
        torch.manual_seed(0)  # of dropout
        model(**inputs, **cache_arguments(model)).logits.logsumexp(-1).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})

    largest = 0.0
    for name, gradient in gradients[0].items():
        if gradient is not None:
            difference = (gradient - gradients[1][name]).abs().max() / gradient.abs().max().clamp_min(1e-30)
            largest = max(largest, float(difference))
    return "" if largest <= 1e-6 else f"differs by {largest:.0e}"


def try_all(rows: Iterable[str], families: Iterable[str], *, again: bool) -> None:
    """Tries pairs of rows and families, and the passes of the families; saves the results after each row."""
    results = load()
    names = list(families)
    with tempfile.TemporaryDirectory() as folder_name:
        root = Path(folder_name)
        texts = write_texts(root / "texts")
        for row in rows:
            for family in names:
                if not again and family in results.get(row, {}):
                    continue
                start_time = time.perf_counter()
                run_folder = root / f"{row}-{family}".replace("=", "-")
                message = try_pair(row, family, texts=texts, cache=root / "cache", folder=run_folder)
                results.setdefault(row, {})[family] = message
                print(f"{time.perf_counter() - start_time:5.1f} s  {row}  {family}  {message}", flush=True)
            save(results)

    for kind in (*PASSES, CHECKPOINTING):
        for family in names:
            if not again and family in results.get(kind, {}):
                continue
            message = (
                try_checkpointing(family) if kind == CHECKPOINTING else try_documents(family, **PASSES[kind])
            )
            results.setdefault(kind, {})[family] = message
            print(f"{kind}  {family}  {message}", flush=True)
        save(results)


def save(results: Results) -> None:
    """Writes the results, and the page that shows them."""
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(make_page(results), encoding="utf-8")


def load() -> Results:
    """The results so far."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


INTRODUCTION = """# Supported models

After this page you know which method trains which model. Each method was run on a small random
model of each family: two domains of two steps, evaluated and exported. Other Hugging Face models of
these kinds work too (`model=hf model.name_or_path=NAME`). A method that needs a missing structure
ends with an error message before training. `python docs/site/support.py` runs the pairs and writes
this page.

"""
PASSES_TEXT = """## Document masks and activation checkpointing

With `domains.packing=document_mask`, documents share a row. Here one document of three was exchanged:
*isolated* means that the hidden states of the other two stayed the same, to the bit. The columns are
eager attention, sdpa, 16-bit autocast, and compiled blocks, on a CPU. In the last column, *equal* means
that gradients with `trainer.gradient_checkpointing=true` differ by at most 1e-6.
"""
LINKS = "[Models](models.md) · [Methods](methods.md) · [Fidelity](fidelity.md)"


def show_family(family: str) -> str:
    return family.replace(", tied head", " with a tied head")


def wrap(text: str) -> list[str]:
    """The lines of a paragraph, and an empty one."""
    return [*textwrap.wrap(text, 100, break_on_hyphens=False), ""]


def make_page(results: Mapping[str, Mapping[str, str]]) -> str:
    """`docs/support.md`."""
    messages: list[str] = []  # those of the page, by number
    supporting_all = []
    exceptions = [["option", "not supported (message)", "not tested"]]
    for row in list_rows():
        refused = []
        missing = []
        for family in FAMILIES:
            message = results.get(row, {}).get(family)
            if message is None:
                missing.append(show_family(family))
            elif message:
                refused.append(f"{show_family(family)} ({number_message(message, messages)})")
        if refused or missing:
            exceptions.append([f"`{row}`", ", ".join(refused) or "–", ", ".join(missing)])
        else:
            supporting_all.append(f"`{row}`")
    pass_lines = list_passes(results, messages)
    if not any(missing for _, _, missing in exceptions[1:]):
        exceptions = [cells[:2] for cells in exceptions]
    exception_lines = [f"| {' | '.join(cells)} |" for cells in exceptions]
    exception_lines.insert(1, "| :-- " * len(exceptions[0]) + "|")

    lines = [
        *wrap(f"Families: {', '.join(map(show_family, FAMILIES))}."),
        "## Options that support all families",
        "",
        *wrap(", ".join(supporting_all) + "."),
        "## Exceptions",
        "",
        *exception_lines,
        "",
        *wrap(", ".join(f"`{row}`" for row in WITH_NCL) + " are `method=ncl` with this option."),
        PASSES_TEXT,
        *pass_lines,
        "",
        "## Error messages",
        "",
        "```",
    ]
    for number, message in enumerate(messages, 1):
        numbered = f"{number}. {message}"
        lines += textwrap.wrap(numbered, 100, subsequent_indent="   ", break_on_hyphens=False)
    return INTRODUCTION + "\n".join([*lines, "```", "", "## See also", "", LINKS]) + "\n"


def list_passes(results: Mapping[str, Mapping[str, str]], messages: list[str]) -> list[str]:
    """The table of kinds of pass by family; new messages are added."""
    kinds = [*PASSES, CHECKPOINTING]
    lines = [f"| family | {' | '.join(kinds)} |", "| :-- " * (len(kinds) + 1) + "|"]
    for family in FAMILIES:
        cells = [show_family(family)]
        for kind in kinds:
            message = results.get(kind, {}).get(family)
            if message is None:
                cells.append("not tested")
            elif message == "":
                cells.append("equal")
            elif message == ISOLATED:
                cells.append("isolated")
            else:
                cells.append(f"no ({number_message(message, messages)})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def number_message(message: str, messages: list[str]) -> int:
    """The number of an error message, which is added if it is new."""
    general = message.partition("; found ")[0]  # without the sizes of the small model
    general = CHOICE.sub("", general)  # the row and the column say it
    if general not in messages:
        messages.append(general)
    return messages.index(general) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="*", default=list_rows(), help="rows to try")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), help="columns to try")
    parser.add_argument("--again", action="store_true", help="also what was tried before")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)

    # Pictures are a third of a run.
    import cpt.reporting.run_figures as run_figures

    for name in ("draw_matrix", "draw_text_curves", "draw_modules"):
        setattr(run_figures, name, lambda *arguments: b"")
    try_all(arguments.methods, arguments.families, again=arguments.again)


if __name__ == "__main__":
    main()
