"""What a run's model writes before a stage, to be replayed in place of past domains' text or examples.

`kept/TEXT.json`           what is kept of a domain, from its own stage on: prefixes of rows, or choices
`NUMBER-STAGE/TEXT.jsonl`  what was written before a stage, a line for each text
`NUMBER-STAGE/TEXT.arrow`  what is replayed of it, as rows
`NUMBER-STAGE/facts.json`  counts, by text

Processes write at the same time; the first appends blocks of texts to files, and makes the rows. Text number
i is a function of the weights, the seed, the stage and i: who wrote it, and when, does not matter."""

import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Features
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedModel

from cpt.adapters.domain_store import BASE
from cpt.contrib.generative_replay.options import GeneratedReplay
from cpt.core.cache import discard, find_artifact_damage, finish_artifact, make_once
from cpt.core.config import digest
from cpt.core.distributed import barrier, gather_objects, leave_together
from cpt.core.exceptions import InvalidOptionError
from cpt.core.files import read_checked_json, write_atomically, write_checked_json
from cpt.core.heartbeat import make_progress_bar
from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process, rank_and_world
from cpt.core.randomness import draw_uniforms, key, permute, sample_keys
from cpt.data import tokenized_tasks
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.options import Domain
from cpt.data.packers import ConcatPacker, PackedRows
from cpt.data.packing import Packed, find_padding_id
from cpt.data.replay import ReplayPool, ReplaySource, to_fraction
from cpt.data.separator import find_default_end
from cpt.data.sources.base import GENERAL
from cpt.data.sources.examples import Example
from cpt.data.text_encoder import find_frame
from cpt.data.text_format import TextFormat
from cpt.data.token_rows import COLUMNS, COLUMNS_WITH_STARTS, ArrowRows
from cpt.evaluation.predictions import file_name
from cpt.methods.base import ContinualMethod
from cpt.models.forward import set_mode
from cpt.models.generation import Sampling, sample_texts

log = logging.getLogger(__name__)
FORMAT = 1  # raise it when what is written changes
FORMS_FORMAT = 2  # raise it when the forms of examples change
EXCERPT = 200  # characters
Array = np.ndarray
COMMIT_FILE = "place.json"  # the last commit of files that are continued after a kill
MARK = "__ans__"  # between question and answer
SIGN = "An example of {domain}:"  # before a generated example: from it the model knows the domain


@dataclass(frozen=True)
class Sample:
    """A text that a model wrote. The fields are keys of a line in the file of samples."""

    ids: list[int]  # to replay, without the end
    real: int  # how many of them, at the beginning, are from the domain's own text
    ended: bool  # whether the model ended the text, before the limit of tokens
    nll: float  # mean of the tokens that the model wrote, nats
    text: str  # decoded ids

    @property
    def size(self) -> int:
        """Tokens, with the end."""
        return len(self.ids) + self.ended


@dataclass(frozen=True)
class WritingJob:
    """Texts to write after `contexts`, in turn, to be replayed in place of a domain's or the general text."""

    text: str  # its name
    domain: int  # whose module writes; BASE for the general text
    contexts: list[list[int]]  # token ids
    tokens_to_write: int  # at least
    tokens_to_replay: int  # at most: the rest is left out
    stream: int  # key of its random numbers


@dataclass
class WritingProgress:
    """How far the texts of a stage are, by text: blocks of samples, and tokens."""

    blocks: dict[str, int]
    tokens: dict[str, int]

    @classmethod
    def resume(cls, jobs: Sequence[WritingJob], committed_counts: Any) -> "WritingProgress":
        """The progress that a killed run has committed (the fields of this class as JSON), or that of a run
        that begins (None)."""
        zeros = dict.fromkeys((job.text for job in jobs), 0)
        counts = committed_counts or {}
        return cls(blocks=zeros | counts.get("blocks", {}), tokens=zeros | counts.get("tokens", {}))

    def add(self, text: str, block: Sequence[Sample]) -> None:
        self.blocks[text] += 1
        self.tokens[text] += sum(sample.size for sample in block)


