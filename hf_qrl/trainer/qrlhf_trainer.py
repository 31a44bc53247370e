# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Autoregressive Q-learning with conservative regularisation as a `transformers.Trainer`."""

from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.integrations import is_deepspeed_zero3_enabled

from ..losses.q_learning_from_states import q_learning_loss_from_states, q_learning_metrics_from_sums
from ..losses.vocabulary import vocabulary_maximum
from ..models import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForSeq2SeqLMWithILQLHeads,
    ILQLCausalLMConfig,
    ILQLSeq2SeqLMConfig,
    LlamaDuelingQConfig,
    LlamaDuelingQForCausalLM,
)
from ..models.modeling_ilql import ILQLPreTrainedModel
from .fitting import fit_q_min
from .processes import fsdp_is_asked_for
from .q_learning_trainer import QLearningTrainer
from .qrlhf_config import QRLHFConfig
from .targets import ModelAverage, ModelTargetUpdateCallback, TargetUpdateCallback


class QRLHFTrainer(QLearningTrainer):
    r"""
    Trains Q-values of tokens by autoregressive Q-learning with conservative regularisation (Chebotar et al., 2023,
    arXiv 2309.10150; on language, as llama-qrlhf sets it out): the target of a token is the largest Q-value of the
    next one, and the Q-values of tokens that the data does not take are pulled to the smallest return.

    It takes a [`LlamaDuelingQForCausalLM`], any Llama (which gets a fresh dueling head), or a model with one ILQL head
    of any kind, whose value head is left alone. Data and arguments are otherwise those of [`ILQLTrainer`].

    Args:
        model (`str` or `PreTrainedModel`):
            A name or directory of a language model, with or without heads, or a live one. A Llama without heads
            becomes a [`LlamaDuelingQForCausalLM`], another model one with a dueling ILQL head.
        args ([`QRLHFConfig`], *optional*):
            Training arguments.
        data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks, optimizers,
        optimizer_cls_and_kwargs, preprocess_logits_for_metrics, quantization_config, peft_config, environment,
        collect_kwargs, prepare_replay:
            As in [`ILQLTrainer`].

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_qrl import QRLHFConfig, QRLHFTrainer

    >>> data = Dataset.from_list([{"prompt": "2 + 2 =", "completion": " 4", "reward": 1.0}])
    >>> trainer = QRLHFTrainer("HuggingFaceTB/SmolLM2-135M", args=QRLHFConfig("out"), train_dataset=data)
    >>> trainer.train()  # doctest: +SKIP
    ```
    """

    _tag_names = ["hf_qrl", "qrlhf"]
    _name = "QRLHF"
    _paper = {
        "title": "Q-Transformer: Scalable Offline Reinforcement Learning via Autoregressive Q-Functions",
        "id": "2309.10150",
    }
    _citation = """@article{chebotar2023qtransformer,
    title  = {Q-Transformer: Scalable Offline Reinforcement Learning via Autoregressive {Q}-Functions},
    author = {Yevgen Chebotar and Quan Vuong and Karol Hausman and others},
    year   = 2023,
    eprint = {arXiv:2309.10150}
}"""
    config_class = QRLHFConfig
    average: ModelAverage | None = None
    q_min = 0.0

    @staticmethod
    def _put_heads(model: Any, config: Any, arguments: dict[str, Any]) -> Any:
        if config.model_type in ("llama", LlamaDuelingQConfig.model_type):
            if isinstance(model, LlamaForCausalLM):
                return LlamaDuelingQForCausalLM.from_base(model, **arguments)
            return LlamaDuelingQForCausalLM.from_pretrained(model, **arguments)
        if not isinstance(config, (ILQLCausalLMConfig, ILQLSeq2SeqLMConfig)):
            arguments = {"head_type": "dueling", "num_q_heads": 1, **arguments}
        if config.is_encoder_decoder:
            return AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(model, **arguments)
        return AutoModelForCausalLMWithILQLHeads.from_pretrained(model, **arguments)

    def _prepare_model(self, model: Any, args: QRLHFConfig) -> None:
        if model.config.num_q_heads != 1:
            raise ValueError(
                f"Autoregressive Q-learning trains one Q-head, and the model has {model.config.num_q_heads}: build it "
                "with `num_q_heads=1`."
            )
        if args.target_network == "model":
            if is_deepspeed_zero3_enabled() or fsdp_is_asked_for(args):
                raise ValueError(
                    '`target_network="model"` averages whole weights, which ZeRO-3 and FSDP spread over the '
                    'processes. Use `target_network="head"`.'
                )
            if args.freeze_base:
                raise ValueError(
                    '`target_network="model"` averages the language model, which `freeze_base=True` leaves as it is. '
                    'Use `target_network="head"`.'
                )
            if model.config.head_type == "tied":
                raise ValueError(
                    'A target head of type "tied" reads the output embedding of the model in training, not the one '
                    'that `target_network="model"` would average. Use `target_network="head"`, or another head.'
                )
        if not args.clones and args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = True  # the output embedding has no part in the loss
        if isinstance(model, ILQLPreTrainedModel):
            model.heads.v.requires_grad_(False)  # it has no part in the loss, for which other processes would wait

    def _fit_to_data(self, model: Any, args: QRLHFConfig, dataset: Any) -> None:
        super()._fit_to_data(model, args, dataset)
        self.q_min = fit_q_min(args, dataset, self.value_min)
        self._fitted["q_min"] = self.q_min

    def _target_callback(self) -> TargetUpdateCallback:
        callback = ModelTargetUpdateCallback if self.args.target_network == "model" else TargetUpdateCallback
        return callback(self, 1 - self.args.ema_beta, self.args.ema_update_every, self.args.ema_warmup_steps)

    def _loss(
        self, hidden_states: Any, heads: Any, lm_head: Any, batch: Any, next_hidden_state: Any, num_items: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        averaged, averaged_next = self._average_states(batch)
        return q_learning_loss_from_states(
            hidden_states,
            heads,
            lm_head,
            batch,
            next_hidden_state,
            num_items=num_items,
            target_hidden_states=averaged,
            target_next_hidden_state=averaged_next,
            gamma=self.args.gamma,
            discount_on=self.args.discount_on,
            n_step=self.args.n_step,
            mc_floor=self.args.mc_floor,
            double_q=self.args.double_q,
            q_min=self.q_min,
            conservative_scale=self.args.conservative_scale,
            cloning_scale=self.args.cloning_scale,
            value_min=self.value_min,
            value_max=self.value_max,
        )

    @staticmethod
    def state_values(states: Any, heads: Any, lm_head: Any) -> Any:
        return heads.target_q[0].on_language_model(states, lm_head, vocabulary_maximum)[0]

    def _metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return q_learning_metrics_from_sums(
            sums, conservative_scale=self.args.conservative_scale, cloning_scale=self.args.cloning_scale
        )

    # ---------------------------------------------------------------------------------------- the average of the model

    def _average_states(self, batch: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Hidden states of the averaged model; None where the target network is the head alone."""
        if self.average is None:
            return None, None
        return self.average.hidden_states(**self._model_inputs(batch))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.args.target_network == "model" and checkpoint is not None:
            self.average = ModelAverage(self.accelerator.unwrap_model(self.model))
            self.average.load(checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.average is not None:
            self.average.load(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.average is not None and self.args.should_save:
            self.average.save(output_dir)


__all__ = ["QRLHFTrainer"]
