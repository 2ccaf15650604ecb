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
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedModel

from cpt.adapters.domain_store import BASE
from cpt.contrib.generative_replay.options import GeneratedReplay
from cpt.contrib.generative_replay.sampling import Sampling, sample_texts
from cpt.core.cache import artifact_damage, discard, finish_artifact, make_once
from cpt.core.config import digest
from cpt.core.distributed import barrier, gather_objects, leave_together
from cpt.core.files import read_checked_json, replace, write_checked_json
from cpt.core.heartbeat import progress_bar
from cpt.core.processes import is_first_process, rank_and_world
from cpt.core.randomness import draws, key, sample_keys, shuffle
from cpt.data import tokenized_tasks
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.options import Domain
from cpt.data.packing import ConcatPacker, Packed, mark_documents, padding_id
from cpt.data.replay import ReplayPool, ReplaySource, to_fraction
from cpt.data.separator import default_end
from cpt.data.sources.base import GENERAL, Example
from cpt.data.text_encoder import frame_of
from cpt.data.text_format import TextFormat
from cpt.evaluation.predictions import file_name
from cpt.methods.base import ContinualMethod
from cpt.models.forward import set_mode

log = logging.getLogger(__name__)
FORMAT = FORMS_FORMAT = 1  # raise it when what is written, or how forms are made, changes
EXCERPT = 200  # characters
Array = np.ndarray
PLACE = "place.json"  # of files that are continued after a kill
MARK, SIGN = "__ans__", "An example of {domain}:"


@dataclass(frozen=True)
class Sample:
    """A text that a model wrote: the ids to replay, the first `real` of them from the domain; whether an end
    follows; the mean `nll` (nats) of what was written; and the text."""

    ids: list[int]
    real: int
    ended: bool
    nll: float
    text: str

    @property
    def size(self) -> int:
        """Tokens, with the end."""
        return len(self.ids) + self.ended


