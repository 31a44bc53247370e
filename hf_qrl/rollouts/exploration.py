# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Policies that try what another policy would not do."""

from typing import Any

import numpy as np

from ..data.chat import Message
from .plans import check_policy
from .policy import Action, Policy, RandomPolicy


class EpsilonGreedyPolicy(Policy):
    """
    Acts as another policy does, and with a probability in its place chooses one of the legal actions uniformly.

    Args:
        policy ([`Policy`]):
            Who acts otherwise.
        epsilon (`float`):
            Probability of a random turn, `0 <= epsilon <= 1`.

    Raises:
        ValueError: If `epsilon` is no probability; when it acts, if the environment names no legal actions.

    Examples:

    ```python
    >>> from hf_qrl.rollouts import EpsilonGreedyPolicy, ScriptedPolicy

    >>> policy = EpsilonGreedyPolicy(ScriptedPolicy(lambda messages: "walk left"), epsilon=0.1)
    ```
    """

    def __init__(self, policy: Policy, epsilon: float) -> None:
        check_policy(policy)
        if not 0 <= epsilon <= 1:
            raise ValueError(f"`epsilon` is a probability, 0 <= epsilon <= 1, got {epsilon}.")
        self.policy, self.epsilon = policy, epsilon
        self.tokenizer_id = policy.tokenizer_id
        self._random = RandomPolicy()

    def act(
        self,
        conversations: list[list[Message]],
        stop_strings: list[list[str] | None],
        seeds: list[np.random.SeedSequence],
        **context: Any,
    ) -> list[Action]:
        """See [`Policy.act`]."""
        explores = [np.random.default_rng(_child(seed, 0)).random() < self.epsilon for seed in seeds]
        actions: list[Action | None] = [None] * len(conversations)
        for policy, chosen in ((self._random, True), (self.policy, False)):
            rows = [i for i, explore in enumerate(explores) if explore is chosen]
            if not rows:
                continue
            replies = policy.act(
                [conversations[i] for i in rows],
                [stop_strings[i] for i in rows],
                # What is drawn for the random action is independent of the draw that led to it.
                [_child(seeds[i], 1) if chosen else seeds[i] for i in rows],
                **{name: [x[i] for i in rows] if isinstance(x, list) else x for name, x in context.items()},
            )
            for i, reply in zip(rows, replies, strict=True):
                actions[i] = reply
        return actions  # type: ignore[return-value]

    def identity(self) -> dict[str, Any]:
        """See [`Policy.identity`]."""
        return {
            "id": "epsilon-greedy",
            "revision": None,
            "sampling": {"epsilon": self.epsilon, "policy": self.policy.identity()},
        }


def _child(seed: np.random.SeedSequence, number: int) -> np.random.SeedSequence:
    """Randomness of its own for each purpose; `seed.spawn` would give another one at every call."""
    return np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, number))


__all__ = ["EpsilonGreedyPolicy"]
