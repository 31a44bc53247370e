# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Dialogues to tokens, as trlX does it: alternating phrases, each tokenised alone, every second one an output.

Chat-template conversations take another path (`chat.py`); both end in the same rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .ilql_types import ILQLElement, ILQLSeq2SeqElement
from .rewards import standardization


@dataclass
class DialogMessage:
    """
    One phrase of a dialogue.

    Args:
        is_output (`bool`):
            Whether the model produced the phrase (its tokens are actions) or read it.
        tokens (`tuple[int, ...]`):
            Token ids of the phrase.
    """

    is_output: bool
    tokens: tuple[int, ...]


def tokenize_dialogue(
    dialogue: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    *,
    append_eos: bool = True,
) -> list[DialogMessage]:
    """
    Tokenises a dialogue and cuts it to `max_length` tokens, on the side that `tokenizer.truncation_side` names.

    A string is one output after the bos (or, without one, the eos) token. Messages left empty are dropped, and a
    dialogue that starts with an output gets a bos message in front, so that every output token has a state.

    Args:
        dialogue (`str` or sequence of `str`):
            An output, or `[prompt_0, output_0, prompt_1, output_1, ...]`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer with an eos token.
        max_length (`int`, *optional*):
            Largest number of tokens. Nothing is cut if it is `None`.
        append_eos (`bool`, *optional*, defaults to `True`):
            Whether the last phrase gets an eos token if it does not end with one.

    Returns:
        `list[DialogMessage]`: the messages in order.

    Raises:
        ValueError: If the list has an odd length or is empty, or a phrase is not a string.
    """
    phrases = dialogue_phrases(dialogue, tokenizer.bos_token or tokenizer.eos_token)
    if tokenizer.eos_token is None:
        raise ValueError("The tokenizer has no end-of-text token, with which dialogues end. Set `eos_token`.")
    if append_eos and not phrases[-1].endswith(tokenizer.eos_token):
        phrases[-1] += tokenizer.eos_token

    messages = [
        DialogMessage(i % 2 == 1, tuple(tokenizer(phrase, add_special_tokens=False)["input_ids"]))
        for i, phrase in enumerate(phrases)
    ]
    side = tokenizer.truncation_side
    messages = [m for m in _truncate(messages, max_length, side) if m.tokens]
    if messages and messages[0].is_output:
        if sum(len(m.tokens) for m in messages) == max_length:  # make room for the bos token
            if side == "left":
                messages[0].tokens = messages[0].tokens[1:]
            else:
                messages[-1].tokens = messages[-1].tokens[:-1]
        bos_id = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        messages.insert(0, DialogMessage(False, (bos_id,)))
    return messages


def dialogue_phrases(dialogue: str | Sequence[str], prompt: str) -> list[str]:
    """Returns prompts and outputs in turn (a string is an output after `prompt`), or raises a `ValueError`."""
    phrases = [prompt, dialogue] if isinstance(dialogue, str) else list(dialogue)
    if not phrases or len(phrases) % 2 != 0:
        raise ValueError(
            f"A dialogue alternates prompts and outputs and needs an even number of phrases, got {len(phrases)}: "
            "[prompt, output, prompt, output, ...]."
        )
    if not all(isinstance(phrase, str) for phrase in phrases):
        raise ValueError(f"The phrases of a dialogue must be strings, got {[type(p).__name__ for p in phrases]}.")
    return phrases


def _truncate(messages: list[DialogMessage], max_length: int | None, side: str) -> list[DialogMessage]:
    """Keeps the first (`side="right"`) or the last (`side="left"`) `max_length` tokens of the flat stream."""
    total = sum(len(m.tokens) for m in messages)
    if max_length is None or total <= max_length:
        return messages
    first, last = (0, max_length) if side == "right" else (total - max_length, total)
    kept, start = [], 0
    for message in messages:
        low, high = max(first - start, 0), max(last - start, 0)
        kept.append(DialogMessage(message.is_output, message.tokens[low:high]))
        start += len(message.tokens)
    return kept


def output_spans(messages: list[DialogMessage]) -> list[tuple[int, int]]:
    """Returns `[start, end)` of every non-empty output in the flat token stream."""
    spans, start = [], 0
    for message in messages:
        end = start + len(message.tokens)
        if message.is_output and message.tokens:
            spans.append((start, end))
        start = end
    return spans


