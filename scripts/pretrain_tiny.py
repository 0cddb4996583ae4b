"""Pre-trains ``tiny``, the small BERT that ships in ``isobn_finetune/demo/tiny``, and its WordPiece vocabulary.

The text is written by the demo grammar (``isobn_finetune.demo.stories``) with draws that no task uses. As in BERT
(Devlin et al., NAACL 2019) the model learns masked words and whether the second sentence follows the first, so its
pooler is trained too. In the first stage a false continuation comes from another passage; in the second most of them
are near misses about the same matter: a deed that does not follow, a question evaded, an opinion reversed. This stage
is close to what the tasks ask, as the pre-training of BERT is not: a model of this size with so few rows needs it.

    python scripts/pretrain_tiny.py --output-dir isobn_finetune/demo/tiny

It takes about fifteen minutes on one core, and nothing but renewing the shipped files needs it. The last line reports
the file's size and EV_3 of ``pooler_output`` on the demo STS-B training rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertConfig, BertForPreTraining, BertModel, BertTokenizerFast

from isobn_finetune.demo import load_demo_rows
from isobn_finetune.demo.draw import Draw
from isobn_finetune.demo.stories import create_near_miss, create_passage

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
POSITIONS = 256
ASCII = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
FUNCTION_WORDS = """
a about after all also an and any are as at be because been before but by can could did do does for from had has have he
her here him his how i if in into is it its just like made many may more most much my no not now of on one only or other
our out over people said she should so some such than that the their them then there these they this time to two under
up us very was way we well were what when where which who why will with would you your ing er est ly ness ment tion un
""".split()


def write_progress(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def create_tokenizer(size: int) -> BertTokenizerFast:
    """An uncased WordPiece tokenizer of about ``size`` pieces, trained on the demo grammar's text.

    Every printable ASCII character is a piece, so that any English text is encoded without ``[UNK]``.
    """
    draw = Draw("tiny vocabulary")
    text = [sentence for _ in range(15000) for sentence in create_passage(draw)]
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizers.BertNormalizer(lowercase=True)
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    sure = [*SPECIAL, *ASCII, *(f"##{char}" for char in ASCII if char.isalnum()), *FUNCTION_WORDS]
    sure = list(dict.fromkeys(sure))
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
    learner.train_from_iterator(text, trainer)
    learned = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    pieces = list(dict.fromkeys([*sure, *(piece for piece, _ in learned)]))[:size]
    return BertTokenizerFast(
        vocab={piece: index for index, piece in enumerate(pieces)}, do_lower_case=True, model_max_length=POSITIONS
    )


def create_pairs(key: str, count: int, near_misses: float) -> list[tuple[str, str, int]]:
    """Two neighbouring pieces of a passage (0), or two that do not belong together (1), as BERT numbers them.

    Of the latter the share ``near_misses`` is about the same matter; in the others the second sentence comes from
    another passage.
    """
    draw = Draw(key)
    passages = [create_passage(draw) for _ in range(400)]
    pairs: list[tuple[str, str, int]] = []
    while len(pairs) < count:
        passage = create_passage(draw)
        passages[draw.below(len(passages))] = passage
        cut = 1 + draw.below(len(passage) - 1)
        first = " ".join(passage[max(0, cut - 1 - draw.chance(0.15)) : cut])
        second, label = passage[cut], 0
        if draw.chance(0.5):
            second, label = draw.one(draw.one(passages)), 1
            if draw.chance(near_misses):
                first, second = create_near_miss(draw)
        pairs.append((first, second, label))
    return pairs


def create_batches(
    tokenizer: BertTokenizerFast, key: str, steps: int, batch_size: int, near_misses: float
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of pairs of like length, with a fifth of the pieces masked as BERT does.

    Among near misses a fifth of the pairs come as one text, so that the pooler also has to read single texts.
    """
    group = 50
    for start in range(0, steps, group):
        pairs = create_pairs(f"{key} {start}", group * batch_size, near_misses)
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        chunks = [pairs[i : i + batch_size] for i in range(0, len(pairs), batch_size)]
        draw = Draw(f"{key} order {start}")
        for chunk in draw.shuffled(chunks)[: steps - start]:
            firsts, seconds, labels = (list(column) for column in zip(*chunk, strict=True))
            texts = [firsts, seconds]
            if near_misses and draw.chance(0.2):
                texts = [[f"{first} {second}" for first, second, _ in chunk]]
            batch = dict(tokenizer(*texts, padding=True, truncation=True, return_tensors="pt"))
            mask_pieces(batch, tokenizer)
            batch["next_sentence_label"] = torch.tensor(labels)
            yield batch


def mask_pieces(batch: dict[str, torch.Tensor], tokenizer: BertTokenizerFast, share: float = 0.2) -> None:
    """Masks a share of the pieces in place: 80% become ``[MASK]``, 10% another piece, 10% stay; sets ``labels``."""
    ids = batch["input_ids"]
    chosen = (torch.rand(ids.shape) < share) & (ids >= len(SPECIAL))
    batch["labels"] = torch.where(chosen, ids, -100)
    fate = torch.rand(ids.shape)
    ids = torch.where(chosen & (fate < 0.8), torch.tensor(tokenizer.mask_token_id), ids)
    other = torch.randint(len(SPECIAL), len(tokenizer), ids.shape)
    batch["input_ids"] = torch.where(chosen & (fate >= 0.9), other, ids)


