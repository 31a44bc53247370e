# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The policy that is being trained, played in an environment: its return is a metric like any other."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, set_seed

from ..rollouts import EvaluationResult, ModelPolicy, evaluate_policy
from ..rollouts.plans import list_of_seeds


class EnvironmentEvaluationCallback(TrainerCallback):
    """
    Evaluates the policy in an environment at each evaluation of the trainer, and logs what comes of it as
    `eval_env/return`, `eval_env/success_rate` and so on ([`EvaluationResult.metrics`]). They are among the metrics of
    `trainer.evaluate()`, so `metric_for_best_model="eval_env/return"` with `greater_is_better=True` selects the best
    checkpoint, and `EarlyStoppingCallback` can watch them.

    The episodes are the same at each evaluation. Training does not notice: the random state and the mode of the model
    are as they were. With several processes each plays all of them, as weights may be spread over the processes, and
    the numbers of the first one count.

    Args:
        trainer ([`ILQLTrainer`]):
            The trainer, with a tokenizer.
        env:
            What is played, as in [`collect_episodes`].
        seeds (`int` or `Iterable[int]`):
            Seeds of the episodes, or how many of those for validation.
        every (`int`, *optional*):
            Number of optimizer steps after which it is evaluated too, whether the trainer evaluates then or not.
        policy_kwargs (`dict`, *optional*):
            Arguments of [`ModelPolicy`]: `max_new_tokens`, `beta`, `do_sample`, ...
        prefix (`str`, *optional*, defaults to `"eval_env"`):
            What the names of the metrics begin with; with several environments one each.
        evaluate_kwargs:
            Further arguments of [`evaluate_policy`]: `max_turns`, `scale`, `batch_size`, ... Failures of the
            environment are counted (`eval_env/n_error`) and do not end the training, unless `max_error_rate` is given.
            There is no `output_dir`: the weights differ at each evaluation, which a folder cannot tell.

    Attributes:
        result ([`EvaluationResult`] or `None`):
            The latest evaluation, with its transcripts.

    Raises:
        ValueError: If the trainer has no tokenizer, `every` is less than 1, there is no seed, or an `output_dir` is
            given.

    Examples:

    ```python
    >>> best = {"metric_for_best_model": "eval_env/return", "greater_is_better": True, "load_best_model_at_end": True}
    >>> args = ILQLConfig("out", eval_strategy="steps", eval_steps=100, save_steps=100, **best)
    >>> trainer = ILQLTrainer(model, args, train_dataset=episodes, eval_dataset=held_out)
    >>> trainer.add_callback(EnvironmentEvaluationCallback(trainer, MyGame, 50, max_turns=20))
    ```
    """

    def __init__(
        self,
        trainer: Any,
        env: Any,
        seeds: int | Iterable[int],
        every: int | None = None,
        *,
        policy_kwargs: dict[str, Any] | None = None,
        prefix: str = "eval_env",
        **evaluate_kwargs: Any,
    ) -> None:
        if trainer._tokenizer is None:
            raise ValueError("Playing needs a tokenizer: give the trainer a `processing_class`.")
        if every is not None and every < 1:
            raise ValueError(f"`every` counts optimizer steps and must be at least 1, got {every}.")
        if evaluate_kwargs.get("output_dir") is not None:
            raise ValueError(
                "`output_dir` would give each evaluation the episodes of the first one, as a run that goes on. The "
                "episodes of the latest are in `callback.result.transcripts`: `to_jsonl` writes them."
            )
        self.trainer, self.env, self.every, self.prefix = trainer, env, every, prefix
        self.seeds = list_of_seeds(seeds, evaluate_kwargs.get("split", "validation"))
        self.policy_kwargs = policy_kwargs or {}
        self.evaluate_kwargs = {"max_error_rate": 1.0, **evaluate_kwargs}
        self.result: EvaluationResult | None = None
        self._latest: tuple[int, dict[str, float]] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Those that read the metrics of an evaluation, such as early stopping, have to come after the one that adds to
        # them. A new list, as the old one is being gone through.
        handler = self.trainer.callback_handler
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]
        self._latest = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every is not None and state.global_step % self.every == 0:
            self._evaluate(state.global_step)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        # The very dict that `evaluate` returns and the best checkpoint is chosen by. Outside of training the weights
        # can be others at the same step.
        if not self.trainer.is_in_train or self._latest is None or self._latest[0] != state.global_step:
            self._evaluate(state.global_step)
        if metrics is not None and self._latest is not None:
            metrics.update(self._latest[1])

    def _evaluate(self, step: int) -> None:
        policy = ModelPolicy(self.trainer.bare_model, self.trainer._tokenizer, **self.policy_kwargs)
        with random_state_kept(self.trainer.bare_model.device):
            self.result = evaluate_policy(policy, self.env, self.seeds, **self.evaluate_kwargs)
        numbers = [{f"{self.prefix}/{name}": number for name, number in self.result.metrics().items()}]
        if self.trainer.accelerator.num_processes > 1:
            # Rounding may differ, and all processes have to agree on the best checkpoint.
            broadcast_object_list(numbers)
        self._latest = (step, numbers[0])
        self.trainer.log(dict(numbers[0]))


@contextmanager
def random_state_kept(device: torch.device, seed: list[int] | None = None) -> Iterator[None]:
    """Leaves the global random state as it was, from which environments may draw; meanwhile it follows from a seed."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            if seed is not None:
                set_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


__all__ = ["EnvironmentEvaluationCallback", "random_state_kept"]
