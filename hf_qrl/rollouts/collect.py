# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Episodes of a policy in an environment, as a dataset that the trainers read."""

import hashlib
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..data.episodes import dataset_of_checked, plain_json, validate_episode
from ..distributed.executors import Executor, LocalExecutor
from ..environments.resetting import EpisodeSource
from ..environments.seeding import check_seed
from .host import EnvironmentHost, describe_environment, host_factory, names_everything
from .journal import FailureLog, Journal, config_digest
from .plans import check_executor, check_policy, count, episode_plans
from .player import EpisodeFailure, Player
from .policy import Policy
from .rows import episode_row


logger = logging.getLogger(__name__)

# Longest JSON of the environment's arguments that each row repeats.
_MAX_REPEATED = 1000


@dataclass
class CollectionReport:
    """
    What became of the episodes that were asked for: `n_requested = n_ok + n_failed + n_pending`.

    Args:
        n_requested (`int`):
            Number of episodes asked for.
        n_ok (`int`, *optional*, defaults to 0):
            Those in the dataset.
        n_resumed (`int`, *optional*, defaults to 0):
            Those of them that an earlier run had played.
        failures (`list[EpisodeFailure]`, *optional*):
            Those that failed.
        num_turns (`int`), num_tokens (`int`), seconds (`float`), *optional*:
            What was played now.
    """

    n_requested: int
    n_ok: int = 0
    n_resumed: int = 0
    failures: list[EpisodeFailure] = field(default_factory=list)
    num_turns: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def n_failed(self) -> int:
        """Number of failed episodes."""
        return len(self.failures)

    @property
    def n_pending(self) -> int:
        """Number of episodes that were not played to their end."""
        return self.n_requested - self.n_ok - self.n_failed

    def __str__(self) -> str:
        kinds = Counter(f"{failure.kind} ({failure.failure_class})" for failure in self.failures)
        reasons = f": {', '.join(f'{count} {kind}' for kind, count in kinds.items())}" if kinds else ""
        counts = f"{self.n_ok} ok + {self.n_failed} failed + {self.n_pending} pending"
        return f"{self.n_requested} requested = {counts}{reasons}"


class TooManyFailures(RuntimeError):
    """
    More episodes failed than `max_error_rate` allows. What was played is not lost.

    Args:
        report ([`CollectionReport`]):
            What became of the episodes.
        rows (`list[dict]`):
            Rows of those that ended.
    """

    def __init__(self, report: CollectionReport, rows: list[dict[str, Any]], max_error_rate: float) -> None:
        last = report.failures[-1]
        super().__init__(
            f"More than {max_error_rate:.0%} of the episodes failed ({report}), and leaving them out would bias the "
            f"data. The last one, seed {last.seed}, after {last.turn} turns: {last.message.rstrip('.')}. Fix the "
            "environment, or raise `max_error_rate`."
        )
        self.report, self.rows = report, rows
        if last.traceback_text:
            self.add_note("Traceback of the last failure:\n" + last.traceback_text)