def create_model(tokenizer: BertTokenizerFast, initializer_range: float) -> BertForPreTraining:
    """A BERT of about one million parameters, freshly drawn."""
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=POSITIONS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=initializer_range,
        pad_token_id=tokenizer.pad_token_id,
    )
    return BertForPreTraining(config)


def train_stage(
    model: BertForPreTraining, tokenizer: BertTokenizerFast, name: str, steps: int, learning_rate: float, **text: Any
) -> None:
    """Trains for some steps with linear warm-up and decay; ``text`` goes to ``create_batches``."""
    model.train()
    warmup = max(1, steps // 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup))
    )
    begun, words, follows, right = time.time(), 0.0, 0.0, 0.0
    for step, batch in enumerate(create_batches(tokenizer, name, steps, **text), 1):
        labels, next_label = batch.pop("labels"), batch.pop("next_sentence_label")
        output = model.bert(**batch)
        masked = labels != -100
        # Only masked places go through the vocabulary's matrix, a fifth of the work.
        word_logits, next_logits = model.cls(output.last_hidden_state[masked], output.pooler_output)
        word_loss = torch.nn.functional.cross_entropy(word_logits, labels[masked])
        next_loss = torch.nn.functional.cross_entropy(next_logits, next_label)
        (word_loss + next_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        words, follows = words + word_loss.item(), follows + next_loss.item()
        right += (next_logits.argmax(-1) == next_label).float().mean().item()
        if step % 100 == 0:
            told = f"masked words {words / 100:.3f}, next sentence {follows / 100:.3f} (right {right:.1f}%)"
            write_progress(f"{name}, step {step}: {told}, {time.time() - begun:.0f} s")
            words = follows = right = 0.0


def pretrain(tokenizer: BertTokenizerFast, args: argparse.Namespace) -> BertModel:
    """Both stages; returns encoder and pooler."""
    torch.manual_seed(args.seed)
    model = create_model(tokenizer, args.initializer_range)
    size = {"batch_size": args.batch_size}
    if args.start_from:
        model.bert = BertModel.from_pretrained(
            args.start_from, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        model.tie_weights()
    else:
        train_stage(model, tokenizer, f"stage 1 of {args.seed}", args.steps, args.learning_rate, near_misses=0, **size)
    steps, rate = args.near_miss_steps, args.learning_rate / 2
    train_stage(model, tokenizer, f"stage 2 of {args.seed}", steps, rate, near_misses=args.near_misses, **size)
    # What fine-tuning reads: the usual dropout, and the usual width for newly drawn heads.
    config = model.bert.config
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.1
    config.initializer_range = 0.02
    return model.bert.eval()


@torch.no_grad()
def compute_pooler_variance(model: BertModel, tokenizer: BertTokenizerFast, top_k: int = 3) -> float:
    """EV_k of ``pooler_output`` on the demo STS-B training rows: the share of the k largest eigenvalues."""
    rows = load_demo_rows("stsb", "train")
    outputs = []
    for start in range(0, len(rows), 100):
        part = rows[start : start + 100]
        firsts, seconds = [row["sentence1"] for row in part], [row["sentence2"] for row in part]
        outputs.append(model(**tokenizer(firsts, seconds, padding=True, return_tensors="pt")).pooler_output)
    eigenvalues = torch.linalg.eigvalsh(torch.cov(torch.cat(outputs).double().T))
    return float(eigenvalues[-top_k:].sum() / eigenvalues.sum())


def main() -> None:
    """Parses the options, trains, saves and reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--near-miss-steps", type=int, default=4000)
    parser.add_argument("--near-misses", type=float, default=0.7)
    parser.add_argument("--start-from", type=Path, help="skip the first stage: a folder with an encoder of this size")
    parser.add_argument("--initializer-range", type=float, default=0.05)
    parser.add_argument("--vocab-size", type=int, default=1184)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    start = args.start_from
    tokenizer = BertTokenizerFast.from_pretrained(start) if start else create_tokenizer(args.vocab_size)
    write_progress(f"{len(tokenizer)} pieces")
    # Saved before it is used: its file would keep the padding and truncation of the last call.
    tokenizer.save_pretrained(args.output_dir)
    model = pretrain(tokenizer, args)
    model.save_pretrained(args.output_dir)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    (args.output_dir / "vocab.txt").write_text("".join(f"{piece}\n" for piece, _ in vocabulary), encoding="utf-8")
    size = (args.output_dir / "model.safetensors").stat().st_size
    write_progress(f"{size} bytes, EV_3 of pooler_output {compute_pooler_variance(model, tokenizer):.3f}")


if __name__ == "__main__":
    main()
