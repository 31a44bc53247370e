# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The interface of environments, under NeMo-RL's names and with its field order."""

from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from ..data.interfaces import LLMMessageLogType
from ..distributed.batched_data_dict import BatchedDataDict


MetadataT = TypeVar("MetadataT")


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
    """
    What a step returns for a batch of B conversations. Rollout loops unpack it: the six fields and their order are
    fixed.

    Args:
        observations (`list[dict[str, str]]`):
            A message per conversation, also for one that ends: it is then the final state. As an extension a list of
            messages may take the place of one, an empty list for none.
        metadata (`list[MetadataT]`):
            State of each conversation, handed back at the next step. `None` keeps the old one. Two keys of a dict are
            reserved: `"_truncated": True` says that the environment cut the episode off (which is not an end of it),
            and `"_failure"` holds an [`~hf_qrl.environments.failures.EnvironmentFailure`] of that conversation alone.
        next_stop_strings (`list[list[str] | None]` or `None`):
            Strings that end the next reply of each conversation.
        rewards (`torch.Tensor` of shape `(B,)`, or a `dict` of such):
            Reward of the turn; the entries of a dict are its summands.
        terminateds (`torch.Tensor` of shape `(B,)`):
            Whether the conversation has ended, in any dtype.
        answers (`list[str | None]` or `None`):
            Answers found in the replies, when the environment was asked for them.
    """

    observations: list[Any]
    metadata: list[MetadataT]
    next_stop_strings: list[list[str] | None] | None
    rewards: Tensor | dict[str, Tensor]
    terminateds: Tensor
    answers: list[str | None] | None


class EnvironmentInterface(ABC, Generic[MetadataT]):
    """
    A functional environment: the state of a conversation travels in its messages and metadata, so one object plays any
    number of them. Most environments are easier to write as a [`~hf_qrl.environments.TextEnv`].
    """

    @abstractmethod
    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MetadataT]
    ) -> EnvironmentReturn[MetadataT]:
        """
        Answers the last message of each conversation. It is called with two positional arguments.

        Args:
            message_log_batch (`list[LLMMessageLogType]`):
                Conversations, their messages with "role" and "content" only; the last is the assistant's.
            metadata (`list[MetadataT]`):
                State of each.
        """

    @abstractmethod
    def global_post_process_and_metrics(self, batch: BatchedDataDict) -> tuple[BatchedDataDict, dict]:
        """Returns the batch of all finished episodes, changed or not, and metrics of it."""
