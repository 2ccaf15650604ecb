"""Add what instruction tuning changed of a base to a run's model: `python -m cpt.graft RUN --instruct M …`.

Writes theta_run + w (theta_M - theta_B) as a Hugging Face model to FOLDER, scores it on the texts of the run,
and adds its row to the page of the run. The model of the run stays as it is. Exit code 1 after an error."""

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from cpt.core.config import digest
from cpt.core.errors import readable_errors
from cpt.core.exceptions import InvalidOptionError
from cpt.core.files import check_output, new_folder, writing
from cpt.core.messages import count_noun
from cpt.core.output import run_program
from cpt.data.sources.files import stamp_files
from cpt.evaluation.chat_answers import collect_losses
from cpt.evaluation.chat_encoding import EncodedChat
from cpt.evaluation.derived_rows import (
    DerivedRow,
    compare_with_row,
    describe_run_chats,
    describe_tuned_chats,
    is_made_already,
    load_derived_documents,
)
from cpt.evaluation.run_folders import choose_run
from cpt.models.loading import load_tokenizer
from cpt.models.residual import (
    MAX_SHARD_BYTES,
    Checkpoint,
    NewVocabulary,
    VocabularyTables,
    check_residual,
    check_tensors,
    find_tables,
    join_vocabularies,
    open_checkpoint,
    sum_tensors,
    write_weight_files,
)
from cpt.reporting.derived_card import write_derived_card
from cpt.reporting.license_choices import load_license_choices
from cpt.reporting.license_sources import find_licenses, find_model_license
from cpt.reporting.license_terms import StatedLicense
from cpt.trainer.base_files import copy_generation_config, save_tokenizer
from cpt.trainer.chat_losses import SHIPPED_CHATS, find_chats, load_causal, measure_chat_losses
from cpt.trainer.rescored_chats import measure_run_chats
from cpt.trainer.rescoring import RunTexts, load_finished_scores, open_run_texts
from cpt.trainer.run_dir import RunDir
from cpt.trainer.run_outputs import finish_report, rewrite_report

ROW = "graft"
PARTS = ("adapters", "parts.json")  # what an exported model may have apart from its plain weights
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of a config.json


def build_parser() -> argparse.ArgumentParser:
    paragraphs = str(__doc__).split("\n\n")
    parser = argparse.ArgumentParser(prog="python -m cpt.graft", description=paragraphs[1])
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a finished run")
    add("--instruct", required=True, metavar="M", help="tuned model: a folder, or a name on the Hub")
    add("--base", required=True, metavar="B", help="the base that M was tuned from")
    add("--weight", type=float, default=1.0, metavar="w", help="weight of the residual; default: 1")
    add("--output", type=Path, metavar="FOLDER", help="new folder for the model; default: RUN/graft")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    with readable_errors():
        run = RunDir(choose_run(options.run))
        folder = options.output or run.path / ROW
        check_weight(options.weight)
        scores = load_finished_scores(run)
        description = describe_graft(options.instruct, options.base, weight=options.weight)
        inputs = hash_checkpoints(options.instruct, options.base)
        if is_made_already(folder, config_hash=scores.config_hash, description=description, inputs=inputs):
            finish_report(run, scores, folder)
            return 0

        check_output(folder)
        check_model_folder(run)

        with run.locked():
            # Texts are read first: nothing is written for a run that cannot be scored.
            texts = open_run_texts(run, scores, needs_base=False)
            choices = load_license_choices(run.path)
            run_licenses = find_licenses(run.stored_config(), scores, stated_for_texts=choices.texts)
            graft = Graft.plan(run, instruct=options.instruct, base=options.base, weight=options.weight)
            with new_folder(folder) as partial_folder:
                num_tensors = graft.write(partial_folder)
                row = score_graft(texts, graft, partial_folder, inputs=inputs)
                write_derived_card(
                    partial_folder,
                    scores,
                    row,
                    title=f"{scores.run['name']}, {row.row}",
                    loading=f'transformers.{graft.run.config.architectures[0]}.from_pretrained("model")',
                    facts=[*graft.list_facts(), *list_chat_facts(row)],
                    licenses=[*run_licenses, *graft.find_tuned_licenses()],
                )
            rewrite_report(run, scores)
        print_results(run, folder, graft, row, num_tensors=num_tensors)
    return 0


def check_weight(weight: float) -> None:
    """Raises ValueError for a weight that is not finite."""
    if not math.isfinite(weight):
        raise InvalidOptionError("--weight", weight, allowed="a finite number")


def describe_graft(instruct: str, base: str, *, weight: float) -> str:
    """How a model is made, in one sentence without paths. No digit of the weight is rounded away: it
    distinguishes models of two weights.

    >>> describe_graft("a/tuned", "a/base", weight=1.0)
    "The run's last model + 1 x (tuned - base), by tensor"
    """
    weight_text = str(weight).removesuffix(".0")
    return f"The run's last model + {weight_text} x ({Path(instruct).name} - {Path(base).name}), by tensor"


