# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""PEFT in the trainer: an adapter on a model with heads, and what cannot be trained."""

import copy
import dataclasses
import re
from typing import Any

from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from ..models.adapters import HEADS, adapter_class, silence_original_heads, task_type_of
from ..models.configuration_llama_dueling_q import LlamaDuelingQConfig
from ..models.heads import NONLINEAR_STEMS
from ..models.modeling_base import PreTrainedModelWithHeads
from .base_config import BaseConfig
from .q_learning_config import QLearningConfig


logger = logging.get_logger(__name__)


def base_of(model: Any) -> Any:
    """The model with its heads, without the adapter around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def adapt(model: Any, peft_config: PeftConfig | None, args: BaseConfig, revision: str | None = None) -> Any:
    """
    Puts an adapter on a model with heads, or checks the one that is there.

    Args:
        model ([`ILQLForCausalLM`] or `peft.PeftModel`): The model; it is changed in place.
        peft_config (`peft.PeftConfig`, *optional*): The adapter; a copy of it is completed and used.
        args ([`BaseConfig`]): Training arguments.
        revision (`str`, *optional*): Revision that the model was loaded at.

    Returns:
        The `peft.PeftModel`, or the model itself if there is no adapter.
    """
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ValueError(
                "The model has an adapter already, and `peft_config` asks for another. Leave `peft_config` out to "
                "train the adapter that is there, or merge it first (`merge_and_unload()`), save the result, and pass "
                "that."
            )
        check_adapter(model)
    elif any(isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) for module in model.modules()):
        raise ValueError(
            "There are adapters in the model without a `peft.PeftModel` around it. `inject_adapter_in_model` leaves "
            "them so, or a trainer that was made of this model before. Load the model anew, and use `peft_config=`."
        )
    elif peft_config is None:
        if vars(model).keys() & {"is_loaded_in_4bit", "is_loaded_in_8bit"} and not (
            isinstance(args, QLearningConfig) and args.freeze_base
        ):
            raise ValueError(
                "The language model is quantised, and its weights cannot be trained: pass `peft_config=` to train an "
                "adapter, or `freeze_base=True` to train the heads only."
            )
        return model
    if isinstance(args, QLearningConfig):
        check_arguments(args, base_of(model))
    if not isinstance(model, PeftModel):
        model = put_adapter(model, peft_config, revision)
    silence_original_heads(model)
    if args.activation_checkpointing and is_deepspeed_zero3_enabled():
        # Anything else recomputes with weights that ZeRO-3 has partitioned again.
        args.activation_checkpointing_kwargs = {**(args.activation_checkpointing_kwargs or {}), "use_reentrant": True}
    return model


def check_arguments(args: QLearningConfig, model: Any) -> None:
    """Raises a `ValueError` for training arguments that contradict an adapter."""
    if args.freeze_base:
        raise ValueError(
            "`freeze_base=True` trains the heads only, and an adapter trains the language model. Leave out one of "
            "them; the weights under an adapter are frozen anyway."
        )
    if model.acts_by_language_model and not args.clones:
        raise ValueError(
            f"With `{args.cloning_argument}=0` nothing holds the language model to the data while its adapter serves "
            f"the heads, and the policy's prior would drift. Raise `{args.cloning_argument}`, or train the heads "
            "only: `freeze_base=True` without an adapter."
        )


def put_adapter(model: PreTrainedModelWithHeads, peft_config: PeftConfig, revision: str | None = None) -> Any:
    """The model with a fresh adapter on it."""
    if not isinstance(peft_config, PeftConfig):
        raise ValueError(
            f"`peft_config` must be a `peft.PeftConfig`, such as `peft.LoraConfig(...)`, got "
            f"{type(peft_config).__name__}."
        )
    config: Any = complete(peft_config, model)
    config.revision = config.revision or revision
    trainable = [name for name, x in model.named_parameters() if x.requires_grad]
    adapted = None
    try:
        # Under ZeRO-3 all that is not partitioned must be of one dtype.
        autocast_adapter_dtype = not is_deepspeed_zero3_enabled()
        adapted = adapter_class(config.task_type)(model, config, autocast_adapter_dtype=autocast_adapter_dtype)
        check_adapter(adapted)
    except ValueError:
        # The model stays as the caller gave it.
        if adapted is not None:
            adapted.unload()
        for name in trainable:
            model.get_parameter(name).requires_grad_(True)
        raise
    return adapted


def complete(peft_config: PeftConfig, model: PreTrainedModelWithHeads) -> PeftConfig:
    """A copy of the user's configuration with what follows from the model."""
    fields = {field.name for field in dataclasses.fields(peft_config)}
    if peft_config.is_prompt_learning or not {"modules_to_save", "target_modules"} <= fields:
        raise ValueError(
            f"{type(peft_config).__name__} is not supported: the heads are trained as `modules_to_save`, beside "
            "adapters of single layers, and virtual tokens would shift the positions of states and actions. Use "
            "`LoraConfig`."
        )
    config: Any = copy.deepcopy(peft_config)
    task_type = task_type_of(model)
    if config.task_type not in (None, task_type):
        raise ValueError(f"`task_type` of the adapter must be {task_type!r} or unset, got {str(config.task_type)!r}.")
    config.task_type = task_type
    config.base_model_name_or_path = model.config._name_or_path or None
    if model.trained_since_loading:
        # An adapter that named the checkpoint would be loaded onto other weights than it was trained on.
        config.base_model_name_or_path = None
        model.name_or_path = ""  # which PEFT would fill in when it saves
        logger.warning(
            "The model under the adapter was trained in this process, so the adapter names no base model. Save the "
            "model, and pass its directory in its place (or as `base_model_name_or_path=` when the adapter is loaded)."
        )
    if HEADS not in (config.modules_to_save or []):
        config.modules_to_save = [*(config.modules_to_save or []), HEADS]
    targets = config.target_modules
    if any(re.match(rf"{HEADS}\b", target) for target in ([targets] if isinstance(targets, str) else targets or [])):
        raise ValueError(
            f"`target_modules` names modules of the heads ({targets}). The heads are trained whole, as "
            "`modules_to_save`; name modules of the language model."
        )
    if not targets and not ("target_parameters" in fields and config.target_parameters):
        config.target_modules = default_target_modules(config, model)
    return config


