# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The model card of a trained model, from the template in `model_cards/`."""

import dataclasses
import math
from enum import Enum
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..models import LlamaDuelingQForCausalLM
from ..models.modeling_value_head import ValueHeadPreTrainedModel


# What of the training arguments decides the result, besides the fields of the algorithm.
COMMON_ARGUMENTS = (
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "num_train_epochs",
    "lr_scheduler_type",
    "optim",
    "weight_decay",
    "max_grad_norm",
    "seed",
)
# Those of all algorithms; each has some of them.
ALGORITHM_ARGUMENTS = (
    "tau",
    "gamma",
    "discount_on",
    "target",
    "n_step",
    "mc_floor",
    "double_q",
    "cql_scale",
    "conservative_scale",
    "awac_scale",
    "awac_beta",
    "awac_weight_clip",
    "cloning_scale",
    "alpha",
    "steps_for_target_q_sync",
    "target_network",
    "ema_beta",
    "ema_warmup_steps",
    "ema_update_every",
    "max_length",
    "truncation_side",
    "reward_scaling",
    "freeze_base",
    "episodes_per_rollout",
    "ppo_epochs",
    "cliprange",
    "cliprange_value",
    "vf_coef",
    "entropy_coef",
    "lam",
    "kl_coef",
    "kl_target",
    "kl_estimator",
    "temperature",
    "reward_scale",
    "whiten_advantages",
    "num_layers_unfrozen",
)
# Those of a trainer that plays.
PLAYING_ARGUMENTS = (
    "collect_every",
    "episodes_per_collect",
    "replay_size",
    "offline_fraction",
    "collect_temperature",
    "collect_epsilon",
    "max_online_steps",
    "max_online_episodes",
    "collect_max_turns",
    "collect_max_new_tokens",
)
HEAD_FIELDS = (
    "head_type",
    "head_stem",
    "head_init",
    "num_q_heads",
    "q_reduction",
    "beta",
    "policy_top_k",
    "history_window",
)


def model_card(
    trainer: Any,
    model_name: str | None = None,
    dataset_name: str | list[str] | None = None,
    tags: str | list[str] | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
) -> str:
    """
    Args:
        trainer ([`ILQLTrainer`]): Supplies the model, the arguments and the log.
        model_name (`str`, *optional*): Title of the card.
        dataset_name (`str` or `list[str]`, *optional*): Names of the training data; a file is only mentioned.
        tags (`str` or `list[str]`, *optional*): Tags beside the trainer's own.
        license (`str`, *optional*): License of the model, as the Hub abbreviates it.
        language (`str` or `list[str]`, *optional*): Languages of the model, by their codes.

    Returns:
        `str`: the card, Markdown with YAML metadata.
    """
    args, state = trainer.args, trainer.state
    model = trainer.bare_model
    config = model.config
    # A policy that was trained further descends from the policy, not from its language model.
    base_model = config._name_or_path or config.get_text_config()._name_or_path
    base_model = base_model if is_repo_id(base_model) else None
    title = model_name or Path(args.output_dir).resolve().name
    names = [dataset_name] if isinstance(dataset_name, str) else list(dataset_name or [])
    datasets = [name for name in names if is_repo_id(name)]
    names = [name if name in datasets else Path(name).name for name in names]
    steps = state.global_step
    if args.load_best_model_at_end and not trainer.is_in_train and state.best_global_step:
        steps = state.best_global_step  # whose weights were restored at the end of training
    metrics = last_metrics([entry for entry in state.log_history if entry["step"] <= steps])
    # The Hub refuses a card with a metric that is not finite.
    evaluation = {name: x for name, x in metrics.items() if name.startswith("eval_") and math.isfinite(x)}
    # The rows of several datasets are evaluated together.
    evaluated_on = datasets[0] if len(names) == len(datasets) == 1 else None
    card_data = ModelCardData(
        # What the Hub's "use this model" imports; transformers is enough for a model that brings its code along.
        library_name="transformers" if model.is_remote_code() else "hf_qrl",
        pipeline_tag="text-generation",
        base_model=base_model,
        datasets=datasets or None,
        tags=sorted({*trainer._tag_names, *([tags] if isinstance(tags, str) else tags or [])}),
        license=license,
        language=language,
        model_name=title if evaluation else None,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=evaluated_on or "evaluation",
                dataset_name=evaluated_on or "evaluation data",
                metric_type=name,
                metric_value=number,
            )
            for name, number in evaluation.items()
        ]
        or None,
    )
    known = {field.name for field in dataclasses.fields(args)}
    playing = PLAYING_ARGUMENTS if getattr(trainer, "online", None) is not None else ()
    names_of_arguments = (*ALGORITHM_ARGUMENTS, *playing, *COMMON_ARGUMENTS)
    arguments = {name: getattr(args, name) for name in names_of_arguments if name in known}
    arguments = {name: x.value if isinstance(x, Enum) else x for name, x in arguments.items()}
    arguments |= trainer._fitted
    dataset = trainer.train_dataset
    card = ModelCard.from_template(
        card_data,
        template_path=str(files("hf_qrl.model_cards") / "template.md"),
        title=title,
        method=f"{trainer._name} ({trainer._paper['title']})",
        paper_id=trainer._paper["id"],
        model_path=trainer.hub_model_id or args.hub_model_id or title,
        **use_of(model),
        citation=trainer._citation,
        reward_mean=config.reward_mean,
        reward_std=config.reward_std,
        history_window=config.history_window,
        adapter=model is not trainer.accelerator.unwrap_model(trainer.model),
        conversational=trainer._conversational,
        # Encoder-decoder models may do without a chat template.
        plain_conversation=trainer._conversational and not trainer._tokenizer.chat_template,
        dataset_name=", ".join(names),
        num_rows=len(dataset) if hasattr(dataset, "__len__") else None,
        steps=steps,
        heads={
            **{name: getattr(config, name) for name in HEAD_FIELDS if name in config.to_dict()},
            **({"policy": config.policy} if isinstance(model, LlamaDuelingQForCausalLM) else {}),
        },
        arguments=arguments,
        metrics={name: f"{number:.4g}" for name, number in metrics.items()},
        versions={name: version(name) for name in ("hf_qrl", "transformers", "torch", "datasets", "accelerate")},
    )
    return str(card)


