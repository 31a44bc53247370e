# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Prompts and what scores their completions: an environment of one turn whose rewards come in batches."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..environments.adapters import from_reward_function
from ..environments.adapters.coroutines import finished


RewardFunction = Callable[..., Any]


class RewardModel:
    """
    A reward function made of a sequence classification model with one output.

    Args:
        model (`str` or `PreTrainedModel`): The model, or its name.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): Its tokenizer; by default that of its name.
        batch_size (`int`): Largest number of texts that are scored at once.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        batch_size: int = 32,
    ):
        name = model if isinstance(model, str) else model.config._name_or_path
        if isinstance(model, str):
            model, info = AutoModelForSequenceClassification.from_pretrained(
                model, num_labels=1, dtype=torch.float32, output_loading_info=True
            )
            if info["missing_keys"]:
                raise ValueError(
                    f"{name!r} lacks weights of a reward model ({sorted(info['missing_keys'])}), which would be "
                    "random: give a sequence classification model with one output."
                )
        if getattr(model.config, "num_labels", None) != 1:
            raise ValueError(
                f"A reward model has one output, and `{type(model).__name__}` has "
                f"{getattr(model.config, 'num_labels', 'none')}: load it with "
                "`AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)`."
            )
        self.__name__ = name.rstrip("/").split("/")[-1] or type(model).__name__
        self.model: Any = model.requires_grad_(False).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(name) if tokenizer is None else tokenizer
        self.batch_size = batch_size
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    @torch.no_grad()
    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        """The scores of completions; conversations are read with the chat template of the reward model."""
        texts = [
            prompt + completion
            if isinstance(prompt, str)
            else self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        scores: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            batch = self.tokenizer(
                texts[start : start + self.batch_size],
                padding=True,
                return_tensors="pt",
                # A template has written its own.
                add_special_tokens=isinstance(prompts[0], str),
            ).to(self.model.device)
            scores += self.model(**batch).logits[:, 0].float().tolist()
        return scores


class RewardedPrompts:
    """
    Prompts that are completed once each, and reward functions.

    Args:
        dataset (`Dataset`):
            Rows with a `prompt`, a string or messages; other columns are handed to the reward functions.
        reward_funcs (`list` of `Callable`):
            TRL's reward functions: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`. `None`
            is for a completion that it does not apply to.
        weights (`list[float]`, *optional*):
            Weight of each in the reward, 1 if not given.
    """

    def __init__(
        self, dataset: Dataset, reward_funcs: Sequence[RewardFunction], weights: Sequence[float] | None = None
    ):
        if "prompt" not in dataset.column_names:
            raise ValueError(f"The prompts are a dataset with a column `prompt`, got {dataset.column_names}.")
        if weights is not None and len(weights) != len(reward_funcs):
            raise ValueError(f"Got {len(weights)} `reward_weights` for {len(reward_funcs)} reward functions.")
        if weights is not None and not all(math.isfinite(weight) for weight in weights):
            raise ValueError(f"`reward_weights` must be finite numbers, got {list(weights)}.")
        self.dataset, self.reward_funcs = dataset, list(reward_funcs)
        self.weights = [1.0] * len(self.reward_funcs) if weights is None else list(weights)
        self.names: list[str] = []
        for function in self.reward_funcs:
            name = getattr(function, "__name__", type(function).__name__)
            while name in self.names:  # as that of a second lambda
                name += "_"
            self.names.append(name)
        # The rewards come later, in batches.
        self.environment = from_reward_function(_no_reward, dataset)

    def seeds(self, first: int, count: int, seed: int) -> list[int]:
        """Seeds that play the prompts `first` to `first + count` of an endless series of shuffled passes."""
        n = len(self.dataset)
        seeds: list[int] = []
        for number in range(first, first + count):
            turn, place = divmod(number, n)
            if place == 0 or not seeds:
                order = np.random.default_rng([seed, turn]).permutation(n)
            # Every seed is another one, and plays the row that it leaves when divided by their number.
            seeds.append((int(order[place]) + n * turn) % (2**32 - 2**32 % n))
        return seeds

    def reward(self, rows: list[dict[str, Any]]) -> None:
        """Puts the rewards into the rows of played episodes, in one call of each function, with what each gave."""
        if not rows:
            return
        examples = [self.dataset[row["seed"] % len(self.dataset)] for row in rows]
        replies = [row["messages"][-1]["content"] for row in rows]
        columns = {
            name: [example[name] for example in examples]
            for name in self.dataset.column_names
            if name not in ("prompt", "completion")
        }
        scores = self.scores(
            prompts=[example["prompt"] for example in examples],
            completions=[
                reply if isinstance(example["prompt"], str) else [{"role": "assistant", "content": reply}]
                for example, reply in zip(examples, replies, strict=True)
            ],
            completion_ids=[row["turn_token_ids"][0] for row in rows],
            **columns,
        )
        for row, parts in zip(rows, scores, strict=True):
            row["turn_reward_components"] = [parts]
            row["return"] = self.weighted(parts)
            row["turn_rewards"] = [row["return"]]

    def score(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        """The weighted sum of the reward functions, as one function of TRL's kind."""
        return [self.weighted(parts) for parts in self.scores(prompts, completions, **columns)]

    def weighted(self, scores: dict[str, float]) -> float:
        """The weighted sum of the scores of a completion."""
        weights = dict(zip(self.names, self.weights, strict=True))
        return sum(weights[name] * score for name, score in scores.items())

    def scores(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[dict[str, float]]:
        """What each reward function gives each completion that it applies to."""
        found: list[dict[str, float]] = [{} for _ in prompts]
        for name, function in zip(self.names, self.reward_funcs, strict=True):
            scores = finished(function(prompts=prompts, completions=completions, **columns))
            if not isinstance(scores, Sequence | np.ndarray | torch.Tensor) or len(scores) != len(prompts):
                raise ValueError(
                    f"The reward function `{name}` must return one number per completion, {len(prompts)}, got "
                    f"{scores!r}."
                )
            for i, score in enumerate(scores):
                if score is None:
                    continue
                if not math.isfinite(score):
                    raise ValueError(f"The reward function `{name}` returned {score} for {completions[i]!r}.")
                found[i][name] = float(score)
        unscored = [completion for completion, scores in zip(completions, found, strict=True) if not scores]
        if unscored:
            raise ValueError(f"No reward function has a score for {unscored[0]!r}: at least one must return a number.")
        return found


def reward_functions(
    reward_funcs: Any, reward_model: str | PreTrainedModel | None, tokenizer: Any, batch_size: int
) -> list[RewardFunction]:
    """The reward functions that a user names, alone or in a list, models among them by their names or live."""
    given = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if reward_model is not None:
        given = [*given, reward_model]
    return [
        RewardModel(function, tokenizer, batch_size) if isinstance(function, (str, PreTrainedModel)) else function
        for function in given
    ]


def _no_reward(prompt: str, completion: str) -> float:
    return 0.0


__all__ = ["RewardModel", "RewardedPrompts", "reward_functions"]
