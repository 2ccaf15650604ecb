"""Let a chat model answer prompts: `python -m cpt.write_chats MODEL --output FILE`.

Writes chats in which MODEL answers prompts to FILE, for replay.sources: what the model itself answers changes
it least. An answer is the model's most likely one. One that does not end within --max-new-tokens, repeats
itself or is empty is left out: it would teach just that. A stopped command continues where it was. Exit code
1 after an error."""

import argparse
import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.errors import find_reason, readable_errors
from cpt.core.exceptions import InvalidOptionError
from cpt.core.files import LOCK, write_atomically, writing
from cpt.core.heartbeat import make_progress_bar
from cpt.core.messages import count_noun
from cpt.core.naming import quote
from cpt.core.output import run_program
from cpt.data.chats import (
    DEFAULT_TEMPLATE,
    RENDER_ERRORS,
    TEMPLATE_DATE,
    read_chat_templates,
    set_template_date,
)
from cpt.data.sources.chats import TEMPLATE_OPTIONS
from cpt.data.sources.examples import ASSISTANT, USER, Example
from cpt.data.tokenized_tasks import TaskPrompt
from cpt.evaluation import chat_set
from cpt.evaluation.chat_answers import MAX_REPEATED, find_repeated_share
from cpt.evaluation.finetune import find_max_length
from cpt.evaluation.task_answers import generate_batches
from cpt.models.loading import (
    find_adapter,
    find_end_ids,
    find_objectives,
    load_config,
    load_tokenizer,
    merge_adapter,
)
from cpt.models.tokenizer_faults import tokenizer_error

UNFINISHED = ".unfinished"  # the file of the answers so far ends so
SHIPPED_PROMPTS = Path(chat_set.__file__).with_name("default_prompts.txt")  # none of the held-out chats
REPLAY_SHARE = 0.1  # of a batch, in the option that is printed


@dataclass(frozen=True, kw_only=True)
class PromptAnswer:
    """What a model answers to a prompt. `problem` says why it is no chat to learn from; empty if it is."""

    prompt: str
    text: str
    num_tokens: int  # of the prompt and the answer
    problem: str


