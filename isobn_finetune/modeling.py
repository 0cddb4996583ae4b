"""The model: encoder -> pooler -> norm -> dropout -> classifier, as one ``PreTrainedModel``."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.utils import ModelOutput

from isobn_finetune.errors import ConfigError
from isobn_finetune.families import Family, get_family
from isobn_finetune.norms import StatisticsNorm, create_norm
from isobn_finetune.packed_attention import PackedSequences


class IsobnConfig(PreTrainedConfig):
    """Config of a sentence classifier: the encoder's own config, the pooling and the norm.

    Args:
        encoder_config: Config of the encoder, or its values.
        norm: ``{"name": ..., **options}`` as ``create_norm`` takes them.
        pooling: ``pooler``, ``cls`` or ``mean``.
        **kwargs: What every config of transformers has, such as ``num_labels`` and ``id2label``.
    """

    model_type = "isobn"
    # Or stock evaluation loops would gather these for every row.
    keys_to_ignore_at_inference = ["pooler_output", "normed_output", "hidden_states", "attentions"]
    sub_configs = {"encoder_config": AutoConfig}

    def __init__(
        self,
        encoder_config: PreTrainedConfig | dict[str, Any] | None = None,
        norm: dict[str, Any] | None = None,
        pooling: str = "pooler",
        **kwargs: Any,
    ) -> None:
        if isinstance(encoder_config, dict):
            encoder_config = AutoConfig.for_model(**encoder_config)
        # transformers builds a config without arguments to learn its defaults.
        self.encoder_config: Any = encoder_config if encoder_config is not None else AutoConfig.for_model("bert")
        self.norm = dict(norm or {"name": "none"})
        self.pooling = pooling
        encoder: Any = self.encoder_config
        attention = encoder._attn_implementation
        super().__init__(**kwargs)  # it resets the attention of an encoder that is loaded already to None, hence eager
        if attention is not None:
            encoder._attn_implementation = attention

    @property
    def hidden_size(self) -> int:
        """Width of the sentence vector."""
        return self.encoder_config.hidden_size

    @property
    def family(self) -> Family:
        """The row of the encoder's family."""
        return get_family(self.encoder_config.model_type)


