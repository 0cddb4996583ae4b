"""The encoder families, one row each: what stands between the last hidden state and the classifier.

Where an encoder has no pooler of its own, ours is the dense part of that family's stock classification head, so that
every family's model is the same function as its stock ``...ForSequenceClassification`` once the norm is folded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isobn_finetune.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """What is to be known about one ``model_type`` of transformers.

    Attributes:
        title: The name people use.
        example: A hub id.
        dense: Where the stock classification model keeps the pooler's dense layer.
        activation: Activation after it, or the config key that names it with a leading ``$``.
        dropout: Config keys of the dropout before the classifier; the first that is set counts.
        classifier: Where the stock classification model keeps the last linear layer.
        layer_norm: Where it keeps the LayerNorm after the activation (ModernBERT).
        position_offset: True where positions start at ``pad_token_id + 1``.
        pools_in_encoder: True where the checkpoint of the encoder itself holds the pooler.
    """

    title: str
    example: str
    dense: str
    activation: str
    dropout: tuple[str, ...]
    classifier: str
    layer_norm: str | None = None
    position_offset: bool = False
    pools_in_encoder: bool = False

    def get_activation(self, config: Any) -> str:
        """Name of the activation after the dense layer."""
        return getattr(config, self.activation[1:]) if self.activation.startswith("$") else self.activation

    def get_dropout(self, config: Any) -> float:
        """Probability of the dropout before the classifier."""
        values = (getattr(config, key, None) for key in self.dropout)
        return float(next((value for value in values if value is not None), 0.0))

    def get_max_length(self, config: Any) -> int | None:
        """Tokens that fit into the position embeddings; ``None`` where there is no limit."""
        limit = getattr(config, "max_position_embeddings", None)
        if limit is None or getattr(config, "position_biased_input", True) is False:
            return None
        return limit - config.pad_token_id - 1 if self.position_offset else limit


_BERT_DROPOUT = ("classifier_dropout", "hidden_dropout_prob")
_HEAD: Any = {"dense": "classifier.dense", "classifier": "classifier.out_proj"}

FAMILIES: dict[str, Family] = {
    "bert": Family(
        "BERT", "bert-base-cased", "bert.pooler.dense", "tanh", _BERT_DROPOUT, "classifier", pools_in_encoder=True
    ),
    "roberta": Family(
        "RoBERTa", "roberta-base", activation="tanh", dropout=_BERT_DROPOUT, position_offset=True, **_HEAD
    ),
    "xlm-roberta": Family(
        "XLM-R", "xlm-roberta-base", activation="tanh", dropout=_BERT_DROPOUT, position_offset=True, **_HEAD
    ),
    "electra": Family(
        "ELECTRA", "google/electra-base-discriminator", activation="gelu", dropout=_BERT_DROPOUT, **_HEAD
    ),
    "albert": Family(
        "ALBERT",
        "albert-base-v2",
        "albert.pooler",
        "tanh",
        ("classifier_dropout_prob", "hidden_dropout_prob"),
        "classifier",
        pools_in_encoder=True,
    ),
    "distilbert": Family(
        "DistilBERT", "distilbert-base-uncased", "pre_classifier", "relu", ("seq_classif_dropout",), "classifier"
    ),
    "deberta-v2": Family(
        "DeBERTa-v2/v3",
        "microsoft/deberta-v3-base",
        "pooler.dense",
        "$pooler_hidden_act",
        ("cls_dropout", "hidden_dropout_prob"),
        "classifier",
    ),
    "mpnet": Family(
        "MPNet",
        "microsoft/mpnet-base",
        activation="tanh",
        dropout=("hidden_dropout_prob",),
        position_offset=True,
        **_HEAD,
    ),
    "modernbert": Family(
        "ModernBERT",
        "answerdotai/ModernBERT-base",
        "head.dense",
        "$classifier_activation",
        ("classifier_dropout",),
        "classifier",
        layer_norm="head.norm",
    ),
}


def get_family(model_type: str) -> Family:
    """Looks a family up by transformers' ``model_type``.

    Raises:
        ConfigError: The family is not supported.
    """
    if model_type not in FAMILIES:
        raise ConfigError(f"encoder family '{model_type}' is not supported. Known: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
