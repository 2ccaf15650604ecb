"""`python -m cpt.card RUN --push NAME`: what is published, what is refused, and failures of the Hub in one line."""

import json
from types import SimpleNamespace

import pytest
from huggingface_hub import errors

from cpt import card as program
from cpt.core import files
from cpt.reporting import publish
from cpt.reporting.model_card import write_model_card
from cpt.trainer.run_dir import RunDir
from tests.support.example_runs import make_scores, save_scores

PRIVATE = "/srv/alice/run/model"


@pytest.fixture
def run(tmp_path):
    """A finished run with an exported model, an adapter, and files that nobody else should have."""
    folder = tmp_path / "run"
    save_scores(folder, config={"seed": 0}, base={"name": "base", "origin": "folder"})
    for name in ("model/adapters/law", "checkpoints", "stages"):
        (folder / name).mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"):
        (folder / "model" / name).write_text("{}")
    for name in ("model/model.safetensors", "model/adapters/law/adapter_model.safetensors"):
        (folder / name).write_bytes(b"weights")
    adapter = {"base_model_name_or_path": PRIVATE, "r": 4}
    (folder / "model/adapters/law/adapter_config.json").write_text(json.dumps(adapter))
    for name in ("checkpoints/000.ckpt", "stages/001.pt", "model/notes.txt", "model/optimizer.pt"):
        (folder / name).write_text("private")
    return folder


class FakeHub:
    """Records what is created and committed; raises the errors that it is given."""

    def __init__(self, *, create_error=None, commit_error=None):
        self.create_error = create_error
        self.commit_error = commit_error
        self.created = []
        self.committed = {}

    def create_repo(self, name, *, private, exist_ok):
        if self.create_error and not exist_ok:
            raise self.create_error
        self.created.append((name, private))
        return SimpleNamespaceUrl(repo_id=f"alice/{name.split('/')[-1]}")

    def create_commit(self, repo_id, operations, *, commit_message):
        if self.commit_error:
            raise self.commit_error
        for operation in operations:
            with operation.as_file() as file:
                self.committed[operation.path_in_repo] = file.read()


class SimpleNamespaceUrl(SimpleNamespace):
    def __str__(self):
        return f"https://huggingface.co/{self.repo_id}"


def answer(status):
    """An error of the Hub with a status, as huggingface_hub raises it."""
    error = errors.HfHubHTTPError.__new__(errors.HfHubHTTPError)
    Exception.__init__(error, f"{status} Error\nsecond line")
    error.response = SimpleNamespace(status_code=status, headers={})
    error.server_message = f"said {status}\nmore"
    return error


@pytest.fixture
def use_hub(monkeypatch):
    def use(hub, *, token="hf_x"):
        monkeypatch.setattr(publish, "HfApi", lambda: hub)
        monkeypatch.setattr(publish, "get_token", lambda: token)
        monkeypatch.setattr(
            "cpt.reporting.license_sources.hf_hub_download", lambda *args, **kwargs: pytest.fail("online")
        )
        return hub

    return use


def test_the_model_its_card_and_nothing_else_is_published_and_privately(run, use_hub, capsys):
    hub = use_hub(FakeHub())
    assert program.main([str(run), "--push", "alice/model"]) == 0
    expected = {
        "README.md",
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "adapters/law/adapter_model.safetensors",
        "adapters/law/adapter_config.json",
    }
    assert hub.committed.keys() == expected and hub.created == [("alice/model", True)]
    config = json.loads(hub.committed["adapters/law/adapter_config.json"])
    assert config == {"base_model_name_or_path": "alice/model", "r": 4}
    assert PRIVATE in (run / "model/adapters/law/adapter_config.json").read_text()  # the run's own stays
    assert hub.committed["README.md"] == (run / "model" / "README.md").read_bytes()
    output = capsys.readouterr().out
    assert "alice/model (private): 8 files" in output and "left out: optimizer.pt" in output
    assert "https://huggingface.co/alice/model" in output
    program.main([str(run), "--push", "alice/model", "--public"])
    assert hub.created[-1] == ("alice/model", False)


