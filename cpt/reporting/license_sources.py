"""Where licenses of a run's base model and texts are stated: in their cards and license files.

A card is README.md with `license` in its YAML, as the Hub has it; a license file is recognized by its text.
Folders are read, of names on the Hub what is in its cache; `is_online` lets missing cards be downloaded. What
cannot be read counts as not stated, so that no license is claimed by it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import hf_hub_download, try_to_load_from_cache

from cpt.core.hub_access import RepositoryKind, find_silent_host
from cpt.core.messages import count_noun, log_once
from cpt.data.sources.base import GENERAL
from cpt.evaluation.scores import Scores
from cpt.reporting.license_terms import KINDS, OTHER, StatedLicense, normalize_identifier

log = logging.getLogger(__name__)
CARD = "README.md"
SOURCES = "replay.sources"  # how the name of a text begins that is a source of replay
REPLAY_SECTIONS = ("replay", "method.mixture")  # of a config: those with the options of replay
HUB_ADDRESS = "https://huggingface.co"
URL = re.compile(r"https?://")
FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
LICENSE_FILE = re.compile(r"(licen[cs]e|copying)([.-][\w.-]+)?", re.IGNORECASE)
MAX_LICENSE_CHARACTERS = 4000  # of a license file: names and versions are at its beginning
# `Attribution-NonCommercial-ShareAlike 4.0`, and its shorter forms.
CREATIVE_COMMONS = re.compile(
    r"attribution(?P<nc>[ -]non[ -]?commercial)?(?P<end>[ -]share[ -]?alike|[ -]no[ -]?deriv\w*)?"
    r"[ -](?P<version>\d\.\d)"
)
# Texts that a license file has at its beginning, in lower case with single spaces, and its identifier.
# The first that fits is taken: GPL after the licenses that have its name in theirs.
OPENINGS = {
    r"apache license,? version 2\.0": "apache-2.0",
    r"boost software license": "bsl-1.0",
    r"university of illinois/ncsa open source license": "ncsa",
    r"permission is hereby granted, free of charge": "mit",
    r"permission to use, copy, modify, and(/or)? distribute this software for any purpose": "isc",
    r"redistributions? of source code must .* neither the name": "bsd-3-clause",
    r"redistributions? of source code must": "bsd-2-clause",
    r"cc0 1\.0 universal": "cc0-1.0",
    r"this is free and unencumbered software released into the public domain": "unlicense",
    r"gnu affero general public license version 3": "agpl-3.0",
    r"gnu lesser general public license version 3": "lgpl-3.0",
    r"gnu lesser general public license version 2\.1": "lgpl-2.1",
    r"gnu general public license version 3": "gpl-3.0",
    r"gnu general public license version 2": "gpl-2.0",
    r"mozilla public license,? version 2\.0": "mpl-2.0",
    r"open database license": "odbl",
    r"open data commons attribution license": "odc-by",
    r"llama 2 community license": "llama2",
    r"(meta )?llama 3 community license": "llama3",
    r"llama 3\.1 community license": "llama3.1",
    r"llama 3\.2 community license": "llama3.2",
    r"llama 3\.3 community license": "llama3.3",
    r"llama 4 community license": "llama4",
    r"gemma terms of use": "gemma",
}


def find_licenses(
    settings: Mapping[str, Any],
    scores: Scores,
    *,
    stated_for_texts: Mapping[str, str] | None = None,
    is_online: bool = False,
) -> list[StatedLicense]:
    """What is stated of the base of a run, unless the run has made it, and of each text that it was trained
    on. `stated_for_texts` has identifiers by text, which are taken."""
    licenses = []
    if scores.base.get("origin") != "built":
        name = scores.base.get("name", scores.run["model"])
        checkpoint = str(settings.get("model.name_or_path", name))
        revision = scores.base.get("revision")
        license = StatedLicense(source=f"the base model {name}", is_model=True)
        with reading_license(license.source):
            license = find_model_license(
                checkpoint,
                source=license.source,
                revision=revision,
                is_online=is_online and scores.base.get("origin") == "hub",
            )
        licenses.append(license)
    for text in list_trained_texts(settings, scores):
        identifier = (stated_for_texts or {}).get(text, "")
        if identifier:
            licenses.append(StatedLicense(source=text, identifier=identifier, stated_in="--data-license"))
            continue
        license = StatedLicense(source=text)
        with reading_license(text):
            license = find_text_license(settings, text, is_online=is_online)
        licenses.append(license)
    return licenses


@contextmanager
def reading_license(source: str) -> Iterator[None]:
    """Inside the context a file or a folder that cannot be read, as one of another user, ends the search for
    the license of a source."""
    try:
        yield
    except OSError as error:
        log_once(log, f"The license of {source} counts as not stated: {error.filename} ({error.strerror})")


def list_trained_texts(settings: Mapping[str, Any], scores: Scores) -> list[str]:
    """The texts that the final model was trained on: the domains, the general text where it is replayed or
    the base was made of it, and the sources of replay, `replay.sources.NAME`."""
    texts = list(scores.run["order"])
    is_base_built = scores.base.get("origin") == "built"
    is_general_replayed = any(settings.get(f"{section}.general_ratio") for section in REPLAY_SECTIONS)
    if is_base_built or is_general_replayed:
        texts.append(GENERAL)

    source_names: dict[str, None] = {}  # each once, in the order of the config
    for section in REPLAY_SECTIONS:
        for key in settings:
            if key.startswith(f"{section}.sources."):
                name, _, _ = key.removeprefix(f"{section}.sources.").partition(".")
                source_names[name] = None
    texts.extend(f"{SOURCES}.{name}" for name in source_names)
    return texts


def find_model_license(
    checkpoint: str, *, source: str, revision: str | None = None, is_online: bool = False
) -> StatedLicense:
    """What is stated of a checkpoint: a folder, or a name on the Hub."""
    if Path(checkpoint).is_dir():
        return read_folder_license(Path(checkpoint), source=source, is_model=True)
    card = find_hub_card(checkpoint, repo_type="model", revision=revision, is_online=is_online)
    if card is None:
        return StatedLicense(source=source, is_model=True)
    license = read_card(card, source=source, is_model=True)
    if license.link and not URL.match(license.link):  # a file of its repository
        license = replace(
            license, link=f"{HUB_ADDRESS}/{checkpoint}/blob/{revision or 'main'}/{license.link}"
        )
    return license


def find_text_license(settings: Mapping[str, Any], text: str, *, is_online: bool) -> StatedLicense:
    """What is stated of a text: by its data set in the catalogue of the Hub, or in the nearest of the folders
    that it is in."""
    if text.startswith(f"{SOURCES}."):
        return find_source_license(settings, text.removeprefix(f"{SOURCES}."), is_online=is_online)
    data_set = settings.get(f"domains.catalogue.{text}.path")
    if data_set is not None and not Path(str(data_set)).is_dir():
        card = find_hub_card(str(data_set), repo_type="dataset", revision=None, is_online=is_online)
        return StatedLicense(source=text) if card is None else read_card(card, source=text)
    for folder in list_text_folders(settings, text, data_set):
        license = read_folder_license(folder, source=text)
        if license.identifier:
            return license
    return StatedLicense(source=text)


def find_source_license(settings: Mapping[str, Any], name: str, *, is_online: bool) -> StatedLicense:
    """What is stated of a source of replay: in its folder, in that of its file, or by its data set."""
    source = f"{SOURCES}.{name}"
    path = ""
    for section in REPLAY_SECTIONS:
        section_path = settings.get(f"{section}.sources.{name}.path")
        if section_path and not path:
            path = str(section_path)

    if not path:
        return StatedLicense(source=source)
    local_path = Path(os.path.expanduser(path))
    if local_path.is_dir():
        return read_folder_license(local_path, source=source)
    if local_path.is_file():
        return read_folder_license(local_path.parent, source=source)
    card = find_hub_card(path, repo_type="dataset", revision=None, is_online=is_online)
    return StatedLicense(source=source) if card is None else read_card(card, source=source)


def list_text_folders(settings: Mapping[str, Any], text: str, data_set: Any) -> Iterator[Path]:
    """The folders that may state the license of a text, its own first, up to the root of all text."""
    if data_set is not None:
        yield Path(str(data_set))
        return
    root = settings.get("domains.root")
    if root is None:
        return
    directory = text
    if text == GENERAL:
        directory = str(settings.get("domains.general") or GENERAL)
    corpora = Path(str(root)) / str(settings.get("domains.folder") or ".")
    for folder in (corpora / directory, Path(str(root)) / directory, corpora, Path(str(root))):
        if folder.is_dir():
            yield folder


def read_folder_license(folder: Path, *, source: str, is_model: bool = False) -> StatedLicense:
    """What a folder states: its card, or else a license file in it."""
    card = folder / CARD
    if card.is_file():
        license = read_card(card, source=source, is_model=is_model)
        if license.link and not URL.match(license.link):  # a file that is not shared
            license = replace(license, link="")
        if license.identifier:
            return license

    paths = sorted(path for path in folder.iterdir() if LICENSE_FILE.fullmatch(path.name))
    license_files = [path for path in paths if path.is_file()]
    if not license_files:
        return StatedLicense(source=source, is_model=is_model)
    license_file = license_files[0]  # of several the first by name
    identifier = recognize(license_file.read_text(encoding="utf-8", errors="replace"))
    stated_in = license_file.name
    if not identifier:
        identifier = OTHER
        stated_in = f"{license_file.name}, which cpt does not recognize"
    return StatedLicense(source=source, is_model=is_model, identifier=identifier, stated_in=stated_in)


def read_card(path: Path, *, source: str, is_model: bool = False) -> StatedLicense:
    """What the YAML of a card states; several licenses stay one identifier that no table has."""
    front_matter = FRONT_MATTER.match(path.read_text(encoding="utf-8-sig", errors="replace"))
    data: Any = None
    if front_matter:
        try:
            data = yaml.safe_load(front_matter[1])
        except (yaml.YAMLError, ValueError) as error:  # a date that does not exist is a ValueError
            problem = str(error)
            if isinstance(error, yaml.MarkedYAMLError) and error.problem:
                problem = error.problem  # without the position, which takes further lines
            first_line = problem.splitlines()[0]
            log_once(
                log, f"The license of {source} counts as not stated: {path} has damaged YAML ({first_line})"
            )

    if not isinstance(data, Mapping) or not data.get("license"):
        return StatedLicense(source=source, is_model=is_model)
    stated = data["license"]
    identifiers = stated if isinstance(stated, list) else [stated]
    return StatedLicense(
        source=source,
        is_model=is_model,
        identifier=", ".join(normalize_identifier(str(identifier)) for identifier in identifiers),
        name=str(data.get("license_name") or ""),
        link=str(data.get("license_link") or ""),
        stated_in="its model card" if is_model else "its dataset card",
    )


def find_hub_card(
    name: str, *, repo_type: RepositoryKind, revision: str | None, is_online: bool
) -> Path | None:
    """The card of a name on the Hub: in the cache, or if it `is_online` downloaded. None without one."""
    with suppress(ValueError):  # it is not a name of the Hub
        cached = try_to_load_from_cache(name, CARD, revision=revision, repo_type=repo_type)
        if isinstance(cached, str):
            return Path(cached)
    if is_online and find_silent_host() is None:  # also of a model in the cache, which may lack its card
        with suppress(OSError, ValueError):  # no such card, no permission, no network
            return Path(hf_hub_download(name, CARD, revision=revision, repo_type=repo_type))
    return None


def recognize(text: str) -> str:
    """The identifier of a license from its text, or from a text that is the identifier; empty if unknown.

    >>> recognize("Attribution-ShareAlike 4.0 International"), recognize("SPDX-License-Identifier: MIT")
    ('cc-by-sa-4.0', 'mit')
    """
    tag = re.search(r"SPDX-License-Identifier:\s*(\S+)", text)
    identifier = normalize_identifier(tag[1] if tag else text)
    if identifier in KINDS:
        return identifier

    opening = " ".join(text[:MAX_LICENSE_CHARACTERS].lower().split())
    for pattern, identifier in OPENINGS.items():
        if re.search(pattern, opening):
            return identifier
    commons = CREATIVE_COMMONS.search(opening)
    return name_commons(commons) if commons else ""


def name_commons(match: re.Match[str]) -> str:
    """The identifier of a license of Creative Commons."""
    parts = ["cc", "by"]
    if match["nc"]:
        parts.append("nc")
    if match["end"]:
        parts.append("sa" if "share" in match["end"] else "nd")
    identifier = "-".join([*parts, match["version"]])
    return identifier if identifier in KINDS else ""


def group_licenses(licenses: Iterable[StatedLicense], *, limit: int) -> list[list[str]]:
    """Rows of a table: the texts of one statement, the license, and where it is stated."""
    sources: dict[tuple[str, str], list[str]] = {}
    for license in licenses:
        label = f"{license.label} ({license.kind})" if license.kind else license.label
        sources.setdefault((label, license.stated_in or "–"), []).append(license.source)
    rows = []
    for (label, stated_in), names in sources.items():
        rows.append([describe_sources(names, limit=limit), label, stated_in])
    return rows


def describe_sources(names: Sequence[str], *, limit: int) -> str:
    """The names with commas; if they are more than `limit`, their number and the first ones."""
    if len(names) > limit:
        return f"{count_noun(len(names), 'text')}, like {names[0]}"
    return ", ".join(names)
