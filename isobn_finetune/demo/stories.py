"""Unlabelled running text in the demo language, on which the small encoder is pre-trained."""

from __future__ import annotations

from dataclasses import replace

from isobn_finetune.demo.draw import Draw
from isobn_finetune.demo.edits import edit_once, weaken
from isobn_finetune.demo.grammar import (
    DETAILS,
    Event,
    draw_entity,
    draw_event,
    finish,
    phrases_for,
    tell,
    tell_clause,
)
from isobn_finetune.demo.lexicon import NOUNS
from isobn_finetune.demo.pairs import create_question_pair, tell_question
from isobn_finetune.demo.singles import create_description, create_opinion, review_topics

_GENRES = ("home", "work")


def _narrate(draw: Draw, genre: str) -> list[str]:
    """What one person or animal did in one place; the place is not always named, and pronouns occur."""
    kinds = ("person",) if genre == "work" or draw.chance(0.7) else ("animal",)
    hero = draw_entity(draw, kinds, genre)
    place = draw.one(phrases_for("place", genre))
    thing = None
    sentences = []
    for number in range(4):
        event = draw_event(draw, genre, 0.2, hero, thing if draw.chance(0.5) else None)
        event = replace(event, place=place if draw.chance(0.5) else "")
        thing = event.patient
        if number and draw.chance(0.35):
            pronoun = "they" if hero.number > 1 else NOUNS[hero.noun].pronoun
            sentences.append(finish(tell_clause(draw, event, passive=False, agent_text=pronoun)))
        else:
            sentences.append(tell(draw, event, genre))
        if number == 0 and hero.adjective and draw.chance(0.5):
            hero = replace(hero, adjective="")
    return sentences


def _restate(draw: Draw, genre: str) -> list[str]:
    """The same deed told again, in other words and ever more loosely."""
    event = draw_event(draw, genre, details=0.3)
    sentences = [tell(draw, event, genre)]
    for _ in range(3):
        event = weaken(draw, event, draw.below(2))
        sentences.append(_tell_again(draw, event))
    return sentences


def _tell_again(draw: Draw, event: Event) -> str:
    lead = draw.one(("in other words, ", "that is, ", "so ", "", "", ""))
    return finish(lead + tell_clause(draw, event))


def _misstate(draw: Draw, genre: str) -> tuple[str, str]:
    """A deed, and one that does not follow from it told as if it did."""
    event = draw_event(draw, genre, details=0.3)
    slot, other = "", event
    while not slot:
        slot, other = edit_once(draw, event, genre, (("depart", 2.0), ("contradict", 1.0), ("add", 1.0)))
    protected = ("agent", "patient", "verb") if slot == "roles" else (slot,)
    if not other.negated:
        other = weaken(draw, other, draw.below(3), protected)
    return tell(draw, event, genre), _tell_again(draw, other)


def _ask(draw: Draw, genre: str) -> list[str]:
    """Questions about one deed, each with its answer."""
    event = draw_event(draw, genre, details=0.45)
    sentences = []
    for _ in range(2):
        asked = draw.one([slot for slot in DETAILS if getattr(event, slot)] + ["agent", "patient"])
        sentences += [tell_question(draw, event, asked), tell(draw, _shorten(draw, event, asked), genre)]
    return sentences


def _shorten(draw: Draw, event: Event, kept: str) -> Event:
    """Leaves details out, but not the one that was asked for."""
    return event.with_details({slot: "" for slot in DETAILS if slot != kept and draw.chance(0.4)})


def _evade(draw: Draw, genre: str) -> tuple[str, str]:
    """A question, and a sentence that does not answer it."""
    question, sentence, label = "", "", 0
    while not label:
        question, sentence, label = create_question_pair(draw, genre)
    return question, sentence


def _review(draw: Draw, genre: str) -> list[str]:
    """Opinions about one thing by one person, all of one polarity."""
    good, topic = draw.chance(0.5), draw.one(review_topics())
    return [create_opinion(draw, topic, good) for _ in range(4)]


def _waver(draw: Draw, genre: str) -> tuple[str, str]:
    """Two opinions about one thing, of different polarity."""
    good, topic = draw.chance(0.5), draw.one(review_topics())
    return create_opinion(draw, topic, good), create_opinion(draw, topic, not good)


def _describe(draw: Draw, genre: str) -> list[str]:
    return create_description(draw, genre, 4)


_KINDS = ((_narrate, 0.2), (_restate, 0.4), (_ask, 0.15), (_review, 0.15), (_describe, 0.1))

_NEAR_MISSES = ((_misstate, 0.5), (_evade, 0.2), (_waver, 0.3))


def create_passage(draw: Draw) -> list[str]:
    """Four sentences that belong together."""
    return draw.weighted(_KINDS)(draw, draw.one(_GENRES))


def create_near_miss(draw: Draw) -> tuple[str, str]:
    """Two sentences about the same matter of which the second does not continue the first."""
    return draw.weighted(_NEAR_MISSES)(draw, draw.one(_GENRES))
