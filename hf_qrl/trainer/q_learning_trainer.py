# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What the Q-learning trainers share: models with heads, rewarded data, losses summed over actions, metrics."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from ..data import (
    DataCollatorForILQL,
    DataCollatorForSeq2SeqILQL,
    ILQLBatch,
    ILQLSeq2SeqBatch,
    is_conversational,
    prepare_dataset,
    training_chat_template,
)
from ..data.formats import column_names, detect_format
from .adapters import adapt, base_of
from .base_trainer import BaseTrainer
from .callbacks import LMHeadCheckCallback, SampleTableCallback
from .fitting import fit_reward_scaling, fit_to_data
from .inputs import (
    check_dataset_type,
    check_q_heads,
    decoder_start_token_id,
    freeze_and_check,
    load_model,
    load_tokenizer,
    pad_token_of,
)
from .metrics import MetricSums
from .online import OnlineCollectionCallback, check_online
from .processes import check_fsdp_settings, check_processes
from .q_learning_config import QLearningConfig


AnyDataset: TypeAlias = Dataset | IterableDataset


class QLearningTrainer(BaseTrainer):
    """
    Trains a language model with heads on rewarded data, by a loss that subclasses define: [`ILQLTrainer`],
    [`QRLHFTrainer`]. Their arguments are those of [`ILQLTrainer`].
    """

    config_class: ClassVar[type[QLearningConfig]]
    loss_is_scaled_for_ga = True
    value_min: float | None = None
    value_max: float | None = None

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: QLearningConfig | None = None,
        data_collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        quantization_config: Any = None,
        peft_config: PeftConfig | None = None,
        environment: Any = None,
        collect_kwargs: dict[str, Any] | None = None,
        prepare_replay: Callable[[Dataset], Dataset] | None = None,
    ):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = self.config_class(f"{(name or 'model').rstrip('/').split('/')[-1]}-{self._name}")
        if not isinstance(args, self.config_class):
            raise ValueError(f"`args` must be a `{self.config_class.__name__}`, got {type(args).__name__}.")
        self._fitted: dict[str, Any] = {}
        check_fsdp_settings(args)
        check_dataset_type("train_dataset", train_dataset)
        eval_datasets = list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
        for dataset in eval_datasets:
            check_dataset_type("eval_dataset", dataset)

        given, revision = model, None
        if isinstance(model, str) and args.model_init_kwargs:
            revision = args.model_init_kwargs.get("revision")  # type: ignore[union-attr]
        loaded = load_model(model, args, self._put_heads, quantization_config)
        adapted = adapt(loaded, peft_config, args, revision)
        model = base_of(adapted)
        check_q_heads(model)
        for head in model.heads.online():
            head.requires_grad_(True)  # a trainer of another algorithm may have left one frozen
        self._prepare_model(model, args)
        freeze_and_check(model, args)

        every_dataset = [x for x in [train_dataset, *eval_datasets] if x is not None]
        formats = [detect_format(column_names(x))[0] for x in every_dataset]
        if processing_class is None and (environment is not None or set(formats) - {"tokenized"}):
            processing_class = load_tokenizer(model, given)
        tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
        if tokenizer is not None and tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self._conversational = environment is not None or any(is_conversational(x) for x in every_dataset)
        if tokenizer is not None and tokenizer.chat_template and self._conversational:
            # Saved with the model, so that it acts in the contexts it was trained in.
            tokenizer.chat_template = training_chat_template(tokenizer)
        self._tokenizer = tokenizer
        if environment is not None:
            check_online(args, model, tokenizer, train_dataset, collect_kwargs)

        if args.history_window is not None:
            model.config.history_window = args.history_window
        fit_reward_scaling(model, args, train_dataset)

        # What `_prepare_dataset` needs, before the parent class sets `self.model` and `self.args`.
        self._prepare_kwargs = {
            "max_length": args.max_length,
            "truncation_side": args.truncation_side,
            "history_window": model.config.history_window,
            "reward_mean": model.config.reward_mean,
            "reward_std": model.config.reward_std,
            "eos_token_id": model.generation_config.eos_token_id,
            "vocab_size": model.get_output_embeddings().out_features,
            "decoder_start_token_id": decoder_start_token_id(model),
            "num_proc": args.dataset_num_proc,
        }
        self._batch_class = ILQLSeq2SeqBatch if model.config.is_encoder_decoder else ILQLBatch
        if train_dataset is not None:
            with args.main_process_first(local=False, desc="preparing the training data"):
                train_dataset = self._prepare_dataset(train_dataset, "train")
        if eval_dataset is not None:
            with args.main_process_first(local=False, desc="preparing the evaluation data"):
                eval_dataset = self._prepare_eval_dataset(eval_dataset)
        if environment is None or train_dataset is not None:  # otherwise to the first episodes that are played
            self._fit_to_data(model, args, train_dataset)

        if data_collator is None:
            collator = DataCollatorForSeq2SeqILQL if model.config.is_encoder_decoder else DataCollatorForILQL
            data_collator = collator(pad_token_id=pad_token_of(tokenizer, model))
        if args.accelerator_config.dispatch_batches is None:
            # By default one process reads a stream for all, which takes batches that are all of one length.
            args.accelerator_config.dispatch_batches = False
        super().__init__(
            model=adapted,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        check_processes(self)
        # Batches hold no `labels`; the model returns a loss all the same.
        self.can_return_loss = True
        self.label_names: list[str] = []
        self._sums = {"train": MetricSums(), "eval": MetricSums()}
        self.add_callback(self._target_callback())
        self.online: OnlineCollectionCallback | None = None
        if environment is not None:
            self.online = OnlineCollectionCallback(self, environment, collect_kwargs, prepare_replay)
            self.add_callback(self.online)
        if args.clones:
            self.add_callback(LMHeadCheckCallback(self))
        if args.log_completions:
            if tokenizer is None:
                raise ValueError("`log_completions` needs a `processing_class` to decode completions with.")
            self.add_callback(
                SampleTableCallback(
                    self, args.log_completions_steps, args.num_completions_to_print, args.max_completion_length
                )
            )
        self.model.add_model_tags(self._tag_names)

    # ------------------------------------------------------------------------------------- what an algorithm defines

    @staticmethod
    def _put_heads(model: str | PreTrainedModel, config: Any, arguments: dict[str, Any]) -> Any:
        """
        The model with heads, from a name or a live language model, its configuration (of an adapter that of the model
        under it), and arguments of `from_pretrained`.
        """
        raise NotImplementedError

    def _prepare_model(self, model: Any, args: Any) -> None:
        """Raises a `ValueError` for arguments that contradict each other or the model; freezes what is not trained."""
        raise NotImplementedError

    def _fit_to_data(self, model: Any, args: Any, dataset: AnyDataset | None) -> None:
        """Takes from the prepared data what the loss must know: bounds and start of the values."""
        self.value_min, self.value_max = fit_to_data(model, args, dataset)
        self._fitted = {"value_min": self.value_min, "value_max": self.value_max}

    def _target_callback(self) -> TrainerCallback:
        """What moves the targets after an optimizer step."""
        raise NotImplementedError

    def _loss(
        self,
        hidden_states: torch.Tensor,
        heads: Any,
        lm_head: Any,
        batch: Any,
        next_hidden_state: torch.Tensor | None,
        num_items: torch.Tensor | int | None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a batch and sums over its actions; called inside the forward of the model."""
        raise NotImplementedError

    @staticmethod
    def state_values(states: torch.Tensor, heads: Any, lm_head: Any) -> torch.Tensor:
        """What the algorithm takes states `(N, d)` to be worth, `(N,)`."""
        raise NotImplementedError

    def _metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Means of the sums, added up over batches and processes."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------------------- data

    def _prepare_dataset(self, dataset: AnyDataset, name: str) -> AnyDataset:
        return prepare_dataset(
            dataset, self._tokenizer, **self._prepare_kwargs, description=f"Preparing {name} dataset"
        )

    def _prepare_eval_dataset(self, dataset: AnyDataset | dict[str, AnyDataset]) -> Any:
        if isinstance(dataset, dict):
            return {name: self._prepare_dataset(part, name) for name, part in dataset.items()}
        return self._prepare_dataset(dataset, "eval")

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = [x.name for x in dataclasses.fields(self._batch_class)]

    def get_train_dataloader(self) -> DataLoader:
        return super().get_train_dataloader() if self.online is None else self.online.dataloader()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.online is not None and self.args.should_save:
            self.online.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.online is not None and checkpoint is not None:
            self.online.load(checkpoint)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._prepare_eval_dataset(eval_dataset)
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        streams = [
            x for x in (chosen.values() if isinstance(chosen, dict) else [chosen]) if isinstance(x, IterableDataset)
        ]
        if streams and self.accelerator.num_processes > 1:
            raise ValueError(
                "A stream that is evaluated by several processes is filled up with rows that count twice. Evaluate on "
                "a `Dataset` (`Dataset.from_list(list(stream.take(n)))`), or in one process."
            )
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return super().predict(self._prepare_dataset(test_dataset, "test"), *args, **kwargs)

    # -------------------------------------------------------------------------------------------------------- loss

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """The (weighted) number of actions of all micro-batches of an optimizer step, on all processes."""
        if len(batch_samples) == 0:
            return None
        num_items = torch.zeros((), device=device)
        for batch in batch_samples:
            mask = batch["dones"][:, :-1].to(device=device, dtype=torch.float32)
            if batch.get("weight") is not None:
                mask = mask * batch["weight"].to(device).unsqueeze(1)
            num_items = num_items + mask.sum()
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            num_items = self.accelerator.gather(num_items).sum() / self.get_tp_size()
        return num_items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        if ("decoder_input_ids" in inputs) != (self._batch_class is ILQLSeq2SeqBatch):
            needed = "needs" if self._batch_class is ILQLSeq2SeqBatch else "does not read"
            raise ValueError(
                f"The collator made a batch of {sorted(inputs)}, and the model {needed} `decoder_input_ids`. "
                "`DataCollatorForILQL` makes the batches of a causal model, `DataCollatorForSeq2SeqILQL` those of an "
                "encoder-decoder one."
            )
        batch = self._batch_class(**inputs)
        training = model.training
        if training and num_items_in_batch is None:
            raise ValueError("The number of actions of the optimizer step is unknown; the loss cannot be normalised.")

        def loss_fn(hidden_states, heads, lm_head, next_hidden_state):
            loss, sums = self._loss(hidden_states, heads, lm_head, batch, next_hidden_state, num_items_in_batch)
            self._sums["train" if training else "eval"].add(sums)
            return loss

        outputs = model(**self._model_inputs(batch), loss_fn=loss_fn)
        loss = outputs.loss
        if training and self.args.average_tokens_across_devices:
            # Gradients are averaged over processes, and `num_items_in_batch` counts the actions of all of them.
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss

    @staticmethod
    def _model_inputs(batch: ILQLBatch | ILQLSeq2SeqBatch) -> dict[str, torch.Tensor | None]:
        """What of a batch `forward` takes besides a `loss_fn`."""
        names = ["input_ids", "attention_mask", "next_input_ids", "next_attention_mask"]
        if isinstance(batch, ILQLSeq2SeqBatch):
            names.append("decoder_input_ids")
        return {name: getattr(batch, name) for name in names}

    def _mask_repeated_rows(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Takes the actions out of rows that only fill up the last batches of several processes."""
        state = self.accelerator.gradient_state
        if self.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return inputs
        rows = torch.arange(len(inputs["dones"]), device=inputs["dones"].device)
        repeated = self.accelerator.process_index * self.args.eval_batch_size + rows >= state.remainder
        return {**inputs, "dones": inputs["dones"].masked_fill(repeated.unsqueeze(1), 0)}

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        inputs = self._mask_repeated_rows(self._prepare_inputs(inputs))
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs).detach()
            if prediction_loss_only:
                return loss, None, None
            names = ("input_ids", "attention_mask", "decoder_input_ids")
            logits = model(**{name: inputs[name] for name in names if name in inputs}).logits
        # Of an encoder-decoder model, states and actions are positions of the decoder.
        tokens = inputs.get("decoder_input_ids", inputs["input_ids"])
        mask = inputs["dones"][:, :-1].bool()
        rows = torch.arange(mask.shape[0], device=mask.device).unsqueeze(1).expand_as(mask)[mask]
        positions = inputs["actions_ixs"][mask] + 1
        labels = torch.full_like(tokens, -100)
        labels[rows, positions] = tokens[rows, positions]
        return loss, logits, labels

    # ----------------------------------------------------------------------------------------------------- metrics

    def _pop_metrics(self, mode: str) -> dict[str, float]:
        sums = self._sums[mode].pop(self.accelerator)
        if not sums:
            return {}
        return self._metrics(sums)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # The step's own log; evaluation adds its metrics in `evaluation_loop`.
        if "loss" in logs:
            metrics = self._pop_metrics("train")
            metrics.pop("loss", None)
            logs.update(metrics)
        super().log(logs, start_time)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        self._sums["eval"] = MetricSums()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        # Sums over all actions: the parent's average of batch means depends on the batch size.
        for name, number in self._pop_metrics("eval").items():
            output.metrics[f"{metric_key_prefix}_{name}"] = number
        return output


__all__ = ["QLearningTrainer"]
