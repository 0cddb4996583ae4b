"""Events of the demo world, the sentences that tell them, and how their meanings relate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from isobn_finetune.demo.draw import Draw
from isobn_finetune.demo.inflection import inflect, pluralize
from isobn_finetune.demo.lexicon import (
    ADJECTIVES,
    MANNERS,
    NOUNS,
    NUMBERS,
    PLACES,
    TIMES,
    VERBS,
    Modifier,
    ancestors,
    in_genre,
)

DETAILS = ("place", "time", "manner")
"""The parts of an event that may be left out."""

_TABLES = {"place": PLACES, "time": TIMES, "manner": MANNERS, "adjective": ADJECTIVES}


@dataclass(frozen=True)
class Entity:
    """Some things of one sort; ``number`` 1 is singular, see ``NUMBERS``; ``adjective`` may be empty."""

    noun: str
    number: int = 1
    adjective: str = ""


@dataclass(frozen=True)
class Event:
    """Who did what to whom, where, when and how; empty details are not told."""

    agent: Entity
    verb: str
    patient: Entity
    place: str = ""
    time: str = ""
    manner: str = ""
    negated: bool = False

    def with_details(self, details: dict[str, str]) -> Event:
        """The same event with other words in some of the slots ``place``, ``time`` and ``manner``."""
        changes: dict[str, Any] = dict(details)
        return replace(self, **changes)


@cache
def nouns_of(kinds: tuple[str, ...], genre: str) -> tuple[str, ...]:
    """The nouns that are no bare kind, of these kinds, in a genre."""
    return tuple(
        name for name, noun in NOUNS.items() if noun.kind in kinds and noun.parent and in_genre(noun.genre, genre)
    )


@cache
def _verbs_for(genre: str) -> tuple[str, ...]:
    return tuple(name for name, verb in VERBS.items() if in_genre(verb.genre, genre))


@cache
def adjectives_for(noun: str) -> tuple[str, ...]:
    """The adjectives that fit a noun."""
    return tuple(name for name, adjective in ADJECTIVES.items() if NOUNS[noun].kind in adjective.kinds)


@cache
def phrases_for(slot: str, genre: str) -> tuple[str, ...]:
    """The specific places, times or manners of a genre."""
    table = _TABLES[slot]
    return tuple(name for name, entry in table.items() if in_genre(entry.genre, genre) and name != entry.group)


def draw_entity(draw: Draw, kinds: tuple[str, ...], genre: str) -> Entity:
    """Some things of one of these kinds."""
    pool = nouns_of(kinds, genre)
    kind = draw.one([kind for kind in kinds if nouns_of((kind,), genre)])
    noun = draw.one(nouns_of((kind,), genre) if draw.chance(0.7) else pool)
    number = 1 if NOUNS[noun].mass or draw.chance(0.7) else draw.one(tuple(NUMBERS))
    return Entity(noun, number, draw.one(adjectives_for(noun)) if draw.chance(0.4) else "")


def draw_event(
    draw: Draw, genre: str, details: float = 0.5, agent: Entity | None = None, patient: Entity | None = None
) -> Event:
    """An event of a genre; each detail is told with the probability ``details``."""
    verbs = [
        name
        for name in _verbs_for(genre)
        if (agent is None or NOUNS[agent.noun].kind in VERBS[name].agents)
        and (patient is None or NOUNS[patient.noun].kind in VERBS[name].patients)
    ]
    verb = draw.one(verbs)
    agent = agent or draw_entity(draw, VERBS[verb].agents, genre)
    while patient is None or (patient.noun == agent.noun and patient.adjective == agent.adjective):
        patient = draw_entity(draw, VERBS[verb].patients, genre)
    told = {slot: draw.one(phrases_for(slot, genre)) for slot in DETAILS if draw.chance(details)}
    return Event(agent, verb, patient).with_details(told)


# ------------------------------------------------------------------------------------------------ sentences


def _word(draw: Draw, forms: tuple[str, ...], plain: bool) -> str:
    return forms[0] if plain or draw.chance(0.5) else draw.one(forms)


def tell_entity(draw: Draw, entity: Entity, plain: bool = False) -> str:
    """A noun phrase such as ``two red kites``; ``plain`` uses no synonyms and always ``the``."""
    noun = NOUNS[entity.noun]
    head = _word(draw, noun.forms, plain)
    words = [_word(draw, ADJECTIVES[entity.adjective].forms, plain)] if entity.adjective else []
    if entity.number > 1:
        number = draw.one(NUMBERS[entity.number])
        words = [number, *words, pluralize(head)]
        return " ".join(["the", *words] if draw.chance(0.4) and entity.number < 9 else words)
    words.append(head)
    if plain or draw.chance(0.65):
        return " ".join(["the", *words])
    if noun.mass:
        return " ".join(["some", *words])
    return " ".join(["an" if words[0][0] in "aeio" else "a", *words])


def is_plural(entity: Entity) -> bool:
    """Whether the verb agrees in the plural."""
    return entity.number > 1


def tell_clause(draw: Draw, event: Event, passive: bool | None = None, agent_text: str = "") -> str:
    """One clause without capital or full stop; the voice is drawn where ``passive`` is None."""
    passive = draw.chance(0.3) if passive is None else passive
    agent = agent_text or tell_entity(draw, event.agent)
    patient = tell_entity(draw, event.patient)
    verb = _word(draw, VERBS[event.verb].forms, False)
    manner = _word(draw, MANNERS[event.manner].forms, False) if event.manner else ""
    early = bool(manner) and draw.chance(0.5)
    if passive:
        be = ("were" if is_plural(event.patient) else "was") + (" not" if event.negated else "")
        parts = [patient, be, manner if early else "", inflect(verb, "participle"), "by", agent]
    else:
        done = f"did not {verb}" if event.negated else inflect(verb, "past")
        early = early and not event.negated
        parts = [agent, manner if early else "", done, patient]
    ends = [] if early else [manner]
    front = ""
    told = [_TABLES[slot][_get(event, slot)].forms for slot in ("place", "time") if _get(event, slot)]
    details = draw.shuffled([_word(draw, forms, False) for forms in told])
    if details and draw.chance(0.25):
        front = details.pop() + ", "
    return front + " ".join(part for part in [*parts, *ends, *details] if part)


def _get(event: Event, slot: str) -> str:
    return str(getattr(event, slot))


def finish(text: str, mark: str = ".") -> str:
    """A capital at the start and a mark at the end."""
    return text[0].upper() + text[1:] + mark


_FRAMES = ("according to the report,", "officials said that", "the news said that", "as we heard,")


def tell(draw: Draw, event: Event, genre: str = "home", passive: bool | None = None) -> str:
    """A whole sentence; texts about work sometimes name their source."""
    clause = tell_clause(draw, event, passive)
    if genre == "work" and draw.chance(0.15):
        clause = f"{draw.one(_FRAMES)} {clause}"
    return finish(clause)


# ------------------------------------------------------------------------------------------------ meanings


def _other(draw: Draw, items: tuple[str, ...] | list[str], *taken: str) -> str:
    left = [item for item in items if item not in taken]
    return draw.one(left) if left else ""


@cache
def _siblings(noun: str, genre: str) -> list[str]:
    entry = NOUNS[noun]
    pool = [
        name for name in nouns_of((entry.kind,), genre) if name not in ancestors(noun) and noun not in ancestors(name)
    ]
    near = [name for name in pool if NOUNS[name].parent == entry.parent and name != noun]
    return near or pool


def sibling(draw: Draw, noun: str, genre: str) -> str:
    """Another noun with the same hypernym, or of the same kind where there is none; neither implies the other."""
    return _other(draw, _siblings(noun, genre), noun)


def exclusive(draw: Draw, slot: str, value: str, genre: str = "home", noun: str = "") -> str:
    """A value that cannot hold together with ``value``: of the same group, or for places of the other one."""
    table: dict[str, Modifier] = _TABLES[slot]
    pool = adjectives_for(noun) if slot == "adjective" else phrases_for(slot, genre)
    if slot == "place":
        return _other(draw, [name for name in pool if table[name].group != table[value].group])
    return _other(draw, [name for name in pool if table[name].group == table[value].group], value)


def verbs_like(event: Event, genre: str) -> list[str]:
    """Other verbs that take the same doer and thing, and neither imply this one nor follow from it."""
    agent, patient = NOUNS[event.agent.noun].kind, NOUNS[event.patient.noun].kind
    parent = VERBS[event.verb].parent
    return [
        name
        for name in _verbs_for(genre)
        if agent in VERBS[name].agents
        and patient in VERBS[name].patients
        and name not in (event.verb, parent)
        and VERBS[name].parent != event.verb
    ]


def swap_roles(event: Event) -> Event | None:
    """The same deed with agent and patient exchanged, where the verb allows it and it would not be the same."""
    verb = VERBS[event.verb]
    fits = NOUNS[event.patient.noun].kind in verb.agents and NOUNS[event.agent.noun].kind in verb.patients
    return replace(event, agent=event.patient, patient=event.agent) if fits else None


def _entity_similarity(first: Entity, second: Entity) -> float:
    """1 for the same things, 0 for things that have nothing in common."""
    one, two = NOUNS[first.noun], NOUNS[second.noun]
    if first.noun == second.noun:
        same = 1.0
    elif second.noun in ancestors(first.noun) or first.noun in ancestors(second.noun):
        same = 0.7
    elif one.parent == two.parent:
        same = 0.4
    else:
        same = 0.2 if one.kind == two.kind else 0.0
    adjective = 0.0 if first.adjective and second.adjective else 0.5
    adjective = 1.0 if first.adjective == second.adjective else adjective
    return same * (0.7 + 0.2 * adjective + 0.1 * (first.number == second.number))


def _verb_similarity(first: str, second: str) -> float:
    if first == second:
        return 1.0
    if first in (VERBS[second].parent, VERBS[second].opposite) or second == VERBS[first].parent:
        return 0.6 if first != VERBS[second].opposite else 0.3
    return 0.3 if VERBS[first].parent and VERBS[first].parent == VERBS[second].parent else 0.0


def _detail_similarity(slot: str, first: str, second: str) -> float:
    if first == second:
        return 1.0
    if not first or not second:
        return 0.5
    return 0.4 if _TABLES[slot][first].group == _TABLES[slot][second].group and slot == "place" else 0.0


def similarity(first: Event, second: Event) -> float:
    """How much meaning two events share, 0 to 1: deed, doer and thing count most, then place, time and manner."""
    agent = _entity_similarity(first.agent, second.agent)
    patient = _entity_similarity(first.patient, second.patient)
    core = 0.35 * agent + 0.35 * _verb_similarity(first.verb, second.verb) + 0.3 * patient
    details = sum(_detail_similarity(slot, _get(first, slot), _get(second, slot)) for slot in DETAILS) / len(DETAILS)
    value = core * (0.7 + 0.3 * details)
    return value * 0.6 if first.negated != second.negated else value
