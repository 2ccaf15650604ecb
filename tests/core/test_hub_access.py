"""A name on the Hub without a network: said at once where nothing of it is cached, and only there."""

import socket

import datasets
import pytest
from transformers import GPT2Config

from cpt.core import hub_access
from cpt.data.sources.mixed import MixedReader
from cpt.evaluation.finetune_tasks import plan_endtasks
from cpt.models import loading
from cpt.reporting import license_sources
from cpt.vocabulary import load_own_tokenizer
from tests.data.sources.test_sources import open_hub
from tests.data.test_mixture import make_source
from tests.support.endtask_fixtures import options

NAME = "no-such-user/no-such-model"


@pytest.fixture
def lookups(monkeypatch):
    """The hosts that are looked up; none has an address, and the Hub's client is not to be asked."""
    hosts = []

    def fail(host, port):
        hosts.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(hub_access.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_access, "getproxies", dict)
    monkeypatch.setattr(hub_access, "is_in_hub_cache", lambda name, kind: False)
    return hosts


def test_a_name_that_nothing_can_answer_for_is_refused_at_once(lookups, monkeypatch):
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda *args, **options: pytest.fail("asked"))
    with pytest.raises(
        ValueError, match=f"model.name_or_path={NAME} is invalid: no such folder.*has no address"
    ):
        loading.load_config(NAME)
    assert lookups == ["huggingface.co"]


def read_task():
    entry = {"path": NAME, "splits": {"train": "train", "dev": None, "test": "test"}}
    return plan_endtasks(options("hub", tasks={"law": entry}), ["law"], ["law"]).source.task("law")


UNREAD = {
    f"--base={NAME} is invalid": lambda: load_own_tokenizer(NAME),
    f"domains.catalogue.news.path={NAME} is invalid": lambda: list(open_hub({"path": NAME}).read("news")),
    f"domains.catalogue.(news).path={NAME} is invalid": lambda: [
        *open_hub({"path": NAME, "data_files": "a.jsonl"}).read("news")
    ],
    f"replay.sources.web.path={NAME} is invalid": lambda: [
        *MixedReader("web", make_source(path=NAME)).read("web")
    ],
    f"endtask.tasks.law, path={NAME}": read_task,
}


@pytest.mark.parametrize("problem", UNREAD)
def test_all_that_is_read_by_a_name_is_refused_at_once(problem, lookups, monkeypatch):
    for name in ("load_dataset", "get_dataset_split_names"):
        monkeypatch.setattr(datasets, name, lambda *args, **options: pytest.fail("asked"))
    monkeypatch.setattr(
        loading.AutoTokenizer, "from_pretrained", lambda *args, **options: pytest.fail("asked")
    )
    reason = "no such folder, and not loaded from the Hub: huggingface.co has no address here"
    with pytest.raises(ValueError, match=f"^{problem}: {reason}"):
        UNREAD[problem]()
    assert lookups == ["huggingface.co"]


def test_the_card_of_a_model_in_the_cache_is_not_asked_for_either(lookups, monkeypatch):
    monkeypatch.setattr(hub_access, "is_in_hub_cache", lambda name, kind: True)
    monkeypatch.setattr(license_sources, "hf_hub_download", lambda *args, **options: pytest.fail("asked"))
    license = license_sources.find_model_license(NAME, source="the base", is_online=True)
    assert license.identifier == "" and lookups == ["huggingface.co"]


def test_what_is_in_a_cache_of_hugging_face_is_left_to_the_client(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_access.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    for kind in ("model", "dataset"):
        assert not hub_access.is_in_hub_cache("user/MySet", kind)
    (tmp_path / "hub" / "models--user--MySet" / "snapshots" / "1" / "config.json").mkdir(parents=True)
    assert hub_access.is_in_hub_cache("user/MySet", "model")
    assert not hub_access.is_in_hub_cache("user/MySet", "dataset")
    (tmp_path / "datasets" / "user___my_set" / "default" / "0.0.0" / "hash").mkdir(parents=True)
    assert hub_access.is_in_hub_cache("user/MySet", "dataset")


def test_what_needs_no_network_or_may_have_one_is_left_to_the_client(lookups, monkeypatch, tmp_path):
    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    assert loading.load_config(str(tmp_path)).n_layer == 1
    assert hub_access.find_missing_host("/no/such/folder", "model") is None and not lookups

    def find_missing_host(name, value):
        with monkeypatch.context() as patched:
            patched.setattr(name, value)
            return hub_access.find_missing_host(NAME, "model")

    assert find_missing_host("huggingface_hub.constants.HF_HUB_OFFLINE", True) is None
    assert find_missing_host("cpt.core.hub_access.getproxies", lambda: {"https": "http://proxy"}) is None
    without_proxy = find_missing_host("cpt.core.hub_access.getproxies", lambda: {"no": "localhost"})
    assert without_proxy == "huggingface.co"
    assert find_missing_host("cpt.core.hub_access.is_in_hub_cache", lambda name, kind: True) is None
    assert find_missing_host("socket.getaddrinfo", lambda host, port: ["an address"]) is None


def test_a_name_server_that_does_not_answer_is_asked_once_more(lookups, monkeypatch):
    answers = [socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), None]
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)

    def answer(host, port):
        result = answers.pop(0)
        if result is not None:
            raise result

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    assert hub_access.has_address("huggingface.co") and pauses == [hub_access.RETRY_S]
