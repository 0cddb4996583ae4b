"""Sentence pairs: similarity, paraphrase, entailment, question and answer."""

from __future__ import annotations

from dataclasses import replace

from isobn_finetune.demo.draw import Draw
from isobn_finetune.demo.edits import edit_once, weaken
from isobn_finetune.demo.grammar import (
    DETAILS,
    Event,
    draw_event,
    finish,
    is_plural,
    similarity,
    tell,
    tell_clause,
    tell_entity,
)
from isobn_finetune.demo.inflection import inflect
from isobn_finetune.demo.lexicon import MANNERS, NOUNS, PLACES, TIMES, VERBS, ancestors

_STEPS = ((0, 1.0), (1, 3.0), (2, 2.0), (3, 1.0))
_JOINTS = (" and ", " while ", ", and ")


def create_similarity_pair(draw: Draw, genre: str) -> tuple[str, str, float]:
    """Two sentences and their similarity, 0.0 to 5.0 in steps of 0.2, spread over the whole range."""
    target = draw.below(5)
    kinds = (("weaken", 1.0), ("add", 1.0), ("contradict", 1.0), ("depart", 4.0))
    while True:
        first = draw_event(draw, genre, details=0.2)
        if target < 3 and draw.chance(0.7):
            second = _other_deed(draw, first, genre, details=0.2)
        else:
            second = first
            for _ in range(draw.below(3) + max(0, 2 * (3 - target))):
                second = edit_once(draw, second, genre, kinds)[1]
        score = round(similarity(first, second) * 25) / 5
        # The top bin holds 4.0 to 5.0, the others one point each without their upper end.
        if min(int(score), 4) == target:
            return tell(draw, first, genre), tell(draw, second, genre), score


def _other_deed(draw: Draw, event: Event, genre: str, details: float) -> Event:
    """Another event of the same doer, or with the same thing, or neither: easily told apart by its other words."""
    shared = draw.below(3)
    agent = event.agent if shared == 0 else None
    patient = event.patient if shared == 1 else None
    other = event
    while other.verb in (event.verb, VERBS[event.verb].parent) or VERBS[other.verb].parent == event.verb:
        other = draw_event(draw, genre, details, agent, patient)
    return other


def create_paraphrase_pair(draw: Draw, genre: str) -> tuple[str, str, int]:
    """Two long sentences with most words in common; 1 where they say the same."""
    label = 1 if draw.chance(0.6) else 0
    first = draw_event(draw, genre, details=0.4)
    second = first
    edits = 0 if label else draw.one((1, 2, 3))
    # One edit may undo another: then there is one more.
    while edits > 0 or (not label and second == first):
        second = edit_once(draw, second, genre, (("depart", 3.0), ("contradict", 1.0)))[1]
        edits -= 1
    passive = draw.chance(0.4)
    return tell(draw, first, genre, passive), tell(draw, second, genre, passive != draw.chance(0.5)), label


def create_inference_pair(draw: Draw, genre: str) -> tuple[str, str, int]:
    """Premise and hypothesis; 0 entailment, 1 neutral, 2 contradiction."""
    label = draw.below(3)
    premise = draw_event(draw, genre, details=0.35)
    if draw.chance(0.2):
        premise = replace(premise, negated=True)
        hypothesis = _relate_to_denial(draw, premise, genre, label)
    else:
        hypothesis = _relate_to_fact(draw, premise, genre, label)
    return tell(draw, premise, genre), tell(draw, hypothesis, genre), label


def _relate_to_fact(draw: Draw, premise: Event, genre: str, label: int) -> Event:
    """A hypothesis that follows from a fact (0), may or may not hold (1), or cannot hold (2)."""
    steps = draw.weighted(_STEPS)
    if label == 0:
        return weaken(draw, premise, max(1, steps))
    if label == 1 and draw.chance(0.5):
        return replace(_other_deed(draw, premise, genre, 0.2), negated=draw.chance(0.15))
    if label == 2 and draw.chance(0.4):
        return replace(premise, negated=True)
    kinds = (("add", 1.0), ("depart", 2.0)) if label == 1 else (("contradict", 1.0),)
    slot, hypothesis = "", premise
    while not slot:
        slot, hypothesis = edit_once(draw, premise, genre, kinds)
    protected = ("agent", "patient", "verb") if slot == "roles" else (slot,)
    if slot != "negated":
        hypothesis = weaken(draw, hypothesis, steps, protected)
    # A denial of something else is neutral too, so that "not" alone tells little.
    if label == 1 and slot in ("agent", "patient", "verb", "roles") and draw.chance(0.3):
        hypothesis = replace(hypothesis, negated=True)
    return hypothesis