def test_a_license_that_was_given_stays_until_it_is_forgotten(run, use_hub, capsys):
    hub = use_hub(FakeHub())
    text = RunDir(run).load_scores().run["order"][0]
    program.main([str(run), "--license", "mit", "--data-license", f"{text}=cc0-1.0"])
    assert "license: `mit`: chosen with --license" in capsys.readouterr().out
    program.main([str(run), "--push", "alice/model"])
    assert b"license: mit" in hub.committed["README.md"] and b"cc0-1.0" in hub.committed["README.md"]
    assert "licenses.json" not in hub.committed

    program.main([str(run), "--license", "none", "--data-license", f"{text}=none"])
    assert "No license is claimed" in capsys.readouterr().out and not (run / "licenses.json").exists()


def test_a_dry_run_lists_the_files_without_network_or_token(run, use_hub, capsys):
    hub = use_hub(FakeHub(), token=None)
    assert program.main([str(run), "--push", "model", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "model.safetensors  " in output and "private" in output and not hub.created
    assert "README.md" in output  # the card is written before the files are listed


def fail(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        program.main(list(map(str, arguments)))
    message = capsys.readouterr().err
    assert caught.value.code == 1 and message.count("\n") == 1 and "Traceback" not in message
    return message


FAILURES = {
    "exists": (
        FakeHub(create_error=answer(409)),
        "the repository exists. Allowed: another name, or --update",
    ),
    "forbidden": (FakeHub(create_error=answer(403)), "the token may not write there (403)"),
    "network": (FakeHub(create_error=ConnectionError("no route")), "the Hub cannot be reached: no route"),
    "client": (FakeHub(create_error=errors.HTTPError("timed out")), "cannot be reached: timed out"),
    "offline": (FakeHub(create_error=errors.OfflineModeIsEnabled("offline")), "cannot be reached: offline"),
    "broken": (
        FakeHub(commit_error=answer(500)),
        "answered 500: said 500; the repository is there, its files were not uploaded: push again with --update",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failures_of_the_hub_are_one_line(failure, run, use_hub, capsys):
    hub, message = FAILURES[failure]
    use_hub(hub)
    assert message in fail(capsys, run, "--push", "alice/model")


def test_a_repository_that_exists_is_updated_where_that_is_asked_for(run, use_hub):
    hub = use_hub(FakeHub(create_error=answer(409)))
    assert program.main([str(run), "--push", "alice/model", "--update"]) == 0 and hub.committed


def test_what_cannot_be_published_is_refused_before_the_network(run, use_hub, capsys, tmp_path):
    hub = use_hub(FakeHub(), token=None)
    assert "there is no token of the Hub" in fail(capsys, run, "--push", "alice/model")
    use_hub(hub)
    assert "--push=a/b/c is invalid" in fail(capsys, run, "--push", "a/b/c")
    assert "--public is invalid without --push NAME" in fail(capsys, run, "--public")
    assert "--data-license=sea=mit is invalid" in fail(capsys, run, "--data-license", "sea=mit")
    assert "Did you mean mit?" in fail(capsys, run, "--license", "mitt")
    unfinished = tmp_path / "unfinished"
    save_scores(unfinished, config={"seed": 0}, finished=False)
    assert "the folder of a finished run that trained" in fail(capsys, unfinished, "--push", "alice/model")

    files.write_checksums(run, [run / "model" / "model.safetensors"])
    (run / "model" / "model.safetensors").write_bytes(b"w3ights")
    assert "model/model.safetensors differs from its checksum" in fail(capsys, run, "--push", "alice/model")
    assert not hub.created


ADAPTERS = [
    ({"r": 8}, "vLLM (--enable-lora) and llama.cpp (--lora) load the adapters."),
    ({"r": 24}, "load the adapters; vLLM with --max-lora-rank 32."),
    ({"r": 600}, "llama.cpp (--lora) loads the adapters; vLLM takes ranks up to 512, not 600."),
    ({"r": 8, "use_dora": True}, "do not load the adapters (use_dora). Use method.export_format=merged."),
    ({"r": 8, "modules_to_save": ["lm_head"]}, "do not load the adapters (modules_to_save)"),
    ({"r": 8, "target_parameters": ["experts"]}, "were not tried in vLLM and llama.cpp."),
]


@pytest.mark.parametrize(("config", "sentence"), ADAPTERS)
def test_adapters_that_engines_do_not_load_are_named_in_the_card(config, sentence, run):
    scores = make_scores(objective="causal")
    (run / "model/adapters/law/adapter_config.json").write_text(json.dumps(config))
    assert sentence in write_model_card(run, scores).read_text()
