"""The words of the demo language and what they mean: synonyms, hypernyms, opposites, and what can be done to what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Noun:
    """A thing. ``forms`` are its synonyms, ``parent`` its hypernym, ``kind`` the root of its hypernyms."""

    forms: tuple[str, ...]
    parent: str
    kind: str
    pronoun: str
    mass: bool
    genre: str


@dataclass(frozen=True)
class Verb:
    """An action. ``agents`` and ``patients`` are kinds of nouns, ``opposite`` and ``parent`` other verbs or empty."""

    forms: tuple[str, ...]
    agents: tuple[str, ...]
    patients: tuple[str, ...]
    opposite: str
    parent: str
    genre: str


@dataclass(frozen=True)
class Modifier:
    """An adjective, place, time or manner. Members of one ``group`` exclude each other."""

    forms: tuple[str, ...]
    group: str
    kinds: tuple[str, ...] = ()
    genre: str = "both"


# synonyms | hypernym | pronoun. A row without a hypernym founds a kind.
_NOUNS = {
    "both": """
        person human ||
        worker | person
        adult grownup | person
        doctor physician | worker
        nurse | worker
        driver | worker
        vehicle ||
        car automobile | vehicle
        truck lorry | vehicle
        bus | vehicle
        tool ||
        hammer | tool
        saw | tool
        shovel spade | tool
        ladder | tool
    """,
    "home": """
        child kid | person
        boy lad | child | he
        girl lass | child | she
        man gentleman | adult | he
        woman lady | adult | she
        teacher instructor | worker
        farmer | worker
        cook chef | worker
        baker | worker
        artist | person
        painter | artist
        singer vocalist | artist
        writer author | artist
        thief robber | person
        animal creature ||
        dog hound | animal
        puppy pup | dog
        cat | animal
        kitten | cat
        horse | animal
        pony | horse
        rabbit bunny | animal
        pig hog | animal
        cow | animal
        goat | animal
        bird | animal
        duck | bird
        crow raven | bird
        parrot | bird
        food* ||
        fruit* | food
        apple | fruit
        pear | fruit
        orange | fruit
        peach | fruit
        cake | food
        pie | food
        sandwich | food
        pizza | food
        bicycle bike | vehicle
        boat | vehicle
        instrument ||
        guitar | instrument
        piano | instrument
        violin fiddle | instrument
        drum | instrument
        flute | instrument
        toy ||
        doll | toy
        kite | toy
        ball | toy
        puzzle | toy
        garment ||
        shirt | garment
        coat jacket | garment
        hat cap | garment
        dress gown | garment
    """,
    "work": """
        expert specialist | worker
        engineer | expert
        scientist researcher | expert
        lawyer attorney | expert
        manager boss | worker
        clerk | worker
        pilot aviator | worker
        reporter journalist | worker
        guard | worker
        student pupil | person
        judge | person
        device gadget ||
        computer | device
        phone telephone | device
        printer | device
        camera | device
        radio | device
        document ||
        report | document
        contract agreement | document
        invoice bill | document
        letter | document
        memo note | document
        map chart | document
        aircraft ||
        plane airplane | aircraft
        helicopter chopper | aircraft
        rocket | aircraft
    """,
}

_THINGS = "food vehicle instrument tool toy garment device document aircraft"
_GOODS = "vehicle instrument tool toy garment device document"
_MADE = "vehicle instrument tool toy device aircraft"

# synonyms | agents | patients | opposite | hypernym
_VERBS = {
    "both": f"""
        repair fix mend | person | {_MADE} | break
        break damage | person animal | {_MADE} | repair
        clean wash | person | vehicle garment instrument tool device aircraft
        get obtain | person | {_THINGS}
        buy purchase | person | {_THINGS} | sell | get
        sell | person | {_THINGS} | buy
        steal | person animal | {_GOODS} food | return | get
        return | person | {_GOODS} | steal
        find discover | person animal | {_THINGS} | lose
        lose misplace | person | {_GOODS} | find
        hide conceal | person | {_GOODS} food | show
        show reveal | person | {_GOODS} food | hide
        lift raise | person | {_GOODS} | drop
        drop | person | {_GOODS} food | lift
        carry transport | person | {_GOODS} food
        follow trail | person animal | person animal vehicle
        watch observe | person animal | person animal vehicle aircraft
        help assist | person | person animal | hurt
        hurt injure | person animal | person animal | help
        praise commend | person | person | blame
        blame criticize | person | person | praise
        drive steer | person | vehicle
    """,
    "home": """
        eat consume | person animal | food
        devour | person animal | food || eat
        cook prepare | person | food
        play | person | instrument
        push shove | person animal | vehicle tool toy | pull
        pull drag | person animal | vehicle tool toy | push
        throw toss | person | toy food tool | catch
        catch grab | person animal | toy food tool | throw
        chase pursue | person animal | person animal vehicle || follow
        touch | person animal | person animal toy instrument
        kick | person animal | person animal toy || touch
        hug embrace | person | person animal toy || touch
        feed | person | person animal
        love adore | person animal | person animal toy | hate
        hate despise | person animal | person animal toy | love
    """,
    "work": """
        write compose | person | document
        read | person | document
        sign | person | document
        send mail | person | document device | receive
        receive | person | document device | send
        copy duplicate | person | document
        approve accept | person | document | reject
        reject refuse | person | document | approve
        examine inspect | person | document device vehicle aircraft tool
        test | person | device vehicle aircraft tool || examine
        build construct | person | device aircraft vehicle | destroy
        destroy demolish | person | device aircraft vehicle document | build
        launch | person | aircraft
        land | person | aircraft
        hire employ | person | person | dismiss
        dismiss fire | person | person | hire
        thank | person | person
        contact | person | person
        call phone | person | person || contact
    """,
}

# name: synonyms, each with its preposition | group
_PLACES = {
    "both": """
        indoors; inside | indoors
        outdoors; outside | outdoors
        in the library | indoors
        in the garage | indoors
        in the shop; in the store | indoors
        in the street; in the road | outdoors
    """,
    "home": """
        in the kitchen | indoors
        in the bedroom | indoors
        in the school | indoors
        in the barn | indoors
        in the garden; in the yard | outdoors
        in the park | outdoors
        on the beach; on the shore | outdoors
        in the field; in the meadow | outdoors
        in the forest; in the woods | outdoors
    """,
    "work": """
        in the office | indoors
        in the lab; in the laboratory | indoors
        in the factory; in the plant | indoors
        at the bank | indoors
        in the court | indoors
        in the hall | indoors
        at the harbor; at the port | outdoors
        on the bridge | outdoors
        on the runway | outdoors
    """,
}
_TIMES = {
    "both": """
        in the morning
        in the evening
        at night
        at noon; at midday
        yesterday
        last week
    """,
    "home": """
        at dawn; at sunrise
        before dinner
        after breakfast
        in the summer
    """,
    "work": """
        on Monday
        on Friday
        before the meeting
        after lunch
        last month
    """,
}
_MANNERS = """
    quickly; rapidly | speed
    slowly | speed
    quietly; silently | noise
    loudly; noisily | noise
    carefully; cautiously | care
    carelessly | care
    happily; gladly | mood
    sadly | mood
