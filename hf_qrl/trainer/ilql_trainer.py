# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Implicit language Q-learning as a `transformers.Trainer`."""

from typing import Any

from ..losses.ilql import check_options, ilql_loss_from_states, metrics_from_sums
from ..models import AutoModelForCausalLMWithILQLHeads, AutoModelForSeq2SeqLMWithILQLHeads
from ..models.modeling_ilql import ILQLPreTrainedModel
from .fitting import refuse_unknown_returns
from .ilql_config import ILQLConfig
from .q_learning_trainer import QLearningTrainer
from .targets import TargetUpdateCallback


class ILQLTrainer(QLearningTrainer):
    r"""
    Trains a causal or an encoder-decoder language model with ILQL heads on rewarded texts, dialogues or episodes.

    Args:
        model (`str` or `PreTrainedModel`):
            A name or directory of a causal or encoder-decoder language model, with or without ILQL heads (loaded in
            float32 unless `model_init_kwargs` says otherwise), or a live one. A model without heads gets fresh ones.
        args ([`ILQLConfig`], *optional*):
            Training arguments.
        data_collator (`Callable`, *optional*):
            Defaults to [`DataCollatorForILQL`], for an encoder-decoder model [`DataCollatorForSeq2SeqILQL`].
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            Rewarded data: `prompt`, `completion`, `reward` (or `label`); `messages` with `rewards` (one per assistant
            turn) or `reward`; `samples`, `rewards`; or tokenised columns. See [`prepare_dataset`].
        eval_dataset (same, or a `dict` of them, *optional*):
            Data to evaluate the losses on.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer; the model's own if not given. Not needed for tokenised columns.
        compute_metrics (`Callable`, *optional*):
            Takes an [`~transformers.EvalPrediction`] of the policy's logits `(B, n, V)` and labels `(B, n)`, which
            hold each action at its position and -100 elsewhere. Of an encoder-decoder model these are positions in
            `decoder_input_ids`.
        callbacks, optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics:
            As in [`~transformers.Trainer`].
        quantization_config (`BitsAndBytesConfig`, *optional*):
            Quantises the language model, if it is given by name. The heads and the output embedding are not quantised.
        peft_config (`peft.PeftConfig`, *optional*):
            Trains an adapter (`LoraConfig(...)`) in the place of the language model's weights, and the heads whole. A
            copy of it is completed: `target_modules` that are not set are PEFT's for the architecture.
        environment ([`TextEnv`] class, [`EnvironmentInterface`], or a factory of either, *optional*):
            What the policy in training plays, as in [`collect_episodes`]. Its episodes are kept in the folder `replay`
            of the output directory, and trained on beside `train_dataset` (or alone); `collect_every` and what follows
            it in [`QLearningConfig`] say how many and when. Bounds of the values and the scaling of rewards stay those
            of `train_dataset`, or else the bounds become those of the first episodes. Needs `max_steps`.
        collect_kwargs (`dict`, *optional*):
            Further arguments of [`collect_episodes`]: `executor`, `batch_size`, `max_error_rate`, ...
        prepare_replay (`Callable`, *optional*):
            Takes all episodes that are kept (a [`~datasets.Dataset`] of [`episode_features`]) and returns what to
            train on in their place, in a format of `train_dataset`. It can merge equal turns of a small world into
            rows with a `weight`, for instance.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_qrl import ILQLConfig, ILQLTrainer

    >>> data = Dataset.from_list([{"prompt": "2 + 2 =", "completion": " 4", "reward": 1.0}])
    >>> trainer = ILQLTrainer("HuggingFaceTB/SmolLM2-135M", args=ILQLConfig("out"), train_dataset=data)
    >>> trainer.train()  # doctest: +SKIP
    ```
    """

    _tag_names = ["hf_qrl", "ilql"]
    _name = "ILQL"
    _paper = {
        "title": "Offline RL for Natural Language Generation with Implicit Language Q Learning",
        "id": "2206.11871",
    }
    _citation = """@article{snell2022offline,
    title  = {Offline {RL} for Natural Language Generation with Implicit Language {Q} Learning},
    author = {Charlie Snell and Ilya Kostrikov and Yi Su and Mengjiao Yang and Sergey Levine},
    year   = 2022,
    eprint = {arXiv:2206.11871}
}"""
    config_class = ILQLConfig

    @staticmethod
    def _put_heads(model: Any, config: Any, arguments: dict[str, Any]) -> Any:
        if config.is_encoder_decoder:
            return AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(model, **arguments)
        return AutoModelForCausalLMWithILQLHeads.from_pretrained(model, **arguments)

    def _prepare_model(self, model: Any, args: ILQLConfig) -> None:
        if not isinstance(model, ILQLPreTrainedModel):
            raise ValueError(
                f"A {type(model).__name__} has no value head for ILQL to train: use `QRLHFTrainer`, or start from its "
                "language model."
            )
        check_options(
            tau=args.tau,
            target=args.target,
            n_step=args.n_step,
            discount_on=args.discount_on,
            num_q_heads=model.config.num_q_heads,
        )

    def _fit_to_data(self, model: Any, args: ILQLConfig, dataset: Any) -> None:
        if args.target == "mc" and dataset is not None:
            refuse_unknown_returns(dataset)
        super()._fit_to_data(model, args, dataset)

    def _target_callback(self) -> TargetUpdateCallback:
        # Monte-Carlo regression has no bootstrap for a target network to stabilise.
        alpha = 1.0 if self.args.target == "mc" else self.args.alpha
        return TargetUpdateCallback(self, alpha, self.args.steps_for_target_q_sync)

    def _loss(
        self, hidden_states: Any, heads: Any, lm_head: Any, batch: Any, next_hidden_state: Any, num_items: Any
    ) -> Any:
        return ilql_loss_from_states(
            hidden_states,
            heads,
            lm_head,
            batch,
            next_hidden_state,
            num_items=num_items,
            tau=self.args.tau,
            gamma=self.args.gamma,
            cql_scale=self.args.cql_scale,
            awac_scale=self.args.awac_scale,
            awac_beta=self.args.awac_beta,
            target=self.args.target,
            n_step=self.args.n_step,
            discount_on=self.args.discount_on,
            value_min=self.value_min,
            value_max=self.value_max,
            awac_weight_clip=self.args.awac_weight_clip,
        )

    @staticmethod
    def state_values(states: Any, heads: Any, lm_head: Any) -> Any:
        return heads.v(states)

    def _metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return metrics_from_sums(sums, cql_scale=self.args.cql_scale, awac_scale=self.args.awac_scale)


__all__ = ["ILQLTrainer"]