class TextWriter(ReplaySource):
    """Writes text after a prompt and prefixes. Raises ValueError where these leave nothing to write."""

    def __init__(
        self,
        options: GeneratedReplay,
        folder: Path,
        *,
        module: ContinualMethod,
        data: DomainSequence,
        corpora: Corpora,
        base: Any,  # cpt.trainer.base_model.Base
        seed: int,
    ) -> None:
        self.options = options
        self.folder = folder
        self.module = module
        self.data = data
        self.seed = seed
        self.corpora = corpora
        self.tokenizer = base.tokenizer
        self.length = base.length
        self.seq2seq = base.seq2seq
        self.text_format: TextFormat = base.text_format
        self.begin, self.after_text = find_frame(self.tokenizer)
        end = self.end_of_text()
        self.sampling = Sampling(
            temperature=options.temperature, top_p=options.top_p, entries=len(self.tokenizer), end=end
        )

        past_domains: dict[str, None] = {}  # an ordered set: the domains that some stage replays
        for stage in data:
            past_domains |= dict.fromkeys(data.max_replayed(stage))
        for domain in past_domains:
            self.prompt(domain)  # raises for one that is too long
        if is_first_process():
            self.log_options_without_effect(list(past_domains))

    def log_options_without_effect(self, past_domains: Sequence[str]) -> None:
        """Logs that the replay has no effect, where no stage has a domain to replay; and where nothing tells
        the model which of several past domains it has to write, that all their texts will be alike."""
        options = self.options
        if not past_domains:
            log.info("No effect of replay=generated: no stage has a past domain or a share to replay")
            return

        # Prefixes, a prompt with the name or modules of its own make a model write text of one domain.
        has_name_in_prompt = "{domain}" in (options.prompt or "")
        has_domain_cue = options.prefix > 0 or has_name_in_prompt or self.module.domain_params is not None
        # Domains of examples have an encoding, and a sign with the name of the domain before each example.
        is_of_examples = self.corpora.encoding is not None
        if len(past_domains) > 1 and not has_domain_cue and not is_of_examples:
            reason = "as nothing says of which it is to be; replay.prefix=8 or a prompt with {domain} would"
            log.info("Generating the same kind of text for all past domains (replay.prefix=0), %s", reason)

    def end_of_text(self) -> int:
        """The id that ends a text which the model writes. Raises ValueError without one."""
        candidates = [*self.text_format.separator, *self.after_text, find_default_end(self.tokenizer)]
        ends = [token_id for token_id in candidates if token_id is not None]
        if not ends:
            raise InvalidOptionError(
                "replay",
                "generated",
                reason=f"the tokenizer {self.tokenizer.name_or_path} has no token that ends a text",
                allowed="domains.separator=TOKEN, or another replay",
            )
        return ends[0]

    def prepare(self, number: int, stage: Domain, device: torch.device) -> None:
        """Stores what later stages need of this one's texts; writes the texts that this stage replays, unless
        they are there and intact; opens their rows."""
        if is_first_process():
            self.store_memory(stage)
        barrier()

        folder = self.folder / f"{number:03d}-{stage.name}"
        max_rows = self.data.max_replayed(stage)  # by text
        damage = find_artifact_damage(folder)
        # The first process decides for all: they write together, and another may see the files later.
        if max_rows and gather_objects(bool(damage))[0]:
            if folder.exists() and is_first_process():
                log.warning("Rebuilding %s, which is damaged (%s)", folder, damage)
            jobs = [self.make_job(name, rows, stage) for name, rows in max_rows.items()]
            self.write(folder, jobs, stage, device)

        self.texts = {}
        for name in max_rows:
            packed = self.open_rows(folder, name)
            if packed is not None:
                self.texts[name] = packed

    def store_memory(self, stage: Domain) -> None:
        """Stores what later stages need of the texts of a stage, and of the general text."""
        names = list(stage.texts)
        if self.options.general_ratio > 0:
            names.append(GENERAL)
        for name in names:
            path = sample_file(self.folder / "kept", name, "json")
            if path.exists():  # of a run that was resumed, or is extended without the domain's text
                continue
            memory = self.select_memory(name)
            if memory is not None:
                write_checked_json(path, memory)

    def make_job(self, name: str, rows: int, stage: Domain) -> WritingJob:
        """The job for a text of which `rows` rows are replayed in a stage, at most."""
        tokens = rows * self.length
        if self.options.max_tokens is not None:
            tokens = min(int(self.options.max_tokens), tokens)
        return WritingJob(
            text=name,
            domain=self.data.domain_indices.get(name, BASE),
            contexts=self.contexts(name),
            tokens_to_write=math.ceil(tokens / (1 - to_fraction(self.options.drop))),
            tokens_to_replay=tokens,
            stream=key(self.seed, "generated", stage.name, name),
        )

    def write(self, folder: Path, jobs: Sequence[WritingJob], stage: Domain, device: torch.device) -> None:
        """Writes the texts of all jobs and makes rows of them; resumes what a killed run has written."""
        # Only the first process has files; the others follow what it found in them.
        partial_folder = folder.with_name(f"{folder.name}.partial")
        files = None
        if is_first_process():
            partial_folder.mkdir(parents=True, exist_ok=True)
            form = [FORMAT, asdict(self.options), self.length, self.seed]
            names = [sample_file(partial_folder, job.text, "jsonl").name for job in jobs]
            files = GrowingFiles(partial_folder, names, form=form)
        committed_counts = gather_objects(files.committed_value if files else None)[0]
        progress = WritingProgress.resume(jobs, committed_counts)

        bar = make_progress_bar(
            f"texts before {stage.name}",
            total=sum(job.tokens_to_write for job in jobs),
            hidden=files is None,
            unit="tok",
            scale=True,
        )
        with closing(files) if files else nullcontext(), bar as opened_bar:
            for job in jobs:
                if progress.tokens[job.text] < job.tokens_to_write:
                    opened_bar.set_postfix_str(job.text, refresh=False)
                    self.write_text(job, progress, files, stage, device, opened_bar)

        if files is not None:
            facts = {job.text: self.write_rows(partial_folder, job) for job in jobs}
            write_atomically(partial_folder / "facts.json", json.dumps(facts, indent=1))
            files.finish()
            discard(folder)
            finish_artifact(partial_folder, folder)
            log.info(
                "Generated text before %s: %s of %s, %d of them kept prefixes: %s",
                stage.name,
                count_noun(sum(counts["texts"] for counts in facts.values()), "text"),
                count_noun(sum(counts["tokens"] for counts in facts.values()), "token"),
                sum(counts["real"] for counts in facts.values()),
                folder,
            )
        barrier()  # the rows are there for all

    def write_text(
        self,
        job: WritingJob,
        progress: WritingProgress,
        files: "GrowingFiles | None",
        stage: Domain,
        device: torch.device,
        bar: Any,
    ) -> None:
        """Writes blocks of samples, one of each process at a time, until there are enough tokens."""
        rank, _ = rank_and_world()
        model = self.module.model_for(job.domain)
        initial_device = model.device
        try:
            with set_mode(model.to(device), training=False):
                while progress.tokens[job.text] < job.tokens_to_write:
                    tokens_before = progress.tokens[job.text]
                    local_block = self.write_block(model, job, progress.blocks[job.text] + rank)
                    for block in gather_objects(local_block):
                        # Blocks beyond are not used, so that the text is the same with one process.
                        if progress.tokens[job.text] >= job.tokens_to_write:
                            break
                        progress.add(job.text, block)
                        if files is not None:
                            append_samples(files, job.text, block)

                    if files is not None:
                        files.commit(asdict(progress))
                    bar.update(progress.tokens[job.text] - tokens_before)
                    leave_together(f"in the texts that are generated before {stage.name}")
        finally:
            model.to(initial_device)  # a domain's module may be stored on the CPU

    def write_block(self, model: PreTrainedModel, job: WritingJob, block: int) -> list[Sample]:
        """The samples of a block, which are a function of the job and their numbers."""
        numbers = block * self.options.batch_size + np.arange(self.options.batch_size)
        contexts = [job.contexts[number % len(job.contexts)] for number in numbers]
        # All contexts of a job have one length. An encoder-decoder has its context in another sequence.
        max_new_tokens = self.length if self.seq2seq else self.length - len(contexts[0])
        uniforms = draw_uniforms(sample_keys(job.stream, numbers), max_new_tokens, stream=key("tokens"))

        samples = []
        drawn = sample_texts(model, contexts, torch.from_numpy(uniforms), sampling=self.sampling)
        for context, (new_ids, nll) in zip(contexts, drawn, strict=True):
            has_end = new_ids[-1] == self.sampling.end
            if has_end:
                new_ids = new_ids[:-1]
            replayed_context = self.select_replayed(context)
            ids = [*replayed_context, *new_ids]
            num_real = len(replayed_context) if self.options.prefix > 0 else 0
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            samples.append(Sample(ids=ids, real=num_real, ended=has_end, nll=nll, text=text))
        return samples

    def select_memory(self, text: str) -> Any:
        """What is kept of a domain, as JSON: the first tokens of rows that its importance samples begin with;
        None where texts are written without. Raises ValueError for a prefix as long as all rows."""
        prefix = self.options.prefix
        if not prefix:
            return None
        packed = self.data.train[text]
        count = min(self.options.starts, len(packed))
        drawn_rows = permute(np.arange(count), len(packed), stream=key("probe", text))
        # A text is generated after the prefix in place of what followed it, so something has to follow.
        long_rows = drawn_rows[packed.row_lengths[drawn_rows] > prefix]
        if not len(long_rows):
            raise InvalidOptionError(
                "replay.prefix",
                prefix,
                reason=f"no row of {text} that could be kept has more tokens",
                allowed="fewer",
            )
        return packed.ids(long_rows)[:, :prefix].tolist()

    def read_memory(self, text: str) -> Any:
        """What was kept of a domain; raises ValueError if it is missing or damaged."""
        remedy = f"restore it from a backup, or delete {self.folder.parent} to start again"
        return read_checked_json(sample_file(self.folder / "kept", text, "json"), remedy=remedy)

    def prompt(self, text: str) -> list[int]:
        """The ids of the prompt before a domain's texts. Raises ValueError if nothing fits after it."""
        options = self.options
        if options.prompt is None:
            return []
        prompt = options.prompt.replace("{domain}", text)
        ids = self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        num_tokens = len(self.begin) + len(ids) + options.prefix
        if num_tokens >= self.length:
            token_count = count_noun(num_tokens, "token")
            raise ValueError(
                f"replay.prompt={options.prompt} and replay.prefix={options.prefix} is invalid: they take "
                f"{token_count} and leave nothing to generate of model.max_seq_length={self.length}. "
                f"Allowed: {self.length - 1} together, or a larger model.max_seq_length"
            )
        return [*self.begin, *ids] if ids else []

    def contexts(self, text: str) -> list[list[int]]:
        """What a domain's texts are written after, in turn."""
        prompt = self.prompt(text)
        if self.options.prefix:
            return [[*prompt, *prefix] for prefix in self.read_memory(text)]
        return [prompt or self.begin or [self.sampling.end]]

    def select_replayed(self, context: list[int]) -> list[int]:
        """What of a context is replayed."""
        return context[-self.options.prefix :] if self.options.prefix else self.begin

    def write_rows(self, folder: Path, job: WritingJob) -> dict[str, Any]:
        """Writes the rows to replay: ended texts one after another, each broken-off one in its own row.
        Returns counts."""
        source = sample_file(folder, job.text, "jsonl")
        sizes, nll, _, _ = measure_samples(source)
        num_replayed = choose_texts(
            sizes,
            nll,
            tokens_to_replay=job.tokens_to_replay,
            tokens_to_write=job.tokens_to_write,
            is_cut=True,
        )

        rows = GeneratedRows(self.length, self.tokenizer.all_special_ids, self.text_format.row_start)
        for sample, count in zip(read_samples(source), num_replayed, strict=True):
            if count <= 0:
                continue
            ids = list(sample.ids)
            if sample.ended:
                ids.append(self.sampling.end)
            if sample.ended and count == sample.size:
                rows.add_ended(ids)
            else:
                rows.add_broken_off(ids[:count])
        rows.write(sample_file(folder, job.text, "arrow"))
        return count_texts(source, num_replayed)

    def open_rows(self, folder: Path, text: str) -> Packed | None:
        """The rows to replay in place of a text; None where there are none."""
        facts = read_facts(folder, text)
        rows = Dataset.from_file(str(sample_file(folder, text, "arrow")))
        return Packed(
            rows=ArrowRows(rows),
            length=self.length,
            pad=find_padding_id(self.tokenizer),
            documents=facts["texts"],
            bytes=facts["bytes"],
            packing=self.data.train[text].packing,
            row_start=self.text_format.row_start,
        )