@dataclass(frozen=True)
class WritingJob:
    """Texts to write after `contexts`, with a domain's module (or BASE); tokens to write, and to replay."""

    text: str
    domain: int
    contexts: list[list[int]]
    wanted: int
    tokens: int
    stream: int  # key of its random numbers


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
        self.options, self.folder, self.module, self.data, self.seed = options, folder, module, data, seed
        self.corpora, self.tokenizer = corpora, base.tokenizer
        self.length, self.seq2seq = base.length, base.seq2seq
        self.text_format: TextFormat = base.text_format
        self.begin, self.after_text = frame_of(self.tokenizer)
        end = self.end_of_text()
        self.sampling = Sampling(options.temperature, options.top_p, len(self.tokenizer), end)
        texts = list(dict.fromkeys(text for stage in data for text in data.max_replayed(stage)))
        for text in texts:
            self.prompt(text)
        named = options.prefix or "{domain}" in (options.prompt or "") or module.domain_params is not None
        if not is_first_process():
            return
        if not texts:
            log.info("No effect of replay=generated: no stage has a past domain or a share to replay")
        elif len(texts) > 1 and not named and corpora.encoding is None:
            why = "as nothing says of which it is to be; replay.prefix=8 or a prompt with {domain} would"
            log.info("Generating the same kind of text for all past domains (replay.prefix=0), %s", why)

    def end_of_text(self) -> int:
        """The id that ends a text which the model writes. Raises ValueError without one."""
        candidates = [*self.text_format.separator, *self.after_text, default_end(self.tokenizer)]
        ends = [token_id for token_id in candidates if token_id is not None]
        if not ends:
            raise ValueError(
                f"replay=generated is invalid: the tokenizer {self.tokenizer.name_or_path} has no token that "
                "ends a text. Allowed: domains.separator=TOKEN, or another replay"
            )
        return ends[0]

    def prepare(self, number: int, stage: Domain, device: torch.device) -> None:
        general, replayed = [GENERAL] * (self.options.general_ratio > 0), self.data.max_replayed(stage)
        for name in (*stage.texts, *general) if is_first_process() else ():
            path = sample_file(self.folder / "kept", name, "json")
            if not path.exists() and (kept := self.to_keep(name)) is not None:
                write_checked_json(path, kept)
        barrier()
        folder, jobs, most = self.folder / f"{number:03d}-{stage.name}", [], self.options.max_tokens
        damage = artifact_damage(folder)
        if replayed and gather_objects(bool(damage))[0]:
            if folder.exists() and is_first_process():
                log.warning("Rebuilding %s, which is damaged (%s)", folder, damage)
            for name, count in replayed.items():
                tokens = count * self.length if most is None else min(int(most), count * self.length)
                wanted = math.ceil(tokens / (1 - to_fraction(self.options.drop)))
                place = self.data.domain_indices.get(name, BASE)
                stream = (self.seed, "generated", stage.name, name)
                jobs.append(WritingJob(name, place, self.contexts(name), wanted, tokens, key(*stream)))
            self.write(folder, jobs, stage, device)
        found = {name: self.open(folder, name) for name in replayed}
        self.texts = {name: rows for name, rows in found.items() if rows is not None}

    def write(self, folder: Path, jobs: Sequence[WritingJob], stage: Domain, device: torch.device) -> None:
        """Writes the texts of all jobs and makes rows of them; resumes what a killed run has written."""
        begun, first = folder.with_name(f"{folder.name}.partial"), is_first_process()
        names, files = {job.text: sample_file(begun, job.text, "jsonl").name for job in jobs}, None
        if first:
            begun.mkdir(parents=True, exist_ok=True)
            form = [FORMAT, asdict(self.options), self.length, self.seed]
            files = Growing(begun, list(names.values()), form=form)
        place = gather_objects(files.place if files else None)[0] or {}
        blocks, tokens = (dict.fromkeys(names, 0) | place.get(each, {}) for each in ("blocks", "tokens"))
        bar: dict[str, Any] = {"total": sum(job.wanted for job in jobs), "done": sum(tokens.values())}
        bar |= {"unit": "tok", "scale": True, "hidden": not first, "label": f"texts before {stage.name}"}
        with closing(files) if files else nullcontext(), progress_bar(**bar) as progress:
            for job in (job for job in jobs if tokens[job.text] < job.wanted):
                name, model = job.text, self.module.model_for(job.domain)
                before = model.device
                progress.set_postfix_str(name, refresh=False)
                try:
                    with set_mode(model.to(device), training=False):
                        while (had := tokens[name]) < job.wanted:
                            own = self.write_block(model, job, blocks[name] + rank_and_world()[0])
                            for block in gather_objects(own):
                                if tokens[name] >= job.wanted:
                                    break
                                blocks[name] += 1
                                tokens[name] += sum(sample.size for sample in block)
                                for sample in block if files else ():
                                    line = json.dumps(asdict(sample), ensure_ascii=False) + "\n"
                                    files.append(names[name], line.encode(errors="replace"))
                            if files:
                                files.commit({"blocks": blocks, "tokens": tokens})
                            progress.update(tokens[name] - had)
                            leave_together(f"in the texts that are generated before {stage.name}")
                finally:
                    model.to(before)
        if files:
            facts = {job.text: self.keep(begun, job) for job in jobs}
            replace(begun / "facts.json", json.dumps(facts, indent=1))
            files.finish()
            discard(folder)
            finish_artifact(begun, folder)
            sums = (sum(each[kind] for each in facts.values()) for kind in ("texts", "tokens", "real"))
            message = "Generated text before %s: %d texts of %d tokens, %d of them kept prefixes: %s"
            log.info(message, stage.name, *sums, folder)
        barrier()  # the rows are there for all

    def write_block(self, model: PreTrainedModel, job: WritingJob, block: int) -> list[Sample]:
        numbers = block * self.options.batch_size + np.arange(self.options.batch_size)
        contexts = [job.contexts[number % len(job.contexts)] for number in numbers]
        room = self.length - len(contexts[0]) * (not self.seq2seq)
        uniforms, samples = draws(sample_keys(job.stream, numbers), room, stream=key("tokens")), []
        found = sample_texts(model, contexts, torch.from_numpy(uniforms), sampling=self.sampling)
        for context, (ids, nll) in zip(contexts, found, strict=True):
            ended, given = ids[-1] == self.sampling.end, self.given(context)
            whole = [*given, *(ids[:-1] if ended else ids)]
            text = self.tokenizer.decode(whole, skip_special_tokens=True)
            samples.append(Sample(whole, len(given) * (self.options.prefix > 0), ended, nll, text))
        return samples

    def to_keep(self, text: str) -> Any:
        """What is kept of a domain, as JSON: the first tokens of rows that its probe begins with; or None."""
        count, prefix, rows = self.options.starts, self.options.prefix, self.data.train[text]
        drawn = shuffle(np.arange(min(count, len(rows))), len(rows), stream=key("probe", text))
        if prefix and not len(drawn := drawn[rows.row_lengths[drawn] > prefix]):
            told = f"replay.prefix={prefix} is invalid: no row of {text} that could be kept has more tokens"
            raise ValueError(f"{told}. Allowed: fewer")
        return rows.ids(drawn)[:, :prefix].tolist() if prefix else None

    def recall(self, text: str) -> Any:
        """What was kept of a domain; ValueError if it is missing or damaged."""
        instead = f"restore it from a backup, or delete {self.folder.parent} to start again"
        return read_checked_json(sample_file(self.folder / "kept", text, "json"), instead=instead)

    def prompt(self, text: str) -> list[int]:
        how = self.options
        if how.prompt is None:
            return []
        prompt = how.prompt.replace("{domain}", text)
        ids = self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        if (taken := len(self.begin) + len(ids) + how.prefix) >= self.length:
            raise ValueError(
                f"replay.prompt={how.prompt} and replay.prefix={how.prefix} is invalid: they take {taken} "
                f"tokens and leave nothing to generate of model.max_seq_length={self.length}. Allowed: fewer"
            )
        return [*self.begin, *ids] if ids else []

    def contexts(self, text: str) -> list[list[int]]:
        """What a domain's texts are written after, in turn."""
        before = self.prompt(text)
        if self.options.prefix:
            return [[*before, *each] for each in self.recall(text)]
        return [before or self.begin or [self.sampling.end]]

    def given(self, context: list[int]) -> list[int]:
        """What of a context is replayed."""
        return context[-self.options.prefix :] if self.options.prefix else self.begin

    def keep(self, folder: Path, job: WritingJob) -> dict[str, Any]:
        """Writes the rows to replay: ended texts one after another, one that was broken off in a row of its
        own; returns counts."""
        source = sample_file(folder, job.text, "jsonl")
        kept = choose_texts(*measure(source)[:2], tokens=job.tokens, wanted=job.wanted, cut=True)
        packer = ConcatPacker(self.length, self.tokenizer.all_special_ids, self.text_format.row_start)
        tables = []
        for sample, count in zip(read_samples(source), kept, strict=True):
            ids = [*sample.ids, *[self.sampling.end] * sample.ended][: max(0, count)]
            if sample.ended and count == sample.size:
                tables.append(packer.add(np.array(ids, np.int32), np.array([len(ids)])))
            elif count > 0:
                row = mark_documents(np.array(ids, np.int32), np.array([len(ids)]), packer.documents)
                packer.documents += 1
                row = row[:, : packer.writer.room(ids[0], self.length)]
                tables.append(packer.writer.table([packer.writer.begin(row)]))
        tables.append(packer.finish())

        path = sample_file(folder, job.text, "arrow")
        with ArrowWriter(path=str(path), features=packer.writer.features) as writer:
            writer.write_table(pa.concat_tables(tables).combine_chunks())
            writer.finalize()
        return count_texts(source, kept)

    def open(self, folder: Path, text: str) -> Packed | None:
        """The rows to replay in place of a text; None where there are none."""
        facts, packing = read_facts(folder, text), self.data.train[text].packing
        rows, pad = Dataset.from_file(str(sample_file(folder, text, "arrow"))), padding_id(self.tokenizer)
        return Packed(
            rows,
            self.length,
            pad,
            facts["texts"],
            facts["bytes"],
            packing,
            row_start=self.text_format.row_start,
        )


