# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""TRL's tool environments as text environments, and the way back."""

import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from ..failures import FailureClass, classify
from ..text_env import Message, Observation, TextEnv, TextEnvFactory, TextStep, checked_reset, checked_step
from .coroutines import finished
from .rows import Rows, check_rows, pick_row, prompt_messages


ToolCall = dict[str, Any]
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_tool_calls(text: str) -> list[ToolCall]:
    """
    Finds the tool calls in a reply: JSON objects with `name` and `arguments`, each between `<tool_call>` and
    `</tool_call>` (as Qwen and Hermes models write them), or one object or a list of them as the whole reply.

    Args:
        text (`str`):
            Reply of a policy.

    Returns:
        `list[dict]`: the calls. One that is not valid has the key `error`. An empty list if the reply calls no tool.

    Examples:

    ```python
    >>> parse_tool_calls('<tool_call>{"name": "look", "arguments": {"where": "left"}}</tool_call>')
    [{'name': 'look', 'arguments': {'where': 'left'}}]
    ```
    """
    tagged = _TOOL_CALL.findall(text)
    if tagged:
        return [_checked_call(_loads(block)) for block in tagged]
    whole = _loads(text)
    calls = whole if isinstance(whole, list) else [whole]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        return []
    return [_checked_call(call) for call in calls]


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _checked_call(call: Any) -> ToolCall:
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        return {"error": 'A tool call is a JSON object with "name" (a string) and "arguments" (an object).'}
    return {"name": call["name"], "arguments": arguments}


