"""A guess of the language of a short text: the script of its letters and, of Latin script, its common words.

The guess serves one question: has a model answered in another language than it was asked in? It says
`unknown` where the words do not decide, as of names, numbers, code, and languages without a list here."""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from heapq import nlargest

UNKNOWN = "unknown"
LATIN = "latin"
MIN_WORD_SCORE = 1.0  # of the likeliest language: one word that no other list has, or several that some have
MIN_LEAD = 1.5  # times the score of the second
MIN_SCRIPT_SHARE = 0.5  # of the letters, which the script of a text has at least
MIN_KANA_SHARE = 0.1  # of the letters, above which Chinese characters are Japanese
WORD = re.compile(r"[^\W\d_]+")

# Some of the commonest words of each language, in lower case.
WORD_LISTS = {
    "en": """
        the of and to a in is it you that was for on are with as his they be at one have this from
        by hot word but what some we can out other were all there when up use your how said an each
        she which do their time if will way about many then them write would like so these her long
        make thing see him two has look more day could go come did number sound no most people my
        over know water than call first who may down side been now find any new work part take get
        place made live where after back little only round man year came show every good me give our
        under name very through just not i yes hello thank thanks please help sure
    """,
    "de": """
        der die das und ist nicht ein eine einen einem einer zu den dem des mit sich auf für von im
        es ich du er sie wir ihr auch als an wie so dass kann aus wenn noch nach bei sind oder aber
        war hat haben wird werden um nur vor mehr durch man sein seine kein keine dir mir dich mich
        uns ihnen diese dieser dieses über unter gegen sehr schon was wer wo warum viel viele gut
        jahr tag frau mann kind haus wasser hilfe danke bitte ja nein gern heute morgen abend guten
        hallo liegt gibt hier dort
    """,
    "fr": """
        le la les de des du un une et est en que qui ne pas il elle on nous vous ils elles je tu ce
        cette ces dans pour par sur avec au aux plus ou mais son sa ses leur leurs mon ma mes être
        avoir fait sont était été comme tout tous toute bien où quand si aussi très peu deux même
        sans entre après avant chez c qu n d l y homme femme enfant jour année temps grand petit
        maison eau ville pays bonjour merci oui non monsieur madame ami quel quelle comment pourquoi
        aujourd hui
    """,
    "es": """
        el la los las de del un una unos unas y es en que no se por con para su sus al lo como más
        pero le ya o este esta estos estas si sí porque muy sin sobre también me hasta hay donde
        quien desde todo todos nos durante uno ni contra otros ese eso ante ellos e esto mí antes
        algunos qué yo otro tengo tiene está estoy estás son fue ser hacer bien hoy día año hombre
        mujer casa agua vida tiempo hola gracias buenos buenas puedo ayudarte usted cómo cuál dónde
    """,
    "it": """
        il lo la i gli le di del della dei delle un uno una e è in che non si per con da come più ma
        anche sono ha ho hai hanno questo questa questi quello quella nel nella al alla dal dalla
        sul sulla io tu lui lei noi voi loro mi ti ci vi molto bene quando dove perché chi cosa
        tutto tutti essere avere fare giorno anno uomo donna casa acqua vita tempo ciao grazie
        buongiorno oggi posso aiutarti
    """,
    "pt": """
        o a os as de do da dos das um uma e é em que não se por com para seu sua no na nos nas ao à
        mais mas como foi ele ela eles elas eu você nós são está estou tem tenho ser ter isso isto
        este esta muito bem também já só quando onde porque quem tudo todos até sem sobre entre
        depois antes dia ano homem mulher casa água vida tempo olá obrigado obrigada bom boa hoje
        posso ajudar
    """,
    "nl": """
        de het een en van is in dat niet op te zijn met voor die ik je hij ze wij jullie u er aan om
        ook als maar dan nog bij of uit naar door over zo wat wel geen deze dit hoe waar wie waarom
        heeft hebben was waren wordt worden kan kunnen zal veel meer goed jaar dag man vrouw kind
        huis water tijd hallo dank bedankt ja nee vandaag
    """,
}
COMMON_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(words.split()) for language, words in WORD_LISTS.items()
}
LANGUAGES = sorted([*COMMON_WORDS, "zh", "ja", "ko"])  # that are distinguished from each other


def guess_language(text: str) -> str:
    """The language of a text of one of COMMON_WORDS, of Chinese (`zh`), Japanese (`ja`) or Korean (`ko`);
    another script by its name in Unicode, as `cyrillic`; else `unknown`."""
    script = find_script(text)
    if script != LATIN:
        return script

    # A word counts for the languages that have it, and the less the more of them there are.
    scores: dict[str, float] = dict.fromkeys(COMMON_WORDS, 0.0)
    for word in WORD.findall(text.casefold()):
        languages = [language for language, words in COMMON_WORDS.items() if word in words]
        for language in languages:
            scores[language] += 1 / len(languages)
    first, second = nlargest(2, scores, key=scores.__getitem__)
    if scores[first] < MIN_WORD_SCORE or scores[first] < MIN_LEAD * scores[second]:
        return UNKNOWN
    return first


def find_script(text: str) -> str:
    """The script of most letters: `latin`, `zh`, `ja`, `ko`, another by its name in Unicode; `unknown` for a
    text without letters, and for one in which no script has most of them."""
    scripts: Counter[str] = Counter()
    for character in text:
        if character.isalpha():
            # The name of a letter begins with its script: LATIN SMALL LETTER A, CJK UNIFIED IDEOGRAPH-4E2D.
            scripts[unicodedata.name(character, UNKNOWN).split(" ")[0].casefold()] += 1
    num_letters = scripts.total()
    num_kana = scripts["hiragana"] + scripts["katakana"]
    num_east_asian = scripts["cjk"] + num_kana
    if num_letters == 0:
        return UNKNOWN
    if num_east_asian >= MIN_SCRIPT_SHARE * num_letters:
        return "ja" if num_kana > MIN_KANA_SHARE * num_letters else "zh"

    script, count = scripts.most_common(1)[0]
    if count < MIN_SCRIPT_SHARE * num_letters:
        return UNKNOWN
    return "ko" if script == "hangul" else script


def is_other_language(answer: str, expected: str) -> bool | None:
    """Whether an answer is in another language or script than `expected`, a value of `guess_language`; None
    where either is unknown. A text in Latin letters is not in a language of another script, whatever its
    words are."""
    script = find_script(answer)
    language = guess_language(answer)
    if expected == UNKNOWN or script == UNKNOWN:
        return None
    is_latin_expected = expected in COMMON_WORDS
    if script == LATIN and language == UNKNOWN:
        return None if is_latin_expected else True
    return language != expected
