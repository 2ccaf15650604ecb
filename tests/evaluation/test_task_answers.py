"""A model asked: against its own losses, one question after another, and a loop over tokens."""

from functools import partial

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from cpt.core.preemption import Preempted
from cpt.data.sources.examples import Example
from cpt.data.tokenized_tasks import TaskPrompt
from cpt.evaluation.task_answers import score_choices, select_likeliest_choices, write_answers
from cpt.models.objectives import Causal, CausalAnswers, Seq2SeqAnswers
from tests.support.data_fixtures import framed_tokenizer

pytestmark = pytest.mark.slow

END, PAD = 2, 1
CHOICES = ("one", "two", "three")
ANSWERS = ([11, END], [12, 13, END], [14, 15, 16, END])


def causal(seed=0):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=64)).eval()


def seq2seq(seed=0):
    torch.manual_seed(seed)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    tokens = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
    return T5ForConditionalGeneration(T5Config(vocab_size=60, **sizes, **tokens)).eval()


MODELS = {
    "causal": (causal, CausalAnswers(Causal(), pad=PAD)),
    "seq2seq": (seq2seq, Seq2SeqAnswers(Causal(), pad=PAD, start=PAD)),
}


def questions(count=9):
    draw = torch.Generator().manual_seed(3)
    lengths = [int(torch.randint(2, 14, (), generator=draw)) for _ in range(count)]
    prompts = [torch.randint(5, 60, (length,), generator=draw).tolist() for length in lengths]
    examples = [Example(str(n), "", CHOICES[n % 3], "t", CHOICES) for n in range(count)]
    return [
        TaskPrompt(*example_and_prompt, ANSWERS, [END])
        for example_and_prompt in zip(examples, prompts, strict=True)
    ]


def logits_after(model, prompt, answer):
    if model.config.is_encoder_decoder:
        decoder_ids = torch.tensor([[PAD, *answer]])
        return model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoder_ids).logits[0, -1]
    return model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, -1]


def log_likelihood(model, prompt, answer):
    passes = ((logits_after(model, prompt, answer[:at]), token) for at, token in enumerate(answer))
    return sum(logits.log_softmax(-1)[token].item() for logits, token in passes)


@pytest.mark.parametrize("kind", MODELS)
def test_the_choice_is_that_of_the_largest_likelihood(kind):
    build, objective = MODELS[kind]
    for seed in range(2):
        model = build(seed)
        step_counts = []
        sums = score_choices(model, objective, questions(), batch_size=4, step=step_counts.append)
        best, best_mean = select_likeliest_choices(questions(), sums)
        for question, choice, found_mean in zip(questions(), best, best_mean, strict=True):
            sums = [log_likelihood(model, question.ids, answer) for answer in ANSWERS]
            means = [total / len(answer) for total, answer in zip(sums, ANSWERS, strict=True)]
            assert choice == CHOICES[sums.index(max(sums))]
            assert found_mean == CHOICES[means.index(max(means))]
        assert sum(step_counts) == 27
    assert len({*best, *best_mean}) > 1


@torch.no_grad()
def answer_by_hand(model, tokenizer):
    """What a loop over tokens writes to every question, at most six."""
    texts = {}
    for number, question in enumerate(questions()):
        answer_ids = []
        while len(answer_ids) < 6 and END not in answer_ids:
            answer_ids.append(int(logits_after(model, question.ids, answer_ids).argmax()))
        texts[number] = tokenizer.decode(answer_ids, skip_special_tokens=True).strip()
    return texts


def write_texts(model, tokenizer, *, batch_size=4, max_new_tokens=6):
    return write_answers(
        model,
        tokenizer,
        questions(),
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        step=lambda count: None,
    )


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_written_is_greedy_in_any_batch_whatever_the_checkpoint_says(kind):
    tokenizer = framed_tokenizer()
    differing = set()
    for seed in range(2):
        model = MODELS[kind][0](seed)
        expected = answer_by_hand(model, tokenizer)
        for batch_size in (1, 4, 20):
            assert write_texts(model, tokenizer, batch_size=batch_size) == expected
        differing |= {*expected.values()}
        generation_config = model.generation_config  # many are saved with a penalty or a beam
        (
            generation_config.repetition_penalty,
            generation_config.forced_bos_token_id,
            generation_config.num_beams,
        ) = 5.0, 7, 3
        assert write_texts(model, tokenizer) == expected and model.generation_config is generation_config
    assert len(differing) > 1


@pytest.mark.parametrize("kind", MODELS)
def test_questions_of_a_batch_are_done_one_by_one_and_a_signal_ends_it(kind):
    """A batch of long answers takes minutes."""
    model = MODELS[kind][0](0)
    write_batch = partial(write_answers, model, framed_tokenizer(), questions(), batch_size=20)
    counts = []
    write_batch(max_new_tokens=20, step=counts.append)
    assert sum(counts) == len(questions()) and len(counts) > 1

    def preempt(count):
        raise Preempted(15)

    with pytest.raises(Preempted):
        write_batch(max_new_tokens=20, step=preempt)


def test_an_answer_ends_with_the_positions_of_the_model():
    tokenizer = framed_tokenizer()
    model = causal()
    long_answers = write_texts(model, tokenizer, max_new_tokens=40, batch_size=1)
    model.config.max_position_embeddings = 16
    model.transformer.wpe.weight.data = model.transformer.wpe.weight.data[:16]
    model.transformer.wpe.num_embeddings = 16
    short = write_texts(model, tokenizer, max_new_tokens=40, batch_size=1)
    assert all(long_answers[number].startswith(text) for number, text in short.items())
    assert short != long_answers
