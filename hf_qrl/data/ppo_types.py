# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The elements and batches of proximal policy optimisation, with trlX's names, fields and order."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch


@dataclass
class PPORLElement:
    """
    One response of a policy, and what is known of it. There is one number to each of its tokens.

    Args:
        query_tensor (`torch.LongTensor` of shape `(Q,)`):
            Tokens that the response was sampled after.
        response_tensor (`torch.LongTensor` of shape `(R,)`):
            Sampled tokens, at least one.
        logprobs (`torch.FloatTensor` of shape `(R,)`):
            Log-probabilities of the tokens under the policy that sampled them.
        values (`torch.FloatTensor` of shape `(R,)`):
            Values of the states that they were sampled in.
        rewards (`torch.FloatTensor` of shape `(R,)`):
            Rewards of the tokens.
        advantages, returns (`torch.FloatTensor` of shape `(R,)`, *optional*):
            What to learn from. Those of a turn depend on the turns after it.

    Raises:
        ValueError: If there is no token to learn from, or not one number to each.
    """

    query_tensor: torch.Tensor
    response_tensor: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("query_tensor", "response_tensor"):
            tokens = getattr(self, name)
            if tokens.ndim != 1 or len(tokens) == 0 or tokens.is_floating_point():
                raise ValueError(
                    f"`{name}` must be a row of at least one token, got {tokens.dtype} of shape {tuple(tokens.shape)}."
                )
        for name in ("logprobs", "values", "rewards", "advantages", "returns"):
            numbers = getattr(self, name)
            if numbers is not None and numbers.shape != self.response_tensor.shape:
                raise ValueError(
                    f"`{name}` must have one number to each of the {len(self.response_tensor)} response tokens, got "
                    f"shape {tuple(numbers.shape)}."
                )


@dataclass
class PPORLBatch:
    """
    A batch of responses. Queries are padded on the left and responses on the right, so that they meet.

    Args:
        query_tensors (`torch.LongTensor` of shape `(B, Q)`), response_tensors (`torch.LongTensor` of shape `(B, R)`):
            Tokens.
        logprobs, values, rewards (`torch.FloatTensor` of shape `(B, R)`):
            As in [`PPORLElement`], 0 on padding.
        advantages, returns (`torch.FloatTensor` of shape `(B, R)`, *optional*):
            As in [`PPORLElement`], 0 on padding.
        query_mask (`torch.BoolTensor` of shape `(B, Q)`), response_mask (shape `(B, R)`), *optional*:
            Which tokens are no padding; [`collate_ppo`] makes them.
    """

    query_tensors: torch.Tensor
    response_tensors: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    query_mask: torch.Tensor | None = None
    response_mask: torch.Tensor | None = None

    def masks(self, pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        `query_mask (B, Q)` and `response_mask (B, R)`. Where the batch has none they are derived from the padding: the
        pad tokens that a query begins with and a response ends with. So a response that ends with an eos token that
        pads, too, loses it; [`collate_ppo`] keeps masks that know better.

        Args:
            pad_token_id (`int`): Token that fills up rows.
        """
        query_mask, response_mask = self.query_mask, self.response_mask
        if query_mask is None:
            query_mask = (self.query_tensors != pad_token_id).cummax(1).values
        if response_mask is None:
            response_mask = (self.response_tensors != pad_token_id).flip(1).cummax(1).values.flip(1)
        return query_mask.bool(), response_mask.bool()


def collate_ppo(elements: Sequence[PPORLElement], pad_token_id: int) -> PPORLBatch:
    """
    Makes a batch of elements, of which all or none have advantages and returns.

    Args:
        elements (`Sequence[PPORLElement]`): Elements, at least one.
        pad_token_id (`int`): Token that fills up rows.

    Raises:
        ValueError: If there are none, or some lack what others have.
    """
    if len(elements) == 0:
        raise ValueError("There are no elements to make a batch of.")
    columns = {}
    for field in fields(PPORLElement):
        rows = [getattr(element, field.name) for element in elements]
        if all(row is None for row in rows):
            continue
        if any(row is None for row in rows):
            raise ValueError(f"Some of the elements have no `{field.name}`, and others do.")
        tokens = field.name.endswith("_tensor")
        side = "left" if field.name == "query_tensor" else "right"
        columns[field.name + "s" * tokens] = padded(rows, pad_token_id if tokens else 0, side)
    for name, side in (("query", "left"), ("response", "right")):
        rows = [torch.ones_like(getattr(element, f"{name}_tensor"), dtype=torch.bool) for element in elements]
        columns[f"{name}_mask"] = padded(rows, False, side)
    return PPORLBatch(**columns)


def padded(rows: Sequence[torch.Tensor], value: float, side: str) -> torch.Tensor:
    """Rows of one length, filled up with a value on the `"left"` or `"right"`."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)


__all__ = ["PPORLBatch", "PPORLElement", "collate_ppo"]
