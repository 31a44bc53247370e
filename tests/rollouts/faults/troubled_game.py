# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A game whose seed says what goes wrong in it, and what collects its episodes."""

import os
import signal
import time
from functools import partial
from pathlib import Path

from hf_qrl.distributed.executors import Executor, ProcessExecutor, RayExecutor
from hf_qrl.environments.text_env import TextEnv
from hf_qrl.rollouts.collect import collect_episodes
from hf_qrl.rollouts.host import host_factory
from hf_qrl.rollouts.policy import RandomPolicy
from tests.rollouts.worker_objects import first_time, write_whole


SEEDS = range(200)
TIMEOUT = 3.0


def fault_of(seed: int) -> str:
    """What goes wrong in the episode of a seed, `""` for nothing: 40 of 200 episodes are in trouble, 12 for good."""
    if seed in (19, 99):
        return "hangs"
    if seed in (59, 139):
        return "hangs once"
    return {
        3: "raises",
        7: "raises at reset",
        11: "crashes once",
        13: "crashes once at reset",
        23: "is slow",
        29: "is killed from outside",
        # Two of five only: each costs its worker three times, and the episodes that are played there.
        31: "crashes" if seed in (31, 151) else "is slow",
    }.get(seed % 40, "")


FAILURES = {
    "raises": {"error"},
    "raises at reset": {"error"},
    "crashes": {"lost", "crashed"},
    "hangs": {"timeout"},
}


class TroubledGame(TextEnv):
    """
    Adds up letters for two to five turns.

    Args:
        folder (`str`):
            Where faults that happen once leave their mark.
        faults (`bool`):
            Whether anything goes wrong.
    """

    def __init__(self, folder: str, faults: bool) -> None:
        self.folder, self.faults = folder, faults

    def reset(self, *, seed, options=None):
        self.seed, self.turn, self.total = seed, 0, seed
        self._trouble(" at reset")
        return f"Episode {seed} begins.", {}

    def legal_actions(self):
        return ["a", "b", "c"]

    def step(self, action):
        self.turn += 1
        if self.turn == 2:
            self._trouble("")
        self.total = (self.total * 31 + ord(action[0])) % 1009
        over = self.turn == 2 + self.seed % 4
        return f"The total is {self.total}.", self.total / 7, over, False, {"success": self.total % 2 == 0}

    def _trouble(self, place: str) -> None:
        fault = fault_of(self.seed) if self.faults else ""
        marker = f"{self.folder}/{self.seed}"
        if fault == "is slow" and not place:
            time.sleep(0.2)
        elif fault == f"raises{place}":
            raise RuntimeError(f"seed {self.seed} is broken")
        elif fault == f"crashes{place}" or (fault == f"crashes once{place}" and first_time(marker)):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == f"hangs{place}" or (fault == f"hangs once{place}" and first_time(marker)):
            time.sleep(3600)
        elif fault == f"is killed from outside{place}" and first_time(marker):
            write_whole(f"{self.folder}/kill-{os.getpid()}", "please")
            time.sleep(3600)


def make_executor(kind: str, factory) -> Executor:
    if kind == "ray":
        return RayExecutor(factory, 3, timeout=TIMEOUT)
    return ProcessExecutor(factory, 3, timeout=TIMEOUT, start_method=kind)


def collect(folder: Path, kind: str | None):
    """Collects all episodes: dataset and report. Without a kind of workers nothing goes wrong."""
    marks = folder / "marks"
    marks.mkdir(parents=True, exist_ok=True)
    game = partial(TroubledGame, str(marks), kind is not None)
    if kind is None:
        return collect_episodes(RandomPolicy(), game, seeds=SEEDS, progress=False, return_report=True)
    with make_executor(kind, host_factory(game)) as executor:
        return collect_episodes(
            RandomPolicy(),
            game,
            seeds=SEEDS,
            executor=executor,
            output_dir=folder / "run",
            batch_size=24,
            progress=False,
            return_report=True,
        )