class GeneratedRows:
    """Rows of texts that a model wrote, of at most `length` tokens. `special` ids are not text; with
    `row_start` each row begins with this id."""

    def __init__(self, length: int, special: Sequence[int], row_start: int | None) -> None:
        self.special = set(special)
        self.row_start = row_start
        self.packer = ConcatPacker(length, special, row_start)
        self.num_texts = 0
        self.ended_ids: list[int] = []  # of all texts that ended, one after another
        self.ended_texts: list[int] = []  # the number of the text of each of these
        self.columns: dict[str, list[Any]] = {name: [] for name in self.features}

    @property
    def features(self) -> Features:
        return COLUMNS if self.row_start is None else COLUMNS_WITH_STARTS

    def add_ended(self, ids: list[int]) -> None:
        """Adds a text with its end, which others may follow in the same row."""
        self.ended_ids += ids
        self.ended_texts += [self.num_texts] * len(ids)
        self.num_texts += 1
        self.add_packed(self.packer.add(np.array(ids), np.array([len(ids)])))

    def add_packed(self, rows: PackedRows) -> None:
        """Adds rows of texts that ended."""
        for piece in rows.pieces:
            cells = slice(piece["begin"], piece["begin"] + piece["size"])
            self.add_row(self.ended_ids[cells], self.ended_texts[cells])

    def add_broken_off(self, ids: list[int]) -> None:
        """Adds a text without an end in a row of its own, where no other seems to continue it; what does not
        fit is left out."""
        ids = ids[: self.packer.cutter.room(ids[0])]
        self.add_row(ids, [self.num_texts] * len(ids))
        self.num_texts += 1

    def add_row(self, ids: list[int], texts: list[int]) -> None:
        """Adds a row of ids with the number of the text that each is of, [tokens] both; `row_start` is put
        first if it is missing."""
        is_opened = self.row_start is not None and ids[0] != self.row_start
        if is_opened:
            ids = [self.row_start, *ids]
            texts = [texts[0], *texts]
        self.columns["ids"].append(ids)
        self.columns["documents"].append(texts)
        self.columns["text_tokens"].append(sum(token not in self.special for token in ids))
        if self.row_start is not None:
            self.columns["inserted"].append(int(is_opened))

    def write(self, path: Path) -> None:
        """Writes the rows as an Arrow file."""
        self.add_packed(self.packer.finish())
        with ArrowWriter(path=str(path), features=self.features) as writer:
            writer.write_table(pa.table(self.columns, schema=self.features.arrow_schema))
            writer.finalize()


