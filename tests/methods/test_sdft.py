"""SDFT: answers that the model writes itself, distilled from the model that is shown the example's answer."""

import pytest
import torch
from transformers import AutoTokenizer

from cpt.data.chats import ChatEncoder
from cpt.data.demonstrations import Demonstration
from cpt.data.sources.examples import Example, Turn
from cpt.methods.options import SDFTOptions
from cpt.methods.sdft import Rollout, find_questions
from tests.support.chat_decoder import TEMPLATE, write_checkpoint
from tests.support.method_fixtures import ORDER, StepRecorder, build_method_fixture, clone_tensors
from tests.support.task_fixtures import write_tasks

TEXT = "\n\nThis is an answer:\n{demonstration}\n\nNow answer:\n"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"), ("law", "food"), train=40, test=8, size=(1, 6))


@pytest.fixture
def make_config(small_gpt2, tasks):
    def compose(*overrides):
        on_tasks = ["domains=tasks", "domains/template=bare", f"domains.root={tasks}", "answers=none"]
        sizes = ["model.max_seq_length=64", "method.max_new_tokens=6", "trainer.steps=2"]
        return small_gpt2("method=sdft", ORDER, *on_tasks, *sizes, *overrides)

    return compose


@pytest.fixture
def build(make_config):
    """A method after the steps of its first domain."""

    def built(*overrides):
        run = build_method_fixture(make_config(*overrides))
        run.learn(0)
        return run

    return built


def log_probabilities(model, prompt, answer):
    """Of the tokens of an answer after a prompt, [T, V], from the model itself."""
    ids = torch.tensor([prompt + answer])
    logits = model(input_ids=ids).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_the_loss_is_the_mean_divergence_over_the_tokens_of_each_answer(divergence, build):
    run = build(f"method.divergence={divergence}", "method.teacher_update_rate=0.5")
    module = run.module
    [batch] = run.batches()
    module.eval()
    rollouts = module.write_answers(find_questions(batch, module.find_stream()))
    assert len(rollouts) == 8 and len({len(rollout.answer) for rollout in rollouts}) >= 1

    expected = torch.tensor(0.0)
    for rollout in rollouts:
        student = log_probabilities(module.model, rollout.prompt, rollout.answer)
        with module.teacher_weights.teaching(module.model):
            teacher = log_probabilities(module.model, rollout.shown_prompt, rollout.answer)
        if divergence == "forward":
            expected = expected + (teacher.exp() * (teacher - student)).sum(-1).mean()
        else:
            expected = expected + (student.exp() * (student - teacher)).sum(-1).mean()
    losses = module.losses(batch)
    assert set(losses) == {"sdft"}
    torch.testing.assert_close(losses["sdft"], expected / batch["mean_rows"])
    assert losses["sdft"] > 0


def test_the_teacher_reads_the_examples_answer_and_the_student_does_not(build):
    run = build()
    [batch] = run.batches()
    questions = find_questions(batch, run.module.find_stream())
    rollouts = run.module.write_answers(questions)
    demonstration = run.module.demonstration
    for question, rollout in zip(questions, rollouts, strict=True):
        row = batch["input_ids"][question.row].tolist()
        length = len(question.prompt)
        assert rollout.prompt == question.prompt == row[:length]
        assert row[length : length + len(question.answer)] == question.answer
        expected = [*question.prompt, *demonstration.before, *question.answer, *demonstration.after]
        assert rollout.shown_prompt == expected and question.answer


def test_answers_are_a_function_of_the_example_and_the_step(build):
    run = build()
    module = run.module
    [batch] = run.batches()
    questions = find_questions(batch, 1)
    answers = [rollout.answer for rollout in module.write_answers(questions)]
    single_answers = [module.write_answers([question])[0].answer for question in reversed(questions)]
    assert single_answers[::-1] == answers
    other_step = [rollout.answer for rollout in module.write_answers(find_questions(batch, 2))]
    assert other_step != answers and all(len(answer) <= 6 for answer in answers)


def test_the_teacher_is_an_average_from_the_model_before_the_domain_on(make_config):
    run = build_method_fixture(make_config("method.teacher_update_rate=0.25"))
    expected = run.weights()
    recorder = StepRecorder(lambda module: clone_tensors(dict(module.model.named_parameters())))
    run.learn(0, recorder)
    for _, weights in recorder.seen:
        expected = {name: average.lerp(weights[name].detach(), 0.25) for name, average in expected.items()}
    for name, average in run.module.teacher_weights.named().items():
        torch.testing.assert_close(average, expected[name], msg=name)


