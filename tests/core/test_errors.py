"""Messages for arguments that Hydra cannot parse, and for options of other choices."""

import shlex

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationResolutionError

import cpt.core.naming  # noqa: F401  (registers the resolvers)
from cpt.core import foreign_names
from cpt.core.config import CONF, flatten
from cpt.core.errors import (
    describe_missing_key,
    describe_unknown_choice,
    explain_error,
    list_choices_with,
)
from cpt.core.schema import describe_unknown_name

HINT = ". Allowed: key=value, with the value in quotes: "


def explain_override(override):
    with pytest.raises(OverrideParseException) as error:
        OverridesParser.create().parse_overrides([override])
    return explain_error(error.value)


@pytest.mark.parametrize(
    "value", ["<|x|>", "</s>", "a&b", "#1", "a=b", "it's", 'say "so"', "über<", r"C:\\<x>"]
)
def test_a_value_that_needs_quotes_is_shown_in_them(value):
    message = explain_override(f"domains.separator={value}")
    problem, hint, argument = message.partition(HINT)
    assert hint and problem.startswith(f"domains.separator={value} is invalid: ")
    assert "Exception" not in message
    (typed,) = shlex.split(argument)
    (override,) = OverridesParser.create().parse_overrides([typed])
    assert override.value() == value


def test_the_hint_is_only_for_values_that_quotes_mend():
    assert explain_override("name=[a").endswith(". Allowed: key=value")
    assert explain_override("a b=c").endswith(". Allowed: key=value")
    assert explain_override("domains.only=[<a>,b]").endswith("in quotes within the list or the keys")
    (typed,) = shlex.split(explain_override("domains.separator='<x>").partition(HINT)[2])
    assert typed == 'domains.separator="<x>"'


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("method.buffer_size", ["agem", "derpp"]),
        ("method.reduction_factor", ["adapter", "demix", "hat"]),  # of a file in their defaults
        ("method.adapter_storage", ["inclora", "nlora", "olora"]),
        ("method.embeddings", ["inclora", "lora", "merge_lora", "nlora", "olora"]),  # of its own defaults
        ("method.nothing", []),
    ],
)
def test_an_option_of_other_choices_is_found_in_all_of_their_files(key, choices):
    assert list_choices_with(key, "method") == choices


@pytest.mark.parametrize(
    ("overrides", "beginning"),
    [
        (
            "trainer.step=1",
            "trainer.step is invalid: unknown option. Did you mean trainer.steps? Allowed: trai",
        ),
        (
            "trainer.max_steps=1",
            "trainer.max_steps is invalid: unknown option. Did you mean trainer.steps (of eac",
        ),
        (
            "model.lora_alpha=8",
            "model.lora_alpha is invalid: method.lora_alpha is an option of method=inclora, l",
        ),
        (
            "logger.wandb.project=x",
            "logger.wandb.project is invalid: unknown option. Did you mean logger.projec",
        ),
        (
            "wandb.project=x",
            "wandb.project is invalid: unknown option. Did you mean logger.project? Allowed: n",
        ),
        (
            "method=ewc method.contrast=1",
            "method.contrast is invalid: it is an option of method=das,dga. Allow",
        ),
        ("name.first=x", "name.first is invalid: unknown option. Allowed: name"),
        ("method=LwF", "method=LwF is invalid: unknown choice. Did you mean kd? Allowed: adapter, "),
        ("method=A-GEM", "method=A-GEM is invalid: unknown choice. Did you mean agem? Allowed: adapter, "),
        ("method=EWC", "method=EWC is invalid: unknown choice. Did you mean ewc? Allowed: adapter, "),
        ("optim.foo=1", "optim.foo is invalid: unknown option. Allowed: optim.lr, "),
        (
            "model=/data/models/x",
            "model=/data/models/x is invalid: unknown choice. Did you mean model=hf "
            "model.name_or_path=/data/models/x? Allowed: bert_base, ",
        ),
        (
            "domains=./corpora",
            "domains=./corpora is invalid: unknown choice. Did you mean domains=texts domains.root=./corpora?",
        ),
        (
            "domains=org/news",
            "domains=org/news is invalid: unknown choice. Did you mean domains=hub "
            "'domains.catalogue={NAME: {path: org/news}}'? Allowed: ",
        ),
        (
            "replay=/x",
            "replay=/x is invalid: unknown choice. Did you mean replay=sources 'replay.sources={NAME: {path: /x",
        ),
        ("mask=[migu,/a/b]", "mask=/a/b is invalid: unknown choice. Allowed: migu, mofo, none; mask=? descr"),
    ],
)
def test_what_is_probably_meant_comes_before_what_is_allowed(overrides, beginning):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        with pytest.raises(HydraException) as error:
            compose("config", overrides=overrides.split())
        message = explain_error(error.value)
    assert message.startswith(beginning) and message.count("Did you mean") <= 1