class ExampleWriter(TextWriter):
    """Writes examples of past tasks (LFPT5: Qin and Joty, ICLR 2022, arXiv 2110.07298): after a sign of their
    domain the question and, after a mark, its answer. Each domain's own are learned in that form, too. What
    is kept of a task are its choices, of which an answer has to be one."""

    def __init__(
        self,
        options: GeneratedReplay,
        folder: Path,
        *,
        module: ContinualMethod,
        data: DomainSequence,
        corpora: Corpora,
        base: Any,  # cpt.trainer.base_model.Base
        seed: int,
    ) -> None:
        # The encoder comes first: the constructor of TextWriter calls `end_of_text` and `prompt`, which here
        # need it.
        self.encoder = corpora.encoder(base.tokenizer, base.length, seq2seq=base.seq2seq)
        super().__init__(options, folder, module=module, data=data, corpora=corpora, base=base, seed=seed)
        # A model can only write examples of a domain later if it was trained on them in the written form.
        self.written_forms: dict[str, Packed] = {}  # by domain: its training examples in that form
        if options.past_ratio and options.forms:
            for stage in self.data:
                for name in stage.texts:
                    self.written_forms[name] = self.encode_forms(name)

    def end_of_text(self) -> int:
        return self.encoder.ending[0]

    def sign(self, domain: str) -> str:
        return (self.options.prompt or SIGN).replace("{domain}", domain)

    def to_form(self, example: Example, domain: str) -> Example:
        """An example in the form in which it is generated: the new question is the sign, the new answer the
        old question, the mark and the old answer."""
        question_and_answer = f"{example.source} {MARK} {example.target}"
        return Example(id=example.id, source=self.sign(domain), target=question_and_answer, task=example.task)

    def encode_whole(self, example: Example) -> tokenized_tasks.EncodedExample | None:
        """The row of an example; None where it does not fit without a cut."""
        try:
            row = self.encoder.encode(example)
        except ValueError:
            return None
        max_length = 2 * self.length if self.seq2seq else self.length
        return None if row.cut or len(row.ids) > max_length else row

    def encode_forms(self, name: str) -> Packed:
        """The training examples of a domain that fit in the form in which they are written, made once for all
        runs. Raises ValueError where none fits."""
        corpus = self.corpora.by_name[name]
        tokenizer_hash = self.corpora.tokenizer_digest(self.tokenizer)
        options = [vars(self.encoder.encoding), self.length, self.seq2seq, self.sign(name)]
        made_of = ["forms", FORMS_FORMAT, corpus.facts["digest"], tokenizer_hash, options]

        folder = make_once(
            self.corpora.cache / "packed" / f"{name}-forms-{digest(made_of)}",
            make=partial(self.write_forms, name=name),
        )
        return tokenized_tasks.open_examples(folder / tokenized_tasks.ROWS_FILE, self.tokenizer)

    def write_forms(self, folder: Path, *, name: str) -> None:
        """Writes the rows of a domain's training examples, in the form in which examples are generated, into
        a folder of the cache. Raises ValueError where none fits."""
        rows = self.read_forms(name)
        path = folder / tokenized_tasks.ROWS_FILE
        counts = tokenized_tasks.write_examples(path, rows, tokenizer=self.tokenizer)
        if not counts.examples:
            raise InvalidOptionError(
                "model.max_seq_length",
                self.length,
                reason=f"no example of {name} fits in the form that is written (replay=generated)",
                allowed="a larger model.max_seq_length, replay=past",
            )

    def read_forms(self, name: str) -> Iterator[tokenized_tasks.EncodedExample]:
        """The training examples of a domain in the written form, one at a time, without those that do not
        fit."""
        for example in tokenized_tasks.read_examples(self.corpora.by_name[name], "train"):
            row = self.encode_whole(self.to_form(example, name))
            if row is not None:
                yield row

    def extra_pools(self, stage: Domain) -> list[ReplayPool]:
        """The stage's own examples, as they are written."""
        texts = {name: self.written_forms[name] for name in stage.texts if name in self.written_forms}
        if not texts:
            return []
        pool = ReplayPool(
            texts,
            share=to_fraction(self.options.forms),
            is_appended=self.options.is_appended,
            buffer_size=None,
            seed=self.seed,
            stream_name=(stage.name, "forms"),
        )
        return [pool]

    def select_memory(self, text: str) -> list[str]:
        """The choices that all examples of a task have; none where they differ, or answers are open."""
        corpus = self.corpora.by_name[text]
        choices = {example.choices for example in tokenized_tasks.read_examples(corpus, "train")}
        return list(choices.pop()) if len(choices) == 1 else []

    def prompt(self, text: str) -> list[int]:
        empty_example = Example(id=text, source="", target="", task=text)  # only the sign is read
        return self.encoder.prompt(self.to_form(empty_example, text)).ids

    def contexts(self, text: str) -> list[list[int]]:
        return [self.prompt(text)]

    def select_replayed(self, context: list[int]) -> list[int]:
        return []

    def write_rows(self, folder: Path, job: WritingJob) -> dict[str, Any]:
        """Writes two rows of each valid example that is replayed: as it is asked, and as it was written, so
        that the model can still write it in a later domain. Returns `count_texts` with `invalid`, the number
        of samples that are no example of the task."""
        source = sample_file(folder, job.text, "jsonl")
        choices = self.read_memory(job.text)
        pairs = []  # of rows, by sample; empty for one that is invalid
        for number, sample in enumerate(read_samples(source)):
            example = from_form(sample.text, task=job.text, number=number, choices=choices)
            # Without an end the answer may be the beginning of another one.
            pairs.append(self.encode_pair(example, job.text) if sample.ended else [])

        is_valid = np.array([bool(pair) for pair in pairs])
        sizes, nll, _, _ = measure_samples(source)
        num_replayed = choose_texts(
            sizes,
            nll,
            tokens_to_replay=job.tokens_to_replay,
            tokens_to_write=job.tokens_to_write,
            is_valid=is_valid,
        )
        rows: list[tokenized_tasks.EncodedExample] = []
        for pair, count in zip(pairs, num_replayed, strict=True):
            if count > 0:
                rows += pair
        path = sample_file(folder, job.text, "arrow")
        tokenized_tasks.write_examples(path, rows, tokenizer=self.tokenizer)

        is_counted = num_replayed >= 0  # not after the tokens to write
        num_invalid = int((~is_valid[is_counted]).sum())
        facts = count_texts(source, num_replayed) | {"invalid": num_invalid}
        if num_invalid:
            num_generated = facts["texts"] + facts["left_out"]
            message = "Dropping %d of %s generated for %s, which do not have its form%s"
            end = "" if facts["texts"] else ": nothing of it is replayed"
            log.info(message, num_invalid, count_noun(num_generated, "example"), job.text, end)
        return facts

    def encode_pair(self, example: Example | None, domain: str) -> list[tokenized_tasks.EncodedExample]:
        """The rows of an example as it is asked and as it is written; none if it is missing or one does not
        fit."""
        if example is None:
            return []
        rows = []
        for form in (example, self.to_form(example, domain)):
            row = self.encode_whole(form)
            if row is not None:
                rows.append(row)
        return rows if len(rows) == 2 else []

    def open_rows(self, folder: Path, text: str) -> Packed | None:
        if not read_facts(folder, text)["texts"]:
            return None
        return tokenized_tasks.open_examples(sample_file(folder, text, "arrow"), self.tokenizer)


