# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The policy in training plays, each process a share of the episodes; what it played is scored and stored."""

import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers.integrations import is_deepspeed_zero3_enabled

from ..data.episodes import success_rate
from ..environments import EpisodeSource, episode_seed
from ..environments.resetting import NumberedStarts
from ..losses.advantages import adapted_kl_coef
from ..rollouts import ModelPolicy, collect_episodes
from ..rollouts.store import RolloutStore
from .environment_callback import random_state_kept
from .ppo_rollouts import Progress
from .ppo_scoring import Scorer


class Experience:
    """
    Plays and scores the rollouts of PPO.

    Args:
        trainer ([`PPOTrainer`]): The trainer, whose model plays.
        executor ([`Executor`] or `Callable`, *optional*): Where the environment runs, as in [`collect_episodes`].
        source ([`EpisodeSource`], *optional*): Where episodes start.
    """

    def __init__(self, trainer: Any, executor: Any = None, source: EpisodeSource | None = None):
        self.trainer, self.executor, self.source = trainer, executor, source
        self.scorer = Scorer(trainer)

    def rollout(self, progress: Progress) -> tuple[RolloutStore, list[dict[str, Any]], dict[str, float]]:
        """The next episodes as elements to learn from and as rows, and what there is to say of them."""
        args = self.trainer.args
        started = time.perf_counter()
        rows = self.play(progress)
        if not rows:
            raise RuntimeError("No episode of the rollout was played to its end: there is nothing to learn from.")
        played = time.perf_counter()
        store, metrics = self.store(rows, progress.kl_coef)
        scored = time.perf_counter()
        turns = [len(row["turn_rewards"]) for row in rows]
        finishes = [finish for row in rows for finish in row["turn_finish"]]
        rate = success_rate(row["success"] for row in rows)
        progress.episodes += len(rows)
        progress.steps += sum(turns)
        metrics |= {
            "env/return": mean([row["return"] for row in rows]),
            "env/turns": mean(turns),
            "env/truncated": mean([row["truncated"] for row in rows]),
            **({} if rate is None else {"env/success_rate": rate}),
            "env/episodes": progress.episodes,
            "env/steps": progress.steps,
            "completions/mean_length": mean([len(element.response_tensor) for element in store.elements]),
            "completions/clipped_ratio": mean([finish == "length" for finish in finishes]),
            "kl_coef": progress.kl_coef,
            "time/rollout": played - started,
            "time/score": scored - played,
        }
        if self.trainer.prompts is not None:
            for name in self.trainer.prompts.names:
                scores = [x for row in rows if (x := row["turn_reward_components"][0].get(name)) is not None]
                if scores:
                    metrics[f"rewards/{name}/mean"] = mean(scores)
        if args.kl_target is not None and self.trainer.reference is not None:
            progress.kl_coef = adapted_kl_coef(
                progress.kl_coef,
                metrics["policy/kl_ref"],
                target=args.kl_target,
                horizon=args.kl_horizon,
                num_items=len(store),
            )
        return store, rows, metrics

    def play(self, progress: Progress) -> list[dict[str, Any]]:
        """Rows of the next episodes, in order and the same on every process."""
        trainer, args = self.trainer, self.trainer.args
        first, count = progress.rollouts * args.episodes_per_rollout, args.episodes_per_rollout
        if trainer.prompts is None:
            seeds = [episode_seed(i) for i in range(first, first + count)]
        else:
            seeds = trainer.prompts.seeds(first, count, args.seed)
        places = list(range(count))[args.process_index :: args.world_size]
        rows: list[tuple[int, dict[str, Any]]] = []
        failure = None
        try:
            rows = self._play([seeds[i] for i in places], places, progress) if places else []
        except Exception as error:
            if args.world_size == 1:
                raise
            failure = f"Process {args.process_index}: {''.join(traceback.format_exception(error))}"
        if args.world_size > 1:
            # All of them stop: the others would wait for the one that failed.
            failures = [text for text in gather_object([failure]) if text is not None]
            if failures:
                raise RuntimeError(f"{len(failures)} processes could not play. {failures[0]}")
            rows = gather_object(rows)
        return [row for _, row in sorted(rows, key=lambda pair: pair[0])]

    def _play(self, seeds: list[int], places: list[int], progress: Progress) -> list[tuple[int, dict[str, Any]]]:
        trainer, args = self.trainer, self.trainer.args
        # A reply that is cut is an action like any other: the environment has answered it.
        options: dict[str, Any] = {"on_length": "continue", **(args.collect_kwargs or {})}
        first = progress.rollouts * args.episodes_per_rollout
        source = None if self.source is None else NumberedStarts(self.source, [first + place for place in places])
        # Others at each rollout, for environments that draw from global random state.
        draws = [args.seed, progress.rollouts, args.process_index]
        with whole_model(trainer), random_state_kept(trainer.bare_model.device, draws):
            episodes = collect_episodes(
                self.policy(),
                trainer.environment,
                seeds=seeds,
                max_turns=1 if trainer.prompts is not None else args.max_turns,
                batch_size=args.generation_batch_size,
                executor=self.executor,
                source=source,
                keep_tokens=True,
                run_seed=int(np.random.SeedSequence([args.seed, progress.rollouts]).generate_state(1)[0]),
                progress=False,
                **options,
            )
        rows = episodes.to_list()
        if trainer.prompts is not None:
            trainer.prompts.reward(rows)
        place_of = dict(zip(seeds, places, strict=True))
        return [(place_of[row["seed"]], row) for row in rows]

    def policy(self) -> ModelPolicy:
        """The model in training as a policy."""
        trainer, args = self.trainer, self.trainer.args
        return ModelPolicy(
            trainer.bare_model,
            trainer._tokenizer,
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
            batch_size=args.generation_batch_size,
        )

    def store(self, rows: list[dict[str, Any]], kl_coef: float) -> tuple[RolloutStore, dict[str, float]]:
        """The elements of played episodes with their advantages, and what there is to say of them."""
        args = self.trainer.args
        store = RolloutStore.from_episodes(rows)
        scores = self.scorer.scores(store.elements)
        for i, score in enumerate(scores):
            store.set_scores(i, score.logprobs, score.values, score.ref_logprobs)
        truncated = [row for row in rows if row["truncated"]]
        values = self.scorer.values([self._last_state(row) for row in truncated])
        store.bootstrap_values = {row["episode_id"]: x for row, x in zip(truncated, values, strict=True)}
        store.compute_advantages(
            gamma=args.gamma,
            lam=args.lam,
            reward_scale=args.reward_scale,
            kl_coef=kl_coef,
            kl_estimator=args.kl_estimator,
            discount_on=args.discount_on,
            whiten_advantages=args.whiten_advantages,
        )
        sampled = torch.cat([torch.tensor(x) for row in rows for x in row["turn_logprobs"]])
        scored = torch.cat([score.logprobs for score in scores])
        entropy = torch.cat([score.entropy for score in scores])
        kl = torch.stack([(score.logprobs - score.ref_logprobs).sum() for score in scores])
        difference = (sampled - scored).abs().mean().item()
        self._check_difference(difference)
        return store, {
            "policy/entropy": entropy.mean().item(),
            "policy/kl_ref": kl.mean().item(),
            "policy/sampling_difference": difference,
        }

    def _last_state(self, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        """What a truncated episode is read as where it was cut: a prompt, and what is said after it."""
        policy = self.policy()
        if row["messages"][-1]["role"] != "assistant":
            (prompt,) = policy.prompts([row["messages"]], [row.get("tools")])
            if policy.budget(len(prompt)) > 0:
                return prompt, []
        # There is no observation to act on, or no room to read it.
        return row["turn_prompt_ids"][-1], row["turn_token_ids"][-1]

    def _check_difference(self, difference: float) -> None:
        """Raises a `ValueError` if training would move other probabilities than those that the model samples by."""
        accelerator, model = self.trainer.accelerator, self.trainer.bare_model
        exact = model.dtype == torch.float32 and not accelerator.native_amp
        if difference > (1e-3 if exact else 0.1):
            raise ValueError(
                f"The log-probabilities of tokens in generation and in training differ by {difference:.3g} on "
                f"average. What {type(model.language_model).__name__} does between its last hidden state and its "
                "logits is not known to hf_qrl, or its generation changes the logits; it is not supported."
            )


def mean(numbers: list[Any]) -> float:
    return sum(numbers) / len(numbers)


def whole_model(trainer: Any) -> AbstractContextManager:
    """Gathers the weights that ZeRO-3 has spread over the processes, so that each can generate for itself."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    from trl.models.utils import unwrap_model_for_generation

    return unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator)


__all__ = ["Experience", "mean", "whole_model"]
