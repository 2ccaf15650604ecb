"""The license in a model card: what is stated, where it is found, and what is claimed from it."""

import logging

import pytest
import yaml
from huggingface_hub import ModelCard

from cpt.reporting import license_sources
from cpt.reporting.license_choices import LicenseChoices, save_license_choices
from cpt.reporting.license_sources import (
    find_licenses,
    find_model_license,
    list_trained_texts,
    read_folder_license,
    recognize,
)
from cpt.reporting.license_terms import (
    IDENTIFIERS_BY_KIND,
    KINDS,
    StatedLicense,
    check_identifier,
    choose_license,
    decide_license,
)
from cpt.reporting.model_card import write_model_card
from tests.support.example_runs import make_scores, save_scores

BASE = "the base model tiny"


def make_licenses(base, *texts, name=""):
    licenses = [] if base is None else [StatedLicense(source=BASE, is_model=True, identifier=base, name=name)]
    for number, identifier in enumerate(texts):
        licenses.append(StatedLicense(source=f"text{number}", identifier=identifier))
    return licenses


# Of the base, then of the texts; the license that is claimed, and a part of the reason.
DECISIONS = [
    (("apache-2.0", "cc-by-4.0", "mit"), "apache-2.0", "all stated licenses are permissive"),
    (("llama3.1", "cc-by-4.0"), "llama3.1", "terms of a model) may apply to what is made of the base model"),
    (("gemma", "mit"), "gemma", "may apply"),
    (
        ("apache-2.0", "cc-by-sa-4.0", "mit"),
        "cc-by-sa-4.0",
        "share-alike) may apply to what is made of text0",
    ),
    (("apache-2.0", "cc-by-nc-4.0"), "cc-by-nc-4.0", "non-commercial"),
    (("llama3.1", "cc-by-sa-4.0"), "", "llama3.1 (the base model tiny), cc-by-sa-4.0 (text0) may each apply"),
    (("gpl-3.0", "cc-by-sa-4.0"), "", "may each apply"),
    (("mit", "cc-by-nd-4.0"), "", "cc-by-nd-4.0 (text0) does not allow changed versions"),
    (("mit", ""), "", "no license is stated of text0"),
    (("", "mit"), "", "no license is stated of the base model tiny"),
    (("mit", "other"), "", "does not know the terms of other (text0)"),
    (("mit, apache-2.0", "mit"), "", "does not know the terms of mit, apache-2.0"),
    ((None, "cc0-1.0", "cc0-1.0"), "cc0-1.0", "all stated licenses are permissive"),
    ((None, "cc0-1.0", "mit"), "", "none is of a base model"),
    ((None,), "", "no license is stated of anything"),
    ((None, "", "", "", "", ""), "", "of text0, text1, text2 and 2 more"),
]


@pytest.mark.parametrize(("licenses", "claimed", "reason"), DECISIONS)
def test_the_strictest_of_what_is_stated_is_claimed_and_nothing_where_that_is_unclear(
    licenses, claimed, reason
):
    decision = decide_license(make_licenses(*licenses))
    assert decision.identifier == claimed and reason in decision.reason


def test_a_license_of_its_own_name_is_passed_on_with_its_link():
    base = StatedLicense(source=BASE, is_model=True, identifier="other", name="qwen", link="https://x/L")
    decision = decide_license([base, StatedLicense(source="law", identifier="mit")])
    assert (decision.identifier, decision.name, decision.link) == ("other", "qwen", "https://x/L")


def test_a_chosen_license_is_checked_and_conflicts_are_reported():
    assert check_identifier("Apache-2.0", option="--license") == "apache-2.0"
    assert check_identifier("GPL-3.0-or-later", option="--license") == "gpl-3.0"
    with pytest.raises(ValueError, match=r"--license=apache2 is invalid.*Did you mean apache-2.0\?"):
        check_identifier("apache2", option="--license")
    with pytest.raises(ValueError, match="--license=other is invalid"):
        check_identifier("other", option="--license")
    assert choose_license(make_licenses("mit", "mit"), "apache-2.0").reason == "chosen with --license"
    reason = choose_license(make_licenses("gemma", "mit"), "mit").reason
    assert "what is stated speaks for gemma" in reason
    assert (
        "does not follow: no license is stated of text0"
        in choose_license(make_licenses("mit", ""), "mit").reason
    )


def test_each_identifier_has_one_kind():
    assert sum(len(identifiers.split()) for identifiers in IDENTIFIERS_BY_KIND.values()) == len(KINDS)