@pytest.mark.parametrize(
    ("key", "allowed"),
    [("method", "method=CHOICE, one of conf/method"), ("seed", "seed=VALUE"), ("name", "name=VALUE")],
)
def test_what_is_removed_is_named_and_not_the_folder_that_has_it_in_its_path(key, allowed):
    interpolation = "${hydra.runtime.choices.method}" if key == "method" else f"${{{key}}}"
    hydra_options = {"run": {"dir": interpolation}, "runtime": {"choices": {}}}
    cfg = OmegaConf.create({"hydra": hydra_options})
    with pytest.raises(InterpolationResolutionError) as error:
        str(cfg.hydra.run.dir)
    assert explain_error(error.value) == f"{key} is missing. Allowed: {allowed}"
    assert describe_missing_key("variant") == "variant is missing. Allowed: variant=VALUE"


def test_a_key_that_no_config_has_is_named_with_the_option_that_takes_it():
    cfg = OmegaConf.create({"hydra": {"run": {"dir": "${sede}"}}})
    with pytest.raises(InterpolationResolutionError) as error:
        str(cfg.hydra.run.dir)
    assert explain_error(error.value).startswith("hydra.run.dir is invalid: Interpolation key 'sede'")


def test_a_text_with_what_begins_a_reference_says_how_it_is_typed():
    reason = r" is invalid: ${ in it begins nothing that can be replaced. Allowed: ${KEY} of an existing key, \${ for"
    contents = {"name=a${b": {"name": "a${b"}, "a.b=${": {"a": {"b": "${"}}, "x${,": {"tags": ["a", "x${,"]}}
    for typed, content in contents.items():
        with pytest.raises(GrammarParseError) as error:
            OmegaConf.create(content)
        assert explain_error(error.value).startswith(f"{typed}{reason}")
    task = OmegaConf.create({"hydra": {"overrides": {"task": []}}})
    with pytest.raises(GrammarParseError) as error:
        task.hydra.overrides.task = ["tags=['${'],[b]"]
    assert explain_error(error.value).startswith(f"tags=['${{'],[b]{reason}")


def test_a_model_that_is_no_choice_may_be_a_name_on_the_hub():
    message = describe_unknown_choice("model", "gpt2-large", ["gpt2", "hf"])
    assert message.endswith(
        "; a folder or a name on the Hub: model=hf model.name_or_path=gpt2-large; model=? describes them"
    )


def test_names_from_other_libraries_and_papers_lead_to_the_names_here():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=["method=lora"])
        keys = {key for key, _ in flatten(cfg)} | set(cfg)
    for name, foreign in foreign_names.OPTIONS.items():
        assert foreign.option in keys and name != foreign.option.rpartition(".")[2]
    for group, choices in foreign_names.CHOICES.items():
        existing = {path.stem for path in (CONF / group).glob("*.yaml")}
        assert set(choices.values()) <= existing and not existing & choices.keys()
        assert all(foreign_names.normalize_choice(name) == name for name in choices)


def test_a_suggestion_shortens_the_list():
    names = [f"trainer.option_{letter}" for letter in "abcdefghi"]
    assert describe_unknown_name("trainer.optoin_a", names).endswith("option_e, trainer.option_f, … 3 more")
    assert describe_unknown_name("trainer.x", names).endswith("option_h, trainer.option_i")


def test_dots_in_a_name_that_is_no_option_are_a_part_of_it():
    names = ["docs.v1", "news.v1", "python3.10"]
    assert "Did you mean docs.v1?" in describe_unknown_name("order=docs.v2", names)
    assert "Did you mean docs.v1?" in describe_unknown_name("answers.metrics.docs.v2", names, name="docs.v2")
    assert describe_unknown_name("order=v9", names).endswith("Allowed: docs.v1, news.v1, python3.10")
