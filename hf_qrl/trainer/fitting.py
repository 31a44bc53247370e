# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What the training data says of the values: their bounds, where they start, and what it does not say."""

import math
from typing import Any

from datasets import Dataset, IterableDataset
from transformers.utils import logging

from ..data import episode_returns, is_prepared, return_statistics, standardization, value_bounds
from .q_learning_config import QLearningConfig
from .qrlhf_config import QRLHFConfig


logger = logging.get_logger(__name__)


def fit_reward_scaling(model: Any, args: QLearningConfig, dataset: Dataset | IterableDataset | None) -> None:
    """Puts the constants that standardise the returns of the data into the model's configuration, if asked to."""
    if args.reward_scaling == "standardize" and dataset is not None:
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                'reward_scaling="standardize" needs the mean and deviation of the returns before training, which '
                "a stream cannot give. Set `model.config.reward_mean` and `model.config.reward_std` yourself and "
                "leave `reward_scaling` unset."
            )
        if is_prepared(dataset):
            raise ValueError(
                'reward_scaling="standardize" needs the rewards before they are put on tokens, and the rewards of '
                "tokenised columns are taken as they are. Standardise them yourself, set "
                "`model.config.reward_mean` and `model.config.reward_std`, and leave `reward_scaling` unset."
            )
        model.config.reward_mean, model.config.reward_std = standardization(episode_returns(dataset))


def fit_to_data(
    model: Any, args: QLearningConfig, dataset: Dataset | IterableDataset | None
) -> tuple[float | None, float | None]:
    """
    Start values of the heads, and bounds of their targets.

    Args:
        model ([`ILQLForCausalLM`] or [`ILQLForSeq2SeqLM`]): The model; heads that are a constant get their value.
        args ([`QLearningConfig`]): Training arguments.
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*): Prepared rows.

    Returns:
        `tuple`: lower and upper bound of the targets of Q and V, None where there is none.
    """
    if dataset is None:
        return args.value_min, args.value_max
    if isinstance(dataset, IterableDataset):
        if args.value_min is None or args.value_max is None:
            logger.warning(
                "The data is a stream, so no bounds of the values are derived from it; set `value_min` and "
                "`value_max` where they are known."
            )
        return args.value_min, args.value_max
    statistics = return_statistics(dataset, args.gamma, args.discount_on)
    if statistics.reward_min == statistics.reward_max == 0:
        logger.warning(
            "Every reward is zero, so there is nothing to learn from but the data itself. Rows that were cut at "
            f"`max_length` ({statistics.truncated_fraction:.1%} of all are truncated) lose rewards beyond the cut."
        )
    low, high = value_bounds(statistics, args.gamma)
    value_min = low if args.value_min is None else args.value_min
    value_max = high if args.value_max is None else args.value_max
    if not value_min <= value_max:
        raise ValueError(
            f"The bounds of the values cross: [{value_min:g}, {value_max:g}], where the data gives "
            f"[{low:g}, {high:g}]. Set both `value_min` and `value_max`."
        )
    logger.info(f"Targets of Q and V are clamped to [{value_min:g}, {value_max:g}].")
    if model.heads.is_constant():
        model.heads.set_constant(min(max(statistics.mean_return, value_min), value_max))
    return value_min, value_max


def fit_q_min(args: QRLHFConfig, dataset: Dataset | IterableDataset | None, value_min: float | None) -> float:
    """
    Where the conservative term pulls the Q-values of tokens that the data does not take: `args.q_min`, or the smallest
    return-to-go of the data.

    Args:
        args ([`QRLHFConfig`]): Training arguments.
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*): Prepared rows.
        value_min (`float`, *optional*): Lower bound of the targets.

    Raises:
        ValueError: If `args.q_min` lies above the smallest return, or is needed and not given.
    """
    if not isinstance(dataset, Dataset):
        if args.q_min is None and args.conservative_scale > 0:
            raise ValueError(
                "The smallest return is not known beforehand of a stream, or without training data: set `q_min` to a "
                "number that no return-to-go lies below, or `conservative_scale=0`."
            )
        return 0.0 if args.q_min is None else args.q_min
    statistics = return_statistics(dataset, args.gamma, args.discount_on)
    smallest = statistics.discounted_return_min
    if args.q_min is not None and args.q_min > smallest and args.conservative_scale > 0:
        raise ValueError(
            f"`q_min` is {args.q_min}, and a return-to-go of the data is {smallest}: tokens that the data does not "
            "take would be pulled above those it takes, and the policy would choose them. Leave `q_min` out, or set "
            f"it to {smallest} or less."
        )
    if args.q_min is not None:
        return args.q_min
    if args.conservative_scale > 0 and statistics.continues_elsewhere and not statistics.pays_only_at_end:
        # A row of one turn does not tell what its episode is worth.
        if value_min is None or not math.isfinite(value_min):
            raise ValueError(
                "The rows are single turns of undiscounted episodes, whose smallest return they do not tell: set "
                "`q_min` to it, or `gamma` below 1."
            )
        return value_min
    return smallest


def refuse_unknown_returns(dataset: Dataset | IterableDataset) -> None:
    """Raises a `ValueError` for prepared rows that do not tell the return of their episode."""
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            '`target="mc"` needs to know that no row is truncated, which a stream cannot tell beforehand; use '
            'a `Dataset`, or `target="td"`.'
        )
    statistics = return_statistics(dataset, gamma=1.0)
    if statistics.continues_elsewhere:
        raise ValueError(
            '`target="mc"` needs the return of a whole episode, which a row of one turn does not hold (with a '
            'history window, or an encoder-decoder model); use `target="td"`.'
        )
    if statistics.truncated_fraction > 0:
        raise ValueError(
            f"{statistics.truncated_fraction:.1%} of the rows are truncated: their returns are unknown, and "
            '`target="mc"` would take what was paid so far for all there is. Drop them, raise `max_length`, or '
            'use `target="td"`, which bootstraps.'
        )


__all__ = ["fit_q_min", "fit_reward_scaling", "fit_to_data", "refuse_unknown_returns"]