class GrowingFiles:
    """Append-only files of a folder, which a killed process can continue.

    `commit` flushes the files to disk and writes COMMIT_FILE: their sizes, and any JSON value that says how
    far the work is."""

    def __init__(self, folder: Path, names: Sequence[str], *, form: Any) -> None:
        """Opens the files `names` of a folder, truncated to their sizes at the last commit. `committed_value`
        is the value of that commit, None without one. `form` is any JSON value that says how the files are
        written. Files of another form, or shorter than at the commit, restart empty."""
        self.folder = folder
        self.form = form
        self.committed_value = None
        committed_sizes = dict.fromkeys(names, 0)
        commit_path = folder / COMMIT_FILE
        if commit_path.exists():
            try:
                self.committed_value, committed_sizes = self.read_commit(commit_path, names)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("Restarting %s, which cannot be continued (%s)", folder, error)
                commit_path.unlink()

        # What was appended after the last commit may be incomplete.
        self.files = {name: (folder / name).open("ab") for name in names}
        for name, file in self.files.items():
            file.truncate(committed_sizes[name])

    def read_commit(self, path: Path, names: Sequence[str]) -> tuple[Any, dict[str, int]]:
        """The value of the last commit, and the sizes of the files. Raises OSError, ValueError, KeyError or
        TypeError if the files cannot be continued."""
        commit = json.loads(path.read_text(encoding="utf-8"))
        if commit["form"] != self.form or set(commit["sizes"]) != set(names):
            raise ValueError(f"{COMMIT_FILE} has another form")
        for name, size in commit["sizes"].items():
            if (self.folder / name).stat().st_size < size:
                raise ValueError(f"{name} is truncated")
        return commit["place"], commit["sizes"]

    def append(self, name: str, data: bytes | memoryview) -> None:
        self.files[name].write(data)

    def commit(self, value: Any) -> None:
        """Makes all that was appended permanent, with a value that says how far the work is."""
        # COMMIT_FILE is replaced after the files are on disk: a kill in between leaves a longer file, which
        # is truncated, and never sizes of what is not there.
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self.files.items()}
        commit = {"form": self.form, "sizes": sizes, "place": value}
        write_atomically(self.folder / COMMIT_FILE, json.dumps(commit))

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def finish(self) -> None:
        self.close()
        (self.folder / COMMIT_FILE).unlink(missing_ok=True)


