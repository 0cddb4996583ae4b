"""Pre-trains ``tiny``, the small BERT that ships in ``isobn_finetune/demo/tiny``, and its WordPiece vocabulary.

The text is written by the demo grammar (``isobn_finetune.demo.stories``) with draws that no task uses. As in BERT
(Devlin et al., NAACL 2019) the model learns masked words and whether the second sentence follows the first, so its
pooler is trained too. Run it only to renew the shipped files:

    python scripts/pretrain_tiny.py --output-dir isobn_finetune/demo/tiny

It takes about ten minutes on one core. The last lines report the file's size and EV_3 of ``pooler_output`` on the demo
STS-B training rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertConfig, BertForPreTraining, BertModel, BertTokenizerFast

from isobn_finetune.demo import load_demo_rows
from isobn_finetune.demo.draw import Draw
from isobn_finetune.demo.stories import create_passage

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


def create_pairs(key: str, count: int) -> list[tuple[str, str, int]]:
    """Two neighbouring pieces of a passage (0), or the second one from another passage (1), as BERT numbers them.

    The false continuation is that of six candidates which shares most words with the first piece: a random one would
    give itself away by its topic.
    """
    draw = Draw(key)
    passages = [create_passage(draw) for _ in range(400)]
    pairs = []
    while len(pairs) < count:
        passage = create_passage(draw)
        passages[draw.below(len(passages))] = passage
        cut = 1 + draw.below(len(passage) - 1)
        first = " ".join(passage[max(0, cut - 1 - draw.below(2)) : cut])
        second, label = passage[cut], 0
        if draw.chance(0.5):
            words = set(first.lower().split())
            others = [draw.one(draw.one(passages)) for _ in range(6)]
            second = max(others, key=lambda text: (len(words & set(text.lower().split())) / len(text.split()), text))
            label = 1
        pairs.append((first, second, label))
    return pairs


def create_batches(
    tokenizer: BertTokenizerFast, key: str, steps: int, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of pairs of like length, with 15% of the pieces masked as BERT does."""
    group = 50
    for start in range(0, steps, group):
        pairs = create_pairs(f"{key} {start}", group * batch_size)
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        chunks = [pairs[i : i + batch_size] for i in range(0, len(pairs), batch_size)]
        for chunk in Draw(f"{key} order {start}").shuffled(chunks)[: steps - start]:
            firsts, seconds, labels = (list(column) for column in zip(*chunk, strict=True))
            batch = dict(tokenizer(firsts, seconds, padding=True, truncation=True, return_tensors="pt"))
            mask_pieces(batch, tokenizer)
            batch["next_sentence_label"] = torch.tensor(labels)
            yield batch


def mask_pieces(batch: dict[str, torch.Tensor], tokenizer: BertTokenizerFast, share: float = 0.15) -> None:
    """Masks a share of the pieces in place: 80% become ``[MASK]``, 10% another piece, 10% stay; sets ``labels``."""
    ids = batch["input_ids"]
    chosen = (torch.rand(ids.shape) < share) & (ids >= len(SPECIAL))
    batch["labels"] = torch.where(chosen, ids, -100)
    fate = torch.rand(ids.shape)
    ids = torch.where(chosen & (fate < 0.8), torch.tensor(tokenizer.mask_token_id), ids)
    other = torch.randint(len(SPECIAL), len(tokenizer), ids.shape)
    batch["input_ids"] = torch.where(chosen & (fate >= 0.9), other, ids)


def pretrain(tokenizer: BertTokenizerFast, args: argparse.Namespace) -> BertModel:
    """Trains for ``args.steps`` steps with linear warm-up and decay; returns encoder and pooler."""
    torch.manual_seed(args.seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=POSITIONS,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = BertForPreTraining(config)
    model.train()
    warmup = max(1, args.steps // 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (args.steps - step) / (args.steps - warmup))
    )
    begun, words, follows, right = time.time(), 0.0, 0.0, 0.0
    for step, batch in enumerate(create_batches(tokenizer, f"tiny text {args.seed}", args.steps, args.batch_size), 1):
        labels, next_label = batch.pop("labels"), batch.pop("next_sentence_label")
        output = model(**batch)
        masked = labels != -100
        word_loss = torch.nn.functional.cross_entropy(output.prediction_logits[masked], labels[masked])
        next_loss = torch.nn.functional.cross_entropy(output.seq_relationship_logits, next_label)
        (word_loss + args.next_weight * next_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        words, follows = words + word_loss.item(), follows + next_loss.item()
        right += (output.seq_relationship_logits.argmax(-1) == next_label).float().mean().item()
        if step % 100 == 0:
            told = f"masked words {words / 100:.3f}, next sentence {follows / 100:.3f} (right {right:.1f}%)"
            write_progress(f"step {step}: {told}, {time.time() - begun:.0f} s")
            words = follows = right = 0.0
    # What fine-tuning reads: the usual dropout, and the usual width for newly drawn heads.
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
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--next-weight", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--vocab-size", type=int, default=1184)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = create_tokenizer(args.vocab_size)
    write_progress(f"{len(tokenizer)} pieces")
    model = pretrain(tokenizer, args)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    (args.output_dir / "vocab.txt").write_text("".join(f"{piece}\n" for piece, _ in vocabulary), encoding="utf-8")
    size = (args.output_dir / "model.safetensors").stat().st_size
    write_progress(f"{size} bytes, EV_3 of pooler_output {compute_pooler_variance(model, tokenizer):.3f}")


if __name__ == "__main__":
    main()