def hash_checkpoints(*names: str) -> str:
    """A hash of models that are folders or names on the Hub: of a folder the paths, sizes and times of its
    files, but for its card, which may be written again."""
    described: list[Any] = []
    for name in names:
        folder = Path(name)
        if folder.is_dir():
            files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != ".md"]
            described.append(stamp_files(files))
        else:
            described.append(name)
    return digest(described)


def check_model_folder(run: RunDir) -> None:
    """Raises ValueError for a run without a plain exported model, and for damaged files of it."""
    if not (run.model / CONFIG_NAME).is_file():
        raise ValueError(f"{run.model} holds no exported model; the command of the run exports it again")
    for name in PARTS:
        if (run.model / name).exists():
            raise InvalidOptionError(
                "RUN",
                run.path,
                reason=f"its model has weights apart from the plain model ({name})",
                allowed="a run that exports one plain model, as with method.export_format=merged",
            )
    damage = [line for line in run.find_damaged_outputs(full=False) if line.startswith("model/")]
    if damage:
        raise InvalidOptionError("RUN", run.path, reason="; ".join(damage), allowed="a whole run")


@dataclass(frozen=True, kw_only=True)
class Graft:
    """What is to be added to the model of a run."""

    run: Checkpoint
    base: Checkpoint
    instruct: Checkpoint
    weight: float
    tables: VocabularyTables
    vocabulary: NewVocabulary

    @classmethod
    def plan(cls, run_folder: RunDir, *, instruct: str, base: str, weight: float) -> "Graft":
        """The graft of an instruct model's difference from its base onto the model of a run. Reads names and
        shapes, and weights until some are found that were tuned. Raises ValueError for models that do not go
        together."""
        run_checkpoint = open_checkpoint("RUN", str(run_folder.model))
        base_checkpoint = open_checkpoint("--base", base)
        instruct_checkpoint = open_checkpoint("--instruct", instruct)
        tables = find_tables(run_checkpoint.config)
        check_tensors(run_checkpoint, base_checkpoint, instruct_checkpoint, tables)
        check_residual(run_checkpoint, base_checkpoint, instruct_checkpoint, tables)
        return cls(
            run=run_checkpoint,
            base=base_checkpoint,
            instruct=instruct_checkpoint,
            weight=weight,
            tables=tables,
            vocabulary=join_vocabularies(run_checkpoint, base_checkpoint, instruct_checkpoint, tables),
        )

    def write(self, folder: Path) -> int:
        """Writes the model with its tokenizer; returns the number of its tensors."""
        rows = self.vocabulary.rows
        with writing(folder):
            tensors = sum_tensors(
                self.run, self.base, self.instruct, weight=self.weight, tables=self.tables, rows=rows
            )
            num_tensors = write_weight_files(folder, tensors, max_bytes=MAX_SHARD_BYTES)
            self.write_config(folder)
            self.write_tokenizer(folder)
        return num_tensors

    def write_config(self, folder: Path) -> None:
        """Writes the run's config.json with the size of the new vocabulary and, if it has all tokens of the
        tuned model, with the ids of that model's special tokens."""
        config = json.loads((Path(self.run.name) / CONFIG_NAME).read_text(encoding="utf-8"))
        section = config.get("text_config", config)
        if self.vocabulary.rows is not None:
            section["vocab_size"] = len(self.vocabulary.rows.run)
        if self.vocabulary.has_all_of_instruct:
            tuned_config = self.instruct.config.get_text_config()
            for name in TOKEN_IDS:
                value = getattr(tuned_config, name, None)
                if value is not None:
                    section[name] = value
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")

    def write_tokenizer(self, folder: Path) -> None:
        """Writes the tuned model's tokenizer if it has the run's ids, else the run's, which gets the chat
        template if it has all tokens of the tuned model. Copies the generation configuration."""
        if self.vocabulary.is_of_instruct:
            save_tokenizer(self.instruct.tokenizer, base=self.instruct.name, folder=folder)
        else:
            save_tokenizer(self.choose_run_tokenizer(), base=self.run.name, folder=folder)
        if self.vocabulary.has_all_of_instruct:
            copy_generation_config(base=self.instruct.name, folder=folder)
        elif (Path(self.run.name) / GENERATION_CONFIG_NAME).is_file():
            shutil.copyfile(Path(self.run.name) / GENERATION_CONFIG_NAME, folder / GENERATION_CONFIG_NAME)

    def choose_run_tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer: Any = self.run.tokenizer
        if self.vocabulary.has_all_of_instruct:
            tokenizer.chat_template = self.instruct.tokenizer.chat_template
        return tokenizer

    def describe(self) -> str:
        return describe_graft(self.instruct.name, self.base.name, weight=self.weight)

    def find_tuned_licenses(self) -> list[StatedLicense]:
        """What is stated of the tuned model and its base."""
        return [
            find_model_license(self.instruct.name, source="the tuned model"),
            find_model_license(self.base.name, source="the base of the tuned model"),
        ]

    def list_facts(self) -> list[str]:
        """What became of the vocabulary, in sentences."""
        return [self.describe_rows(), self.describe_tokenizer()]

    def describe_rows(self) -> str:
        """How many rows of embedding and head were summed, and what became of the others."""
        vocabulary = self.vocabulary
        if vocabulary.rows is None:
            return "Embedding and head: all three vocabularies are one, all rows summed"
        num_kept = len(vocabulary.rows.run) - vocabulary.num_summed - vocabulary.num_added
        left_out = ""
        if vocabulary.num_left_out:
            left_out = f"; {count_noun(vocabulary.num_left_out, 'token')} of the tuned model left out"
        summed_rows = count_noun(vocabulary.num_summed, "row")
        return (
            f"Embedding and head by token: {summed_rows} summed, {num_kept:,} as in the run "
            f"(no such token in the tuned model or the base), {vocabulary.num_added:,} as in the tuned model "
            f"(no such token in the run){left_out}"
        )

    def describe_tokenizer(self) -> str:
        """Whose tokenizer, chat template and generation options the new model has."""
        if self.vocabulary.is_of_instruct:
            return "Tokenizer, chat template and generation options: the tuned model's"
        if self.vocabulary.has_all_of_instruct:
            return "Tokenizer: the run's; chat template and generation options: the tuned model's"
        return (
            "Tokenizer and generation options: the run's, without the tuned model's chat template, whose "
            "tokens it lacks or has with other ids"
        )