"""

# synonyms | group | kinds of nouns it fits
_ADJECTIVES = f"""
    big large | size | animal vehicle tool toy instrument device aircraft
    small little | size | animal vehicle tool toy instrument device aircraft
    young | age | person animal
    old elderly | age | person animal
    tall | height | person
    short | height | person
    rich wealthy | money | person
    poor needy | money | person
    angry furious | temper | person animal
    calm peaceful | temper | person animal
    new modern | wear | {_GOODS} aircraft
    worn shabby | wear | {_GOODS} aircraft
    cheap inexpensive | price | {_THINGS}
    costly expensive | price | {_THINGS}
    red | color | vehicle toy garment instrument tool
    blue | color | vehicle toy garment instrument tool
    green | color | vehicle toy garment instrument tool
    yellow | color | vehicle toy garment instrument tool
    black | color | vehicle animal garment instrument device
    white | color | vehicle animal garment instrument device
    fresh | taste | food
    stale | taste | food
"""

NUMBERS = {2: ("two",), 3: ("three",), 9: ("several", "some")}
"""Plural numbers and their words; 9 stands for any number above one."""


def _rows(table: str) -> list[list[str]]:
    lines = [line.strip() for line in table.strip().splitlines()]
    return [[field.strip() for field in line.split("|")] + [""] * 5 for line in lines]


def _read_nouns() -> dict[str, Noun]:
    nouns: dict[str, Noun] = {}
    for genre in ("both", "home", "work"):
        for words, parent, pronoun, *_ in _rows(_NOUNS[genre]):
            forms = tuple(words.replace("*", "").split())
            kind = nouns[parent].kind if parent else forms[0]
            pronoun = pronoun or ("they" if kind == "person" else "it")
            nouns[forms[0]] = Noun(forms, parent, kind, pronoun, "*" in words, genre)
    return nouns


def _read_verbs() -> dict[str, Verb]:
    verbs = {}
    for genre, table in _VERBS.items():
        for words, agents, patients, opposite, parent, *_ in _rows(table):
            forms = tuple(words.split())
            verbs[forms[0]] = Verb(forms, tuple(agents.split()), tuple(patients.split()), opposite, parent, genre)
    return verbs


def _read_phrases(tables: dict[str, str]) -> dict[str, Modifier]:
    phrases = {}
    for genre, table in tables.items():
        for words, group, *_ in _rows(table):
            forms = tuple(form.strip() for form in words.split(";"))
            phrases[forms[0]] = Modifier(forms, group, genre=genre)
    return phrases


NOUNS = _read_nouns()
VERBS = _read_verbs()
PLACES = _read_phrases(_PLACES)
TIMES = _read_phrases(_TIMES)
MANNERS = _read_phrases({"both": _MANNERS})
ADJECTIVES = {
    words.split()[0]: Modifier(tuple(words.split()), group, tuple(kinds.split()))
    for words, group, kinds, *_ in _rows(_ADJECTIVES)
}


@cache
def ancestors(noun: str) -> tuple[str, ...]:
    """The hypernyms of a noun, nearest first."""
    parent = NOUNS[noun].parent
    return (parent, *ancestors(parent)) if parent else ()


def in_genre(entry_genre: str, genre: str) -> bool:
    """Whether a word may be used in texts of this genre (``home`` or ``work``)."""
    return entry_genre in ("both", genre)
