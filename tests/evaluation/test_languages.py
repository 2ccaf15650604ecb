"""The language of short texts, and whether an answer is in another one than the question."""

import pytest

from cpt.evaluation.languages import guess_language, is_other_language

TEXTS = {
    "The capital of France is Paris.": "en",
    "Das Buch liegt auf dem Tisch.": "de",
    "La femme de France, la femme de France, la femme de France": "fr",
    "Estoy muy bien, gracias. ¿En qué puedo ayudarte hoy?": "es",
    "Oggi sono a casa con la mia famiglia, grazie.": "it",
    "Hoje eu não tenho tempo, mas muito obrigado.": "pt",
    "Het water is vandaag niet koud, maar wij gaan niet zwemmen.": "nl",
    "中国的首都是北京。": "zh",
    "東京は日本の首都です。": "ja",
    "서울은 한국의 수도입니다.": "ko",
    "Москва — столица России.": "cyrillic",
    "def add(x, y): return x + y": "unknown",
    "Paris": "unknown",
    "2 + 3 = 5": "unknown",
    "": "unknown",
    "Ää Яя 中文 ab": "unknown",  # no script has most of the letters
}


@pytest.mark.parametrize(("text", "language"), TEXTS.items())
def test_the_language_is_that_of_common_words_and_letters_or_unknown(text, language):
    assert guess_language(text) == language


def test_another_language_is_distinguished_from_an_unknown_one():
    assert is_other_language("La femme de France, la femme de France", "en") is True
    assert is_other_language("The capital of France is Paris.", "en") is False
    assert is_other_language("Paris", "en") is None  # a name
    assert is_other_language("Paris", "zh") is True  # whatever its language, it is not in Chinese letters
    assert is_other_language("北京", "en") is True
    assert is_other_language("42", "en") is None
    assert is_other_language("The capital", "unknown") is None
