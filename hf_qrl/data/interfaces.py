# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What travels between datasets, rollouts and environments, under NeMo-RL's names."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch


# A conversation: dicts with "role" and "content", and inside a rollout loop tensors such as "token_ids". An
# environment only ever receives the two strings.
LLMMessageLogType = list[dict[str, str | torch.Tensor]]


class DatumSpec(TypedDict):
    """
    Start of an episode, one row of a dataset.

    Args:
        message_log (`LLMMessageLogType`):
            Messages the policy sees first.
        length (`int`):
            Number of tokens of the message log.
        extra_env_info (`dict` or `None`):
            Initial metadata, which the environment gets at its first step.
        loss_multiplier (`float`):
            Weight of the row, 0 masks it out.
        idx (`int`):
            Index of the row.
        task_name (`str`, *optional*):
            Name of the environment that plays it.
        stop_strings (`list[str]`, *optional*):
            Strings that end the first reply.
    """

    message_log: LLMMessageLogType
    length: int
    extra_env_info: dict[str, Any] | None
    loss_multiplier: float
    idx: int
    task_name: NotRequired[str]
    stop_strings: NotRequired[list[str]]


@dataclass
class TaskDataSpec:
    """
    Name and prompts of a task. The two files are read when the object is made.

    Args:
        task_name (`str`, *optional*):
            Name of the task.
        prompt_file (`str` or `os.PathLike`, *optional*):
            Text file of `prompt`.
        system_prompt_file (`str` or `os.PathLike`, *optional*):
            Text file of `system_prompt`.

    Raises:
        FileNotFoundError: If a file is named that does not exist.
    """

    task_name: str | None = None
    prompt_file: str | os.PathLike | None = None
    system_prompt_file: str | os.PathLike | None = None
    prompt: str | None = field(init=False, default=None)
    system_prompt: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.prompt_file is not None:
            self.prompt = Path(self.prompt_file).read_text(encoding="utf-8")
        if self.system_prompt_file is not None:
            self.system_prompt = Path(self.system_prompt_file).read_text(encoding="utf-8")

    def copy_defaults(self, from_spec: "TaskDataSpec") -> None:
        """Takes the prompts that this task lacks from another one."""
        if self.prompt is None:
            self.prompt = from_spec.prompt
        if self.system_prompt is None:
            self.system_prompt = from_spec.system_prompt
