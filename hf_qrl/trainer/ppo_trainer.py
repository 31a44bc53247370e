# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Proximal policy optimisation as a `transformers.Trainer`."""

import dataclasses
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback, TrainerControl
from transformers.integrations import is_deepspeed_zero3_enabled

from ..data import training_chat_template
from ..data.ppo_types import PPORLBatch
from ..environments import EpisodeSource
from ..environments.adapters import from_reward_function
from ..losses.ppo import ppo_loss_from_states, ppo_metrics_from_sums
from ..models import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from ..models.heads import gather_states
from ..models.modeling_value_head import ValueHeadPreTrainedModel
from ..rollouts.store import RolloutStore
from .adapters import adapt, base_of
from .base_trainer import BaseTrainer
from .callbacks import EpisodeTableCallback
from .environment_callback import EnvironmentEvaluationCallback
from .inputs import (
    check_dataset_type,
    decoder_start_token_id,
    disable_dropout,
    load_model,
    load_tokenizer,
    pad_token_of,
)
from .metrics import MetricSums
from .ppo_checks import check_generation, check_trainable
from .ppo_config import PPOConfig
from .ppo_experience import Experience, mean
from .ppo_rollouts import Progress, RolloutBatches
from .ppo_rows import model_inputs
from .processes import check_fsdp_settings, check_processes, fsdp_is_asked_for
from .reference import begins_as_no_change, reference_policy
from .rewarded_prompts import RewardedPrompts, reward_functions


