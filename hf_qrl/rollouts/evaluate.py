# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""How good policies are: returns with intervals, and differences between policies that played the same seeds."""

import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table

from ..data.episodes import success_rate
from ..distributed.executors import Executor, Task
from ..environments.resetting import EpisodeSource
from ..environments.sessions import TextEnvironment
from ..environments.text_env import TextEnv
from .collect import collect_episodes, open_executor
from .intervals import Interval, bootstrap_mean, check_resampling
from .plans import check_policy, list_of_seeds
from .player import EpisodeFailure
from .policy import Policy


# Longest prompt that environments get in `text`, and how much of a longer one its hash takes the place of.
_MAX_TEXT = 1024
_HASH_LENGTH = 64


@dataclass
class EvaluationResult:
    """
    What a policy did.

    Args:
        transcripts ([`~datasets.Dataset`]):
            The episodes.
        n_requested (`int`), n_ok (`int`), n_error (`int`):
            Number of episodes asked for, played, and failed. The other numbers are of those played.
        mean_return ([`Interval`]):
            Mean return, and its bootstrap interval.
        success_rate (`float` or `None`):
            Share of successes, if the environment tells of any episode: one it says nothing of is no success.
        mean_turns (`float`):
            Mean number of turns.
        truncations (`dict[str, float]`):
            Share of the episodes that were truncated, by reason.
        invalid_action_rate (`float` or `None`):
            Share of the turns that the environment called invalid, if it gives information on turns.
        normalized_score (`float` or `None`):
            Mean return on LMRL-Gym's scale of 0 to 100, if a scale was given.
        environment_metrics (`dict`):
            What the environment's `global_post_process_and_metrics` returned.
        environment_metrics_error (`str` or `None`):
            Why it did not return.
        failures (`list[EpisodeFailure]`):
            The failed episodes.
    """

    transcripts: Dataset
    n_requested: int
    n_ok: int
    n_error: int
    mean_return: Interval
    success_rate: float | None
    mean_turns: float
    truncations: dict[str, float]
    invalid_action_rate: float | None
    normalized_score: float | None = None
    environment_metrics: dict[str, Any] = field(default_factory=dict)
    environment_metrics_error: str | None = None
    failures: list[EpisodeFailure] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Returns the numbers by name, as one logs them; what is not known is left out."""
        numbers: dict[str, float | None] = {
            "return": self.mean_return.mean,
            "return_low": self.mean_return.low,
            "return_high": self.mean_return.high,
            "success_rate": self.success_rate,
            "normalized_score": self.normalized_score,
            "turns": self.mean_turns,
            "invalid_action_rate": self.invalid_action_rate,
            "n_ok": self.n_ok,
            "n_error": self.n_error,
        }
        numbers |= {f"truncated_{reason}": share for reason, share in self.truncations.items()}
        numbers |= {
            f"environment_{name}": float(value)
            for name, value in self.environment_metrics.items()
            if isinstance(value, bool | int | float)
        }
        return {name: float(number) for name, number in numbers.items() if number is not None}


def evaluate_policy(
    policy: Policy,
    env: Any,
    seeds: int | Iterable[int],
    *,
    split: str = "validation",
    source: EpisodeSource | None = None,
    executor: Any = None,
    scale: tuple[float, float, float] | None = None,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    progress: bool = False,
    on_length: str = "continue",
    **collect_kwargs: Any,
) -> EvaluationResult:
    """
    Plays episodes with a policy and measures them.

    Args:
        policy ([`Policy`]):
            Who acts.
        env, source, executor:
            What is played, and where, as in [`collect_episodes`].
        seeds (`int` or `Iterable[int]`):
            Seeds of the episodes, or how many of the `split`. Policies that are to be compared play the same ones.
        split (`str`, *optional*, defaults to `"validation"`):
            Where a number of seeds is taken from.
        scale (`tuple[float, float, float]`, *optional*):
            Lowest return, mean of the data and highest return of the task, for the normalised score: one of
            `hf_qrl.environments.games.scores.SCALES`, for instance.
        confidence (`float`, *optional*, defaults to 0.95), num_resamples (`int`, *optional*, defaults to 2000):
            Probability and number of resamples of the bootstrap interval.
        progress (`bool`, *optional*, defaults to `False`):
            Whether to show a progress bar.
        on_length (`str`, *optional*, defaults to `"continue"`):
            What a reply that was cut at its length does: `"continue"`, for the environment to judge it like any other,
            or `"truncate"` the episode. Where moves cost, a policy that never ends its first reply would then score
            best.
        collect_kwargs:
            Further arguments of [`collect_episodes`]: `max_turns`, `max_seq_len`, `batch_size`, `run_seed`, ...

    Returns:
        [`EvaluationResult`]: the measures, and the episodes.

    Raises:
        TooManyFailures, TypeError, ValueError: As [`collect_episodes`].

    Examples:

    ```python
    >>> result = evaluate_policy(policy, MazeEnv, 100, max_turns=100)
    >>> print(result.mean_return, result.success_rate)
    ```
    """
    check_policy(policy)
    check_resampling(confidence, num_resamples)
    _check_scale(scale)
    seeds = list_of_seeds(seeds, split)
    with open_executor(executor, env, source) as workers:
        transcripts, report = collect_episodes(
            policy,
            env,
            seeds=seeds,
            split=split,
            source=source,
            executor=workers,
            progress=progress,
            on_length=on_length,
            return_report=True,
            **collect_kwargs,
        )
        environment_metrics, error = ({}, None) if _measures_nothing(env) else _post_process(workers, transcripts)
    returns = np.asarray(transcripts["return"], dtype=np.float64)
    infos = [info["turns"] for info in transcripts["info"] if info and "turns" in info]
    num_invalid = sum(bool(turn.get("invalid_action")) for turns in infos for turn in turns)
    reasons = Counter(reason for reason in transcripts["truncation_reason"] if reason is not None)
    num_turns = [len(rewards) for rewards in transcripts["turn_rewards"]]
    interval = bootstrap_mean(returns, confidence=confidence, num_resamples=num_resamples)
    return EvaluationResult(
        transcripts=transcripts,
        n_requested=report.n_requested,
        n_ok=report.n_ok,
        n_error=report.n_failed,
        mean_return=interval,
        success_rate=success_rate(transcripts["success"]),
        mean_turns=float(np.mean(num_turns)) if num_turns else float("nan"),
        truncations={reason: count / len(transcripts) for reason, count in sorted(reasons.items())},
        invalid_action_rate=num_invalid / sum(num_turns) if infos else None,
        normalized_score=_normalized(interval.mean, scale),
        environment_metrics=environment_metrics,
        environment_metrics_error=error,
        failures=report.failures,
    )


@dataclass
class Comparison:
    """
    Policies that played the same seeds.

    Args:
        results (`dict[str, EvaluationResult]`):
            Of each policy.
        baseline (`str`):
            Name of the first policy, which the others are compared with.
        differences (`dict[str, Interval]`):
            Mean, over the episodes that both have played, of the return minus the baseline's, with its interval.
        output_dirs (`dict[str, Path]`):
            Folder of each policy's episodes, if they were written.
    """

    results: dict[str, EvaluationResult]
    baseline: str
    differences: dict[str, Interval]
    output_dirs: dict[str, Path] = field(default_factory=dict)

    def table(self) -> Table:
        """Returns the results as a table to print."""
        table = Table(title=f"Returns, with differences from {self.baseline}")
        table.add_column("Policy", overflow="fold")
        for column in ("Return", "Difference"):
            table.add_column(column, justify="right", overflow="fold")
        for column in ("Success", "Turns", "Truncated", "Episodes"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, result in self.results.items():
            errors = f" + {result.n_error} failed" if result.n_error else ""
            table.add_row(
                name,
                str(result.mean_return),
                str(self.differences[name]) if name in self.differences else "",
                "" if result.success_rate is None else f"{result.success_rate:.1%}",
                f"{result.mean_turns:.2f}",
                f"{sum(result.truncations.values()):.1%}",
                f"{result.n_ok}{errors}",
            )
        return table


def compare_policies(
    policies: Mapping[str, Policy],
    env: Any,
    seeds: int | Iterable[int],
    *,
    split: str = "validation",
    output_dir: str | os.PathLike | None = None,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    verbose: bool = True,
    **kwargs: Any,
) -> Comparison:
    """
    Evaluates policies on the same seeds. The differences of their returns are taken episode by episode, which makes
    their intervals narrower than those of the returns.

    Args:
        policies (`Mapping[str, Policy]`):
            Policies by name; the first one is what the others are compared with.
        env, seeds, split, confidence, num_resamples:
            As in [`evaluate_policy`].
        output_dir (`str` or `os.PathLike`, *optional*):
            Folder of a folder for each policy, of its name: `output_dir` of its [`collect_episodes`]. A name that is
            no plain name of a file is changed, and its hash added.
        verbose (`bool`, *optional*, defaults to `True`):
            Whether to print the table.
        kwargs:
            Further arguments of [`evaluate_policy`].

    Returns:
        [`Comparison`]: results and differences.

    Raises:
        TypeError, ValueError: If there is no policy, or one of them is none; and as [`evaluate_policy`].
    """
    if not isinstance(policies, Mapping):
        raise TypeError(f'`policies` must have names: {{"random": RandomPolicy(), ...}}, got {policies!r}.')
    if not policies:
        raise ValueError("There is nothing to compare: give at least one policy.")
    for policy in policies.values():
        check_policy(policy)
    resampling: dict[str, Any] = {"confidence": confidence, "num_resamples": num_resamples}
    # Taken once: an iterator would leave none to the second policy.
    common: dict[str, Any] = {"seeds": list_of_seeds(seeds, split), "split": split, **resampling, **kwargs}
    folders = {} if output_dir is None else {name: Path(output_dir) / _folder_name(name) for name in policies}
    results = {
        name: evaluate_policy(policy, env, output_dir=folders.get(name), **common) for name, policy in policies.items()
    }
    if any(result.success_rate is not None for result in results.values()):
        for result in results.values():
            if result.success_rate is None and result.n_ok > 0:
                result.success_rate = 0.0
    baseline = next(iter(results))
    reference = _returns(results[baseline])
    differences = {}
    for name, result in results.items():
        if name != baseline:
            returns = _returns(result)
            both = [key for key in returns if key in reference]
            differences[name] = bootstrap_mean([returns[key] - reference[key] for key in both], **resampling)
    comparison = Comparison(results, baseline, differences, folders)
    if verbose:
        Console().print(comparison.table())
    return comparison


def _folder_name(name: str) -> str:
    """The same for the same name, and another one for another."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", str(name))[:100].lstrip(".") or "policy"
    return safe if safe == name else f"{safe}-{hashlib.sha256(str(name).encode(errors='replace')).hexdigest()[:8]}"


