# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The loop: a batch of conversations, the policy, the workers; an episode that ends makes room for the next."""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np

from ..data.chat import Message
from ..distributed.executors import Executor, Outcome, Task
from ..environments.failures import EnvironmentFailure, FailureClass, ReplayMismatch
from ..environments.text_env import observation_hash
from .host import HostStart, HostStep
from .naming import same_description
from .policy import OVERFLOW, Action, Policy, checked_actions


MAX_ATTEMPTS = 3
BACK_OFF_SECONDS = 0.5


@dataclass(frozen=True)
class EpisodePlan:
    """
    An episode to be played.

    Args:
        episode_id (`str`):
            Its name.
        index (`int`):
            Its place among those requested, by which an [`EpisodeSource`] picks a start.
        seed (`int`):
            Seed of the environment.
        policy_seed (`np.random.SeedSequence`):
            Randomness of the policy.
        options (`dict`, *optional*):
            Options of the reset.
    """

    episode_id: str
    index: int
    seed: int
    policy_seed: np.random.SeedSequence
    options: dict[str, Any] | None = None

    def turn_seed(self, turn: int) -> np.random.SeedSequence:
        """The policy's randomness of one turn, which does not depend on what was drawn before it."""
        return np.random.SeedSequence(self.policy_seed.entropy, spawn_key=(turn,))


@dataclass(frozen=True)
class EpisodeFailure:
    """
    An episode that could not be played to its end.

    Args:
        episode_id (`str`), index (`int`), seed (`int`):
            Which one.
        turn (`int`):
            Number of turns that were played.
        kind (`str`):
            `"error"`, `"crashed"`, `"timeout"`, `"lost"`, or `"error:replay_mismatch"`.
        failure_class (`str`):
            `"DATA"`, it would happen again, or `"INFRA"`.
        message (`str`), traceback_text (`str`):
            What happened.
        attempts (`int`):
            How often the call that failed was made.
    """

    episode_id: str
    index: int
    seed: int
    turn: int
    kind: str
    failure_class: str
    message: str
    traceback_text: str = ""
    attempts: int = 1


@dataclass
class Episode:
    """An episode that is being played, or has ended."""

    plan: EpisodePlan
    start: HostStart
    slot: int
    messages: list[Message]
    metadata: Any
    stop_strings: list[str] | None
    actions: list[Action] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    reward_components: list[dict[str, float]] = field(default_factory=list)
    legal_actions: list[list[str] | None] = field(default_factory=list)
    infos: list[dict[str, Any]] = field(default_factory=list)
    terminated: bool = False
    truncation_reason: str | None = None
    # Of calls, so that each has a name of its own.
    calls: int = 0

    @property
    def over(self) -> bool:
        return self.terminated or self.truncation_reason is not None

    def described(self, key: str) -> Any:
        """What the metadata says under a key; only text environments say something."""
        return self.metadata.get(key) if isinstance(self.metadata, dict) else None


Result = Episode | EpisodeFailure


