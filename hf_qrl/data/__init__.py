# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Rewarded texts and conversations, as tokens, actions and batches."""

from .chat import training_chat_template, window_messages
from .collators import DataCollatorForILQL, DataCollatorForSeq2SeqILQL
from .formats import is_conversational, is_prepared
from .ilql_types import ILQLBatch, ILQLElement, ILQLSeq2SeqBatch, ILQLSeq2SeqElement
from .ppo_types import PPORLBatch, PPORLElement, collate_ppo
from .preparation import prepare_dataset
from .rewards import episode_returns, standardization
from .seq2seq import conversation_text
from .statistics import ReturnStatistics, return_statistics, value_bounds
from .tokenization import DialogMessage, make_experience, make_experience_seq2seq, tokenize_dialogue


__all__ = [
    "DataCollatorForILQL",
    "DataCollatorForSeq2SeqILQL",
    "DialogMessage",
    "ILQLBatch",
    "ILQLElement",
    "ILQLSeq2SeqBatch",
    "ILQLSeq2SeqElement",
    "PPORLBatch",
    "PPORLElement",
    "ReturnStatistics",
    "collate_ppo",
    "conversation_text",
    "episode_returns",
    "is_conversational",
    "is_prepared",
    "make_experience",
    "make_experience_seq2seq",
    "prepare_dataset",
    "return_statistics",
    "standardization",
    "tokenize_dialogue",
    "training_chat_template",
    "value_bounds",
    "window_messages",
]