def score_graft(texts: RunTexts, graft: Graft, folder: Path, *, inputs: str) -> DerivedRow:
    """Scores the written model on the texts of the run, and stores its row; `inputs` is a hash of the tuned
    model and its base."""
    module = texts.build_module(folder)
    text_scores = texts.score(module, row=ROW)
    return texts.store(
        folder,
        text_scores,
        row=ROW,
        description=graft.describe(),
        chats=measure_chats(texts, graft, folder, module.model),
        run_chats=measure_run_chats(texts, module, folder, config=graft.run.config),
        inputs=inputs,
    )


def measure_chats(texts: RunTexts, graft: Graft, folder: Path, model: PreTrainedModel) -> dict[str, Any]:
    """The losses of the new and of the tuned model on held-out chats, for a row; empty where the new model
    has no chat template, or all chats are too long for it."""
    tokenizer = load_tokenizer(folder)
    options = texts.method_plan.chats or SHIPPED_CHATS
    chats: list[EncodedChat] = []
    if graft.vocabulary.has_all_of_instruct:
        chats = find_chats(
            options, tokenizer, model.config, objective=texts.base.objective_name, length=texts.base.length
        )
    if not chats:
        return {}
    losses = []
    for scored_model in (load_causal(graft.instruct.name), model):
        losses.append(
            measure_chat_losses(
                scored_model,
                chats,
                tokenizer,
                batch_size=options.batch_size,
                device=texts.machine.device,
            )
        )
    nll_by_model, rise_by_model = collect_losses(losses)
    return {
        "chats": len(chats),
        "nll": nll_by_model[1],
        "tuned_nll": nll_by_model[0],
        "rise": rise_by_model[1],
    }


def list_chat_facts(row: DerivedRow) -> list[str]:
    facts = describe_run_chats(row)
    if row.chats:
        facts.insert(0, describe_tuned_chats(row))
    return facts


def print_results(run: RunDir, folder: Path, graft: Graft, row: DerivedRow, *, num_tensors: int) -> None:
    """Prints what was added and the losses of the new model on each text, against those of the run."""
    print(f"{folder}: {graft.describe()}; {count_noun(num_tensors, 'tensor')}")
    for fact in [*graft.list_facts(), *list_chat_facts(row)]:
        print(fact)
    scores = load_finished_scores(run)
    last = len(scores.rows) - 1
    changes = compare_with_row(run.path, last, load_derived_documents(folder), row.domains)
    print(f"{'text':24}{'run':>9}{'graft':>9}{'change':>9}  nats per token [95 % interval]")
    for change in changes:
        interval = ""
        if math.isfinite(change.low):
            interval = f"  [{change.low:+.4f}, {change.high:+.4f}]"
        print(f"{change.text:24}{change.before:9.4f}{change.after:9.4f}{change.difference:+9.4f}{interval}")


if __name__ == "__main__":
    run_program(main)