TEXTS = {
    "Apache License\n  Version 2.0, January 2004": "apache-2.0",
    "Copyright (c)\nPermission is hereby granted, free of charge, to": "mit",
    "Redistributions of source code must retain … Neither the name of": "bsd-3-clause",
    "Redistributions of source code must retain": "bsd-2-clause",
    "Attribution-NonCommercial-ShareAlike 4.0 International": "cc-by-nc-sa-4.0",
    "Creative Commons Attribution 4.0 International Public License": "cc-by-4.0",
    "Attribution-NoDerivatives 4.0 International": "cc-by-nd-4.0",
    "GNU GENERAL PUBLIC LICENSE\n   Version 3, 29 June 2007": "gpl-3.0",
    "GNU LESSER GENERAL PUBLIC LICENSE\n Version 3": "lgpl-3.0",
    "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT": "llama3.1",
    "SPDX-License-Identifier: CC0-1.0": "cc0-1.0",
    "cc-by-sa-4.0\n": "cc-by-sa-4.0",
    "All rights reserved.": "",
}


@pytest.mark.parametrize(("text", "identifier"), TEXTS.items())
def test_license_files_are_recognized(text, identifier):
    assert recognize(text) == identifier


def test_a_folder_states_its_license_in_a_card_or_else_in_a_file(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="cpt")
    assert read_folder_license(tmp_path, source="law").identifier == ""
    (tmp_path / "LICENSE.txt").write_text("All rights reserved.")
    unknown = read_folder_license(tmp_path, source="law")
    assert unknown.identifier == "other" and "does not recognize" in unknown.stated_in
    (tmp_path / "LICENSE.txt").write_text("SPDX-License-Identifier: MIT")
    assert read_folder_license(tmp_path, source="law").stated_in == "LICENSE.txt"
    (tmp_path / "README.md").write_text("No YAML here.\n")
    assert read_folder_license(tmp_path, source="law").identifier == "mit"
    (tmp_path / "README.md").write_text("---\nlicense: [mit, gpl-3.0]\n---\n# x\n")
    assert read_folder_license(tmp_path, source="law").identifier == "mit, gpl-3.0"
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")  # damaged YAML states nothing
    for _ in range(2):
        assert read_folder_license(tmp_path, source="law").identifier == "mit"
    [line] = caplog.messages
    assert line.startswith(
        f"The license of law counts as not stated: {tmp_path / 'README.md'} has damaged YAML"
    )