class ExampleWriter(TextWriter):
    """Writes examples of past tasks (LFPT5: Qin and Joty, ICLR 2022, arXiv 2110.07298): after a sign of their
    domain the question and, after a mark, its answer. Each domain's own are learned in that form, too. What
    is kept of a task are its choices, of which an answer has to be one."""

    def __init__(
        self, options: GeneratedReplay, folder: Path, *, corpora: Corpora, base: Any, **run: Any
    ) -> None:
        self.encoder = corpora.encoder(base.tokenizer, base.length, seq2seq=base.seq2seq)
        super().__init__(options, folder, corpora=corpora, base=base, **run)
        stages = self.data if options.past_ratio and options.forms else ()
        self.forms = {name: self.encode_forms(name) for stage in stages for name in stage.texts}

    def end_of_text(self) -> int:
        return self.encoder.ending[0]

    def sign(self, domain: str) -> str:
        return (self.options.prompt or SIGN).replace("{domain}", domain)

    def to_form(self, example: Example, domain: str) -> Example:
        """The sign asks, and the whole example is the answer."""
        whole = f"{example.source} {MARK} {example.target}"
        return Example(example.id, self.sign(domain), whole, example.task)

    def encode_whole(self, example: Example) -> tokenized_tasks.EncodedExample | None:
        """The row of an example; None where it does not fit without a cut."""
        try:
            row = self.encoder.encode(example)
        except ValueError:
            return None
        return None if row.cut or len(row.ids) > self.length * (1 + self.seq2seq) else row

    def encode_forms(self, name: str) -> Packed:
        """The training examples of a domain that fit in the form in which they are written, made once for all
        runs. Raises ValueError where none fits."""
        corpus, encoder = self.corpora.by_name[name], self.encoder
        known_by = self.corpora.tokenizer_digest(self.tokenizer)
        options = [vars(encoder.encoding), self.length, self.seq2seq, self.sign(name)]
        made_of = ["forms", FORMS_FORMAT, corpus.facts["digest"], known_by, options]

        def make(folder: Path) -> None:
            forms = (self.to_form(each, name) for each in tokenized_tasks.read_examples(corpus, "train"))
            rows = filter(None, map(self.encode_whole, forms))
            counts = tokenized_tasks.write_examples(folder / "rows.arrow", rows, tokenizer=self.tokenizer)
            if not counts.examples:
                raise ValueError(
                    f"model.max_seq_length={self.length} is invalid: no example of {name} fits in the form "
                    "that is written (replay=generated). Allowed: a larger model.max_seq_length, replay=past"
                )

        folder = make_once(self.corpora.cache / "packed" / f"{name}-forms-{digest(made_of)}", make=make)
        return tokenized_tasks.open_examples(folder / "rows.arrow", self.tokenizer)

    def extra_pools(self, stage: Domain) -> list[ReplayPool]:
        """The stage's own examples, as they are written."""
        texts = {name: self.forms[name] for name in stage.texts if name in self.forms}
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

    def to_keep(self, text: str) -> list[str]:
        """The choices that all examples of a task have; none where they differ, or answers are open."""
        corpus = self.corpora.by_name[text]
        found = {example.choices for example in tokenized_tasks.read_examples(corpus, "train")}
        return list(found.pop()) if len(found) == 1 else []

    def prompt(self, text: str) -> list[int]:
        return self.encoder.prompt(self.to_form(Example(text, "", "", text), text)).ids

    def contexts(self, text: str) -> list[list[int]]:
        return [self.prompt(text)]

    def given(self, context: list[int]) -> list[int]:
        return []

    def keep(self, folder: Path, job: WritingJob) -> dict[str, Any]:
        """Writes the rows of the valid examples: each as it is asked, and as it is written, so that the model
        can still write it later; returns counts."""
        source, pairs, choices = sample_file(folder, job.text, "jsonl"), [], self.recall(job.text)
        for number, sample in enumerate(read_samples(source)):
            example = from_form(sample.text, task=job.text, number=number, choices=choices)
            both = [] if example is None else [example, self.to_form(example, job.text)]
            rows = list(filter(None, map(self.encode_whole, both)))
            pairs.append(rows if len(rows) == 2 and sample.ended else [])
        valid = np.array([bool(each) for each in pairs])
        kept = choose_texts(*measure(source)[:2], tokens=job.tokens, wanted=job.wanted, valid=valid)
        chosen = (row for rows, count in zip(pairs, kept, strict=True) if count > 0 for row in rows)
        path = sample_file(folder, job.text, "arrow")
        tokenized_tasks.write_examples(path, chosen, tokenizer=self.tokenizer)
        facts = count_texts(source, kept) | {"invalid": int((~valid[kept >= 0]).sum())}
        if wrong := facts["invalid"]:
            message = "Dropping %d of %d examples generated for %s, which are none of it%s"
            end = "" if facts["texts"] else ": nothing of it is replayed"
            log.info(message, wrong, facts["texts"] + facts["left_out"], job.text, end)
        return facts

    def open(self, folder: Path, text: str) -> Packed | None:
        if not read_facts(folder, text)["texts"]:
            return None
        return tokenized_tasks.open_examples(sample_file(folder, text, "arrow"), self.tokenizer)