def _relate_to_denial(draw: Draw, premise: Event, genre: str, label: int) -> Event:
    """As for a fact, but what does not happen at all does not happen in a special way either: more detail follows."""
    if label == 1:
        return edit_once(draw, premise, genre, (("weaken", 1.0), ("depart", 3.0)))[1]
    hypothesis = replace(premise, negated=label == 0)
    return edit_once(draw, hypothesis, genre, (("add", 1.0),))[1] if draw.chance(0.5) else hypothesis


def create_entailment_pair(draw: Draw, genre: str) -> tuple[str, str, int]:
    """A premise of two clauses and a hypothesis; 0 where it follows, 1 where not."""
    label = draw.below(2)
    told = draw_event(draw, genre, details=0.3)
    beside = draw_event(draw, genre, details=0.1)
    slot, hypothesis = "", told
    if label:
        kind = draw.below(5)
        if kind == 0 and (mixed := _mix(told, beside)) is not None:
            slot, hypothesis = "roles", mixed
        if kind > 1:
            slot, hypothesis = "roles", _other_deed(draw, told, genre, 0.2)
        while hypothesis == told:
            slot, hypothesis = edit_once(draw, told, genre, (("depart", 2.0), ("add", 1.0), ("contradict", 1.0)))
    protected = ("agent", "patient", "verb") if slot == "roles" else (slot,)
    if not hypothesis.negated:
        hypothesis = weaken(draw, hypothesis, draw.weighted(_STEPS), protected)
    clauses = draw.shuffled([tell_clause(draw, told), tell_clause(draw, beside)])
    return finish(draw.one(_JOINTS).join(clauses)), tell(draw, hypothesis), label


def _mix(first: Event, second: Event) -> Event | None:
    """The first deed by the doer of the second, which neither of them implies; None where the verb does not fit."""
    noun = second.agent.noun
    related = [first.agent.noun, *ancestors(first.agent.noun), first.patient.noun]
    if NOUNS[noun].kind in VERBS[first.verb].agents and noun not in related:
        return replace(first, agent=second.agent)
    return None


# ------------------------------------------------------------------------------------------------ questions

_ASKED = {"place": ("where",), "time": ("when",), "manner": ("how",)}


def tell_question(draw: Draw, event: Event, asked: str) -> str:
    """A question about one part of an event: ``agent``, ``patient``, ``place``, ``time`` or ``manner``."""
    verb = draw.one(VERBS[event.verb].forms)
    agent, patient = tell_entity(draw, event.agent), tell_entity(draw, event.patient)
    tables = {"place": PLACES, "time": TIMES, "manner": MANNERS}
    rest = [
        draw.one(table[value].forms)
        for slot, table in tables.items()
        if slot != asked and (value := getattr(event, slot)) and draw.chance(0.6)
    ]
    were = "were" if is_plural(event.patient) else "was"
    if asked == "agent":
        words = ["who", inflect(verb, "past"), patient]
        if draw.chance(0.3):
            words = ["by whom", were, patient, inflect(verb, "participle")]
    elif asked == "patient":
        words = ["what did", agent, verb]
        if draw.chance(0.3):
            words = ["what was", inflect(verb, "participle"), "by", agent]
    else:
        words = [*_ASKED[asked], "did", agent, verb, patient]
        if draw.chance(0.3):
            words = [*_ASKED[asked], were, patient, inflect(verb, "participle"), "by", agent]
    return finish(" ".join([*words, *rest]), "?")


def create_question_pair(draw: Draw, genre: str) -> tuple[str, str, int]:
    """A question and a sentence; 0 where the sentence answers it, 1 where not."""
    label = draw.below(2)
    event = draw_event(draw, genre, details=0.5)
    told = [slot for slot in DETAILS if getattr(event, slot)]
    asked = draw.one([*told, "agent", "patient"])
    question = tell_question(draw, event, asked)
    if label:
        other = event
        if draw.chance(0.5):
            other = _other_deed(draw, event, genre, 0.5)
        elif asked in DETAILS and draw.chance(0.5):
            # The answer is missing; another detail often stands in its place.
            other = event.with_details({asked: ""})
            if draw.chance(0.7):
                other = edit_once(draw, other, genre, (("add", 1.0),))[1]
                other = other.with_details({asked: ""})
        else:
            slot = asked
            while slot in (asked, ""):
                slot, other = edit_once(draw, event, genre, (("depart", 1.0),))
        event = other
    return question, tell(draw, event, genre), label
