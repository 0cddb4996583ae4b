"""Changes to an event whose effect on the meaning is known: weaker, stronger, contradictory or merely different.

Every edit comes as ``(slot, event)``; the slot says which part was changed, so that a later edit can leave it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from isobn_finetune.demo.draw import Draw
from isobn_finetune.demo.grammar import (
    DETAILS,
    Entity,
    Event,
    adjectives_for,
    exclusive,
    phrases_for,
    sibling,
    swap_roles,
    verbs_like,
)
from isobn_finetune.demo.lexicon import NOUNS, PLACES, VERBS, in_genre

Edit = tuple[str, Event]
_ROLES = ("agent", "patient")


def _with(event: Event, role: str, **changes: str | int) -> Event:
    entity = replace(getattr(event, role), **changes)
    return replace(event, agent=entity) if role == "agent" else replace(event, patient=entity)


def weakenings(event: Event) -> list[Edit]:
    """What follows from the event: less detail or more general words. Holds only where the event is not negated."""
    edits: list[Edit] = []
    for role in _ROLES:
        entity: Entity = getattr(event, role)
        if entity.adjective:
            edits.append((f"{role}.adjective", _with(event, role, adjective="")))
        if NOUNS[entity.noun].parent and (entity.number == 1 or not NOUNS[NOUNS[entity.noun].parent].mass):
            edits.append((role, _with(event, role, noun=NOUNS[entity.noun].parent)))
        if entity.number in (2, 3):
            edits.append((f"{role}.number", _with(event, role, number=9)))
    if VERBS[event.verb].parent:
        edits.append(("verb", replace(event, verb=VERBS[event.verb].parent)))
    edits += [(slot, event.with_details({slot: ""})) for slot in DETAILS if getattr(event, slot)]
    if event.place and PLACES[event.place].group != event.place:
        edits.append(("place", replace(event, place=PLACES[event.place].group)))
    return edits


def weaken(draw: Draw, event: Event, steps: int, protected: tuple[str, ...] = ()) -> Event:
    """Applies up to ``steps`` weakenings, none of them to a protected slot."""
    for _ in range(steps):
        edits = [edit for edit in weakenings(event) if edit[0] not in protected]
        if edits:
            event = draw.one(edits)[1]
    return event


def additions(draw: Draw, event: Event, genre: str) -> list[Edit]:
    """Stronger events that do not follow: a detail more, or a more special noun."""
    edits: list[Edit] = []
    for slot in DETAILS:
        if not getattr(event, slot):
            edits.append((slot, event.with_details({slot: draw.one(phrases_for(slot, genre))})))
    for role in _ROLES:
        entity: Entity = getattr(event, role)
        if not entity.adjective:
            edits.append((f"{role}.adjective", _with(event, role, adjective=draw.one(adjectives_for(entity.noun)))))
        special = [name for name in NOUNS if NOUNS[name].parent == entity.noun and in_genre(NOUNS[name].genre, genre)]
        if special:
            edits.append((role, _with(event, role, noun=draw.one(special))))
    return edits


def contradictions(draw: Draw, event: Event, genre: str) -> list[Edit]:
    """Events that cannot be true together with this one, if both tell of the same moment."""
    edits: list[Edit] = [("negated", replace(event, negated=not event.negated))]
    if VERBS[event.verb].opposite:
        edits.append(("verb", replace(event, verb=VERBS[event.verb].opposite)))
    for slot in ("place", "manner"):
        value = getattr(event, slot)
        if value and (other := exclusive(draw, slot, value, genre)):
            edits.append((slot, event.with_details({slot: other})))
    for role in _ROLES:
        entity: Entity = getattr(event, role)
        if entity.adjective and (other := exclusive(draw, "adjective", entity.adjective, noun=entity.noun)):
            edits.append((f"{role}.adjective", _with(event, role, adjective=other)))
        if entity.number in (2, 3):
            edits.append((f"{role}.number", _with(event, role, number=5 - entity.number)))
    return edits


def departures(draw: Draw, event: Event, genre: str) -> list[Edit]:
    """Other events that may or may not be true as well: another doer, thing or deed, or the roles exchanged."""
    edits: list[Edit] = []
    for role in _ROLES:
        entity: Entity = getattr(event, role)
        other = sibling(draw, entity.noun, genre)
        if other and other != getattr(event, _ROLES[role == "agent"]).noun:
            edits.append((role, _with(event, role, noun=other)))
    verbs = [name for name in verbs_like(event, genre) if name != VERBS[event.verb].opposite]
    if verbs:
        edits.append(("verb", replace(event, verb=draw.one(verbs))))
    swapped = swap_roles(event)
    if swapped:
        edits.append(("roles", swapped))
    return edits


def edit_once(draw: Draw, event: Event, genre: str, kinds: tuple[tuple[str, float], ...]) -> Edit:
    """One edit of a kind drawn by weight from ``weaken add contradict depart``; the event as it is if none fits."""
    makers: dict[str, Callable[[], list[Edit]]] = {
        "weaken": lambda: weakenings(event),
        "add": lambda: additions(draw, event, genre),
        "contradict": lambda: contradictions(draw, event, genre),
        "depart": lambda: departures(draw, event, genre),
    }
    edits = makers[draw.weighted(kinds)]()
    return draw.one(edits) if edits else ("", event)