def default_target_modules(config: PeftConfig, model: Any) -> str:
    """PEFT's choice for the architecture, in the language model only, as a regular expression."""
    text_config = model.config.get_text_config()
    # A Llama with a Q-head has a Llama's layers.
    model_type = "llama" if isinstance(text_config, LlamaDuelingQConfig) else text_config.model_type
    names: Any = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type)
    if config.peft_type != "LORA" or names is None:
        raise ValueError(
            f"There is no default for the `target_modules` of {type(config).__name__} on {model_type!r} models. Name "
            'the layers to adapt, such as `target_modules=["q_proj", "v_proj"]`, or use `target_modules="all-linear"`.'
        )
    # In the module of the language model: the heads are beside it.
    trunk = model.base_model_prefix
    return rf"{trunk}\.(?:{names})" if isinstance(names, str) else rf"{trunk}\..*\.({'|'.join(names)})"


def check_adapter(model: Any) -> None:
    """Raises a `ValueError` for an adapter that the trainer cannot train, save or load again."""
    base = model.get_base_model()
    if not isinstance(base, PreTrainedModelWithHeads):
        raise ValueError(
            f"The adapter is on a {type(base).__name__} without heads. Merge it (`merge_and_unload()`), save the "
            "result, and pass that with `peft_config=`; or put the heads on the bare model and the adapter on the "
            "result."
        )
    active = model.active_adapters
    if active != ["default"]:
        raise ValueError(
            f'One adapter is trained, under the name "default"; the active ones are {active}. Choose it with '
            "`model.set_adapter(...)`, or load it under that name."
        )
    config = model.peft_config["default"]
    if config.is_prompt_learning:
        raise ValueError(f"{type(config).__name__} is not supported with heads. Use `LoraConfig`.")
    heads = base.heads
    if not isinstance(heads, ModulesToSaveWrapper) or "default" not in heads.modules_to_save:
        raise ValueError(
            "The adapter does not hold the heads, so that they would be neither trained nor saved. Build it with "
            '`modules_to_save=["heads"]`, or pass its configuration as `peft_config=`, which adds that.'
        )
    zero = not any(x.any() for x in heads.modules_to_save["default"].state_dict().values())
    if zero and base.config.head_stem in NONLINEAR_STEMS:
        raise ValueError(
            "The heads of the adapter are all zero, and such heads learn nothing: they are copies of those that act "
            "while an adapter is disabled. Load the base model anew, and put the adapter on that."
        )
    if not any(x.requires_grad for x in heads.modules_to_save["default"].parameters()):
        raise ValueError(
            "The adapter is frozen. Load it with `is_trainable=True`, or build it with `inference_mode=False`."
        )
    output = base.get_output_embeddings()
    shared = base.get_input_embeddings().weight is output.weight
    tied = base.config.tie_word_embeddings
    for name, module in base.named_modules():
        if isinstance(module, BaseTunerLayer):
            if name.startswith(f"{HEADS}."):
                raise ValueError(
                    f"The adapter changes {name!r}, a module of the heads, which are trained whole. Restrict "
                    r'`target_modules` to the language model: a regular expression like "base\..*\.(q_proj|v_proj)".'
                )
            # An input embedding that is tied to it is the same weight.
            if module is output or (shared and module.get_base_layer().weight is output.weight):
                raise ValueError(not_seen(name))
        elif isinstance(module, AuxiliaryTrainingWrapper) and module is not heads:
            plain = isinstance(module, ModulesToSaveWrapper)
            if (module is output or tied) and not plain:
                raise ValueError(not_seen(name))
    if tied and isinstance(output, ModulesToSaveWrapper):
        raise ValueError(
            "`modules_to_save` holds the output embedding, which this model ties to its input embedding: the copy "
            "would be lost when the adapter is merged and saved. Leave it out, or save the model with "
            "`tie_word_embeddings=False` first."
        )


def not_seen(name: str) -> str:
    return (
        f"The adapter changes {name!r}, which is (or shares its weight with) the output embedding. The losses read "
        "that weight itself and would not see the change. Leave it out of `target_modules`; "
        '`modules_to_save=["lm_head"]` trains an untied output embedding whole.'
    )


__all__ = ["adapt", "base_of"]
