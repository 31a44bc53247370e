# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The elements and batches of implicit language Q-learning, with trlX's names, fields and order.

A row is one trajectory of `L` tokens with `T` actions. An action is one token the model produced; it is known by the
position of its *state*, the token before it, so `input_ids[actions_ixs[j] + 1]` is the token taken by action `j`.
"""

from dataclasses import dataclass

import torch


@dataclass
class ILQLElement:
    """
    One trajectory for a causal language model.

    Args:
        input_ids (`torch.LongTensor` of shape `(L,)`):
            All tokens of the trajectory.
        attention_mask (`torch.LongTensor` of shape `(L,)`):
            Ones.
        rewards (`torch.FloatTensor` of shape `(T,)`):
            Reward of each action.
        states_ixs (`torch.LongTensor` of shape `(T + 1,)`):
            Positions of the states: `actions_ixs` followed by the final state.
        actions_ixs (`torch.LongTensor` of shape `(T,)`):
            Positions of the states in which the actions were taken.
        dones (`torch.LongTensor` of shape `(T + 1,)`):
            The name is inverted, as in trlX: 1 = not terminal, 0 = the final state (or padding, in a batch).
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    rewards: torch.Tensor
    states_ixs: torch.Tensor
    actions_ixs: torch.Tensor
    dones: torch.Tensor


@dataclass
class ILQLSeq2SeqElement:
    """
    One trajectory for an encoder-decoder model. `input_ids` and `attention_mask` are the encoder's; the indices point
    into `decoder_input_ids`. The other fields are those of [`ILQLElement`].

    The decoder reads the decoder start token first, so the first token of the output is an action, whose state is
    position 0. (trlX's elements lack that token, and there the first token is never trained.)

    Args:
        input_ids (`torch.LongTensor` of shape `(L,)`):
            Tokens of the encoder.
        attention_mask (`torch.LongTensor` of shape `(L,)`):
            Ones.
        decoder_input_ids (`torch.LongTensor` of shape `(M,)`):
            Tokens of the decoder: the decoder start token, and those of the output.
        rewards (`torch.FloatTensor` of shape `(T,)`):
            Reward of each action.
        states_ixs (`torch.LongTensor` of shape `(T + 1,)`):
            Positions of the states in `decoder_input_ids`.
        actions_ixs (`torch.LongTensor` of shape `(T,)`):
            Positions, in `decoder_input_ids`, of the states in which the actions were taken.
        dones (`torch.LongTensor` of shape `(T + 1,)`):
            1 = not terminal, 0 = the final state.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    decoder_input_ids: torch.Tensor
    rewards: torch.Tensor
    states_ixs: torch.Tensor
    actions_ixs: torch.Tensor
    dones: torch.Tensor


@dataclass
class ILQLBatch:
    """
    `B` rows of [`ILQLElement`], padded on the right with 0. Padded `actions_ixs` point at position 0 and are removed
    by the mask `dones[:, :-1]`.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, n)`):
            Tokens.
        attention_mask (`torch.LongTensor` of shape `(B, n)`):
            1 on tokens, 0 on padding.
        rewards (`torch.FloatTensor` of shape `(B, T)`):
            Reward of each action.
        states_ixs (`torch.LongTensor` of shape `(B, T + 1)`):
            Positions of the states.
        actions_ixs (`torch.LongTensor` of shape `(B, T)`):
            Positions of the states in which the actions were taken.
        dones (`torch.LongTensor` of shape `(B, T + 1)`):
            1 = not terminal, 0 = final state or padding. Truncation is never coded here.
        truncated (`torch.BoolTensor` of shape `(B,)`, *optional*):
            The row ends without having terminated: the value of its final state is bootstrapped.
        weight (`torch.FloatTensor` of shape `(B,)`, *optional*):
            Weight of the row in every loss term and in the normaliser.
        turn_ixs (`torch.LongTensor` of shape `(B, T)`, *optional*):
            Index of the utterance each action belongs to.
        next_input_ids (`torch.LongTensor` of shape `(B, n')`, *optional*):
            Context of the next turn, where the next state is a row of its own (history windows).
        next_attention_mask (`torch.LongTensor` of shape `(B, n')`, *optional*):
            1 on tokens, 0 on padding; all 0 for a row without a next turn.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    rewards: torch.Tensor
    states_ixs: torch.Tensor
    actions_ixs: torch.Tensor
    dones: torch.Tensor
    truncated: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    turn_ixs: torch.Tensor | None = None
    next_input_ids: torch.Tensor | None = None
    next_attention_mask: torch.Tensor | None = None


@dataclass
class ILQLSeq2SeqBatch:
    """
    `B` rows of [`ILQLSeq2SeqElement`], padded on the right with 0.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, n)`):
            Tokens of the encoder.
        attention_mask (`torch.LongTensor` of shape `(B, n)`):
            1 on tokens, 0 on padding.
        decoder_input_ids (`torch.LongTensor` of shape `(B, m)`):
            Tokens of the decoder: the decoder start token, and those of the output.
        rewards, states_ixs, actions_ixs, dones:
            As in [`ILQLBatch`], with positions in `decoder_input_ids`.
        truncated, weight, turn_ixs (*optional*):
            As in [`ILQLBatch`].
        next_input_ids, next_attention_mask (*optional*):
            As in [`ILQLBatch`]: what the encoder reads in the state of the next turn. The decoder has only started.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    decoder_input_ids: torch.Tensor
    rewards: torch.Tensor
    states_ixs: torch.Tensor
    actions_ixs: torch.Tensor
    dones: torch.Tensor
    truncated: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    turn_ixs: torch.Tensor | None = None
    next_input_ids: torch.Tensor | None = None
    next_attention_mask: torch.Tensor | None = None
