"""English plurals and verb forms, as far as the demo language needs them."""

from __future__ import annotations

_PAST = {
    "break": ("broke", "broken"),
    "build": ("built", "built"),
    "buy": ("bought", "bought"),
    "catch": ("caught", "caught"),
    "drive": ("drove", "driven"),
    "eat": ("ate", "eaten"),
    "feed": ("fed", "fed"),
    "find": ("found", "found"),
    "get": ("got", "gotten"),
    "hide": ("hid", "hidden"),
    "hurt": ("hurt", "hurt"),
    "lose": ("lost", "lost"),
    "read": ("read", "read"),
    "sell": ("sold", "sold"),
    "send": ("sent", "sent"),
    "show": ("showed", "shown"),
    "steal": ("stole", "stolen"),
    "throw": ("threw", "thrown"),
    "write": ("wrote", "written"),
}
_PLURALS = {"person": "people", "child": "children", "man": "men", "woman": "women", "thief": "thieves"}
_PLURALS |= {"gentleman": "gentlemen", "aircraft": "aircraft"}
_DOUBLED = ("get", "drop", "hug", "grab", "drag")


def pluralize(noun: str) -> str:
    """``box`` to ``boxes``."""
    if noun in _PLURALS:
        return _PLURALS[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def inflect(verb: str, form: str) -> str:
    """A form of a verb: ``base``, ``third``, ``past``, ``participle`` or ``gerund``."""
    if form == "base":
        return verb
    if form == "third":
        return pluralize(verb)
    if form in ("past", "participle") and verb in _PAST:
        return _PAST[verb][form == "participle"]
    stem = verb + verb[-1] if verb in _DOUBLED else verb
    if form == "gerund":
        return (stem[:-1] if stem.endswith("e") else stem) + "ing"
    if stem.endswith("e"):
        return stem + "d"
    return stem[:-1] + "ied" if stem.endswith("y") and stem[-2] not in "aeiou" else stem + "ed"
