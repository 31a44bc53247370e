# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Which episodes a run plays: their seeds, options and names, and whether the arguments of the run make sense."""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ..data.episodes import plain_json
from ..distributed.executors import Executor
from ..distributed.worker_pool import WorkerPool
from ..environments.seeding import MAX_SEED, check_seed, episode_seed, policy_seed_sequence
from .journal import config_digest
from .player import EpisodePlan
from .policy import Policy


def count(name: str, value: Any) -> int:
    """Returns a number of things as an `int`, or raises a `ValueError` if it is not a whole one of at least 1."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}.")
    return number


def list_of_seeds(seeds: int | Iterable[int], split: str) -> list[int]:
    """
    Returns seeds as a list.

    Args:
        seeds (`int` or `Iterable[int]`):
            Seeds, or how many of the split's.
        split (`str`):
            Where a number of seeds is taken from.

    Raises:
        ValueError: If they are neither a whole number nor several, there is none, or one is out of range.
    """
    if isinstance(seeds, str | bytes | Mapping):
        raise ValueError(f"`seeds` are whole numbers in a list, or how many of them, got {seeds!r}.")
    if not isinstance(seeds, Iterable):
        return [episode_seed(i, split) for i in range(count("seeds", seeds))]
    listed = [check_seed(seed) for seed in seeds]
    if not listed:
        raise ValueError("There is no episode to play: give at least one seed.")
    return listed


def check_policy(policy: Any) -> None:
    """Raises a `TypeError` if something is not a policy."""
    if isinstance(policy, Policy):
        return
    if isinstance(policy, type):
        advice = f"Got the class `{policy.__name__}`: make an object of it."
    elif callable(policy):
        advice = f"Got the function {policy!r}: `ScriptedPolicy(function)` makes a policy of one."
    else:
        advice = f"Got a `{type(policy).__name__}`. A model is played with `ModelPolicy(model, tokenizer)`."
    raise TypeError(f"`policy` must be a `Policy`, such as `RandomPolicy()`. {advice}")


def check_executor(executor: Any) -> None:
    """Raises a `TypeError` if something is neither an executor nor makes one."""
    if executor is None or isinstance(executor, Executor):
        return
    if isinstance(executor, type) and issubclass(executor, WorkerPool):
        raise TypeError(
            f"`executor` is the class `{executor.__name__}`, which needs to know how many workers it has: give "
            f"`functools.partial({executor.__name__}, num_workers=4)`."
        )
    if not callable(executor):
        raise TypeError(
            "`executor` must be an `Executor` or make one of a factory, such as `functools.partial(ProcessExecutor, "
            f"num_workers=4)`, got {executor!r}."
        )


def episode_plans(
    num_episodes: int | None,
    seeds: Iterable[int] | None,
    split: str,
    options: Any,
    run_seed: int,
    run_id: str,
) -> list[EpisodePlan]:
    """
    Returns the episodes of a run.

    Args:
        num_episodes, seeds, split, options, run_seed: As in [`collect_episodes`].
        run_id (`str`): What the names of the episodes begin with.

    Raises:
        ValueError: If the arguments contradict each other.
    """
    if (num_episodes is None) == (seeds is None):
        raise ValueError("Give either `num_episodes` or `seeds`.")
    if seeds is None:
        numbers = list(range(count("num_episodes", num_episodes)))
        listed = [episode_seed(i, split) for i in numbers]
    elif not isinstance(seeds, Iterable):
        raise ValueError(
            f"`seeds` are those of single episodes, got {seeds}: for a number of them `num_episodes={seeds}`."
        )
    else:
        listed = list_of_seeds(seeds, split)
        # By the seed, so that the policy's sample is the same in another list; repeated ones are told apart.
        times: Counter[int] = Counter()
        numbers = []
        for seed in listed:
            numbers.append(seed + MAX_SEED * times[seed])
            times[seed] += 1
    own = _own_options(options, len(listed))
    return [
        EpisodePlan(
            _episode_id(run_id, index, seed, number, own[index] if own else None),
            index,
            seed,
            policy_seed_sequence(run_seed, number, split),
            own[index] if own else options,
        )
        for index, (seed, number) in enumerate(zip(listed, numbers, strict=True))
    ]


def _own_options(options: Any, num_episodes: int) -> list[dict[str, Any] | None] | None:
    """The options of each episode, `None` if all have the same."""
    if options is None or isinstance(options, Mapping):
        return None
    own = [] if isinstance(options, str | bytes) or not isinstance(options, Iterable) else list(options)
    if not own or not all(option is None or isinstance(option, Mapping) for option in own):
        raise ValueError(f"`options` is one dict for all episodes, or a list of one each, got {options!r}.")
    if len(own) != num_episodes:
        raise ValueError(f"Got {len(own)} options for {num_episodes} episodes: give one dict for all, or one each.")
    return own


def _episode_id(run_id: str, index: int, seed: int, number: int, option: dict[str, Any] | None) -> str:
    """Names an episode after all that it follows from beyond the run, so that no other one is taken for it."""
    name = f"{run_id}-{index}-{seed}"
    if number == index and option is None:
        return name
    return f"{name}-{config_digest({'number': number, 'options': plain_json(option)})[:8]}"
