# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What the training data says of the values: their bounds and where they start."""

from datasets import Dataset, IterableDataset
from transformers.utils import logging

from ..data import return_statistics, value_bounds
from .ilql_config import ILQLConfig
from .inputs import ILQLModel


logger = logging.get_logger(__name__)


def fit_to_data(
    model: ILQLModel, args: ILQLConfig, dataset: Dataset | IterableDataset | None
) -> tuple[float | None, float | None]:
    """
    Start values of the heads, and what the data cannot be trained on.

    Args:
        model ([`ILQLForCausalLM`] or [`ILQLForSeq2SeqLM`]): The model; heads that are a constant get their value.
        args ([`ILQLConfig`]): Training arguments.
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*): Prepared rows.

    Returns:
        `tuple`: lower and upper bound of the targets of Q and V, None where there is none.
    """
    if dataset is None:
        return args.value_min, args.value_max
    if isinstance(dataset, IterableDataset):
        if args.target == "mc":
            raise ValueError(
                '`target="mc"` needs to know that no row is truncated, which a stream cannot tell beforehand; use '
                'a `Dataset`, or `target="td"`.'
            )
        if args.value_min is None or args.value_max is None:
            logger.warning(
                "The data is a stream, so no bounds of the values are derived from it; set `value_min` and "
                "`value_max` where they are known."
            )
        return args.value_min, args.value_max
    statistics = return_statistics(dataset, args.gamma, args.discount_on)
    if args.target == "mc" and statistics.continues_elsewhere:
        raise ValueError(
            '`target="mc"` needs the return of a whole episode, which a row of one turn does not hold (with a '
            'history window, or an encoder-decoder model); use `target="td"`.'
        )
    if args.target == "mc" and statistics.truncated_fraction > 0:
        raise ValueError(
            f"{statistics.truncated_fraction:.1%} of the rows are truncated: their returns are unknown, and "
            '`target="mc"` would take what was paid so far for all there is. Drop them, raise `max_length`, or '
            'use `target="td"`, which bootstraps.'
        )
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


__all__ = ["fit_to_data"]
