"""Single sentences: acceptability and sentiment."""

from __future__ import annotations

from isobn_finetune.demo.draw import Draw
from isobn_finetune.demo.grammar import draw_entity, draw_event, finish, is_plural, phrases_for, tell_entity
from isobn_finetune.demo.inflection import inflect
from isobn_finetune.demo.lexicon import NOUNS, VERBS

# ------------------------------------------------------------------------------------------------ acceptability

_REFLEXIVES = {"he": "himself", "she": "herself", "it": "itself", "they": "themselves"}
_FORMS = ("base", "third", "past", "participle", "gerund")


def _subject(draw: Draw, kinds: tuple[str, ...], genre: str) -> tuple[list[str], bool, str]:
    """Words of a subject, whether it is plural, and its pronoun; a second noun may stand between it and the verb."""
    entity = draw_entity(draw, kinds, genre)
    words = tell_entity(draw, entity).split()
    if draw.chance(0.4):
        near = draw_entity(draw, ("vehicle", "tool", "animal", "person"), genre)
        words += [draw.one(("near", "behind", "beside")), *tell_entity(draw, near).split()]
    plural = is_plural(entity)
    return words, plural, "they" if plural else NOUNS[entity.noun].pronoun


def _verb_group(draw: Draw, verb: str, plural: bool) -> list[str]:
    """An auxiliary and the form it takes, or a bare finite form."""
    number = 1 if plural else 0
    return draw.one(
        (
            [inflect(verb, "base" if plural else "third")],
            [inflect(verb, "past")],
            [("is", "are")[number], inflect(verb, "gerund")],
            [("was", "were")[number], inflect(verb, "gerund")],
            [("has", "have")[number], inflect(verb, "participle")],
            [("does", "do")[number], "not", verb],
            ["did", "not", verb],
            [draw.one(("will", "can", "must")), verb],
        )
    )


def create_acceptability(draw: Draw, genre: str) -> tuple[str, int]:
    """A sentence and 1, or the same with one fault of grammar and 0."""
    acceptable = draw.chance(0.65)
    words: list[str] = []
    while not words:
        words = _sentence_with_fault(draw, genre, "" if acceptable else draw.one(_FAULTS))
    return finish(" ".join(words), "?" if words[0] == "what" else "."), int(acceptable)


_FAULTS = ("agreement", "agreement", "form", "form", "order", "missing", "double", "reflexive", "gap", "determiner")
_OTHER_NUMBER = {"is": "are", "was": "were", "has": "have", "does": "do"}
_OTHER_NUMBER |= {plural: singular for singular, plural in _OTHER_NUMBER.items()}


def _sentence_with_fault(draw: Draw, genre: str, fault: str) -> list[str]:
    """The words of a sentence with this fault, or none where the sentence drawn cannot have it."""
    event = draw_event(draw, genre, details=0)
    subject, plural, pronoun = _subject(draw, VERBS[event.verb].agents, genre)
    verb = draw.one(VERBS[event.verb].forms)
    group = _verb_group(draw, verb, plural)
    reflexive = fault == "reflexive" or (not fault and draw.chance(0.12))
    thing = tell_entity(draw, event.patient).split()
    tail = draw.one(phrases_for(draw.one(("place", "time")), genre)).split() if draw.chance(0.4) else []
    if fault == "gap" or (not fault and draw.chance(0.12)):
        # "What did the boy eat?" leaves the object's place empty; to fill it is the fault.
        return ["what", "did", *subject, verb, *(thing if fault else []), *tail]
    if reflexive:
        # "The doctor" may be he or she: such subjects take none here.
        if not plural and pronoun in ("they", "it"):
            return []
        wrong = [word for name, word in _REFLEXIVES.items() if name != pronoun]
        thing = [draw.one(wrong) if fault else _REFLEXIVES[pronoun]]
    if fault == "agreement":
        group = _wrong_agreement(group, verb, plural)
    elif fault == "form":
        group = _wrong_form(draw, group, verb)
    elif fault == "determiner":
        subject = _wrong_determiner(draw, subject, plural)
    if not (group and subject):
        return []
    words = [*subject, *group, *thing]
    words = _damage(draw, words, fault) if fault in ("order", "missing", "double") else words
    return words and [*words, *tail]


def _wrong_agreement(group: list[str], verb: str, plural: bool) -> list[str]:
    if group[0] in _OTHER_NUMBER:
        return [_OTHER_NUMBER[group[0]], *group[1:]]
    if group == [inflect(verb, "base" if plural else "third")]:
        return [inflect(verb, "third" if plural else "base")]
    return []


def _wrong_form(draw: Draw, group: list[str], verb: str) -> list[str]:
    """An auxiliary with a form that it does not take."""
    # "Has got" and "has showed" are heard too.
    if len(group) == 1 or verb in ("get", "show"):
        return []
    allowed = {"is", "are", "was", "were"} & set(group)
    # "was eaten the apple" is wrong too, since an object follows.
    wrong = [form for form in _FORMS if inflect(verb, form) != group[-1] and (form != "gerund" or not allowed)]
    return [*group[:-1], inflect(verb, draw.one(wrong))] if wrong else []


def _wrong_determiner(draw: Draw, subject: list[str], plural: bool) -> list[str]:
    if plural:
        return [draw.one(("a", "this")), *(word for word in subject if word != "the")]
    if subject[0] in ("the", "a", "an"):
        return [draw.one(("these", "two", "many")), *subject[1:]]
    return []