def test_cards_of_the_hub_are_read_from_its_cache_and_downloaded_only_online(tmp_path, monkeypatch):
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n")
    downloads = []

    def download(name, file, **arguments):
        downloads.append((name, arguments["repo_type"]))
        if name == "a/gone":
            raise OSError("no network")
        return str(card)

    monkeypatch.setattr(license_sources, "try_to_load_from_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr(license_sources, "hf_hub_download", download)
    monkeypatch.setattr(license_sources, "find_silent_host", lambda: None)
    assert find_model_license("a/b", source=BASE).identifier == "" and downloads == []
    license = find_model_license("a/b", source=BASE, is_online=True)
    assert license.name == "own" and license.link == "https://huggingface.co/a/b/blob/main/LICENSE"
    of_revision = find_model_license("a/b", source=BASE, revision="v2", is_online=True)
    assert of_revision.link == "https://huggingface.co/a/b/blob/v2/LICENSE"
    assert find_model_license("a/gone", source=BASE, is_online=True).identifier == ""
    monkeypatch.setattr(license_sources, "find_silent_host", lambda: "a host")
    assert find_model_license("a/b", source=BASE, is_online=True).identifier == ""
    monkeypatch.setattr(license_sources, "try_to_load_from_cache", lambda *args, **kwargs: str(card))
    assert find_model_license("a/b", source=BASE).name == "own" and len(downloads) == 3

    settings = {"domains.catalogue.law.path": "a/law"}
    scores = make_scores(order=["law"], nll=[[5.0, 5.0], [4.0, 5.0]], base={"origin": "built"})
    licenses = find_licenses(settings, scores)
    assert [license.source for license in licenses] == ["law", "general"]
    assert licenses[0].stated_in == "its dataset card"


def test_the_card_has_the_license_of_base_and_data_and_no_path(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: llama3.1\nlicense_link: LICENSE\n---\n")
    root = tmp_path / "texts"
    for name in ("law", "food", "general"):
        (root / name).mkdir(parents=True)
    (root / "LICENSE").write_text("Creative Commons Attribution 4.0 International")
    (root / "food" / "COPYING").write_text("SPDX-License-Identifier: CC0-1.0")
    config = {"domains": {"root": str(root)}, "model": {"name_or_path": str(base)}}
    folder = tmp_path / "run"
    scores = save_scores(
        folder,
        config=config,
        base={"name": "base", "origin": "folder"},
        order=["law", "food"],
        nll=[[5.0, 5.2, 4.9], [4.6, 5.1, 5.0], [4.7, 4.2, 5.1]],
    )
    (folder / "model").mkdir()
    path = write_model_card(folder, scores)
    card = ModelCard.load(path)
    assert card.data.license == "llama3.1" and card.data.license_link is None
    assert "| law | cc-by-4.0 (permissive) | LICENSE |" in card.text
    assert "| food | cc0-1.0 (permissive) | COPYING |" in card.text and "| general | not" not in card.text
    assert "It gives no legal advice" in card.text and str(tmp_path) not in path.read_text()

    save_license_choices(folder, LicenseChoices(model="mit", texts={"law": "cc-by-nc-4.0"}))
    card = ModelCard.load(write_model_card(folder, scores))
    assert (
        card.data.license == "mit" and "| law | cc-by-nc-4.0 (non-commercial) | --data-license |" in card.text
    )
    assert "may each apply" in card.text
    (folder / "licenses.json").write_text("[]")
    with pytest.raises(ValueError, match=r"licenses.json is damaged"):
        write_model_card(folder, scores)
    save_license_choices(folder, LicenseChoices())
    assert not (folder / "licenses.json").exists()
    (base / "README.md").unlink()
    page = write_model_card(folder, scores).read_text()
    assert "license" not in yaml.safe_load(page.split("---\n")[1])
    assert "No license is claimed: no license is stated of the base model base." in page


def test_sources_of_replay_have_licenses_too(tmp_path):
    (tmp_path / "chats").mkdir()
    (tmp_path / "LICENSE").write_text("SPDX-License-Identifier: CC-BY-NC-4.0")
    (tmp_path / "web.jsonl").touch()
    scores = make_scores(order=["law"], nll=[[5.0, 5.0], [4.0, 5.0]], base={"origin": "built"})
    settings = {
        "replay.sources.web.path": str(tmp_path / "web.jsonl"),
        "replay.sources.web.ratio": 0.1,
        "method.mixture.sources.chat.path": str(tmp_path / "chats"),
    }
    licenses = {license.source: license for license in find_licenses(settings, scores)}
    assert list(licenses) == ["law", "general", "replay.sources.web", "replay.sources.chat"]
    assert licenses["replay.sources.web"].identifier == "cc-by-nc-4.0"
    assert licenses["replay.sources.chat"].identifier == ""
    scores.base["origin"] = "folder"
    assert list_trained_texts({"method.mixture.general_ratio": 0.1}, scores) == ["law", "general"]


def test_what_cannot_be_read_counts_as_not_stated(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\nupdated: 2024-02-31\n---\n")  # a day that does not exist
    assert not read_folder_license(tmp_path, source="x").identifier and "damaged YAML" in caplog.text
    card.write_text("\ufeff---\nlicense: mit\n---\n")
    assert read_folder_license(tmp_path, source="x").identifier == "mit"

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(license_sources.Path, "is_dir", refuse)  # a folder of another user
    scores = make_scores()
    scores.base = {"name": "theirs", "origin": "folder"}
    settings = {"model.name_or_path": "/theirs/model", "domains.root": "/theirs/texts"}
    licenses = find_licenses(settings, scores)
    assert [license.identifier for license in licenses] == [""] * len(licenses) and len(licenses) > 1
    assert "/theirs/model (Permission denied)" in caplog.text


def test_a_source_without_a_path_has_no_license_of_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "LICENSE").write_text("MIT")
    monkeypatch.chdir(tmp_path)
    license = license_sources.find_source_license({}, "web", is_online=False)
    assert not license.identifier


def test_licenses_with_the_words_of_another_are_told_apart():
    grant = "Permission is hereby granted, free of charge, to any person"
    assert recognize(f"Boost Software License - Version 1.0\n\n{grant}") == "bsl-1.0"
    assert recognize(f"University of Illinois/NCSA Open Source License\n\n{grant}") == "ncsa"
    assert recognize(grant) == "mit"