class TRLTextEnv(TextEnv):
    """
    Plays an environment as TRL's `environment_factory` makes them. See [`from_trl_environment`] for the arguments.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        rows: Rows = ({},),
        tool_parser: Callable[[str], list[ToolCall]] = parse_tool_calls,
        reward_function: Callable[[Any], float] | None = None,
        max_tool_calling_iterations: int | None = None,
    ) -> None:
        from transformers.utils import get_json_schema

        check_rows(rows)
        self.env = make_env()
        self.rows = rows
        self.tool_parser = tool_parser
        self.max_tool_calling_iterations = max_tool_calling_iterations
        # As TRL does it: the public functions of the class, but for the two that are not tools.
        methods = {name: getattr(self.env, name) for name, _ in inspect.getmembers(type(self.env), inspect.isfunction)}
        if "reset" not in methods:
            raise TypeError(f"`{type(self.env).__name__}` has no `reset`, which TRL's environments must have.")
        get_reward = methods.get("get_reward")
        if reward_function is not None:
            get_reward = partial(reward_function, self.env)
        if get_reward is None:
            raise TypeError(
                f"`{type(self.env).__name__}` has no `get_reward`. Add it, or pass `reward_function`, from the "
                "environment to a number."
            )
        self._get_reward: Callable[[], Any] = get_reward
        self._methods = {
            name: method
            for name, method in methods.items()
            if name not in ("reset", "get_reward") and not name.startswith("_")
        }
        self.tools = [get_json_schema(method) for method in self._methods.values()]
        self._tool_turns = 0

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        index, row = pick_row(self.rows, seed)
        row = {**row, **(options or {})}
        self._tool_turns = 0
        messages = prompt_messages(row.get("prompt", ""), f"Row {index}")
        observation = finished(self.env.reset(**row))
        if observation is not None:
            last = messages[-1]
            messages[-1] = {**last, "content": last["content"] + observation}
        return messages, {"row": index}

    def step(self, action: str) -> TextStep:
        calls = self.tool_parser(action)
        limit = self.max_tool_calling_iterations
        cut = bool(calls) and limit is not None and self._tool_turns >= limit
        if cut or not calls:
            return [], finished(self._get_reward()), not cut, cut, {}
        self._tool_turns += 1
        answers, failures = [], 0
        for call in calls:
            name = call.get("name", "unknown")
            try:
                content = self._call(call)
            except Exception as error:
                if classify(error) is FailureClass.INFRA:
                    raise
                # The model's mistake, mostly: it is told, as in TRL.
                failures += 1
                content = str({"error": str(error)})
            answers.append({"role": "tool", "name": name, "content": content})
        return answers, 0.0, False, False, {"invalid_action": failures > 0}

    def _call(self, call: ToolCall) -> str:
        if "error" in call:
            raise ValueError(call["error"])
        if call["name"] not in self._methods:
            raise ValueError(f"Tool {call['name']} not found. There are {sorted(self._methods)}.")
        return str(finished(self._methods[call["name"]](**call["arguments"])))


def from_trl_environment(
    make_env: Callable[[], Any],
    rows: Rows = ({},),
    *,
    tool_parser: Callable[[str], list[ToolCall]] = parse_tool_calls,
    reward_function: Callable[[Any], float] | None = None,
    max_tool_calling_iterations: int | None = None,
) -> TextEnvFactory:
    """
    Makes a text environment of what TRL takes as `environment_factory`: a class with `reset(**row) -> str | None`,
    public methods with type hints and docstrings, which are the tools, and `get_reward() -> float`.

    Tool calls are read from the text of a reply; their results come back as `tool` messages, errors included, but for
    lost connections and the like (`INFRA` in [`classify`]), which are failures of the episode. A reply without a call
    ends the episode. TRL pays an environment once, so the reward is that of the last turn. The schemas
    of the tools are in `tools`, and at the start in a session's metadata under `_tools`.

    Args:
        make_env (`Callable[[], Any]`):
            Makes an environment: the class.
        rows (`Sequence[Mapping]`, *optional*):
            Rows of the dataset, which `reset` gets as keywords, with the messages to start with as `prompt` if there
            are any. An episode plays row `seed % len(rows)`, with the reset's options added.
        tool_parser (`Callable[[str], list[dict]]`, *optional*):
            Finds the tool calls in a reply; by default [`parse_tool_calls`], which reads JSON.
        reward_function (`Callable[[Any], float]`, *optional*):
            Reward of an environment in place of `get_reward`.
        max_tool_calling_iterations (`int`, *optional*):
            Number of turns with tool calls after which a further one truncates the episode.

    Returns:
        `Callable[[], TextEnv]`: makes text environments.

    Raises:
        ValueError: If there are no rows.
    """
    check_rows(rows)
    return partial(TRLTextEnv, make_env, rows, tool_parser, reward_function, max_tool_calling_iterations)


class TRLEnvironment:
    """
    A text environment as TRL's trainers want them: one tool, `act`, and the sum of the rewards as `get_reward`. See
    [`to_trl_environment`].
    """

    def __init__(self, factory: TextEnvFactory) -> None:
        self._env = factory()
        self._return = 0.0
        self._over = True

    def reset(self, seed: int | None = None, **row: Any) -> str:
        """Starts the episode of a row, whose column `seed` says which."""
        if seed is None:
            raise ValueError("The dataset needs a column `seed`: rows of a group must play the same episode.")
        messages, _ = checked_reset(self._env, seed)
        self._return, self._over = 0.0, False
        return _text(messages)

    def act(self, action: str) -> str:
        """
        Sends a text to the environment.

        Args:
            action: The text to send.

        Returns:
            What the environment answers.
        """
        if self._over:
            raise ValueError("The episode is over.")
        step = checked_step(self._env, action)
        self._return += step.reward
        self._over = step.terminated or step.truncated
        return _text(step.messages)

    def get_reward(self) -> float:
        """Returns the sum of the rewards of the episode."""
        return self._return


def to_trl_environment(factory: TextEnvFactory) -> Callable[[], TRLEnvironment]:
    """
    Makes of a text environment what TRL's trainers take as `environment_factory`. The dataset needs a column `seed`.

    Args:
        factory (`Callable[[], TextEnv]`):
            Makes text environments.

    Returns:
        `Callable[[], TRLEnvironment]`: makes environments with `reset`, the tool `act`, and `get_reward`.

    Examples:

    ```python
    trainer = GRPOTrainer(model=model, train_dataset=seeds, environment_factory=to_trl_environment(MyGame))
    ```
    """
    return partial(TRLEnvironment, factory)


def _text(messages: list[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