def append_samples(files: GrowingFiles, text: str, samples: Sequence[Sample]) -> None:
    """Appends samples to the file of a text, a line each."""
    name = sample_file(files.folder, text, "jsonl").name
    for sample in samples:
        line = json.dumps(asdict(sample), ensure_ascii=False) + "\n"
        files.append(name, line.encode(errors="replace"))


def sample_file(folder: Path, text: str, suffix: str) -> Path:
    return folder / f"{file_name(text)}.{suffix}"


def read_facts(folder: Path, text: str) -> dict[str, Any]:
    return json.loads((folder / "facts.json").read_text(encoding="utf-8"))[text]


def read_samples(path: Path) -> Iterator[Sample]:
    with path.open("rb") as file:
        for line in file:
            yield Sample(**json.loads(line))


def measure_samples(source: Path) -> list[np.ndarray]:
    """Four arrays [n] over the n samples of a file: their tokens, nll, real tokens, and bytes."""
    rows = []
    for sample in read_samples(source):
        num_bytes = len(sample.text.encode(errors="replace"))
        rows.append((sample.size, sample.nll, sample.real, num_bytes))
    return [np.array(column) for column in zip(*rows, strict=True)]


def choose_texts(
    sizes: Array,
    nll: Array,
    *,
    tokens_to_replay: int,
    tokens_to_write: int,
    is_valid: Array | bool = True,
    is_cut: bool = False,
) -> Array:
    """How many tokens are replayed of each sample, [n], at most `tokens_to_replay` in all.

    The first samples count, until they have `tokens_to_write` tokens. Their valid ones are replayed, those of
    the lowest nll if more are written than are replayed; the rest of them have 0. Samples after them have -1,
    so that a larger block, which writes more of them, changes nothing. With `is_cut` the last one that is
    replayed is cut to the budget."""
    is_counted = np.cumsum(sizes) - sizes < tokens_to_write
    order = np.flatnonzero(is_counted & is_valid)
    if tokens_to_write > tokens_to_replay:
        order = order[np.argsort(nll[order], kind="stable")]

    ordered_sizes = sizes[order]
    remaining_tokens = tokens_to_replay - np.cumsum(ordered_sizes) + ordered_sizes  # before each sample
    num_replayed = np.where(is_counted, 0, -1)
    if is_cut:
        num_replayed[order] = np.clip(remaining_tokens, 0, ordered_sizes)
    else:
        num_replayed[order] = np.where(remaining_tokens >= ordered_sizes, ordered_sizes, 0)
    return num_replayed