_SMALL_WORDS = ("the", "a", "an", "near", "is", "are", "was", "did", "has", "will")
_NO_ARTICLE_NEEDED = ("two", "three", "several", "some", "food", "fruit", "aircraft")


def _damage(draw: Draw, words: list[str], fault: str) -> list[str]:
    """Exchanges an article with its noun, leaves a needed word out, or says a small word twice."""
    articles = [i for i, word in enumerate(words) if word in ("the", "a", "an") and i + 1 < len(words)]
    small = [i for i, word in enumerate(words) if word in _SMALL_WORDS]
    if fault == "double" and small:
        place = draw.one(small)
        return [*words[: place + 1], *words[place:]]
    if not articles:
        return []
    place = draw.one(articles)
    if fault == "missing":
        if any(word in _NO_ARTICLE_NEEDED for word in words[place + 1 : place + 3]):
            return []
        return [*words[:place], *words[place + 1 :]]
    return [*words[:place], words[place + 1], words[place], *words[place + 2 :]]


# ------------------------------------------------------------------------------------------------ sentiment

_ASPECTS = {
    "film": "film movie plot story acting ending music script cast scene",
    "meal": "food soup dessert service waiter menu bread dinner wine coffee",
    "stay": "room bed hotel staff view pool lobby breakfast bathroom location",
}
_ANY_GOOD = "good great wonderful excellent lovely brilliant superb pleasant perfect impressive"
_ANY_BAD = "bad terrible awful horrible poor dreadful disappointing unpleasant weak miserable"
_GOOD = {"film": "charming funny clever gripping touching", "meal": "delicious tasty fresh friendly warm"}
_BAD = {"film": "dull boring silly clumsy predictable", "meal": "stale bland greasy rude cold"}
_GOOD["stay"], _BAD["stay"] = "clean comfortable quiet spacious cozy", "dirty noisy cramped shabby damp"
_LIKED, _DISLIKED = ("loved", "enjoyed", "liked", "admired"), ("hated", "disliked", "regretted", "despised")
_DEGREES = ("", "", "very ", "really ", "quite ", "so ", "truly ")


def _judgement(draw: Draw, topic: str, good: bool) -> str:
    """An adjective of this polarity."""
    words = f"{_ANY_GOOD} {_GOOD[topic]}" if good else f"{_ANY_BAD} {_BAD[topic]}"
    return draw.one(words.split())


def _opinion(draw: Draw, topic: str, aspect: str, good: bool) -> str:
    """One clause of this polarity; a quarter of the clauses turn the polarity of their words round."""
    shape = draw.below(16)
    if shape < 8:
        return f"the {aspect} was {draw.one(_DEGREES)}{_judgement(draw, topic, good)}"
    if shape < 10:
        turn = draw.one(("not", "not", "never", "hardly", "far from", "anything but", "not at all"))
        return f"the {aspect} was {turn} {_judgement(draw, topic, not good)}"
    if shape < 13:
        return f"{draw.one(('I', 'we', 'everyone'))} {draw.one(_LIKED if good else _DISLIKED)} the {aspect}"
    if shape == 13:
        who = draw.one(("nobody", "hardly anyone", "no one"))
        return f"{who} {draw.one(_DISLIKED if good else _LIKED)} the {aspect}"
    if shape == 14:
        more = draw.one(("more", "no less")) if draw.chance(0.5) else ""
        if more:
            return f"the {aspect} was {more} {_judgement(draw, topic, good)} than I expected"
        return f"the {aspect} was less {_judgement(draw, topic, not good)} than I expected"
    return f"I would {'' if good else 'not '}recommend the {aspect}"


def create_opinion(draw: Draw, topic: str, good: bool) -> str:
    """One clause of this polarity, two that agree, or two that differ, of which the weightier one counts."""
    shape = draw.below(10)
    aspect, beside = draw.shuffled(_ASPECTS[topic].split())[:2]
    own = _opinion(draw, topic, aspect, good)
    if shape < 5:
        return finish(own)
    if shape < 8:
        return finish(f"{own} and {_opinion(draw, topic, beside, good)}")
    other = _opinion(draw, topic, beside, not good)
    if shape < 9:
        return finish(f"{other}, but {own}")
    return finish(f"although {other}, {own}" if draw.chance(0.5) else f"{own}, although {other}")


def create_description(draw: Draw, genre: str, count: int) -> list[str]:
    """Acceptable sentences about one subject, in many tenses."""
    words, plural, _ = _subject(draw, ("person",), genre)
    sentences = []
    for _ in range(count):
        event = draw_event(draw, genre, details=0)
        group = _verb_group(draw, draw.one(VERBS[event.verb].forms), plural)
        sentences.append(finish(" ".join([*words, *group, tell_entity(draw, event.patient)])))
    return sentences


def create_sentiment(draw: Draw, genre: str) -> tuple[str, int]:
    """A sentence of a review; 1 where it is positive. The genre is not used: reviews have topics of their own."""
    good = draw.chance(0.5)
    return create_opinion(draw, draw.one(tuple(_ASPECTS)), good), int(good)


def review_topics() -> tuple[str, ...]:
    """What reviews are about."""
    return tuple(_ASPECTS)
