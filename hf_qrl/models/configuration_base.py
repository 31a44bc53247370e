# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What the configurations of language models with heads on them have in common, whatever the heads are."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec


@strict
class HeadsConfigBase(PreTrainedConfig):
    """
    Configuration of a language model (`text_config`) and of heads on it. The fields are described at
    [`ILQLCausalLMConfig`].
    """

    sub_configs_defaults = {"text_config": SubConfigSpec(config_class=AutoConfig, model_type="gpt2")}

    # How the names of the Auto classes end that make such a model.
    auto_suffix: ClassVar[str]
    # Fields that describe the heads and what they are trained on; the Auto classes take them as arguments.
    head_arguments: ClassVar[tuple[str, ...]]
    # What saved heads are, which cannot be chosen when they are loaded: some kinds have tensors of the same shapes.
    kinds_of_heads: ClassVar[tuple[str, ...]] = ("head_expansion",)

    text_config: dict | PreTrainedConfig | None = None
    head_expansion: int = 2
    history_window: int | None = None
    reward_mean: float | int = 0.0
    reward_std: float | int = 1.0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any):
        # Without this a plain base checkpoint, loaded with this class, would silently become a random GPT-2.
        if self.text_config is None:
            raise ValueError(
                f"{type(self).__name__} needs `text_config`, the configuration of the language model under the heads, "
                f"and got None. Use `AutoModelFor...{self.auto_suffix}.from_pretrained(...)` to put heads on a base "
                "checkpoint, or pass `text_config=AutoConfig.from_pretrained(...)`."
            )
        if isinstance(self.text_config, PreTrainedConfig):
            # `PreTrainedConfig` resets the attention implementation of its sub-configurations to this argument, None
            # if absent, and a live base model would compute other logits from then on.
            kwargs.setdefault("attn_implementation", self.text_config._attn_implementation)
        super().__post_init__(**kwargs)

        self.reward_mean, self.reward_std = float(self.reward_mean), float(self.reward_std)
        text_config: Any = self.text_config
        text_config = text_config.get_text_config()
        self.tie_word_embeddings = bool(text_config.tie_word_embeddings)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(text_config, name, None))  # not every model has each of them

    def check_kind_of_heads(self, asked: dict[str, Any], name: str) -> None:
        """Raises a `ValueError` if other heads are asked for than these, which were saved in `name`."""
        kinds = {key: getattr(self, key) for key in self.kinds_of_heads}
        wrong = {key: asked[key] for key in kinds if asked.get(key) is not None and asked[key] != kinds[key]}
        if wrong:
            raise ValueError(
                f"The heads saved in {name!r} are {kinds}, and {wrong} is asked for. Load them without it."
            )

    def validate_heads(self) -> None:
        """Raises a `ValueError` for heads that cannot be built, also after single fields were changed."""
        if self.head_expansion < 1:
            raise ValueError(f"`head_expansion` must be at least 1, got {self.head_expansion}.")
        if self.history_window is not None and self.history_window < 1:
            raise ValueError(
                f"`history_window` counts turns and must be at least 1, or None for the whole history, got "
                f"{self.history_window}."
            )
        if not self.reward_std > 0:
            raise ValueError(f"`reward_std` must be positive, got {self.reward_std}.")


@strict
class Seq2SeqHeadsConfigBase(HeadsConfigBase):
    """
    What is added to it where the language model is an encoder-decoder.
    """

    sub_configs_defaults = {"text_config": SubConfigSpec(config_class=AutoConfig, model_type="t5")}

    is_encoder_decoder: bool = True
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs: Any):
        super().__post_init__(**kwargs)
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = getattr(self.text_config, "decoder_start_token_id", None)


__all__ = ["HeadsConfigBase", "Seq2SeqHeadsConfigBase"]
