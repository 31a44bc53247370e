# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What makes models with heads: of any language model of the Hub, or of one saved with heads, by us or by trlX."""

import os
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from .adapters import load_adapter
from .configuration_base import HeadsConfigBase
from .modeling_base import HUB_ARGUMENTS
from .modeling_wrapper import WrapperPreTrainedModel
from .sharding import check_ties
from .trlx import from_trlx, read_trlx


class AutoModelWithHeads:
    """What the Auto classes of models with heads share."""

    model_class: ClassVar[type[WrapperPreTrainedModel]]

    def __init__(self, *args: Any, **kwargs: Any):
        raise OSError(
            f"{type(self).__name__} is made with `{type(self).__name__}.from_pretrained(...)` or `.from_config(...)`."
        )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | PreTrainedModel, *model_args: Any, **kwargs: Any
    ) -> Any:
        """
        Args:
            pretrained_model_name_or_path (`str` or `PreTrainedModel`):
                A plain language model (fresh heads are put on it) or one saved with such heads, by name or directory;
                one that trlX saved (its heads are kept, safetensors are written when it is saved again); an adapter
                with heads, which gives a `peft.PeftModel` with the model with heads in it; or a live language model.
            is_trainable (`bool`, *optional*, defaults to `False`):
                Whether an adapter is to be trained on.
            base_model_name_or_path (`str`, *optional*):
                The model under an adapter, if it is not where the adapter says.
            kwargs:
                Fields of the configuration that describe the heads (`head_type`, `head_init`, `beta`, ...), and
                whatever [`~transformers.PreTrainedModel.from_pretrained`] takes.
        """
        config_class = cls.model_class.config_class
        head_arguments = {name: kwargs.pop(name) for name in config_class.head_arguments if name in kwargs}
        adapter_arguments = {
            "base_name": kwargs.pop("base_model_name_or_path", None),
            "is_trainable": kwargs.pop("is_trainable", False),
        }
        if not isinstance(pretrained_model_name_or_path, (str, os.PathLike)):
            if model_args or kwargs:
                raise ValueError(f"A live model takes no loading arguments, got {sorted(kwargs)}.")
            return cls.model_class.from_base(pretrained_model_name_or_path, **head_arguments)
        name, loading = pretrained_model_name_or_path, {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        adapter = find_adapter_config_file(name, **loading)
        if adapter is not None:
            rest = {key: argument for key, argument in kwargs.items() if key not in HUB_ARGUMENTS}
            return load_adapter(
                cls.from_pretrained,
                config_class,
                name,
                adapter,
                config_class.head_arguments,
                head_arguments,
                loading,
                **adapter_arguments,
                **rest,
            )
        if adapter_arguments["base_name"] is not None:
            raise ValueError(f"`base_model_name_or_path` goes with an adapter, and {str(name)!r} is none.")
        config = kwargs.get("config")
        if config is None:
            more = {key: kwargs[key] for key in ("gguf_file", "trust_remote_code") if key in kwargs}
            config = AutoConfig.from_pretrained(name, **loading, **more)
        cls.model_class.check_kind(config, f"{str(name)!r}")
        if isinstance(config, config_class):
            loaded = cls.model_class.from_pretrained(name, *model_args, **kwargs, **head_arguments)
            check_ties(loaded[0] if kwargs.get("output_loading_info") else loaded, name, **loading)
            return loaded
        if isinstance(config, HeadsConfigBase):
            raise ValueError(
                f"{str(name)!r} was saved with other heads. Load it with `AutoModelFor...{config.auto_suffix}`; to "
                f"put others on its language model, pass that (the `base` of what is loaded) to {cls.__name__}."
            )
        state_dict = None if "gguf_file" in kwargs else read_trlx(name, cls.model_class.trlx_prefix, **loading)
        if state_dict is not None:
            rest = {key: argument for key, argument in kwargs.items() if key not in (*HUB_ARGUMENTS, "config")}
            return from_trlx(cls.model_class, name, state_dict, config, head_arguments, loading, **rest)
        kwargs["output_loading_info"] = True
        base, info = cls.model_class.base_auto_class.from_pretrained(name, *model_args, **kwargs)
        if info["missing_keys"]:
            keys = sorted(info["missing_keys"])
            raise ValueError(
                f"{len(keys)} weights of the {type(base).__name__} are missing from {str(name)!r} "
                f"({', '.join(keys[:3])}) and would be random. Load a checkpoint of the whole language model."
            )
        check_ties(base, name, **loading)
        return cls.model_class.from_base(base, **head_arguments)

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> Any:
        """
        A model with random weights.

        Args:
            config (`PreTrainedConfig`): One of the model with heads, or that of a language model.
            kwargs: Fields that describe the heads, if `config` is that of a language model.
        """
        cls.model_class.check_kind(config, type(config).__name__)
        config_class = cls.model_class.config_class
        if isinstance(config, config_class):
            if kwargs:
                raise ValueError(f"{sorted(kwargs)} are set in the configuration, not beside it.")
            return cls.model_class(config)
        head_arguments = {name: kwargs.pop(name) for name in config_class.head_arguments if name in kwargs}
        base = cls.model_class.base_auto_class.from_config(config, **kwargs)
        return cls.model_class.from_base(base, **head_arguments)


__all__ = ["AutoModelWithHeads"]
