# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Questions with a reward function, as an environment of one turn."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..text_env import Observation, TextEnv, TextEnvFactory, TextStep
from .coroutines import finished
from .rows import check_rows, pick_row, prompt_messages


class RewardFunctionTextEnv(TextEnv):
    """
    Asks one question, and rewards the reply to it. See [`from_reward_function`] for the arguments.
    """

    def __init__(self, reward_fn: Callable[..., Any], prompts: Sequence[Any], trl_signature: bool = False) -> None:
        check_rows(prompts)
        self.reward_fn = reward_fn
        self.prompts = prompts
        self.trl_signature = trl_signature
        self._row: dict[str, Any] = {}

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        index, row = pick_row(self.prompts, seed)
        self._row = dict(row) if isinstance(row, Mapping) else {"prompt": row}
        return prompt_messages(self._row["prompt"], f"Row {index}"), {"row": index}

    def step(self, action: str) -> TextStep:
        prompt = self._row["prompt"]
        if self.trl_signature:
            completion = action if isinstance(prompt, str) else [{"role": "assistant", "content": action}]
            columns = {name: [value] for name, value in self._row.items() if name not in ("prompt", "completion")}
            call = partial(self.reward_fn, prompts=[prompt], completions=[completion], **columns)
        else:
            call = partial(self.reward_fn, prompt, action)
        reward = finished(call())
        if self.trl_signature:
            if len(reward) != 1 or reward[0] is None:
                raise ValueError(f"The reward function must return one number for one completion, got {reward!r}.")
            reward = reward[0]
        return [], reward, True, False, {}


def from_reward_function(
    reward_fn: Callable[..., Any], prompts: Sequence[Any], *, trl_signature: bool = False
) -> TextEnvFactory:
    """
    Makes an environment of one turn from prompts and a function that scores replies.

    Args:
        reward_fn (`Callable`):
            `reward_fn(prompt, completion) -> float`, or with `trl_signature` a reward function of TRL, which is called
            by keyword with lists, here of one: `reward_fn(prompts, completions, **columns) -> list[float]`. It may be
            a coroutine function, or an object with such a `__call__`; in a notebook, where a loop is running, it is
            awaited in a thread of its own.
        prompts (`Sequence`):
            Prompts: strings, lists of messages, or rows (such as those of a `datasets.Dataset`) with one of these as
            `prompt`. An episode plays row `seed % len(prompts)`.
        trl_signature (`bool`, *optional*, defaults to `False`):
            Whether the function has TRL's signature. It then gets the other columns of the row too, and completions as
            TRL makes them: a string for a string prompt, else a list with one message. Token ids are not passed.

    Returns:
        `Callable[[], TextEnv]`: makes text environments.

    Raises:
        ValueError: If there are no prompts.

    Examples:

    ```python
    >>> env = as_environment(from_reward_function(lambda prompt, completion: float("4" in completion), ["2+2?"]))
    ```
    """
    check_rows(prompts)
    return partial(RewardFunctionTextEnv, reward_fn, prompts, trl_signature)