def collect_episodes(
    policy: Policy,
    env: Any,
    num_episodes: int | None = None,
    seeds: Iterable[int] | None = None,
    *,
    split: str = "train",
    source: EpisodeSource | None = None,
    options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
    max_turns: int | None = None,
    max_seq_len: int | None = None,
    on_length: str = "truncate",
    batch_size: int = 32,
    executor: Executor | Callable[[Callable[[], Any]], Executor] | None = None,
    output_dir: str | os.PathLike | None = None,
    max_error_rate: float = 0.1,
    keep_tokens: bool = False,
    task: str = "",
    run_seed: int = 0,
    progress: bool = True,
    return_report: bool = False,
) -> Any:
    """
    Plays episodes and returns them as a dataset, which [`ILQLTrainer`] trains on as it is.

    `batch_size` episodes are under way at any time: one that ends makes room for the next. Rows come in the order of
    the seeds, and are the same for any batch size and any workers, as far as the policy's floating point allows.

    **How an episode ends:** the environment terminates it, or it is truncated for one of the reasons `"env_limit"`
    (the environment stops), `"length"` (a reply was cut), `"max_turns"` and `"max_seq_len"`. **An episode in which the
    environment fails is no row**: it is counted, logged and, with `output_dir`, written to `failures.jsonl`. So is one
    that cannot be stored, as what the environment or the policy said is no text, for instance.

    Args:
        policy ([`Policy`]):
            Who acts.
        env ([`TextEnv`] class, [`EnvironmentInterface`], or a factory of either):
            What is played. Other processes need something that can be pickled, such as a class or a
            `functools.partial` of it.
        num_episodes (`int`, *optional*):
            Number of episodes; their seeds are those of `split`.
        seeds (`Iterable[int]`, *optional*):
            Seeds, in the place of a number. A seed may occur several times, with another sample of the policy each.
        split (`str`, *optional*, defaults to `"train"`):
            `"train"`, `"validation"`, `"test"` or `"other"`: none shares a seed with another.
        source ([`EpisodeSource`], *optional*):
            Where episodes start, for an environment without `reset`.
        options (`dict`, or a sequence of them, *optional*):
            Options of all resets, or of each.
        max_turns (`int`, *optional*):
            Number of turns after which an episode is truncated. Without it an episode that never ends is played for
            ever.
        max_seq_len (`int`, *optional*):
            Number of tokens of a prompt and its reply. A reply is cut there, and an episode whose next prompt has as
            many is truncated; its last observation is stored whole. Policies without tokens do not mind.
        on_length (`str`, *optional*, defaults to `"truncate"`):
            What a reply that was cut at its length does, after the environment has answered it: truncate the episode,
            or `"continue"`.
        batch_size (`int`, *optional*, defaults to 32):
            Number of episodes under way.
        executor ([`Executor`], or a function from a factory to one, *optional*):
            Where the environment runs: in this process by default, else for instance
            `partial(ProcessExecutor, num_workers=4, timeout=10)`. An executor that is already there must hold
            [`EnvironmentHost`]s of this environment (`host_factory(env)`); it is not closed.
        output_dir (`str` or `os.PathLike`, *optional*):
            Folder of `episodes.jsonl` and `failures.jsonl`. A run that was stopped goes on from there when called
            again with the same arguments, or for more episodes; failed ones are tried again. That the weights of the
            policy and the rows of `source` are still the same is not checked, and neither are environments and
            policies without a name, such as those made by a `lambda`, of which a warning tells.

            Arguments of the environment (those of a `functools.partial`) whose JSON is longer than a kilobyte are
            stored once, in the first line of `episodes.jsonl`; each row has their SHA-256 and their beginning.
        max_error_rate (`float`, *optional*, defaults to 0.1):
            Share of the requested episodes that may fail.
        keep_tokens (`bool`, *optional*, defaults to `False`):
            Whether to store the sampled tokens, their log-probabilities, and the tokens that each turn was read from.
        task (`str`, *optional*, defaults to `""`):
            Name of the task, for the record.
        run_seed (`int`, *optional*, defaults to 0):
            Seed of the policy's randomness.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show a progress bar.
        return_report (`bool`, *optional*, defaults to `False`):
            Whether to return the pair of dataset and [`CollectionReport`].

    Returns:
        [`~datasets.Dataset`]: episodes ([`episode_features`]), in the order of the seeds.

    Raises:
        TooManyFailures: If more than `max_error_rate` of the episodes failed.
        TypeError, ValueError: If arguments are not what they should be or contradict each other, or `output_dir` holds
            a run with other ones.

    Examples:

    ```python
    >>> from hf_qrl.environments.games import GuessNumberEnv
    >>> from hf_qrl.rollouts import RandomPolicy, collect_episodes

    >>> policy = RandomPolicy([f"{n}\\n" for n in range(1, 17)])
    >>> episodes = collect_episodes(policy, GuessNumberEnv, 100, max_turns=20)
    ```
    """
    if on_length not in ("truncate", "continue"):
        raise ValueError(f'`on_length` must be "truncate" or "continue", got {on_length!r}.')
    batch_size = count("batch_size", batch_size)
    max_turns = None if max_turns is None else count("max_turns", max_turns)
    max_seq_len = None if max_seq_len is None else count("max_seq_len", max_seq_len)
    if isinstance(max_error_rate, bool) or not isinstance(max_error_rate, Real) or not 0 <= max_error_rate <= 1:
        raise ValueError(f"`max_error_rate` is a share, 0 <= max_error_rate <= 1, got {max_error_rate!r}.")
    if not isinstance(task, str):
        raise TypeError(f"`task` is the name of the task, a string, got {task!r}.")
    check_policy(policy)
    check_executor(executor)
    run_seed = check_seed(run_seed)
    one_each = not (options is None or isinstance(options, Mapping))
    env_id, env_kwargs = describe_environment(env)
    identity = {**policy.identity(), "seed": run_seed}
    config = plain_json(
        {
            "env_id": env_id,
            "env_kwargs": env_kwargs,
            "task": task,
            "split": split,
            "options": "one each" if one_each else options,
            "policy": identity,
            "max_turns": max_turns,
            "max_seq_len": max_seq_len,
            "on_length": on_length,
            "keep_tokens": keep_tokens,
        }
    )
    digest = config_digest(config)
    plans = episode_plans(num_episodes, seeds, split, options, run_seed, digest[:12])
    constants = {
        "run_id": digest[:12],
        "env_id": env_id,
        "env_kwargs": _shortened(env_kwargs),
        "task": task,
        "policy": identity,
        **({"tokenizer_id": policy.tokenizer_id} if keep_tokens else {}),
    }
    report = CollectionReport(len(plans))
    rows: dict[str, dict[str, Any]] = {}
    started = time.perf_counter()
    with ExitStack() as stack:
        journal = failure_log = None
        if output_dir is not None:
            folder = Path(output_dir)
            journal = stack.enter_context(Journal(folder / "episodes.jsonl", digest, config))
            failure_log = stack.enter_context(FailureLog(folder / "failures.jsonl"))
            wanted = {plan.episode_id for plan in plans}
            for number, (name, row) in enumerate(journal.completed().items(), start=2):
                if name in wanted:
                    rows[name] = validate_episode(row, f"Line {number} of {journal.path}")
            _warn_of_the_nameless(env_kwargs, identity)
            report.n_ok = report.n_resumed = len(rows)
        workers = stack.enter_context(open_executor(executor, env, source))
        player = Player(
            policy,
            workers,
            batch_size=batch_size,
            max_turns=max_turns,
            max_seq_len=max_seq_len,
            on_length=on_length,
            environment=(env_id, env_kwargs) if isinstance(executor, Executor) else None,
        )
        results = player.play([plan for plan in plans if plan.episode_id not in rows])
        stack.enter_context(closing(results))
        bar = stack.enter_context(
            tqdm(total=len(plans), initial=len(rows), desc="Episodes", unit="ep", disable=not progress)
        )
        returns = math.fsum(row["return"] for row in rows.values())
        for result in results:
            bar.update()
            row = result if isinstance(result, EpisodeFailure) else episode_row(result, constants, keep_tokens)
            if isinstance(row, EpisodeFailure):
                _note(row, report, failure_log)
            else:
                if journal is not None:
                    journal.append(row)
                rows[row["episode_id"]] = row
                report.n_ok += 1
                returns += row["return"]
            report.num_turns, report.num_tokens = player.num_turns, player.num_tokens
            report.seconds = time.perf_counter() - started
            if progress:
                bar.set_postfix(_progress(report, returns), refresh=False)
            if report.n_failed > max_error_rate * report.n_requested:
                raise TooManyFailures(report, list(rows.values()), max_error_rate)
    if report.failures:
        logger.warning("Episodes: %s.", report)
    dataset = dataset_of_checked([rows[plan.episode_id] for plan in plans if plan.episode_id in rows])
    return (dataset, report) if return_report else dataset