class Player:
    """
    Plays episodes.

    Args:
        policy ([`Policy`]):
            Who acts.
        executor ([`Executor`]):
            Workers, each with an [`EnvironmentHost`].
        batch_size (`int`):
            Number of episodes under way.
        max_turns (`int`, *optional*):
            Number of turns after which an episode is truncated.
        max_seq_len (`int`, *optional*):
            Number of tokens, of a prompt and its reply, at which it is.
        on_length (`str`):
            Whether a reply that is cut at its length ends the episode (`"truncate"`, after its turn) or not
            (`"continue"`).
        environment (`tuple[str, dict | None]`, *optional*):
            The [`describe_environment`] of what the workers must hold, for an executor that was made elsewhere.

    Raises:
        TypeError, ValueError: While it plays, if the policy returns something else than one [`Action`] for each
            conversation, or if the workers hold something else than `environment`. No episode can be played then.
    """

    def __init__(
        self,
        policy: Policy,
        executor: Executor,
        *,
        batch_size: int,
        max_turns: int | None,
        max_seq_len: int | None,
        on_length: str,
        environment: tuple[str, dict[str, Any] | None] | None = None,
    ) -> None:
        self.policy, self.executor = policy, executor
        self.batch_size, self.max_turns, self.max_seq_len = batch_size, max_turns, max_seq_len
        self.on_length, self.environment = on_length, environment
        self.num_turns = self.num_tokens = 0
        self._releases = 0
        # An executor may stay open, and the tasks of another run are others.
        self._prefix = uuid4().hex[:12]

    def play(self, plans: Iterable[EpisodePlan]) -> Generator[Result, None, None]:
        """
        Plays the planned episodes and yields each as it ends or fails. What is under way when the iterator is closed
        is given up.
        """
        queue = deque(plans)
        active: list[Episode] = []
        if queue and self.environment is not None:
            self._check_workers(self.environment)
        try:
            while queue or active:
                started = self._start([queue.popleft() for _ in range(min(self.batch_size - len(active), len(queue)))])
                active += [result for result in started if isinstance(result, Episode)]
                yield from (result for result in started if isinstance(result, EpisodeFailure))
                ended = self._turn(active) if active else []
                gone = {id(result) for result in ended if isinstance(result, Episode)}
                failed = {result.episode_id for result in ended if isinstance(result, EpisodeFailure)}
                active = [x for x in active if id(x) not in gone and x.plan.episode_id not in failed]
                yield from ended
        finally:
            # An executor that an interrupt has closed has nothing left to give up.
            with suppress(RuntimeError):
                self._release(active)

    def _check_workers(self, environment: tuple[str, dict[str, Any] | None]) -> None:
        (outcome,) = self.executor.run([Task(f"{self._prefix}/description", "description")])
        failure = outcome.failure
        if failure is not None and failure.kind == "error":
            raise TypeError(
                "The workers of the executor must hold an `EnvironmentHost`: make it of `host_factory(env)`, as in "
                f"`LocalExecutor(host_factory(MyGame))`. What they hold does not tell what it plays: {failure.message}"
            )
        # Workers that die may live the next time: that is for the episodes to find out.
        if failure is None and not same_description(outcome.value, environment):
            raise ValueError(
                f"The executor plays another environment than the one given: {outcome.value!r:.200}, and not "
                f"{environment!r:.200}. Make it of `host_factory(env)` with the same `env`."
            )

    def _start(self, plans: list[EpisodePlan]) -> list[Result]:
        todo = {plan.episode_id: plan for plan in plans}
        done: dict[str, Result] = {}
        for attempt in range(1, MAX_ATTEMPTS + 1):
            tasks = [
                Task(f"{self._prefix}/{name}/reset/{attempt}", "reset", (plan.seed, plan.index, plan.options))
                for name, plan in todo.items()
            ]
            again = {}
            for name, outcome in self._run(tasks, list(todo)):
                plan = todo[name]
                if outcome.failure is None:
                    start: HostStart = outcome.value
                    done[name] = Episode(
                        plan, start, outcome.slot, list(start.messages), start.metadata, start.stop_strings
                    )
                elif _may_succeed(outcome, attempt):
                    again[name] = plan
                else:
                    done[name] = _failed(plan, 0, outcome, attempt)
            todo = again
            if not todo:
                break
            time.sleep(BACK_OFF_SECONDS * 2 ** (attempt - 1))
        return [done[plan.episode_id] for plan in plans]

    def _turn(self, active: list[Episode]) -> list[Result]:
        """Lets every active episode act once, and returns those that are over."""
        replies = self.policy.act(
            [episode.messages for episode in active],
            [episode.stop_strings for episode in active],
            [episode.plan.turn_seed(len(episode.actions)) for episode in active],
            legal_actions=[episode.described("_legal_actions") for episode in active],
            tools=[start_tools(episode.start) for episode in active],
            max_seq_len=self.max_seq_len,
        )
        ended: list[Result] = []
        acting: list[Episode] = []
        for episode, action in zip(active, checked_actions(self.policy, replies, len(active)), strict=True):
            if action.finish != OVERFLOW:
                episode.legal_actions.append(episode.described("_legal_actions"))
                episode.actions.append(action)
                episode.messages.append({"role": "assistant", "content": action.text})
                acting.append(episode)
                self.num_tokens += action.num_tokens
            elif episode.actions:
                episode.truncation_reason = "max_seq_len"
                ended.append(episode)
            else:
                message = f"The first prompt has {action.num_prompt_tokens} tokens, which leaves none for a reply."
                ended.append(_failure(episode.plan, 0, "error", FailureClass.DATA, message))
        # These stop in the middle, as far as the environment knows.
        self._release([x for x in active if x.truncation_reason == "max_seq_len" or not x.actions])
        self.num_turns += len(acting)
        ended += self._steps(acting)
        return ended

    def _steps(self, acting: list[Episode]) -> list[Result]:
        """Plays the new actions in the environment."""
        ended: list[Result] = []
        given_up: list[Episode] = []
        todo = {episode.plan.episode_id: episode for episode in acting}
        for attempt in range(1, MAX_ATTEMPTS + 1):
            again: dict[str, Episode] = {}
            hung = set()
            for name, outcome in self._run([self._step_task(episode) for episode in todo.values()], list(todo)):
                episode = todo[name]
                if outcome.failure is None:
                    self._absorb(episode, outcome.value)
                    if episode.over:
                        ended.append(episode)
                        given_up.append(episode)
                elif _may_succeed(outcome, attempt, episode.start.stateful):
                    again[name] = episode
                    if outcome.failure.kind == "timeout":
                        hung.add(name)
                else:
                    ended.append(_failed(episode.plan, len(episode.rewards), outcome, attempt))
                    given_up.append(episode)
            # One at a time: if it kills its worker again, it takes no other episode with it.
            for name in [name for name, episode in again.items() if episode.start.stateful]:
                episode = again.pop(name)
                failure = self._replay(episode, name in hung)
                if failure is not None:
                    ended.append(failure)
                elif episode.over:
                    ended.append(episode)
                if failure is not None or episode.over:
                    given_up.append(episode)
            todo = again
            if not todo:
                break
            time.sleep(BACK_OFF_SECONDS * 2 ** (attempt - 1))
        self._release(given_up)
        return ended

    def _replay(self, episode: Episode, hung: bool) -> EpisodeFailure | None:
        """
        Plays a lost episode again up to its last observation, in any worker, and then its new action. `hung`: its own
        call took too long, it was not lost with another's.
        """
        plan, turn = episode.plan, len(episode.rewards)
        actions = [action.text for action in episode.actions[:-1]]
        hashes = [observation_hash(observation) for observation in _observations(episode.messages)]
        for attempt in range(2, MAX_ATTEMPTS + 1):
            key = f"{self._prefix}/{plan.episode_id}/restore/{turn}/{attempt}"
            arguments = (plan.seed, actions, hashes)
            (outcome,) = self.executor.run([Task(key, "restore", arguments, {"options": plan.options})])
            if outcome.failure is None:
                episode.metadata, episode.slot = outcome.value, outcome.slot
                (outcome,) = self.executor.run([self._step_task(episode)])
                if outcome.failure is None:
                    self._absorb(episode, outcome.value)
                    return None
            if not _may_succeed(outcome, attempt, stateful=True, hung=hung):
                break
            hung |= outcome.failure.kind == "timeout"
        return _failed(plan, turn, outcome, attempt)

    def _step_task(self, episode: Episode) -> Task:
        episode.calls += 1
        key = f"{self._prefix}/{episode.plan.episode_id}/step/{episode.calls}"
        if not episode.start.stateful:
            return Task(key, "step", (episode.messages, episode.metadata))
        # The worker has the rest.
        metadata = {name: episode.metadata[name] for name in ("_session", "_seed", "_options")}
        return Task(key, "step", (episode.messages[-1:], metadata), slot=episode.slot)

    def _absorb(self, episode: Episode, step: HostStep) -> None:
        episode.messages += step.observation
        episode.rewards.append(step.reward)
        episode.reward_components.append(step.reward_components)
        episode.metadata = step.metadata
        if step.stop_strings is not None:
            episode.stop_strings = step.stop_strings
        episode.infos.append(episode.described("_info") or {} if episode.start.stateful else {})
        episode.terminated = step.terminated
        if step.truncated:
            episode.truncation_reason = "env_limit"
        elif not step.terminated and self.on_length == "truncate" and episode.actions[-1].finish == "length":
            episode.truncation_reason = "length"
        elif not step.terminated and self.max_turns is not None and len(episode.rewards) >= self.max_turns:
            episode.truncation_reason = "max_turns"

    def _run(self, tasks: list[Task], names: list[str]) -> Iterator[tuple[str, Outcome]]:
        name_of = {task.key: name for task, name in zip(tasks, names, strict=True)}
        for outcome in self.executor.run(tasks) if tasks else ():
            yield name_of[outcome.key], outcome

    def _release(self, episodes: list[Episode]) -> None:
        tasks = []
        for episode in episodes:
            if episode.start.stateful:
                self._releases += 1
                key = f"{self._prefix}/{episode.plan.episode_id}/release/{self._releases}"
                tasks.append(Task(key, "release", (episode.metadata,), slot=episode.slot))
        for _ in self.executor.run(tasks) if tasks else ():
            pass


