"""What the tests of tasks share: examples, chats, and tokenizers of six styles."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cpt.data.sources.base import Encoding
from cpt.data.sources.examples import Example, Turn
from cpt.data.tokenized_tasks import Encoder
from tests.conftest import VOCABULARIES, sentences
from tests.support.data_fixtures import (
    bare_tokenizer,
    bos_tokenizer,
    eos_tokenizer,
    framed_tokenizer,
    make_prose,
)

LABELS = ("mu na", "pe ri so", "tu")
CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ m['content'] }}</s>{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETFUL = (  # as templates that drop the thoughts of earlier answers
    "{% for m in messages %}<s>{{ m['role'] }}\n"
    "{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}"
    "{% else %}{{ m['content'][3:] }}{% endif %}"
    "</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def metaspace() -> PreTrainedTokenizerFast:
    """As Llama's SentencePiece: a blank before every text, shown as a mark on words."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    letters = sorted(set("".join(make_prose(50))) | set("Answer:Options\n,"))
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=letters, show_progress=False
    )
    backend.train_from_iterator(iter(make_prose(50)), trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def prefix_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = bare_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


STYLES = {
    "bare": bare_tokenizer,
    "opened": bos_tokenizer,
    "closed": eos_tokenizer,
    "framed": framed_tokenizer,
    "metaspace": metaspace,
    "prefixed": prefix_tokenizer,
}


def make_examples(count: int, *, seed: int = 0, words: tuple[int, int] = (1, 12)) -> list[Example]:
    """Questions on a text with one of LABELS as the answer; the text alone may be truncated."""
    generator = random.Random(seed)
    examples = []
    for number, text in enumerate(make_prose(count, seed=seed, words=words)):
        instruction = f"Options: {', '.join(LABELS)}\n"
        text_span = (len(instruction), len(instruction) + len(text))
        source = f"{instruction}{text}\nAnswer:"
        label = generator.choice(LABELS)
        examples.append(Example(f"e-{number}", source, label, "TC", LABELS, text_span))
    return examples


def chat(*, seed: int = 0, exchanges: int = 3, words: tuple[int, int] = (3, 6)) -> Example:
    texts = make_prose(2 * exchanges + 1, seed=seed, words=words)
    turns = [Turn("system", texts.pop())]
    for number in range(exchanges):
        turns += [Turn("user", texts[2 * number]), Turn("assistant", texts[2 * number + 1])]
    return Example(f"chat-{seed}", "", turns[-1].content, "chat", turns=tuple(turns))


def encoder(
    tokenizer: PreTrainedTokenizerFast,
    *,
    length: int = 200,
    truncate: str = "tail",
    seq2seq: bool = False,
    scored_turns: str = "all",
) -> Encoder:
    return Encoder(tokenizer, length, Encoding(truncate=truncate, scored_turns=scored_turns), seq2seq)


def write_tasks(
    root: Path, names: Sequence[str], *, train: int, test: int, size: tuple[int, int] = (8, 30)
) -> Path:
    for seed, name in enumerate(names):
        (root / name).mkdir()
        for number, (split, count) in enumerate((("train", train), ("test", test))):
            texts = sentences(VOCABULARIES[name], count=count, seed=10 * seed + number, size=size)
            rows = [{"text": text, "label": "long" if len(text) > 110 else "short"} for text in texts]
            (root / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    (root / "general").mkdir()
    general = sentences(VOCABULARIES["general"], count=120, seed=0)
    (root / "general" / "all.txt").write_text("\n".join(general))
    return root