@contextmanager
def open_executor(
    executor: Executor | Callable[[Callable[[], Any]], Executor] | None, env: Any, source: EpisodeSource | None
) -> Iterator[Executor]:
    """Gives the executor of a run: the user's, one that the user's function makes, or one of this process."""
    if isinstance(executor, Executor):
        yield executor
    elif executor is not None:
        made = executor(host_factory(env, source))
        if not isinstance(made, Executor):
            raise TypeError(f"`executor` must make an `Executor` of a factory, it made a `{type(made).__name__}`.")
        with made:
            yield made
    else:
        with closing(EnvironmentHost(env, source)) as host, LocalExecutor(lambda: host) as local:
            yield local


def _shortened(env_kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
    """What rows say of the arguments of the environment: a dataset among them would be in each."""
    text = json.dumps(env_kwargs)
    if len(text) <= _MAX_REPEATED:
        return env_kwargs
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "beginning": text[:200]}


def _warn_of_the_nameless(env_kwargs: dict[str, Any] | None, identity: dict[str, Any]) -> None:
    if not names_everything(env_kwargs):
        logger.warning(
            "Whether a run that goes on in this folder has the same environment cannot be checked: what it is made of "
            "has no name that tells. A class or function at the top level of a module has, and a `functools.partial` "
            "of one with plain arguments."
        )
    if not names_everything(identity):
        logger.warning(
            "Whether a run that goes on in this folder has the same policy cannot be checked: its identity, %s, does "
            "not tell. Give a `ScriptedPolicy` a `name`, and policies of your own an `identity`.",
            identity,
        )


def _note(failure: EpisodeFailure, report: CollectionReport, log: FailureLog | None) -> None:
    report.failures.append(failure)
    if log is not None:
        log.append(
            episode_id=failure.episode_id,
            failure_class=failure.failure_class,
            kind=failure.kind,
            attempts=failure.attempts,
            seed=failure.seed,
            message=f"After {failure.turn} turns: {failure.message}",
            traceback_text=failure.traceback_text,
        )


def _progress(report: CollectionReport, returns: float) -> dict[str, str]:
    shown = {"turns": str(report.num_turns)}
    if report.num_tokens:
        shown["tokens/s"] = f"{report.num_tokens / max(report.seconds, 1e-9):.0f}"
    if report.n_ok:
        shown["return"] = f"{returns / report.n_ok:.3g}"
    if report.n_failed:
        shown["failed"] = str(report.n_failed)
    return shown
