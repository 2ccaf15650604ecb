"""What of a config is shown: no secret by the name of its key or by its form, no text of the environment."""

import pytest
from omegaconf import OmegaConf

from cpt.core.errors import readable_errors
from cpt.core.secrets import (
    HIDDEN,
    hide_environment,
    is_same_setting,
    is_secret,
    redact,
    redact_override,
    redact_text,
)
from cpt.trainer.run_dir import RunDir

SECRET_KEYS = """
callbacks.n.teams_token telegramToken X-Auth-Token logger.x.pat gitlab_pat db_pwd
discord_webhook mattermost_webhook_url smtp_password passphrase storage_account_key
signingKey aws_secret_access_key client_secret secret_name google_credentials apikey
azure_connection_string sentry_dsn session_cookie Authorization hf.api_key refresh_tokens
"""
OTHER_KEYS = """
max_tokens trainer.tokens special_tokens pad_token eos_token separator_token key
image_token mask_token tokenizer tokenizer_name text_key label_key sort_keys
pattern path update steps_per_token token_type patience keep compat spat
split_special_tokens decoder_start_token tokens_per_row
"""


@pytest.mark.parametrize("key", SECRET_KEYS.split())
def test_a_secret_is_known_by_the_end_of_its_key(key):
    assert is_secret(key)
    assert redact({key: "canary", "list": [{key: 1234}]}) == {key: HIDDEN, "list": [{key: HIDDEN}]}


@pytest.mark.parametrize("key", OTHER_KEYS.split())
def test_words_of_models_and_columns_are_no_secrets(key):
    assert not is_secret(key) and redact({key: "shown"}) == {key: "shown"}


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("postgresql+psycopg://me:p@s/canary@db:5432/x", f"postgresql+psycopg://{HIDDEN}@db:5432/x"),
        ("https://canary@host/path", f"https://{HIDDEN}@host/path"),
        ("me:canary@db.example.org/x", f"me:{HIDDEN}@db.example.org/x"),
        ("https://host/x?v=1&access_token=canary&n=2", f"https://host/x?v=1&access_token={HIDDEN}&n=2"),
        ("Server=h;User=me;Password=canary;Port=1", f"Server=h;User=me;Password={HIDDEN};Port=1"),
        ("https://hooks.slack.com/services/T0/B0/canary", f"https://hooks.slack.com/services/{HIDDEN}"),
        ("token ghp_" + 36 * "canary"[0], f"token {HIDDEN}"),
        ("callbacks.n.bot_token=canary is invalid", f"callbacks.n.bot_token={HIDDEN} is invalid"),
        ("https://host:8080/path@v2", "https://host:8080/path@v2"),
        ("org/model@main pad_token=<pad> max_tokens=5", "org/model@main pad_token=<pad> max_tokens=5"),
    ],
)
def test_secrets_are_known_by_their_form(text, redacted):
    assert redact_text(text) == redact_text(redacted) == redacted


def test_an_override_is_shown_without_its_secret():
    assert redact_override("+callbacks.n.chat_token=canary") == f"+callbacks.n.chat_token={HIDDEN}"
    assert redact_override("trainer.tokens=1e6") == "trainer.tokens=1e6" and redact_override("~x") == "~x"


ENVIRONMENT = """
direct: ${oc.env:CANARY}
within: left-${oc.env:CANARY}-right
other: ${direct}
nested: {list: ["${oc.env:CANARY}", plain]}
copy: ${nested}
decoded: ${oc.decode:${oc.env:NUMBER}}
texts: ${oc.decode:${oc.env:LIST}}
default: ${oc.env:ABSENT,fallback}
plain: text
"""


def test_texts_of_the_environment_are_shown_by_name_however_they_come_in(monkeypatch):
    monkeypatch.setenv("CANARY", "canary-value")
    monkeypatch.setenv("NUMBER", "12")
    monkeypatch.setenv("LIST", "[canary-a,canary-b]")
    settings = hide_environment(OmegaConf.create(ENVIRONMENT))
    assert "canary" not in str(settings)
    assert (settings["decoded"], settings["default"], settings["plain"]) == (12, "fallback", "text")
    assert settings["direct"].startswith("${oc.env:CANARY}#") and settings["nested"]["list"][1] == "plain"
    assert settings["other"] == settings["direct"] == settings["copy"]["list"][0] != settings["within"]
    assert [text.partition("#")[0] for text in settings["texts"]] == ["${oc.env:LIST}"] * 2


def test_another_value_of_a_variable_is_another_run_and_another_secret_the_same(tmp_path, monkeypatch):
    def settings(**variables):
        """What a run stores of its config when the environment has these variables."""
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        method = {"rank": "${oc.env:RANK}", "api_key": "${oc.env:KEY}", "x": r"\${y}"}
        return redact(hide_environment(OmegaConf.create({"method": method})))

    run = RunDir(tmp_path)
    run.write_config(settings(RANK="one", KEY="canary"))
    assert "one" not in run.config.read_text() and "canary" not in run.config.read_text()

    assert run.find_config_changes(settings(KEY="another")) == []
    typed = {"method": {"rank": "one", "api_key": "typed", "x": "${y}"}}  # no names of variables
    assert run.find_config_changes(typed) == []
    (change,) = run.find_config_changes(settings(RANK="two"))
    assert change.startswith("method.rank: ${oc.env:RANK}#") and "two" not in change

    run.write_config({"method": {"rank": "two", "api_key": HIDDEN, "x": "${y}"}})  # of an earlier version
    assert run.find_config_changes(settings()) == []
    assert is_same_setting(1, 1) and not is_same_setting("${oc.env:A}#0000000", "x")


def test_an_error_message_shows_no_secret(capsys):
    with pytest.raises(SystemExit), readable_errors():
        raise ValueError("logger.x.chat_token=canary is invalid. Allowed: a class")
    assert capsys.readouterr().err == f"cpt: logger.x.chat_token={HIDDEN} is invalid. Allowed: a class\n"
