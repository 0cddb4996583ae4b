"""The built-in corpus and encoder keep what they promise, on every machine."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import pytest
import torch
from transformers import BertModel, BertTokenizerFast

from isobn_finetune.demo import DEMO_TASKS, load_demo_rows, tiny_model_dir
from isobn_finetune.demo.draw import Draw
from isobn_finetune.demo.edits import additions, contradictions, departures, weaken, weakenings
from isobn_finetune.demo.grammar import Entity, Event, draw_event, similarity, swap_roles
from isobn_finetune.demo.inflection import inflect, pluralize
from isobn_finetune.demo.lexicon import NOUNS, PLACES, VERBS
from isobn_finetune.errors import ConfigError
from isobn_finetune.tasks import get_task

TRAIN_ROWS = {"mnli": 4000, "qnli": 4000, "sst2": 3000, "rte": 3000, "mrpc": 3000, "cola": 3000, "stsb": 3000}

# Over all splits. They change only together with the corpus, and then recorded scores change too.
SHA256 = {
    "mnli": "9baf857419e5c34c23b06d5ac2d42d880057b952b79add81dc8be487e781c072",
    "qnli": "4a8d112d0c8979ac0a609d2ac9938a31dcf856da1fb0cc72ba61160f69886213",
    "sst2": "c27cafe33a1f0721a6629ee5bd9b90e7fa26adf95c6dcdbeb447cc17d834ba50",
    "rte": "88167b4d3e1caa2cda3cd64881b5ae163837da7b9178003899397cba68f6806a",
    "mrpc": "938872a582c8e52062a7b0726fde20069508e792209cbef98f46c71d866a25fc",
    "cola": "ee80b171df112348a025259e26beebfbe3376883e46e4a0938f82ac106f19e23",
    "stsb": "a43caeb4a86a885f3191dfd4df08e041a472f50d14056d6d3d105edb949e73ae",
}

EV3_AIM = 0.5


def _texts(task: str, split: str) -> list[tuple[str, ...]]:
    columns = get_task(task).text_columns
    return [tuple(row[column] for column in columns) for row in load_demo_rows(task, split)]


@pytest.mark.parametrize("task", DEMO_TASKS)
def test_rows_are_the_same_on_every_machine(task: str) -> None:
    rows = {split: load_demo_rows(task, split) for split in get_task(task).splits}
    assert hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest() == SHA256[task]


@pytest.mark.parametrize("task", DEMO_TASKS)
def test_splits_have_the_columns_and_counts_of_the_task(task: str) -> None:
    spec = get_task(task)
    for split in spec.splits:
        rows = load_demo_rows(task, split)
        expected = TRAIN_ROWS[task] if split == "train" else 400 if split.startswith("validation") else 300
        assert len(rows) == expected
        assert [row["idx"] for row in rows] == list(range(expected))
        assert all(tuple(row) == (*spec.text_columns, "label", "idx") for row in rows)
        assert all(isinstance(row["label"], float if spec.is_regression else int) for row in rows)


@pytest.mark.parametrize("task", DEMO_TASKS)
def test_test_labels_are_hidden_and_other_labels_are_in_range(task: str) -> None:
    spec = get_task(task)
    for split in spec.splits:
        labels = {row["label"] for row in load_demo_rows(task, split)}
        if split.startswith("test"):
            assert labels == {-1}
        elif spec.is_regression:
            assert 0.0 <= min(labels) and max(labels) <= 5.0
        else:
            assert labels == set(range(spec.num_labels))


@pytest.mark.parametrize("task", [task for task in DEMO_TASKS if not get_task(task).is_regression])
def test_no_class_is_rare(task: str) -> None:
    for split in ("train", *get_task(task).labelled_dev_splits):
        rows = load_demo_rows(task, split)
        counts = Counter(row["label"] for row in rows)
        assert min(counts.values()) / len(rows) > 0.7 / get_task(task).num_labels - 0.05


def test_similarity_scores_cover_the_range() -> None:
    rows = load_demo_rows("stsb", "train")
    for low in range(5):
        share = sum(low <= row["label"] < low + 1 + (low == 4) for row in rows) / len(rows)
        assert share > 0.12


@pytest.mark.parametrize("task", DEMO_TASKS)
def test_no_text_occurs_twice_within_or_across_splits(task: str) -> None:
    keys = [
        frozenset(text.lower() for text in texts) for split in get_task(task).splits for texts in _texts(task, split)
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == len(get_task(task).text_columns) for key in keys)


def test_mismatched_rows_are_about_work_and_training_rows_are_not() -> None:
    def words(split: str) -> set[str]:
        return {word.strip(".,") for texts in _texts("mnli", split) for text in texts for word in text.lower().split()}

    training, mismatched = words("train"), words("validation_mismatched")
    assert {"office", "scientist", "contract"} <= mismatched - training
    assert len(words("validation_matched") - training) <= 3 < len(mismatched - training)


def test_task_names_are_read_in_any_spelling() -> None:
    assert load_demo_rows("STS-B", "validation") == load_demo_rows("stsb", "validation")


@pytest.mark.parametrize("task", ["wnli", "qqp", "ax"])
def test_tasks_outside_the_corpus_are_refused_by_name(task: str) -> None:
    with pytest.raises(ConfigError, match=rf"no task '{task}'.*mnli, qnli, sst2, rte, mrpc, cola, stsb"):
        load_demo_rows(task, "test")


def test_unknown_split_is_refused_with_the_splits_that_exist() -> None:
    with pytest.raises(ConfigError, match="no split 'dev'.*train, validation, test"):
        load_demo_rows("rte", "dev")


# ------------------------------------------------------------------------------------------------ grammar

_APPLE = Event(Entity("boy", 2), "devour", Entity("apple", adjective="fresh"), place="in the kitchen")


def test_weakening_goes_up_the_hypernyms_and_drops_detail() -> None:
    weaker = [event for _, event in weakenings(_APPLE)]
    assert Event(Entity("child", 2), "devour", Entity("apple", adjective="fresh"), "in the kitchen") in weaker
    assert Event(Entity("boy", 2), "eat", Entity("apple", adjective="fresh"), "in the kitchen") in weaker
    assert Event(Entity("boy", 2), "devour", Entity("apple", adjective="fresh"), "indoors") in weaker
    assert Event(Entity("boy", 9), "devour", Entity("apple"), "in the kitchen") not in weaker  # two steps


def test_no_contradiction_addition_or_departure_is_a_weakening() -> None:
    draw = Draw("test")
    for _ in range(300):
        event = draw_event(draw, draw.one(("home", "work")))
        follows = {weaken(draw, event, steps) for steps in range(1, 6) for _ in range(10)} | {event}
        for edits in (contradictions, additions, departures):
            assert not {other for _, other in edits(draw, event, "home")} & follows


def test_similarity_is_one_for_the_same_and_falls_with_each_change() -> None:
    weaker = Event(Entity("boy", 2), "eat", Entity("fruit"), "in the kitchen")
    other = Event(Entity("horse"), "kick", Entity("ball"), "in the park")
    assert similarity(_APPLE, _APPLE) == pytest.approx(1)
    assert 1 > similarity(_APPLE, weaker) > 0.6 > similarity(_APPLE, other) > -1e-9
    assert similarity(_APPLE, other) < 0.2
    assert similarity(_APPLE, weaker) == pytest.approx(similarity(weaker, _APPLE))


def test_exchanged_roles_lower_similarity_although_the_words_stay() -> None:
    event = Event(Entity("dog"), "chase", Entity("nurse"))
    swapped = swap_roles(event)
    assert swapped == Event(Entity("nurse"), "chase", Entity("dog"))
    assert similarity(event, swapped) < 0.5
    assert swap_roles(_APPLE) is None


def test_lexicon_refers_only_to_words_that_it_has() -> None:
    kinds = {name for name, noun in NOUNS.items() if not noun.parent}
    for verb in VERBS.values():
        assert set(verb.agents) | set(verb.patients) <= kinds
        assert {verb.opposite, verb.parent} - {""} <= set(VERBS)
    for name, verb in VERBS.items():
        assert not verb.opposite or VERBS[verb.opposite].opposite == name
    assert {place.group for place in PLACES.values()} == {"indoors", "outdoors"}
    assert all(noun.kind in kinds for noun in NOUNS.values())


@pytest.mark.parametrize(
    ("verb", "forms"),
    [
        ("eat", "eats ate eaten eating"),
        ("carry", "carries carried carried carrying"),
        ("drop", "drops dropped dropped dropping"),
        ("push", "pushes pushed pushed pushing"),
        ("play", "plays played played playing"),
        ("hide", "hides hid hidden hiding"),
    ],
)
def test_verbs_are_inflected_as_in_english(verb: str, forms: str) -> None:
    assert " ".join(inflect(verb, form) for form in ("third", "past", "participle", "gerund")) == forms


def test_nouns_have_english_plurals() -> None:
    assert [pluralize(noun) for noun in ("lady", "boy", "bus", "man", "sandwich")] == [
        "ladies",
        "boys",
        "buses",
        "men",
        "sandwiches",
    ]


# ------------------------------------------------------------------------------------------------ tiny


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizerFast:
    return BertTokenizerFast.from_pretrained(tiny_model_dir())


@pytest.fixture(scope="module")
def encoder() -> BertModel:
    return BertModel.from_pretrained(tiny_model_dir()).eval()


def test_tiny_is_small_safetensors_without_pickle() -> None:
    names = {path.name for path in tiny_model_dir().iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}
    assert (tiny_model_dir() / "model.safetensors").stat().st_size <= 4_000_000


def test_tiny_loads_whole_and_fits_its_tokenizer(tokenizer: BertTokenizerFast) -> None:
    model, report = BertModel.from_pretrained(tiny_model_dir(), output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert 900_000 < sum(weights.numel() for weights in model.parameters()) <= 1_000_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 256
    assert tokenizer.pad_token_id == model.config.pad_token_id == 0
    vocabulary = (tiny_model_dir() / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert {piece: index for index, piece in enumerate(vocabulary)} == tokenizer.get_vocab()


def test_tiny_encodes_any_ascii_text_without_unknown_pieces(tokenizer: BertTokenizerFast) -> None:
    every_character = "".join(chr(code) for code in range(32, 127))
    english = (
        "He said: \"It's 42% (or $3.50) more, isn't it?\" Quixotic zephyrs vexed Jim's café - e.g. http://a.b/c_d~#1"
    )
    for text in (every_character, english):
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_tiny_keeps_words_of_the_corpus_whole(tokenizer: BertTokenizerFast) -> None:
    texts = [text for texts in _texts("stsb", "validation") for text in texts]
    words = sum(len(text.replace(".", " .").replace(",", " ,").split()) for text in texts)
    pieces = sum(len(tokenizer.tokenize(text)) for text in texts)
    assert pieces / words < 1.15


def test_tiny_tokenizer_lowercases(tokenizer: BertTokenizerFast) -> None:
    assert tokenizer.tokenize("The DOG") == ["the", "dog"]


@torch.no_grad()
def test_tiny_pooler_output_is_anisotropic_on_the_demo(encoder: BertModel, tokenizer: BertTokenizerFast) -> None:
    rows = load_demo_rows("stsb", "train")[:1000]
    batches = [rows[start : start + 100] for start in range(0, len(rows), 100)]
    outputs = []
    for batch in batches:
        pairs = [row["sentence1"] for row in batch], [row["sentence2"] for row in batch]
        outputs.append(encoder(**tokenizer(*pairs, padding=True, return_tensors="pt")).pooler_output)
    eigenvalues = torch.linalg.eigvalsh(torch.cov(torch.cat(outputs).double().T))
    assert eigenvalues[-3:].sum() / eigenvalues.sum() >= EV3_AIM
