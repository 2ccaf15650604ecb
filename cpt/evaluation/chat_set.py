"""The held-out chats of a run, read from files.

A chat is a row of JSON with `messages`; `expect` and `language` say what its last answer should be. Nothing
here needs torch: a wrong file is reported at once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cpt.core.config import digest
from cpt.core.exceptions import InvalidOptionError
from cpt.core.files import hash_file
from cpt.data.sources import files, readers
from cpt.data.sources.chats import IgnoredKeys, read_chat
from cpt.data.sources.examples import BadExampleError, Example, write_example
from cpt.evaluation.languages import LANGUAGES, UNKNOWN, guess_language
from cpt.evaluation.options import ChatOptions

OTHER_SUFFIXES = (".md", ".csv", ".tsv", ".parquet", ".arrow")  # of files that have no JSON lines
SHIPPED = Path(__file__).with_name("default_chats.jsonl")


@dataclass(frozen=True)
class HeldOutChat:
    """A chat that ends with an answer of the assistant, and what is expected of a model's answer."""

    example: Example
    expect: tuple[str, ...] = ()  # texts that the answer has to contain
    language: str = UNKNOWN  # of the answer, a value of guess_language
    position: str = ""  # file and line, for messages

    def to_json(self) -> list[Any]:
        """All that its loss and the judgement of an answer depend on."""
        return [write_example(self.example), self.expect, self.language]

    @property
    def question(self) -> str:
        """The turn before the last answer."""
        turns = self.example.turns
        return turns[-2].content if len(turns) > 1 else ""


def find_chat_files(options: ChatOptions) -> list[Path]:
    """The files of JSON lines with the chats. Raises ValueError where there are none."""
    if options.path is None:
        return [SHIPPED]
    path = Path(options.path)
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        paths = find_files_below(path)
    else:
        raise make_path_error(path, reason="it is missing")
    for chat_file in paths:
        if files.find_suffix(chat_file) in OTHER_SUFFIXES:
            raise make_path_error(path, reason=f"{chat_file.name} is no file of JSON lines")
    return paths


def find_files_below(folder: Path) -> list[Path]:
    """The files of a folder, in their order. Raises ValueError where there are none."""
    try:
        return files.list_text_files(folder)
    except files.NoTextFileError as error:
        raise make_path_error(folder, reason="no file of the folder has JSON lines") from error


def make_path_error(path: Path, *, reason: str) -> InvalidOptionError:
    return InvalidOptionError(
        "chats.path", path, reason=reason, allowed="a file or folder of JSON lines with messages; chats=none"
    )


def stamp_chats(options: ChatOptions) -> str:
    """A hash of names, sizes and times of the files. The chats that cpt ships are hashed by their content,
    since each installation writes the file again."""
    if options.path is None:
        return hash_file(SHIPPED)
    return digest(files.stamp_files(find_chat_files(options)))


def read_chats(options: ChatOptions) -> list[HeldOutChat]:
    """The chats of all files, in their order. Raises ValueError for a row that is not a chat, by file and
    line, and for files without any."""
    paths = find_chat_files(options)
    chats: list[HeldOutChat] = []
    for path in paths:
        with files.naming_file(path):
            for where, row in readers.read_json_rows(path):
                chats.append(read_held_out_chat(row, where, number=len(chats)))
    if not chats:
        raise InvalidOptionError(
            "chats.path", options.path, reason="it has no chats", allowed="JSON lines with messages"
        )
    return chats


def read_held_out_chat(row: Any, where: str, *, number: int) -> HeldOutChat:
    """The chat of a row. Raises ValueError for a row of another form."""
    raw = read_chat(row, where, IgnoredKeys())
    if len(raw.turns) < 2:
        raise BadExampleError(f"{where} has no turn before the answer. Allowed: a question, then an answer")
    example = Example(
        id=str(row.get("id", number)),
        source="",
        target=raw.target,
        task="chats",
        turns=raw.turns,
        tools=raw.tools,
        template_options=raw.template_options,
    )
    chat = HeldOutChat(example, expect=read_expected(row, where), position=where)
    return replace(chat, language=choose_language(row, chat))


def read_expected(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The texts of `expect`. Raises ValueError where it is neither a text nor a list of texts."""
    expected = row.get("expect", [])
    if isinstance(expected, str):
        expected = [expected]
    is_list_of_texts = isinstance(expected, list) and all(isinstance(text, str) and text for text in expected)
    if not is_list_of_texts:
        raise ValueError(f"{where}: expect={expected!r:.60} is invalid. Allowed: a text, or a list of texts")
    return tuple(expected)


def choose_language(row: Mapping[str, Any], chat: HeldOutChat) -> str:
    """The language in which a chat is to be answered: `language` of its row, as for a translation; else the
    language of its own answer, or of the question if the answer is too short to tell. Raises ValueError for a
    language that is not recognized: every answer would count as one in another language."""
    language = row.get("language")
    if language:
        if language not in LANGUAGES:
            raise ValueError(
                f"{chat.position}: language={language!r:.60} is invalid: it is not recognized in answers. "
                f"Allowed: {', '.join(LANGUAGES)}, or no language"
            )
        return str(language)
    language = guess_language(chat.example.turns[-1].content)
    return guess_language(chat.question) if language == UNKNOWN else language