def make_experience(
    samples: Sequence[str | Sequence[str]],
    rewards: Sequence[float],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 2048,
) -> list[ILQLElement]:
    """
    Turns dialogues with one reward each into ILQL elements, with the numbers trlX gives.

    The rewards are standardised over all samples, `(R - mean) / std` in float64, and each sample's is put on its last
    action. A sample cut at `max_length` still counts as terminated and keeps its reward, as in trlX; datasets
    prepared by [`prepare_dataset`] keep the two apart.

    Args:
        samples (sequence of `str` or of sequences of `str`):
            Dialogues as [`tokenize_dialogue`] takes them.
        rewards (sequence of `float`):
            One reward per sample.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer. Its `truncation_side` is respected.
        max_length (`int`, *optional*, defaults to `2048`):
            Largest number of tokens of a sample.

    Returns:
        `list[ILQLElement]`: one element per sample.

    Raises:
        ValueError: If the counts differ, or truncation leaves a sample without an action.
    """
    elements = []
    for i, (messages, score) in enumerate(_scored_dialogues(samples, rewards, tokenizer, max_length)):
        tokens = [token for message in messages for token in message.tokens]
        actions = [p for start, end in output_spans(messages) for p in range(start - 1, end - 1)]
        if not actions:
            raise ValueError(
                f"Sample {i} has no output token left within max_length={max_length} "
                f"(truncation side {tokenizer.truncation_side!r}). Raise max_length, or drop the sample."
            )
        elements.append(ILQLElement(**_tensors(tokens), **_steps(actions, len(tokens) - 1, score)))
    return elements


def make_experience_seq2seq(
    samples: Sequence[str | Sequence[str]],
    rewards: Sequence[float],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 2048,
    decoder_start_token_id: int | None = None,
) -> list[ILQLSeq2SeqElement]:
    """
    As [`make_experience`], for encoder-decoder models: the encoder reads the first phrase, the decoder says the
    second, and later phrases are dropped, as in trlX (whose end-of-text token goes with the last phrase).

    trlX's elements have no decoder start token, so that the first token of the output is never an action.
    [`ILQLTrainer`] wants it: pass `decoder_start_token_id` to train on the elements. [`prepare_dataset`] makes a row
    of every turn.

    Args:
        samples (sequence of `str` or of sequences of `str`):
            Dialogues as [`tokenize_dialogue`] takes them.
        rewards (sequence of `float`):
            One reward per sample.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer. Its `truncation_side` is respected.
        max_length (`int`, *optional*, defaults to `2048`):
            Largest number of tokens of a sample, encoder and decoder together.
        decoder_start_token_id (`int`, *optional*):
            Put in front of the output, all of whose tokens are actions then: `model.config.decoder_start_token_id`.

    Returns:
        `list[ILQLSeq2SeqElement]`: one element per sample.

    Raises:
        ValueError: If the counts differ, or truncation leaves a sample without a prompt or an action.
    """
    elements = []
    for i, (messages, score) in enumerate(_scored_dialogues(samples, rewards, tokenizer, max_length)):
        output = [] if decoder_start_token_id is None else [decoder_start_token_id]
        if len(messages) > 1:
            output += messages[1].tokens
        if len(messages) < 2 or messages[0].is_output or not messages[1].is_output or len(output) < 2:
            raise ValueError(
                f"Sample {i} has no prompt with an output of an action left within max_length={max_length} "
                f"(truncation side {tokenizer.truncation_side!r}). Raise max_length, or drop the sample."
            )
        elements.append(
            ILQLSeq2SeqElement(
                **_tensors(messages[0].tokens),
                decoder_input_ids=torch.tensor(output),
                **_steps(range(len(output) - 1), len(output) - 1, score),
            )
        )
    return elements


def _scored_dialogues(
    samples: Sequence[str | Sequence[str]],
    rewards: Sequence[float],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> Iterator[tuple[list[DialogMessage], float]]:
    """Yields the messages of each sample and its standardised reward."""
    if len(samples) != len(rewards):
        raise ValueError(f"Got {len(samples)} samples and {len(rewards)} rewards: give one reward per sample.")
    if not samples:
        return
    returns = np.asarray(rewards, dtype=np.float64)
    mean, std = standardization(returns)
    for sample, score in zip(samples, (returns - mean) / std, strict=True):
        yield tokenize_dialogue(sample, tokenizer, max_length), float(score)


def _tensors(tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor(tokens), "attention_mask": torch.ones(len(tokens), dtype=torch.long)}


def _steps(actions: Sequence[int], final_state: int, score: float) -> dict[str, torch.Tensor]:
    """The fields of states and actions of an element that terminated, and is paid for its last action."""
    rewards = torch.zeros(len(actions))
    rewards[-1] = score
    return {
        "rewards": rewards,
        "states_ixs": torch.tensor([*actions, final_state]),
        "actions_ixs": torch.tensor(actions),
        "dones": torch.tensor([1] * len(actions) + [0]),
    }
