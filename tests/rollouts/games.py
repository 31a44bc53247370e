# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Environments that end, fail and hang in the ways a collector has to tell apart."""

import os

import torch

from hf_qrl.environments import EnvironmentFailure, EnvironmentInterface, EnvironmentReturn, FailureClass, TextEnv
from hf_qrl.environments.resetting import EnvironmentReset
from tests.environments.games_for_tests import TreasureHunt


class Endless(TextEnv):
    """Never ends; every turn is worth 1."""

    stop_strings = ["."]

    def reset(self, *, seed, options=None):
        self.turns = 0
        return f"Begin {seed % 7}.", {}

    def step(self, action):
        self.turns += 1
        return f"Turn {self.turns}.", 1.0, False, False, {}


class Broken(TreasureHunt):
    """A treasure hunt that breaks in its second turn, in the episodes whose seed is divisible by 4."""

    def reset(self, *, seed, options=None):
        self.seed = seed
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.seed % 4 == 0 and self.moves == 1:
            raise ValueError("the treasure map burns")
        return super().step(action)


class Crashing(TreasureHunt):
    """Kills its process once, as a file remembers, in the episode with the seed 5, and always in those of `always`."""

    def __init__(self, marker: str, always: tuple[int, ...] = ()):
        super().__init__()
        self.marker, self.always = marker, always

    def reset(self, *, seed, options=None):
        self.seed = seed
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.moves == 1 and self.seed in self.always:
            os._exit(1)
        if self.moves == 1 and self.seed == 5 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os._exit(1)
        return super().step(action)


class Counting(EnvironmentInterface[dict]):
    """Functional: count to the target. Rewards have two components; some calls fail for a moment."""

    def __init__(self, fail_first: int = 0):
        self.failures_left = fail_first

    def reset(self, seeds, options=None):
        logs = [[{"role": "environment", "content": f"Count to {seed % 3 + 1}."}] for seed in seeds]
        return EnvironmentReset(logs, [{"target": seed % 3 + 1, "said": 0} for seed in seeds], [["!"]] * len(seeds))

    def step(self, message_log_batch, metadata):
        if self.failures_left:
            self.failures_left -= 1
            raise EnvironmentFailure("busy", FailureClass.INFRA)
        states = [{**state, "said": state["said"] + 1} for state in metadata]
        ends = [state["said"] >= state["target"] for state in states]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"{state['said']}."} for state in states],
            metadata=states,
            next_stop_strings=None,
            rewards={"reward/step": torch.full((len(ends),), -0.5), "reward/end": torch.tensor(ends).float()},
            terminateds=torch.tensor(ends).float(),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch):
        assert batch["text"].shape[0] == len(batch["idx"])
        return batch, {"accuracy": (batch["rewards"] * batch["is_end"] > 0).float().mean().item(), "n": batch.size}