def build_parser() -> argparse.ArgumentParser:
    paragraphs = str(__doc__).split("\n\n")
    parser = argparse.ArgumentParser(prog="python -m cpt.write_chats", description=paragraphs[1])
    add = parser.add_argument
    add("model", metavar="MODEL", help="a chat model: a folder, or a name on the Hub")
    add(
        "prompts",
        nargs="?",
        type=Path,
        default=SHIPPED_PROMPTS,
        metavar="PROMPTS",
        help="a question in each line, or .jsonl with `prompt`; default: 200 questions in English",
    )
    add("--output", required=True, type=Path, metavar="FILE", help="new .jsonl file for the chats")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="of an answer; default: 128")
    add("--batch-size", type=int, default=16, metavar="N", help="prompts at a time; default: 16")
    add(
        "--template-options",
        default="{}",
        metavar="JSON",
        help="variables of the chat template, as '{\"enable_thinking\": false}'; stored with each chat",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    with readable_errors():
        write_chats(options)
    return 0


def write_chats(options: argparse.Namespace) -> None:
    """Raises ValueError for options, prompts or a model that cannot be used, and where no answer is a chat to
    learn from."""
    check_write_options(options)
    prompts = read_prompts(options.prompts)
    config = read_chat_config(options.model)
    tokenizer = load_chat_tokenizer(options.model)
    check_template_options(tokenizer, options)
    questions = encode_prompts(tokenizer, prompts, options)
    check_rows_of_tokens(config, questions, options)

    with writing(options.output), holding_output(options.output):
        answers_so_far = UnfinishedAnswers(options, prompts)
        answers = answers_so_far.read()
        if len(answers) < len(questions):
            for batch_answers in answer_questions(tokenizer, questions, options, begin=len(answers)):
                answers_so_far.append(batch_answers)
                answers += batch_answers

        chats = [answer for answer in answers if not answer.problem]
        check_chats(chats, answers, options)
        lines = [json.dumps(make_row(chat, options.template_options), ensure_ascii=False) for chat in chats]
        write_atomically(options.output, "".join(f"{line}\n" for line in lines))
        answers_so_far.path.unlink()
    print_summary(chats, answers, options)


@contextmanager
def holding_output(output: Path) -> Iterator[None]:
    """Holds a lock next to the output, in a folder that is made, and which ends with the process. Raises
    ValueError if another process has it: both would write to one file of answers."""
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = output.with_name(f"{output.name}{LOCK}")
    try:
        with FileLock(lock, timeout=0):
            yield
            lock.unlink()
    except Timeout:
        raise InvalidOptionError(
            "--output", output, reason="another process is writing it", allowed="a new file"
        ) from None


def check_write_options(options: argparse.Namespace) -> None:
    """Reads the JSON of --template-options. Raises ValueError for values that are not allowed, and an output
    that is there."""
    for name in ("max_new_tokens", "batch_size"):
        value = getattr(options, name)
        if value < 1:
            raise InvalidOptionError(f"--{name.replace('_', '-')}", value, allowed="1 or more")
    options.template_options = parse_template_options(options.template_options)
    if options.output.exists():
        raise InvalidOptionError("--output", options.output, reason="it exists", allowed="a new file")
    if options.output.suffix != ".jsonl":
        raise InvalidOptionError("--output", options.output, allowed="a name that ends in .jsonl")


def parse_template_options(text: str) -> dict[str, Any]:
    """The variables of the chat template in the JSON of --template-options. Raises ValueError for anything
    else."""
    try:
        template_options = json.loads(text)
    except (ValueError, RecursionError):
        template_options = None
    if not isinstance(template_options, dict):
        raise InvalidOptionError("--template-options", text, allowed="a JSON object")
    return template_options


def read_prompts(path: Path) -> list[str]:
    """The different prompts of a file, in their order. Raises ValueError for a file without any, and for one
    that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(
            "PROMPTS", path, reason=find_reason(error), allowed="a text file in UTF-8"
        ) from error
    if "\0" in text:  # UTF-16 without a mark of its order is valid UTF-8
        raise InvalidOptionError(
            "PROMPTS", path, reason="it has characters of number 0", allowed="a text file in UTF-8"
        )

    # Not splitlines: a row of JSON may hold other ends of lines, like U+2028, as they are.
    lines = text.split("\n")
    prompts: dict[str, None] = {}  # in order
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompt = read_prompt_row(line, f"{path}:{number}") if path.suffix == ".jsonl" else line.strip()
            prompts[prompt] = None
    if not prompts:
        raise InvalidOptionError(
            "PROMPTS", path, reason="it has no prompt", allowed="a question in each line"
        )
    return list(prompts)


def read_prompt_row(line: str, position: str) -> str:
    """The prompt of a line of JSON. Raises ValueError for a line without one."""
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError, RecursionError):
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'{position}: {line:.80} has no prompt. Allowed: {{"prompt": "a question"}}')
    return prompt


def read_chat_config(model: str) -> PretrainedConfig:
    """The configuration of a model. Raises ValueError for one that is missing or not causal, and for an
    adapter without its model."""
    try:
        config = load_config(model)
    except InvalidOptionError as error:
        raise InvalidOptionError("MODEL", model, reason=error.reason, allowed=error.allowed) from error
    if "causal" not in find_objectives(config):
        raise InvalidOptionError(
            "MODEL", model, reason=f"a {config.model_type} does not continue text", allowed="a causal model"
        )
    return config


def load_chat_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Raises ValueError for a tokenizer that cannot be read or has no chat template."""
    try:
        tokenizer = load_tokenizer(model)
    except ConnectionError:
        raise
    except Exception as error:  # each tokenizer class raises other errors for bad files
        raise tokenizer_error("MODEL", model, error, allowed="a whole checkpoint") from error
    if DEFAULT_TEMPLATE not in read_chat_templates(tokenizer):
        raise InvalidOptionError(
            "MODEL", model, reason="it has no chat template", allowed="an instruction-tuned model"
        )
    return tokenizer


def check_template_options(tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> None:
    """Raises ValueError for variables that the chat template does not read: a name with a typing error would
    change nothing, and be stored with each chat."""
    template = read_chat_templates(tokenizer)[DEFAULT_TEMPLATE]
    words = re.findall(r"\w+", template)
    for name in options.template_options:
        if name not in words:
            raise InvalidOptionError(
                "--template-options",
                json.dumps(options.template_options),
                reason=f"the chat template of {options.model} does not read {name}",
                allowed="variables of the chat template",
            )


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], options: argparse.Namespace
) -> list[TaskPrompt]:
    """The prompts as the model is asked them. Raises ValueError for one that the chat template does not
    take."""
    template = set_template_date(read_chat_templates(tokenizer)[DEFAULT_TEMPLATE], TEMPLATE_DATE)
    questions = []
    for prompt in prompts:
        try:
            encoded = tokenizer.apply_chat_template(
                [{"role": USER, "content": prompt}],
                chat_template=template,
                add_generation_prompt=True,
                return_dict=True,
                **options.template_options,
            )
        except RENDER_ERRORS as error:
            raise ValueError(
                f"the chat template of {options.model} does not take the prompt {prompt[:80]!r}: "
                f"{find_reason(error)}"
            ) from error
        example = Example(id=prompt, source=prompt, target="", task="")
        questions.append(TaskPrompt(example, list(encoded["input_ids"]), choices=[], reference=[]))
    return questions