@dataclass
class SentenceClassifierOutput(ModelOutput):
    """What the model returns.

    Attributes:
        loss: Scalar, where labels were given.
        logits: ``(batch, num_labels)``.
        pooler_output: ``(batch, hidden_size)``, before the norm.
        normed_output: ``(batch, hidden_size)``, after the norm.
        hidden_states: Of the encoder, where its config asks for them.
        attentions: Of the encoder, where its config asks for them.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    pooler_output: Tensor | None = None
    normed_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class Pooler(nn.Module):
    """The dense part of the family's stock classification head, on the vector of token 0.

    Shape:
        ``(batch, hidden_size)`` in and out.
    """

    def __init__(self, encoder_config: PreTrainedConfig, family: Family) -> None:
        super().__init__()
        width = encoder_config.hidden_size
        with_norm = family.layer_norm is not None
        self.dense = nn.Linear(width, width, bias=encoder_config.classifier_bias if with_norm else True)
        self.activation = ACT2FN[family.get_activation(encoder_config)]
        # Called LayerNorm, so that no weight decay touches it.
        self.LayerNorm = (
            nn.LayerNorm(width, eps=encoder_config.norm_eps, bias=encoder_config.norm_bias)
            if with_norm
            else nn.Identity()
        )

    def forward(self, token_0: Tensor) -> Tensor:
        """Returns ``pooler_output``."""
        return self.LayerNorm(self.activation(self.dense(token_0)))


class IsobnForSequenceClassification(PreTrainedModel):
    """Encoder, pooler, norm, dropout and a linear classifier.

    With ``labels``, the loss is the mean squared error where ``num_labels`` is 1, else the cross-entropy.
    """

    config_class = IsobnConfig
    base_model_prefix = "encoder"
    # A forward with **kwargs is taken to divide its loss by the number of items in the whole accumulated batch.
    accepts_loss_kwargs = False
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: IsobnConfig, encoder: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        family, width = config.family, config.hidden_size
        self.num_labels = config.num_labels
        self.encoder = encoder if encoder is not None else AutoModel.from_config(config.encoder_config)
        # The encoder's own pooler reads token 0 of each batch row only; ours takes over its weights.
        self.encoder.pooler = None
        self.pooler = Pooler(config.encoder_config, family) if config.pooling == "pooler" else nn.Identity()
        options = {key: value for key, value in config.norm.items() if key != "name"}
        self.norm = create_norm(config.norm["name"], width, **options)
        self.dropout = nn.Dropout(family.get_dropout(config.encoder_config))
        self.classifier = nn.Linear(width, config.num_labels)
        self._takes_token_types = takes_token_types(self.encoder)
        self.supports_gradient_checkpointing = self.encoder.supports_gradient_checkpointing
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_length: int | None = None,
        **kwargs: Any,
    ) -> SentenceClassifierOutput:
        """Computes logits, and the loss where labels are given.

        Args:
            input_ids: ``(batch, length)``.
            attention_mask: ``(batch, length)``, 1 for tokens and 0 for padding.
            token_type_ids: ``(batch, length)``, 1 for the second text of a pair, where the family knows them.
            labels: ``(batch,)`` class indices, or real numbers where ``num_labels`` is 1.
            cu_seqlens: Of a packed batch, whose rows lie one after another in ``(1, tokens)``: where each begins and
                ends, ``(batch + 1,)``.
            max_length: Of a packed batch, tokens in its longest row.
            **kwargs: Handed on to the encoder.
        """
        kwargs.pop("return_dict", None)
        packed = None
        if cu_seqlens is not None and max_length is not None:
            kwargs["packed"] = packed = PackedSequences(cu_seqlens, max_length)
        if token_type_ids is not None and self._takes_token_types:
            kwargs["token_type_ids"] = token_type_ids
        encoded = self.encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **kwargs)
        pooler_output = self.pooler(self._select(encoded.last_hidden_state, attention_mask, packed))
        normed_output = self.norm(pooler_output)
        logits = self.classifier(self.dropout(normed_output))
        return SentenceClassifierOutput(
            loss=None if labels is None else compute_loss(logits, labels),
            logits=logits,
            pooler_output=pooler_output,
            normed_output=normed_output,
            hidden_states=encoded.get("hidden_states"),
            attentions=encoded.get("attentions"),
        )

    def _select(
        self, last_hidden_state: Tensor, attention_mask: Tensor | None, packed: PackedSequences | None
    ) -> Tensor:
        """``(batch, length, hidden_size)`` to ``(batch, hidden_size)``: token 0, or the mean over the tokens."""
        if packed is not None:
            select = packed.mean if self.config.pooling == "mean" else packed.first
            return select(last_hidden_state[0])
        if self.config.pooling != "mean":
            return last_hidden_state[:, 0]
        if attention_mask is None:
            return last_hidden_state.mean(dim=1)
        mask = attention_mask.unsqueeze(-1).to(last_hidden_state.dtype)
        return (last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)

    def _init_weights(self, module: nn.Module) -> None:
        """Sets what a checkpoint did not bring. Each function of ``init`` leaves loaded tensors alone."""
        if isinstance(module, StatisticsNorm):
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                init.constant_(tensor, module.initial_values.get(name, 0))
        elif isinstance(module, nn.LayerNorm):
            super()._init_weights(module)
        elif isinstance(module, nn.Linear):
            # As the family draws its heads.
            init.normal_(module.weight, mean=0.0, std=getattr(self.config.encoder_config, "initializer_range", 0.02))
            if module.bias is not None:
                init.zeros_(module.bias)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As every model of transformers, but never fills missing weights or statistics in.

        Raises:
            ConfigError: The file lacks weights, or the statistics of its norm.
        """
        wanted = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        where = f"{pretrained_model_name_or_path}: the model file"
        if info["missing_keys"]:
            missing = sorted(info["missing_keys"])
            raise ConfigError(f"{where} lacks {len(missing)} of its weights, the first is {missing[0]}; save it again")
        norm = model.norm
        if isinstance(norm, StatisticsNorm) and not norm.has_statistics():
            raise ConfigError(f"{where} has no statistics for its norm '{model.config.norm['name']}': all are zero")
        return (model, info) if wanted else model


def takes_token_types(encoder: PreTrainedModel) -> bool:
    """False where the encoder has no argument for them or but one embedding: tokenizers may give them all the same."""
    known = "token_type_ids" in inspect.signature(encoder.forward).parameters
    return known and getattr(encoder.config, "type_vocab_size", 2) != 1


def compute_loss(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, class_weights: Tensor | None = None
) -> Tensor:
    """Mean squared error for one output, else cross-entropy, in float32.

    Args:
        logits: ``(batch, num_labels)``.
        labels: ``(batch,)``.
        label_smoothing: Share of the target that is spread evenly over the classes.
        class_weights: ``(num_labels,)``.
    """
    logits = logits.float()
    if logits.shape[-1] == 1:
        # squeeze(-1), not squeeze(): a batch of one keeps its shape, and (n, 1) never meets (n,).
        return nn.functional.mse_loss(logits.squeeze(-1), labels.to(logits.dtype))
    return nn.functional.cross_entropy(logits, labels, weight=class_weights, label_smoothing=label_smoothing)


# So that AutoConfig, AutoModelForSequenceClassification and pipeline load what we save.
AutoConfig.register(IsobnConfig.model_type, IsobnConfig, exist_ok=True)
AutoModelForSequenceClassification.register(IsobnConfig, IsobnForSequenceClassification, exist_ok=True)