def _observations(messages: list[Message]) -> list[list[Message]]:
    """What was observed before each action, of a conversation that ends with one."""
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [messages[start:end] for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]


def start_tools(start: HostStart) -> list[dict[str, Any]] | None:
    """The tools that an environment described when the episode began."""
    return start.metadata.get("_tools") if isinstance(start.metadata, dict) else None


def _may_succeed(outcome: Outcome, attempt: int, stateful: bool = False, hung: bool = False) -> bool:
    """
    Whether to make a failed call again, which took too long before if it `hung`. The executor did so itself where a
    worker died, but not with the episodes that the worker held: these are played again.
    """
    failure = outcome.failure
    if failure is None or attempt >= MAX_ATTEMPTS:
        return False
    if failure.kind == "error":
        error = failure.error
        return isinstance(error, EnvironmentFailure) and error.failure_class == FailureClass.INFRA
    # One that hangs twice will hang for ever, and each time costs the whole deadline.
    return stateful and (failure.kind == "lost" or (failure.kind == "timeout" and not hung))


def _failed(plan: EpisodePlan, turn: int, outcome: Outcome, attempts: int) -> EpisodeFailure:
    failure = outcome.failure
    assert failure is not None
    kind, failure_class = failure.kind, FailureClass.INFRA
    if kind == "lost" and attempts >= MAX_ATTEMPTS:
        # It was alone in the worker's queue, and the worker died each time.
        kind = "crashed"
    message, text = failure.message, failure.traceback_text
    if kind == "error":
        error = failure.error
        failure_class = error.failure_class if isinstance(error, EnvironmentFailure) else FailureClass.DATA
        if isinstance(error, EnvironmentFailure):
            message, text = error.message, error.traceback_text or text
        if isinstance(error, ReplayMismatch):
            kind = "error:replay_mismatch"
    return _failure(plan, turn, kind, failure_class, message, text, attempts)


def _failure(
    plan: EpisodePlan,
    turn: int,
    kind: str,
    failure_class: FailureClass,
    message: str,
    traceback_text: str = "",
    attempts: int = 1,
) -> EpisodeFailure:
    return EpisodeFailure(
        plan.episode_id, plan.index, plan.seed, turn, kind, str(failure_class), message, traceback_text, attempts
    )
