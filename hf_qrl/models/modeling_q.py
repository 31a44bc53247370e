# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What models with Q-heads have in common: a policy made of the language model and the heads."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from .heads import candidate_values
from .modeling_base import PreTrainedModelWithHeads
from .sharding import gathered, is_partitioned


class QPreTrainedModel(PreTrainedModelWithHeads, GenerationMixin):
    """
    A language model with Q-heads (`heads`), by which its policy departs from it.
    """

    # Arguments of `forward` that override the configuration's policy.
    policy_arguments: ClassVar[tuple[str, ...]] = ("beta",)
    language_model_policy = {"beta": 0.0}

    def _take_over(self, base: PreTrainedModel) -> None:
        super()._take_over(base)
        if any(map(is_partitioned, base.parameters())):
            self.heads.update_targets(1.0)  # the online heads were rounded

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """
        Resizes the embeddings and the Q-heads; in each Q-head a new token starts as the mean of the old ones.
        """
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        vocab_size = self.get_output_embeddings().out_features
        for head in (*self.heads.q, *self.heads.target_q):
            with gathered(head.parameters(), modify=True):
                head.resize(vocab_size)
        return embeddings

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """
        As [`~transformers.GenerationMixin.generate`]; `beta=` (and what else the configuration says of the policy and
        `forward` takes) overrides the configuration for this call.
        """
        beta = kwargs.get("beta")
        if beta is not None and not (isinstance(beta, (int, float)) and math.isfinite(beta)):
            raise ValueError(f"`beta` must be a finite number, the same for all rows, got {beta!r}.")
        for name in self.policy_arguments:
            if kwargs.get(name) is not None and kwargs.get("guidance_scale") is not None:
                raise ValueError(
                    f"Guidance runs the model a second time without `{name}`; set `model.config.{name}` instead."
                )
            if kwargs.get(name) is not None and kwargs.get("assistant_model") is not None:
                raise ValueError(
                    f"Assisted decoding hands every argument to the draft model too, which has no `{name}`; set "
                    f"`model.config.{name}` instead."
                )
        if self.config.policy_top_k is not None:
            processors = kwargs.get("logits_processor") or []
            kwargs["logits_processor"] = LogitsProcessorList([*processors, SupportCheck()])
        return super().generate(*args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~transformers.GenerationMixin.generate_batch`], with the policy of the configuration."""
        for name in self.policy_arguments:
            if name in kwargs:
                raise ValueError(f"`generate_batch` would ignore `{name}`; set `model.config.{name}` instead.")
        return super().generate_batch(*args, **kwargs)


def on_support(
    logits: torch.Tensor, top_k: int | None, score: Callable[[torch.Tensor, Callable[..., Any] | None], torch.Tensor]
) -> torch.Tensor:
    """
    Logits of a policy on its support, -inf elsewhere.

    Args:
        logits (`torch.Tensor` of shape `(..., V)`): Those of the language model.
        top_k (`int`, *optional*): The support is the `top_k` likeliest tokens of the language model, or every token.
        score (`Callable`): Called with the language model's logits of the support `(..., k)` and the `evaluate` with
            which a [`QHead`] gives the values of the same tokens; returns the policy's logits of the support.

    Returns:
        `torch.Tensor` of shape `(..., V)`.
    """
    if top_k is None or top_k >= logits.shape[-1]:
        return score(logits, None)
    support = logits.topk(top_k, dim=-1).indices
    scores = score(logits.gather(-1, support), partial(candidate_values, candidates=support))
    return torch.full_like(logits, -torch.inf, dtype=scores.dtype).scatter_(-1, support, scores)


class SupportCheck(LogitsProcessor):
    """Stops when other processors (bad words, a minimal length) have forbidden all that `policy_top_k` left."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        if not (scores > -torch.inf).any(-1).all():
            raise ValueError(
                "Every token in the support of the policy is forbidden by arguments of `generate` (`bad_words_ids`, "
                "`min_new_tokens`, ...). Raise `model.config.policy_top_k`."
            )
        return scores


__all__ = ["QPreTrainedModel"]