def _returns(result: EvaluationResult) -> dict[str, float]:
    """Returns by place and seed, what an episode's name ends with; its beginning names the policy."""
    rows = zip(result.transcripts["episode_id"], result.transcripts["return"], strict=True)
    return {name.partition("-")[2]: total for name, total in rows}


def _check_scale(scale: Any) -> None:
    if scale is not None:
        numbers = list(scale) if isinstance(scale, Iterable) else []
        if len(numbers) != 3 or not all(isinstance(number, Real) and math.isfinite(number) for number in numbers):
            raise ValueError(
                "`scale` is three numbers: lowest return of the task, mean of the data, highest return; "
                f"got {scale!r}."
            )


def _normalized(score: float, scale: tuple[float, float, float] | None) -> float | None:
    if scale is None:
        return None
    from ..environments.games.scores import ScoreScale, normalized_score  # imports the games

    return normalized_score(score, ScoreScale(*scale))


def _measures_nothing(env: Any) -> bool:
    """Whether an environment is known to have no measures of its own, so that nothing needs to be sent to it."""
    if isinstance(env, TextEnvironment):
        return type(env).global_post_process_and_metrics is TextEnvironment.global_post_process_and_metrics
    return isinstance(env, type) and issubclass(env, TextEnv)


def _post_process(workers: Executor, episodes: Dataset) -> tuple[dict[str, Any], str | None]:
    """Asks the environment, in any worker, what it measures; that it cannot say is no reason to lose the rest."""
    if len(episodes) == 0:
        return {}, None
    task = Task(f"post_process/{uuid4().hex}", "post_process", (post_process_batch(episodes),))
    (outcome,) = workers.run([task])
    if outcome.failure is not None:
        return {}, outcome.failure.message
    return outcome.value, None


