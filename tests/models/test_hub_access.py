"""A name on the Hub without a network: said at once where nothing of it is cached, and only there."""

import socket

import pytest
from transformers import GPT2Config

from cpt.models import hub_access, loading

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
    monkeypatch.setattr(hub_access, "is_on_this_machine", lambda checkpoint: False)
    return hosts


def test_a_name_that_nothing_can_answer_for_is_refused_at_once(lookups, monkeypatch):
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda *args, **options: pytest.fail("asked"))
    with pytest.raises(
        ValueError, match=f"model.name_or_path={NAME} is invalid: no such folder.*has no address"
    ):
        loading.load_config(NAME)
    assert lookups == ["huggingface.co"]


def test_what_needs_no_network_or_may_have_one_is_left_to_the_client(lookups, monkeypatch, tmp_path):
    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    assert loading.load_config(str(tmp_path)).n_layer == 1
    assert hub_access.find_missing_host("/no/such/folder") is None and not lookups

    def find_missing_host(name, value):
        with monkeypatch.context() as patched:
            patched.setattr(name, value)
            return hub_access.find_missing_host(NAME)

    assert find_missing_host("huggingface_hub.constants.HF_HUB_OFFLINE", True) is None
    assert find_missing_host("cpt.models.hub_access.getproxies", lambda: {"https": "http://proxy"}) is None
    assert find_missing_host("cpt.models.hub_access.is_on_this_machine", lambda checkpoint: True) is None
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