class Growing:
    """Append-only files of a folder. `commit` flushes them to disk and records their sizes with a place, any
    JSON value. Opening them again truncates them to the last commit, whose value is `place`, None without
    one. Files that are shorter than recorded, or were written in another `form`, restart empty."""

    def __init__(self, folder: Path, names: Sequence[str], *, form: Any) -> None:
        self.folder, self.form = folder, form
        self.place, sizes = None, dict.fromkeys(names, 0)
        record = folder / PLACE
        if record.exists():
            try:
                known = json.loads(record.read_text(encoding="utf-8"))
                if known["form"] != form or set(known["sizes"]) != set(names):
                    raise ValueError(f"{PLACE} has another form")
                for name, size in known["sizes"].items():
                    if (folder / name).stat().st_size < size:
                        raise ValueError(f"{name} is truncated")
                self.place, sizes = known["place"], known["sizes"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("Restarting %s, which cannot be continued (%s)", folder, error)
                record.unlink()
        self.files = {name: (folder / name).open("ab") for name in names}
        for name, file in self.files.items():
            file.truncate(sizes[name])

    def append(self, name: str, data: bytes | memoryview) -> None:
        self.files[name].write(data)

    def commit(self, place: Any) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self.files.items()}
        replace(self.folder / PLACE, json.dumps({"form": self.form, "sizes": sizes, "place": place}))

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def finish(self) -> None:
        self.close()
        (self.folder / PLACE).unlink(missing_ok=True)