def post_process_batch(episodes: Dataset) -> dict[str, Any]:
    """
    Returns what environments in the manner of NeMo-RL read in `global_post_process_and_metrics`.

    Args:
        episodes ([`~datasets.Dataset`]):
            B episodes.

    Returns:
        `dict`: `rewards` and `total_reward` `(B,)`, the returns; `is_end` `(B,)`, whether an episode terminated, as
        a float; `truncated` `(B,)`; `generation_lengths`, `prompt_lengths` `(B,)`, in tokens, in characters if the
        policy has none; `text` `(B, S)`, the first prompts as padded code points, equal rows for equal prompts and for
        no others, `S <= 1024`: of a longer prompt the end is left out, for which the SHA-256 of the whole stands;
        `idx` (`list[int]`); and `message_log` (`list[list[dict]]`).
    """
    texts, prompt_lengths, lengths = [], [], []
    for messages, info in zip(episodes["messages"], episodes["info"], strict=True):
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        prompt = "\n".join(str(message["content"]) for message in messages[:first])
        texts.append(_bounded(prompt))
        replies = [str(message["content"]) for message in messages if message["role"] == "assistant"]
        counted = info is not None and "num_tokens" in info
        lengths.append(sum(info["num_tokens"]) if counted else sum(map(len, replies)))
        prompt_lengths.append(info["num_prompt_tokens"][0] if counted else len(prompt))
    width = max(map(len, texts))
    text = torch.tensor([[ord(letter) for letter in text.ljust(width, "\0")] for text in texts])
    returns = torch.tensor(episodes["return"], dtype=torch.float32)
    return {
        "rewards": returns,
        "total_reward": returns.clone(),
        "is_end": torch.tensor(episodes["terminated"]).float(),
        "truncated": torch.tensor(episodes["truncated"]),
        "generation_lengths": torch.tensor(lengths),
        "prompt_lengths": torch.tensor(prompt_lengths),
        "text": text.reshape(len(texts), width),
        "idx": list(range(len(texts))),
        "message_log": [list(messages) for messages in episodes["messages"]],
    }


def _bounded(prompt: str) -> str:
    if len(prompt) <= _MAX_TEXT:
        return prompt
    return prompt[: _MAX_TEXT - _HASH_LENGTH] + hashlib.sha256(prompt.encode()).hexdigest()