def check_rows_of_tokens(
    config: PretrainedConfig, questions: Sequence[TaskPrompt], options: argparse.Namespace
) -> None:
    """Raises ValueError for a token of a prompt that has no row in the embedding."""
    num_rows = config.get_text_config().vocab_size
    largest_token = max(max(question.ids) for question in questions)
    if largest_token >= num_rows:
        raise InvalidOptionError(
            "MODEL",
            options.model,
            reason=f"its tokenizer makes the token {largest_token:,}, and its embedding has "
            f"{count_noun(num_rows, 'row')}",
            allowed="a model with its own tokenizer",
        )


class UnfinishedAnswers:
    """The answers so far, in a file next to the output: a line that says what they depend on, then a line for
    each answer."""

    def __init__(self, options: argparse.Namespace, prompts: Sequence[str]) -> None:
        self.path = options.output.with_name(f"{options.output.name}{UNFINISHED}")
        self.batch_size = options.batch_size
        settings = {
            "model": options.model,
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
            "max_new_tokens": options.max_new_tokens,
            "batch_size": options.batch_size,
            "template_options": options.template_options,
        }
        self.settings_line = json.dumps(settings)

    def read(self) -> list[PromptAnswer]:
        """The answers of whole batches; none of another command. The file is then ready for the next."""
        answers = []
        if self.path.exists():
            settings_line, *lines = self.path.read_text(encoding="utf-8").split("\n")
            if settings_line == self.settings_line:
                whole_lines = lines[:-1]  # what follows the last end of a line was not written whole
                answers = [PromptAnswer(**json.loads(line)) for line in whole_lines]
        num_whole = len(answers) - len(answers) % self.batch_size
        answers = answers[:num_whole]

        write_atomically(self.path, f"{self.settings_line}\n")
        self.append(answers)
        return answers

    def append(self, answers: Sequence[PromptAnswer]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(asdict(answer))}\n" for answer in answers)


def answer_questions(
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[TaskPrompt],
    options: argparse.Namespace,
    *,
    begin: int,
) -> Iterator[list[PromptAnswer]]:
    """Yields the answers to the questions from number `begin` on, batch by batch. Raises ValueError for a
    model without a token that ends answers."""
    model = load_answering_model(options.model)
    ends = find_end_ids(options.model, model.config)
    if not ends and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]
    if not ends:
        raise InvalidOptionError(
            "MODEL", options.model, reason="no token ends its answers", allowed="a model with an eos_token_id"
        )

    total = len(questions)
    label = f"answering {count_noun(total, 'prompt')}"
    with make_progress_bar(label, total=total, initial=begin, unit="prompt", hidden=False) as progress:
        for first in range(begin, total, options.batch_size):
            yield answer_questions_together(
                model,
                tokenizer,
                questions[first : first + options.batch_size],
                ends=ends,
                max_new_tokens=options.max_new_tokens,
                step=progress.update,  # also within a batch, which can take a minute
            )


