"""Replaces internals of libraries that repeat work in every test: README.md beside this file lists them.

Runs in processes of their own are not affected."""

import io
import os
import pickle
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Any
from unittest import mock

import omegaconf.base
import yaml
from hydra._internal import defaults_list
from jinja2 import Environment
from omegaconf import OmegaConf
from yaml import YAMLError

LOAD = OmegaConf.load


def make_libraries_fast() -> None:
    from lightning.pytorch.trainer.connectors import callback_connector as connector

    cache_yaml()
    cache_composition()
    Environment.compile = cache(Environment.compile)
    os.fsync = lambda descriptor: None
    connector._load_external_callbacks = cache(connector._load_external_callbacks)


def cache_yaml() -> None:
    """Has OmegaConf, and with it Hydra, parse a text once: a composed config is read from 25 files, for each
    of which PyYAML takes 3 ms, and the tests compose thousands of times."""
    OmegaConf.load = staticmethod(load_cached)


def cache_composition() -> None:
    """Has OmegaConf parse an interpolation once, and Hydra make no map of choices where defaults have none: a
    third of the time that a config takes."""
    make_map = defaults_list._create_interpolation_map

    def map_if_needed(overrides: Any, defaults: list, self_added: bool) -> Any:
        if not any(default.is_interpolation() for default in defaults):
            return None
        return make_map(overrides, defaults, self_added)

    defaults_list._create_interpolation_map = map_if_needed
    omegaconf.base.parse = cache(omegaconf.base.parse)


def load_cached(file: str | Path | IO[Any]) -> Any:
    """As OmegaConf.load, errors too: they name the file."""
    if not isinstance(file, (str, Path)):
        text = file.read()
        try:
            return pickle.loads(pickle_yaml(text))
        except (YAMLError, OSError):
            file.seek(0)
            return LOAD(file)
    try:
        return pickle.loads(pickle_yaml(Path(file).read_text(encoding="utf-8")))
    except (YAMLError, OSError, UnicodeDecodeError):
        return LOAD(file)


@lru_cache(maxsize=1024)
def pickle_yaml(text: str) -> bytes:
    """By libyaml where it is there, in a tenth of the time; `load_again` has the errors of PyYAML."""
    with mock.patch.object(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        return pickle.dumps(LOAD(io.StringIO(text)))