def count_texts(source: Path, num_replayed: np.ndarray) -> dict[str, Any]:
    """Counts for the report. `num_replayed` [n], as of `choose_texts`: how many tokens of each sample are
    replayed, 0 of one that is left out, -1 of one after the tokens to write."""
    _, nll, num_real, num_bytes = measure_samples(source)
    is_replayed = num_replayed > 0
    is_left_out = num_replayed == 0
    # The first that is replayed; if none is, the first of all.
    first = next(islice(read_samples(source), int(np.argmax(is_replayed)), None))
    return {
        "tokens": int(num_replayed[is_replayed].sum()),
        "texts": int(is_replayed.sum()),
        "real": int(np.minimum(num_real, num_replayed)[is_replayed].sum()),
        "nll": float(nll[is_replayed].mean()) if is_replayed.any() else None,
        "left_out": int(is_left_out.sum()),
        "nll_left_out": float(nll[is_left_out].mean()) if is_left_out.any() else None,
        "bytes": int(num_bytes[is_replayed].sum()),
        "excerpt": first.text[:EXCERPT],
    }


def from_form(text: str, *, task: str, number: int, choices: Sequence[str]) -> Example | None:
    """The example in a text that a model has written, the inverse of `to_form`. None where the text has no
    question or no answer, or where a closed task (with `choices`) has an answer outside its choices."""
    question, _, answer = text.rpartition(MARK)
    source = question.strip()
    target = answer.strip()
    if not source or not target or (choices and target not in choices):
        return None
    return Example(
        id=f"generated-{number}",
        source=source,
        target=target,
        task=task,
        choices=tuple(choices),
        text_span=(0, len(source)),
    )