def use_of(model: Any) -> dict[str, str]:
    """How the card says the model is used: its policy, its class, arguments of `generate`, its values, its prior."""
    config = model.config
    suffix = "Seq2SeqLM" if config.is_encoder_decoder else "CausalLM"
    if isinstance(model, ValueHeadPreTrainedModel):
        return {
            "origin": "by acting",
            "policy": "softmax(logits)",
            "architecture": (config.text_config.architectures or ["language model"])[0],
            "auto_class": f"AutoModelFor{suffix}WithValueHead",
            "generate_arguments": "temperature=1.0",
            "generate_comment": "what it was trained at",
            "values": "model(**inputs, output_values=True).value` has the state values.",
            "language_model": "model.base.save_pretrained(...)` exports the language model, the policy, alone.",
        }
    if isinstance(model, LlamaDuelingQForCausalLM):
        by_q = config.policy == "q"
        return {
            "origin": "offline on rewarded data",
            "policy": "softmax(Q / temperature)" if by_q else "softmax(logits + beta * (Q - V))",
            "architecture": "LlamaForCausalLM",
            "auto_class": type(model).__name__,
            "generate_arguments": "top_k=0" if by_q else f"beta={config.beta}",
            "generate_comment": "or do_sample=False: the best token" if by_q else "beta=0 is the language model",
            "values": "model(**inputs, return_q_values=True).q_values` has the Q-values of every next token.",
            "language_model": "transformers.LlamaForCausalLM.from_pretrained(...)` loads the language model alone.",
        }
    return {
        "origin": "offline on rewarded data",
        "policy": "softmax(logits + beta * (Q - V))",
        "architecture": (config.text_config.architectures or ["language model"])[0],
        "auto_class": f"AutoModelFor{suffix}WithILQLHeads",
        "generate_arguments": f"beta={config.beta}",
        "generate_comment": "beta=0 is the language model",
        "values": "model(**inputs, output_values=True)` gives the state values and Q-values.",
        "language_model": "model.base.save_pretrained(...)` exports the language model alone.",
    }


def is_repo_id(name: str) -> bool:
    """Whether the name can be that of a repository of the Hub and is not that of a file or directory."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def last_metrics(log_history: list[dict[str, float]]) -> dict[str, float]:
    """The most recent value of each logged loss and statistic."""
    metrics: dict[str, float] = {}
    for entry in log_history:
        metrics |= {
            name: number
            for name, number in entry.items()
            if ("/" in name or name in ("loss", "eval_loss")) and isinstance(number, (int, float))
        }
    return metrics


__all__ = ["model_card"]