def sample_file(folder: Path, text: str, suffix: str) -> Path:
    return folder / f"{file_name(text)}.{suffix}"


def read_facts(folder: Path, text: str) -> dict[str, Any]:
    return json.loads((folder / "facts.json").read_text(encoding="utf-8"))[text]


def read_samples(path: Path) -> Iterator[Sample]:
    with path.open("rb") as file:
        for line in file:
            yield Sample(**json.loads(line))


def measure(source: Path) -> list[np.ndarray]:
    """Of each sample of a file the tokens, the nll, the real tokens and the bytes, each [n]."""
    rows = ((s.size, s.nll, s.real, len(s.text.encode(errors="replace"))) for s in read_samples(source))
    return [np.array(column) for column in zip(*rows, strict=True)]


def choose_texts(
    sizes: Array, nll: Array, *, tokens: int, wanted: int, valid: Array | bool = True, cut: bool = False
) -> Array:
    """How many tokens are replayed of each sample, [n], `tokens` in all at most: of the first that come to
    `wanted` tokens the valid ones, of the lowest nll where some are to be left out (0); -1 of the rest, so
    that a larger block changes nothing. With `cut` the last one is cut to the budget."""
    asked = np.cumsum(sizes) - sizes < wanted
    order = np.flatnonzero(asked & valid)
    if wanted > tokens:
        order = order[np.argsort(nll[order], kind="stable")]
    left, kept = tokens - np.cumsum(sizes[order]) + sizes[order], np.where(asked, 0, -1)
    kept[order] = np.clip(left, 0, sizes[order]) if cut else sizes[order] * (left >= sizes[order])
    return kept


def count_texts(source: Path, kept: np.ndarray) -> dict[str, Any]:
    """Counts for the report, of samples with the number of their tokens that are replayed."""
    (_, nll, real, size), chosen, left = measure(source), kept > 0, kept == 0
    first = next(islice(read_samples(source), int(np.argmax(chosen)), None))  # of all, if none is replayed
    return {
        "tokens": int(kept[chosen].sum()),
        "texts": int(chosen.sum()),
        "real": int(np.minimum(real, kept)[chosen].sum()),
        "nll": float(nll[chosen].mean()) if chosen.any() else None,
        "left_out": int(left.sum()),
        "nll_left_out": float(nll[left].mean()) if left.any() else None,
        "bytes": int(size[chosen].sum()),
        "excerpt": first.text[:EXCERPT],
    }


def from_form(text: str, *, task: str, number: int, choices: Sequence[str]) -> Example | None:
    """The example that a model has written; None where it has no question, no answer, or one outside
    the choices, if there are some."""
    source, _, target = (part.strip() for part in text.rpartition(MARK))
    if not source or not target or (choices and target not in choices):
        return None
    return Example(f"generated-{number}", source, target, task, tuple(choices), (0, len(source)))