def test_rows_without_a_question_keep_their_language_model_loss(build):
    run = build("method.strength=0.75")
    module = run.module.eval()
    [batch] = run.batches()
    raw = {**batch, "positions": batch["positions"].clone()}
    raw["positions"][raw["rows"] == 2] -= (
        raw["positions"][raw["rows"] == 2][0] - 2 * batch["input_ids"].shape[1]
    )
    questions = find_questions(raw, 0)
    assert [question.row for question in questions] == [0, 1, 3, 4, 5, 6, 7]

    nll = module.objective.nll(module.model, raw)
    weights = torch.where(raw["rows"] == 2, 1.0, 0.25)
    torch.testing.assert_close(module.sum_text_loss(raw, questions), (weights * nll).sum() * raw["weight"])


def test_one_of_several_answers_is_drawn_for_each_step():
    # Tokens 3 and 4 are one answer, 7 and 8 the other; 8 ends answers.
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    batch = {
        "input_ids": ids,
        "positions": torch.tensor([1, 2, 5, 6]),
        "targets": torch.tensor([3, 4, 7, 8]),
        "rows": torch.zeros(4, dtype=torch.long),
    }
    drawn = {}
    for stream in range(20):
        [question] = find_questions(batch, stream)
        drawn[tuple(question.prompt)] = (question.answer, question.end)
    assert drawn == {(1, 2): ([3, 4], 8), (1, 2, 3, 4, 5, 6): ([7], 8)}


def test_a_chats_demonstration_is_in_the_turn_of_the_question(tmp_path):
    write_checkpoint(tmp_path, TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    demonstration = Demonstration.encode(TEXT, tokenizer)
    turns = (Turn("user", "the court finds"), Turn("assistant", "damages"))
    [answer] = ChatEncoder(tokenizer).answers(Example("e", "", "damages", "chat", turns=turns))
    shown_prompt = demonstration.insert(answer.prompt, answer.ids[:-1])
    text = "user:\nthe court finds\n\nThis is an answer:\ndamages\n\nNow answer:\n<|end|>\nassistant:\n"
    assert tokenizer.decode(shown_prompt).replace(tokenizer.bos_token, "") == text
    assert shown_prompt.count(tokenizer.convert_tokens_to_ids("<|end|>")) == 1

    # A task's prompt is no turn: what is shown follows it.
    prompt = tokenizer("the court finds", add_special_tokens=False)["input_ids"]
    assert demonstration.insert(prompt, [7]) == [*prompt, *demonstration.before, 7, *demonstration.after]


def test_all_weights_learn_in_16_bits(make_config):
    """Answers are generated without gradients, of which autocast could keep copies of the weights."""
    run = build_method_fixture(make_config("trainer.precision=bf16-mixed"))
    weights = run.weights()
    run.learn(0)
    for name, weight in run.weights().items():
        assert not torch.equal(weight, weights[name]), name


def test_questions_that_fill_the_model_are_left_out(build, caplog):
    run = build("model.config.n_positions=64", "method.max_new_tokens=60")
    [batch] = run.batches()
    with caplog.at_level("WARNING"):
        run.module.has_logged_length = False
        rollouts = run.module.write_answers(find_questions(batch, 0))
    assert all(len(rollout.shown_prompt) + len(rollout.answer) <= 64 for rollout in rollouts)
    assert len(rollouts) < 8 and "Leaving out questions of law" in caplog.text


def test_skipped_tokens_are_not_distilled(build):
    run = build("method.skipped_tokens=2")
    rollouts = [Rollout([5, 6], [5, 6, 7], [8, 9, 10, 11])]
    batch = run.module.make_batch([(rollouts[0].prompt, rollouts[0].answer)])
    assert batch["targets"].tolist() == [10, 11]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["domains=texts"], "method=sdft is invalid: it needs questions with answers"),
        (["model=tiny_t5"], "method=sdft is invalid: model=tiny_t5 is an encoder-decoder"),
        (["loss=eaft"], "loss=EntropyWeights is invalid with method=sdft method.strength=1"),
        (["method.prompt=no answer"], "method.prompt=no answer is invalid: it does not show the answer once"),
        (["method.skipped_tokens=256"], "method.skipped_tokens=256 is invalid with max_new_tokens=256"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides, message, composed, tasks, tmp_path):
    from cpt.train import train

    options = ["method=sdft", "model=tiny_gpt2", "domains=tasks", f"domains.root={tasks}", "logger=none"]
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        train(composed(*options, *overrides, f"cache_dir={tmp_path}"), run_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "stages").exists()


def test_defaults_are_those_of_the_paper(composed):
    options = dict(composed("method=sdft").method)
    options = {name: value for name, value in options.items() if name in SDFTOptions.__annotations__}
    assert (options["strength"], options["divergence"], options["teacher_update_rate"]) == (
        1,
        "forward",
        0.01,
    )