class PPOTrainer(BaseTrainer):
    r"""
    Trains a language model with a value head by acting: it plays an environment, or completes prompts that reward
    functions score, and learns from what comes of it (Schulman et al., 2017, arXiv 1707.06347).

    Args:
        model (`str` or `PreTrainedModel`):
            A name or directory of a causal or encoder-decoder language model, with or without a value head (loaded in
            float32 unless `model_init_kwargs` says otherwise), or a live one.
        args ([`PPOConfig`], *optional*):
            Training arguments. `max_steps` must be set, unless there are prompts to go through.
        environment ([`TextEnv`] class, [`EnvironmentInterface`], or a factory of either, *optional*):
            What is played, as in [`collect_episodes`].
        source ([`EpisodeSource`], *optional*):
            Where episodes start, for an environment without `reset`.
        reward_funcs (`Callable`, `str` or `PreTrainedModel`, or a list of them, *optional*):
            What scores the completions of `train_dataset`, in the place of an environment: reward functions as those
            of TRL, `f(prompts, completions, completion_ids, **columns) -> list[float]`, or sequence classification
            models with one output.
        reward_weights (`list[float]`, *optional*):
            Weight of each reward function.
        reward_model (`str` or `PreTrainedModel`, *optional*):
            One more of `reward_funcs`, by its usual name.
        reward_processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer of the reward models; loaded by their names if not given.
        train_dataset ([`~datasets.Dataset`], *optional*):
            Rows with a `prompt`, a string or messages, and columns for the reward functions.
        eval_dataset ([`~datasets.Dataset`], *optional*):
            Prompts to evaluate on.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer; the model's own if not given.
        ref_model (`str` or `PreTrainedModel`, *optional*):
            The policy to stay close to, if it is not the one that training begins with.
        executor ([`Executor`], or a function from a factory to one, *optional*):
            Where the environment runs, as in [`collect_episodes`].
        callbacks, optimizers, optimizer_cls_and_kwargs:
            As in [`~transformers.Trainer`].
        quantization_config (`BitsAndBytesConfig`, *optional*):
            Quantises the language model, if it is given by name; for training an adapter.
        peft_config (`peft.PeftConfig`, *optional*):
            Trains an adapter in the place of the language model's weights, and the value head whole.

    Example:

    ```python
    >>> from hf_qrl import PPOConfig, PPOTrainer
    >>> from hf_qrl.environments.games import GuessNumberEnv

    >>> playing = {"max_turns": 20, "max_completion_length": 8, "reward_scale": 0.1}
    >>> args = PPOConfig("out", max_steps=400, per_device_train_batch_size=64, **playing)
    >>> trainer = PPOTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", args, environment=GuessNumberEnv)
    >>> trainer.train()  # doctest: +SKIP
    ```
    """

    _tag_names = ["hf_qrl", "ppo"]
    _name = "PPO"
    _paper = {"title": "Proximal Policy Optimization Algorithms", "id": "1707.06347"}
    _citation = """@article{schulman2017proximal,
    title  = {Proximal Policy Optimization Algorithms},
    author = {John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov},
    year   = 2017,
    eprint = {arXiv:1707.06347}
}"""
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: PPOConfig | None = None,
        *,
        environment: Any = None,
        source: EpisodeSource | None = None,
        reward_funcs: Any = None,
        reward_weights: list[float] | None = None,
        reward_model: str | PreTrainedModel | None = None,
        reward_processing_class: PreTrainedTokenizerBase | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        ref_model: str | PreTrainedModel | None = None,
        executor: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        quantization_config: Any = None,
        peft_config: PeftConfig | None = None,
    ):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = PPOConfig(f"{(name or 'model').rstrip('/').split('/')[-1]}-{self._name}")
        if not isinstance(args, PPOConfig):
            raise ValueError(f"`args` must be a `PPOConfig`, got {type(args).__name__}.")
        check_fsdp_settings(args)
        if fsdp_is_asked_for(args):
            raise ValueError("PPO generates with weights that FSDP2 has sharded, which is not supported. Use ZeRO-3.")
        functions = reward_functions(reward_funcs, reward_model, reward_processing_class, args.generation_batch_size)
        self.prompts = self._prompts(environment, functions, reward_weights, train_dataset)
        if self.prompts is None and (reward_weights is not None or eval_dataset is not None):
            raise ValueError(
                "`reward_weights` and `eval_dataset` belong to reward functions, and an `environment` is played. "
                "Leave them out; `eval_episodes` is the number of episodes of an evaluation."
            )
        self.environment = environment if self.prompts is None else self.prompts.environment
        self.turns_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._set_max_steps(args)

        given = model
        revision = args.model_init_kwargs.get("revision") if isinstance(args.model_init_kwargs, dict) else None
        loaded = load_model(model, args, put_value_head, quantization_config)
        fresh_adapter = not isinstance(loaded, PeftModel) and begins_as_no_change(peft_config)
        adapted = adapt(loaded, peft_config, args, revision)
        model = base_of(adapted)
        if not isinstance(model, ValueHeadPreTrainedModel):
            raise ValueError(
                f"A {type(model).__name__} has heads of Q-learning, and PPO trains a value head: start from its "
                "language model (`model.base`)."
            )
        model.heads.requires_grad_(True)
        if args.disable_dropout:
            disable_dropout(model)
        if args.num_layers_unfrozen is not None:
            if adapted is not model:
                raise ValueError(
                    "`num_layers_unfrozen` and an adapter both say what is trained. Leave out one of them."
                )
            model.base.requires_grad_(True)
            model.freeze_lower_layers(args.num_layers_unfrozen)
        check_trainable(adapted, model)
        check_generation(model.generation_config)
        if args.history_window is not None:
            model.config.history_window = args.history_window

        if processing_class is None:
            processing_class = load_tokenizer(model, given)
        tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.chat_template:
            # Saved with the model, so that it acts in the contexts it was trained in.
            tokenizer.chat_template = training_chat_template(tokenizer)
        self._tokenizer = tokenizer
        self._conversational = bool(tokenizer.chat_template)
        self.pad_token_id = pad_token_of(tokenizer, model)
        self.decoder_start_token_id = decoder_start_token_id(model)
        self._fitted: dict[str, Any] = {}
        # Where a run goes on is in the checkpoint (`RolloutBatches`): there is nothing to skip.
        args.ignore_data_skip = True

        super().__init__(
            model=adapted,
            args=args,
            data_collator=lambda rows: rows,  # batches are made of rollouts
            train_dataset=train_dataset,
            eval_dataset=self._eval_dataset(args, eval_dataset),
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        check_processes(self)
        self.reference = reference_policy(self, self._load_reference(ref_model, given), fresh_adapter)
        self.batches = RolloutBatches(self)
        self.experience = Experience(self, executor, source)
        self._sums = MetricSums()
        self._rollout_metrics: list[dict[str, float]] = []
        self.latest_episodes: list[dict[str, Any]] = []
        if args.log_completions:
            self.add_callback(EpisodeTableCallback(self, args.log_completions_steps, args.num_completions_to_print))
        if args.eval_strategy != "no":
            self.add_callback(self._evaluation(eval_dataset))
        self.model.add_model_tags(self._tag_names)

    # --------------------------------------------------------------------------------------------------- arguments

    @staticmethod
    def _prompts(
        environment: Any, functions: list[Any], weights: list[float] | None, dataset: Dataset | None
    ) -> RewardedPrompts | None:
        """The prompts to complete, or None where an environment is played."""
        check_dataset_type("train_dataset", dataset)
        if (environment is None) == (not functions):
            raise ValueError(
                "PPO learns by acting: give either an `environment`, or `reward_funcs` (or `reward_model`) with a "
                f"`train_dataset` of prompts. Got {'both' if functions else 'neither'}."
            )
        if environment is not None:
            if dataset is not None:
                raise ValueError(
                    "An `environment` starts its episodes itself, and `train_dataset` would not be read. Leave it "
                    "out, or make an environment of its prompts (`from_reward_function`)."
                )
            return None
        if not isinstance(dataset, Dataset):
            raise ValueError(
                "`reward_funcs` score the completions of a `train_dataset` of prompts, and there is none."
            )
        return RewardedPrompts(dataset, functions, weights)

    def _set_max_steps(self, args: PPOConfig) -> None:
        """Derives the number of steps from the number of prompts; that of turns of an environment nobody knows."""
        if args.max_steps > 0:
            return
        if self.prompts is None:
            raise ValueError(
                "How many steps there are to an epoch nobody knows where an environment decides how many turns its "
                "episodes take: set `max_steps`, the number of optimizer steps."
            )
        rollouts = -(-len(self.prompts.dataset) * args.num_train_epochs // args.episodes_per_rollout)
        args.max_steps = int(rollouts) * args.ppo_epochs * -(-args.episodes_per_rollout // self.turns_per_step)

    def _eval_dataset(self, args: PPOConfig, dataset: Dataset | None) -> Dataset | None:
        """What satisfies the parent class where episodes are played to evaluate."""
        check_dataset_type("eval_dataset", dataset)
        if args.eval_strategy != "no" and dataset is None and self.prompts is not None:
            raise ValueError(
                "There are no prompts to evaluate on: give an `eval_dataset`, or leave out `eval_strategy`."
            )
        return Dataset.from_dict({}) if dataset is None else dataset

    def _evaluation(self, dataset: Dataset | None) -> TrainerCallback:
        """Plays episodes that are not trained on at each evaluation."""
        args = self.args
        environment, seeds = self.environment, args.eval_episodes
        if self.prompts is not None and dataset is not None:
            environment = from_reward_function(self._evaluation_reward, dataset, trl_signature=True)
            seeds = range(len(dataset))
        return EnvironmentEvaluationCallback(
            self,
            environment,
            seeds,
            source=self.experience.source,
            policy_kwargs={"max_new_tokens": args.max_completion_length, "temperature": args.temperature},
            max_turns=1 if self.prompts is not None else args.max_turns,
            batch_size=args.generation_batch_size,
            # What fails in a reward function is no matter of luck.
            max_error_rate=1.0 if self.prompts is None else 0.0,
        )

    def _evaluation_reward(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        """The rewards of completions of which the text is known."""
        texts = [x if isinstance(x, str) else x[0]["content"] for x in completions]
        completion_ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return self.prompts.score(prompts, completions, completion_ids=completion_ids, **columns)  # type: ignore[union-attr]

    def _load_reference(self, ref_model: str | PreTrainedModel | None, given: Any) -> Any:
        """A reference policy that is a model of its own, with a value head so that it is called alike."""
        args = self.args
        if ref_model is None and is_deepspeed_zero3_enabled() and isinstance(given, str) and args.kl_coef > 0:
            adapted = self.accelerator.unwrap_model(self.model) is not self.bare_model
            ref_model = None if adapted else given
        if ref_model is None:
            return None
        if args.kl_coef == 0:
            raise ValueError("With `kl_coef=0` there is no reference policy: leave out `ref_model`.")
        if isinstance(ref_model, nn.Module):
            own = set(map(id, self.model.parameters()))
            if any(id(x) in own for x in ref_model.parameters()):
                raise ValueError(
                    "`ref_model` shares weights with the model in training, and a reference stays as it is. Leave it "
                    "out for the policy that training begins with, or pass a copy."
                )
        arguments = dict(args.model_init_kwargs or {}) if isinstance(ref_model, str) else {}
        if isinstance(ref_model, str):
            arguments.setdefault("dtype", self.bare_model.dtype)
        elif isinstance(ref_model, ValueHeadPreTrainedModel):
            return ref_model
        config = ref_model.config if isinstance(ref_model, PreTrainedModel) else self.bare_model.config
        return put_value_head(ref_model, config, arguments)

    # -------------------------------------------------------------------------------------------------------- data

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As [`~transformers.Trainer.train`]."""
        if not resume_from_checkpoint:
            self.batches = RolloutBatches(self)
            self._rollout_metrics = []
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        return self.batches

    def to_device(self, batch: PPORLBatch) -> PPORLBatch:
        """A batch on the device of the model."""
        moved = self._prepare_inputs({field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)})
        return PPORLBatch(**moved)

    def rollout(self, progress: Progress) -> RolloutStore:
        """Plays, scores and stores the next episodes."""
        store, self.latest_episodes, metrics = self.experience.rollout(progress)
        self._rollout_metrics.append(metrics)
        return store

    # -------------------------------------------------------------------------------------------------------- loss

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """The number of response tokens of all micro-batches of an optimizer step, on all processes."""
        if len(batch_samples) == 0:
            return None
        num_items = sum(batch["response_mask"].sum() for batch in batch_samples).to(device=device, dtype=torch.float32)
        if self.args.world_size > 1:
            num_items = self.accelerator.gather(num_items).sum()
        return num_items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        batch = PPORLBatch(**inputs)
        rows, positions = model_inputs(batch, self.pad_token_id, self.decoder_start_token_id)

        def loss_fn(hidden_states, heads, lm_head, next_hidden_state):
            loss, sums = ppo_loss_from_states(
                gather_states(hidden_states, positions),
                heads,
                lm_head,
                batch,
                num_items=num_items_in_batch,
                cliprange=self.args.cliprange,
                cliprange_value=self.args.cliprange_value,
                vf_coef=self.args.vf_coef,
                entropy_coef=self.args.entropy_coef,
                temperature=self.args.temperature,
            )
            self._sums.add(sums)
            return loss

        outputs = model(**rows, loss_fn=loss_fn)
        # Gradients are averaged over processes, and `num_items_in_batch` counts the tokens of all of them.
        loss = outputs.loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    # ---------------------------------------------------------------------------------------- logs and checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            metrics = ppo_metrics_from_sums(self._sums.pop(self.accelerator))
            metrics.pop("loss", None)
            logs.update(metrics)
            logs.update(mean_metrics(self._rollout_metrics))
            self._rollout_metrics = []
        super().log(logs, start_time)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict:
        """Plays the episodes of evaluation, and returns their metrics, whose names begin with `eval_env/`."""
        if eval_dataset is not None or metric_key_prefix != "eval" or self.args.eval_strategy == "no":
            raise ValueError(
                "`evaluate` plays what the trainer was made to evaluate on: set `eval_strategy` (and, for reward "
                "functions, `eval_dataset`). Other episodes are played by `evaluate_policy`."
            )
        metrics: dict[str, float] = {}
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            self.batches.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.batches.load(checkpoint)


def put_value_head(model: str | PreTrainedModel, config: Any, arguments: dict[str, Any]) -> Any:
    """The model with a value head, from a name or a live language model."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLMWithValueHead.from_pretrained(model, **arguments)
    return AutoModelForCausalLMWithValueHead.from_pretrained(model, **arguments)


def mean_metrics(rollouts: list[dict[str, float]]) -> dict[str, float]:
    """Means over the rollouts between two logs; of what counts up, the latest."""
    if not rollouts:
        return {}
    means = {name: mean([metrics[name] for metrics in rollouts if name in metrics]) for name in rollouts[-1]}
    return means | {name: rollouts[-1][name] for name in ("env/episodes", "env/steps", "kl_coef")}


__all__ = ["PPOTrainer"]
