# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A language model of any architecture (`base`) under heads (`heads`): all but the heads and `forward`."""

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from .configuration_base import HeadsConfigBase
from .lm_head import LMHead, capture_input
from .modeling_base import HUB_ARGUMENTS, PreTrainedModelWithHeads, attend_somewhere, check_bare


class WrapperPreTrainedModel(PreTrainedModelWithHeads, GenerationMixin):
    """
    A language model (`base`) and heads on the inputs of its LM head (`heads`).
    """

    # The Auto class of the language model, and what it is.
    base_auto_class: ClassVar[Any]
    kind: ClassVar[str]
    # What is on the language model, in words; who trains it; and its tag on the Hub.
    heads_title: ClassVar[str]
    trainer_name: ClassVar[str]
    heads_tag: ClassVar[str]
    # What a checkpoint of trlX calls such heads.
    trlx_prefix: ClassVar[str]

    config_class: ClassVar[type[HeadsConfigBase]]
    base_model_prefix = "base"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: Any, base: PreTrainedModel | None = None):
        super().__init__(config)
        config.validate_heads()
        if base is None:
            base = self.base_auto_class.from_config(config.text_config)
        self.base = base
        output: Any = base.get_output_embeddings()
        if output is None:
            raise ValueError(
                f"{type(base).__name__} has no output embeddings to take the width of the heads from; "
                f"{self.heads_title} can only be put on a model with a language modelling head."
            )
        self.heads = self._make_heads(output.in_features, output.out_features)
        self.post_init()
        self.add_model_tags(["hf_qrl", self.heads_tag])
        if not self.heads.v.projection.weight.is_meta:  # as it is where a checkpoint is about to be loaded
            self.heads.reset(str(config.head_init))

    def _make_heads(self, hidden_size: int, vocab_size: int) -> nn.Module:
        """The module of the heads, with a value head `v` in it."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ construction

    @classmethod
    def check_kind(cls, config: PreTrainedConfig, name: str) -> None:
        """Raises a `ValueError` if a model of this configuration is encoder-decoder and the class is not, or so."""
        kinds = {False: ("causal", "CausalLM"), True: ("an encoder-decoder", "Seq2SeqLM")}
        kind, model = kinds[bool(config.is_encoder_decoder)]
        if kind != cls.kind:
            raise ValueError(
                f"{name} is {kind}, and {cls.__name__} takes models that are {cls.kind}. Use "
                f"`AutoModelFor{model}{cls.config_class.auto_suffix}`."
            )

    @classmethod
    def from_base(cls, base: PreTrainedModel, **head_arguments: Any) -> Any:
        """
        Puts fresh heads on a live language model, which is used as it is (not copied).

        Args:
            base (`PreTrainedModel`): The language model.
            head_arguments: Fields of the configuration that describe the heads.
        """
        if not isinstance(base, PreTrainedModel):
            raise ValueError(
                f"Heads go on a `PreTrainedModel`, got {type(base).__name__}. If it is an adapter: put the heads "
                "on its base model and the adapter on the result (`peft_config=` of the trainer does it), or merge it "
                "first (`merge_and_unload()`)."
            )
        check_bare(base)
        cls.check_kind(base.config, type(base).__name__)
        # The constructor initialises modules that are not marked as initialised, such as an embedding that was
        # resized or replaced since loading.
        for module in base.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]
        config = cls.config_class(
            text_config=base.config, dtype=base.dtype, name_or_path=base.name_or_path, **head_arguments
        )
        model = cls(config, base=base)
        model._take_over(base)
        return model

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """
        As [`~transformers.PreTrainedModel.from_pretrained`], for a checkpoint that has its heads.

        Raises:
            `ValueError`: if weights are missing from the checkpoint or have another shape, or if it has heads that are
            not in the configuration.
        """
        cls._check_kind_of_heads(pretrained_model_name_or_path, kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _check_kind_of_heads(cls, name: str | os.PathLike, kwargs: dict[str, Any]) -> None:
        """Raises a `ValueError` if other heads are asked for than were saved."""
        asked, config, kinds = kwargs, kwargs.get("config"), cls.config_class.kinds_of_heads
        if isinstance(config, cls.config_class):
            own = {x.name for x in fields(cls.config_class)} - {x.name for x in fields(PreTrainedConfig)}
            beside = [key for key in kwargs if key in own]
            if beside:
                raise ValueError(f"{beside} are set in the configuration that is passed, not beside it.")
            asked = {key: getattr(config, key) for key in kinds}
        if all(asked.get(key) is None for key in kinds):
            return
        loading = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        try:
            saved = cls.config_class.from_pretrained(name, **loading)
        except OSError:
            return  # there are weights without a configuration, and the one that is passed is all there is
        saved.check_kind_of_heads(asked, str(name))

    # -------------------------------------------------------------------------------------------------- embeddings

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.base.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.base.set_output_embeddings(new_embeddings)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resizes the embeddings of the language model."""
        config = self.base.config.get_text_config()
        # Flan-T5 says that it is tied and is not. transformers would tie it here, and its own LM head would be lost.
        apart = self.get_output_embeddings().weight is not self.get_input_embeddings().weight
        tied, config.tie_word_embeddings = config.tie_word_embeddings, config.tie_word_embeddings and not apart
        try:
            return self.base.resize_token_embeddings(new_num_tokens, *args, **kwargs)
        finally:
            config.tie_word_embeddings = tied

    # ----------------------------------------------------------------------------------------------------- forward

    @property
    def language_model(self) -> PreTrainedModel:
        return self.base

    def _refuse_labels(self, labels: Any) -> None:
        if labels is not None:
            raise ValueError(
                f"A model with {self.heads_title} takes no `labels`: train it with `{self.trainer_name}`, or train "
                "the language model alone through `model.base`."
            )

    def _refuse_part_of_rows(self, inputs: dict[str, Any], **ixs: Any) -> None:
        """Raises a `ValueError` for positions of whole rows where the language model is to project a part of them."""
        kept = inputs.get("logits_to_keep", 0)
        if any(x is not None for x in ixs.values()) and not (isinstance(kept, int) and kept == 0):
            names = " and ".join(f"`{name}`" for name in ixs)
            raise ValueError(
                f"{names} are positions of the whole row, of which `logits_to_keep` leaves a part. Leave out one of "
                "them."
            )

    def _run_base(self, **inputs: Any) -> tuple[Any, torch.Tensor]:
        """Runs the language model; returns its output, and the inputs of its LM head `(B, n, d)`."""
        with capture_input(self.get_output_embeddings()) as captured:
            base_output = self.base(return_dict=True, **inputs)
        return base_output, captured[0]

    def hidden_states(self, **inputs: Any) -> torch.Tensor:
        """
        The inputs of the LM head, `(B, n, d)`, without the cost of the logits. `inputs` are those of the language
        model under the heads; rows are padded on the right.
        """
        with capture_input(self.get_output_embeddings(), project=False) as captured:
            self.base(use_cache=False, return_dict=True, **inputs)
        return captured[0]

    def _state_after(self, input_ids: Any, attention_mask: Any) -> torch.Tensor | None:
        if input_ids is None or attention_mask is None or not self.config.is_encoder_decoder:
            return super()._state_after(input_ids, attention_mask)
        # The state after rows of the encoder is the decoder's first on them.
        start = input_ids.new_full((len(input_ids), 1), self.config.decoder_start_token_id)
        with torch.no_grad():
            states = self.hidden_states(
                input_ids=input_ids, attention_mask=attend_somewhere(attention_mask), decoder_input_ids=start
            )
        return states[:, 0]

    def _loss(
        self, loss_fn: Callable[..., torch.Tensor], next_input_ids: Any, next_attention_mask: Any, **inputs: Any
    ) -> torch.Tensor:
        """What `loss_fn` makes of the hidden states, the heads, the LM head, and the state after the next rows."""
        hidden_states = self.hidden_states(**inputs)
        next_state = self._state_after(next_input_ids, next_attention_mask)
        return loss_fn(hidden_states, self.heads, LMHead(self.base), next_state)


__all__ = ["WrapperPreTrainedModel"]