def load_answering_model(model_name: str) -> PreTrainedModel:
    """The model in the type of its weights, with an adapter in its folder merged, on a GPU if there is one.
    Raises ValueError for weights that the checkpoint lacks, with which answers would be random."""
    model, report = AutoModelForCausalLM.from_pretrained(
        model_name, trust_remote_code=False, output_loading_info=True
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise InvalidOptionError(
            "MODEL",
            model_name,
            reason=f"its files lack {count_noun(len(missing), 'weight')}, for example {missing[0]}",
            allowed="a whole checkpoint",
        )
    adapter = find_adapter(model_name)
    if adapter is not None:
        model = merge_adapter(model, adapter, checkpoint=model_name)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def answer_questions_together(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[TaskPrompt],
    *,
    ends: Sequence[int],
    max_new_tokens: int,
    step: Callable[[int], object],
) -> list[PromptAnswer]:
    """The answers to prompts that are answered together, in their order. A prompt that leaves no positions
    for `max_new_tokens` is not asked: it would shorten the answers of the others."""
    answers: dict[int, PromptAnswer] = {}
    fitting_indices: list[int] = []
    for index, question in enumerate(questions):
        if leaves_positions(model, question, max_new_tokens):
            fitting_indices.append(index)
        else:
            answers[index] = skip_prompt(question)
            step(1)

    outputs = generate_batches(
        model,
        tokenizer,
        [questions[index] for index in fitting_indices],
        ends=ends,
        max_new_tokens=max_new_tokens,
        batch_size=len(questions),
        step=step,
        share=(0, 1),
    )
    for indices, output in outputs:  # several where the model takes no padding
        for position, row in zip(indices, output.tolist(), strict=True):
            index = fitting_indices[position]
            answers[index] = judge_prompt_answer(tokenizer, questions[index], row, ends=ends)
    return [answers[index] for index in range(len(questions))]


def leaves_positions(model: PreTrainedModel, question: TaskPrompt, max_new_tokens: int) -> bool:
    """Whether a prompt and as long an answer fit into the positions of the model."""
    length = len(question.ids) + max_new_tokens
    return find_max_length(model, length) == length


def skip_prompt(question: TaskPrompt) -> PromptAnswer:
    """No answer, to a prompt that leaves no positions for one."""
    return PromptAnswer(
        prompt=question.example.source,
        text="",
        num_tokens=len(question.ids),
        problem="longer than the positions of the model allow",
    )


def judge_prompt_answer(
    tokenizer: PreTrainedTokenizerBase, question: TaskPrompt, row: Sequence[int], *, ends: Sequence[int]
) -> PromptAnswer:
    """The answer in a row of new tokens, up to one of the tokens `ends`, and what is wrong with it."""
    end_positions = [position for position, token in enumerate(row) if token in ends]
    answer_ids = row[: end_positions[0]] if end_positions else row
    text = str(tokenizer.decode(answer_ids, skip_special_tokens=True)).strip()

    problem = ""
    if not end_positions:
        problem = "not ended"
    elif not text:
        problem = "empty"
    elif find_repeated_share(answer_ids) > MAX_REPEATED:
        problem = "repetitive"
    num_tokens = len(question.ids) + len(answer_ids) + 1  # its end
    return PromptAnswer(prompt=question.example.source, text=text, num_tokens=num_tokens, problem=problem)


def check_chats(
    chats: Sequence[PromptAnswer], answers: Sequence[PromptAnswer], options: argparse.Namespace
) -> None:
    """Raises ValueError where no answer is a chat to learn from."""
    if not chats:
        raise InvalidOptionError(
            "MODEL",
            options.model,
            reason=f"none of its answers can be learned from: {count_problems(answers)}",
            allowed="an instruction-tuned model, or another --max-new-tokens",
        )


def count_problems(answers: Sequence[PromptAnswer]) -> str:
    """`3 not ended, 1 empty`: the answers that are left out, by their problem; empty for none."""
    counts = Counter(answer.problem for answer in answers if answer.problem)
    return ", ".join(f"{count:,} {problem}" for problem, count in counts.most_common())


def make_row(chat: PromptAnswer, template_options: Mapping[str, Any]) -> Mapping[str, Any]:
    """A chat as `replay.sources` and domains of chats read it."""
    turns = [{"role": USER, "content": chat.prompt}, {"role": ASSISTANT, "content": chat.text}]
    if template_options:
        return {"messages": turns, TEMPLATE_OPTIONS: template_options}
    return {"messages": turns}


def print_summary(
    chats: Sequence[PromptAnswer], answers: Sequence[PromptAnswer], options: argparse.Namespace
) -> None:
    """Prints how many chats there are, how long they are, and the option that mixes them into a run."""
    print(f"{options.output}: {count_noun(len(chats), 'chat')} of {len(answers):,}")
    if len(chats) < len(answers):
        print(f"Left out: {count_problems(answers)}")

    lengths = sorted(chat.num_tokens for chat in chats)
    print(f"Tokens of a chat: median {lengths[len(lengths) // 2]:,}, longest {lengths[-1]:,}")
    source = f"{{path: {quote(str(options.output))}, format: messages, ratio: {REPLAY_SHARE}}}"
    print(f"Use them: {shlex.quote(f'replay.sources={{chat: {source}}}')}")


if __name__ == "__main__":
    run_program(main)
