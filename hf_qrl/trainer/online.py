# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""From offline to online: the policy plays while it is trained, and is trained on what it played."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from ..data import prepare_dataset
from ..data.episodes import episodes_dataset, plain_json, success_rate
from ..environments.resetting import NumberedStarts
from ..environments.seeding import episode_seed
from ..rollouts import (
    CollectionReport,
    EpisodeFailure,
    EpsilonGreedyPolicy,
    ModelPolicy,
    Policy,
    TooManyFailures,
    collect_episodes,
)
from ..rollouts.host import describe_environment
from .environment_callback import random_state_kept
from .mixing import RowMixer
from .processes import fsdp_is_asked_for
from .replay import Replay, ReplayJournal


logger = logging.get_logger(__name__)

# What of `collect_episodes` the trainer decides, and where from.
_OWN_ARGUMENTS = {
    "policy": "the model in training",
    "env": "`environment`",
    "num_episodes": "`args.episodes_per_collect`",
    "seeds": "`collect_kwargs={'split': ...}`, whose seeds are taken in turn",
    "max_turns": "`args.collect_max_turns`",
    "run_seed": "`args.seed`",
    "output_dir": "`args.output_dir`, in the folder `replay`",
    "return_report": "the logs",
}


def check_online(args: Any, model: Any, tokenizer: Any, train_dataset: Any, collect_kwargs: dict | None) -> None:
    """Raises a `ValueError` for arguments with which a policy cannot play and be trained on it."""
    if args.max_steps <= 0:
        raise ValueError(
            "With an `environment` the data grows and has no epochs: set `max_steps`, the number of optimizer steps."
        )
    if isinstance(train_dataset, IterableDataset):
        raise ValueError(
            "With an `environment` the batches mix shuffled rows of `train_dataset` and of the replay, and a stream "
            "has no rows to choose from. Take a `Dataset` (`Dataset.from_list(list(stream.take(n)))`)."
        )
    if args.reward_scaling is not None and train_dataset is None:
        raise ValueError(
            f'reward_scaling="{args.reward_scaling}" takes its constants from `train_dataset`, and there is none. Set '
            "`model.config.reward_mean` and `model.config.reward_std`, and leave `reward_scaling` unset."
        )
    if getattr(args, "target", None) == "mc":
        raise ValueError(
            '`target="mc"` regresses on the returns of the policies that played, of which an `environment` gives as '
            'many as there are collections. Use `target="td"`.'
        )
    if fsdp_is_asked_for(args) or is_deepspeed_zero3_enabled():
        raise ValueError(
            "With an `environment` each process plays episodes of its own, for which it needs whole weights; FSDP and "
            "ZeRO-3 spread them. Use DDP or ZeRO-2."
        )
    if not model.config.is_encoder_decoder and not tokenizer.chat_template:
        raise ValueError(
            "Episodes are conversations, and the tokenizer has no chat template to read them with. Set "
            "`tokenizer.chat_template`, for instance to `hf_qrl.data.episodes.PLAIN_CHAT_TEMPLATE`."
        )
    for name in collect_kwargs or {}:
        if name in _OWN_ARGUMENTS:
            raise ValueError(f"`collect_kwargs` has `{name}`, which comes from {_OWN_ARGUMENTS[name]}. Leave it out.")


class OnlineCollectionCallback(TrainerCallback):
    """
    Plays episodes with the policy in training at the start and after every `args.collect_every` optimizer steps, adds
    them to the replay, and makes the batches of both the training data and the replay.

    The random state and the mode of the model stay as they were. Episodes have seeds of their own, each played once.
    Of several processes each plays its share, and all have the same replay.

    Args:
        trainer ([`ILQLTrainer`]): The trainer.
        environment: What is played, as in [`collect_episodes`].
        collect_kwargs (`dict`, *optional*): Further arguments of [`collect_episodes`].
        prepare_replay (`Callable[[Dataset], Dataset]`, *optional*): Makes training data of the episodes.

    Attributes:
        replay ([`Replay`]): The episodes that are kept, and their rows.
        num_episodes (`int`): Number of episodes so far, those that are no longer kept included.
        num_steps (`int`): Number of environment steps so far, those of failed episodes included.
    """

    file_name = "replay.json"

    def __init__(
        self,
        trainer: Any,
        environment: Any,
        collect_kwargs: dict[str, Any] | None = None,
        prepare_replay: Callable[[Dataset], Dataset] | None = None,
    ):
        args = trainer.args
        self.trainer, self.environment, self.prepare_replay = trainer, environment, prepare_replay
        self.collect_kwargs = {"max_error_rate": 0.1, "split": "train", "progress": False, **(collect_kwargs or {})}
        env_id, env_kwargs = describe_environment(environment)
        self.journal = ReplayJournal(
            Path(args.output_dir) / "replay" / "episodes.jsonl",
            plain_json({"env_id": env_id, "env_kwargs": env_kwargs, "seed": args.seed}),
        )
        self.replay = Replay(self._prepare, args.replay_size, prepare_replay)
        offline = trainer.train_dataset
        self.mixer = RowMixer(None if offline is None else self._columns(offline), args.offline_fraction, args.seed)
        self.num_episodes = self.num_steps = self._num_planned = 0

    # ----------------------------------------------------------------------------------------------------- batches

    def dataloader(self) -> DataLoader:
        """
        One batch per micro-batch of the run. It is made when it is asked for, and not earlier, as the replay grows.
        """
        args = self.trainer.args
        numbers = range(args.max_steps * args.gradient_accumulation_steps)
        return DataLoader(numbers, batch_size=1, collate_fn=self._batch)  # type: ignore[arg-type]

    def _batch(self, numbers: list[int]) -> Any:
        trainer = self.trainer
        rows, size = self.replay.rows, trainer._train_batch_size
        if rows is None:
            raise ValueError("The replay is empty: every episode so far has failed. Fix the environment.")
        start = (numbers[0] * trainer.args.world_size + trainer.args.process_index) * size
        return trainer.data_collator(self.mixer.draw(start, size, rows))

    def _columns(self, rows: Dataset) -> Dataset:
        return self.trainer._remove_unused_columns(rows, "training")

    def _prepare(self, dataset: Dataset) -> Dataset:
        options = {**self.trainer._prepare_kwargs, "num_proc": None}  # too few to start processes for
        rows = prepare_dataset(dataset, self.trainer._tokenizer, **options, description="Preparing replay")
        return self._columns(rows)

    # -------------------------------------------------------------------------------------------------- collection

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 0:  # from a checkpoint, with its replay
            return
        if self.trainer.is_world_process_zero():
            self.journal.begin()
        self.replay.clear()
        self.num_episodes = self.num_steps = self._num_planned = 0
        self._collect()
        if self.mixer.offline is None and self.replay.rows is not None:
            self.trainer._fit_to_data(self.trainer.bare_model, args, self.replay.rows)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.collect_every == 0 and state.global_step < state.max_steps:
            self._collect()

    def _plan(self) -> tuple[range, int | None]:
        """Which episodes are played next, and how many turns each may have, such that no budget can be exceeded."""
        args = self.trainer.args
        count, max_turns = args.episodes_per_collect, args.collect_max_turns
        if args.max_online_episodes is not None:
            count = min(count, args.max_online_episodes - self._num_planned)
        if args.max_online_steps is not None:
            left = args.max_online_steps - self.num_steps
            max_turns = min(max_turns, left)
            count = min(count, left // max_turns if left > 0 else 0)
        return range(self._num_planned, self._num_planned + count), max_turns

    def _collect(self) -> None:
        trainer, args = self.trainer, self.trainer.args
        planned, max_turns = self._plan()
        if not planned:
            return
        # Others at each collection, for environments that draw from global random state.
        with random_state_kept(trainer.bare_model.device, [args.seed, planned.start, args.process_index]):
            mine = planned[args.process_index :: args.world_size]
            parts = gather_object([self._play(mine, max_turns)] if mine else [])
            played = sorted((row for rows, _ in parts for row in rows), key=self._place(planned))
            failures = [failure for _, report in parts for failure in report.failures]
            turns = sum(report.num_turns for _, report in parts)
            episodes, unusable = self._add_usable(played)
            report = CollectionReport(len(planned), len(episodes), failures=failures + unusable, num_turns=turns)
            if report.n_failed:
                logger.warning("Episodes played: %s. The last: %s", report, report.failures[-1].message)
            if report.n_failed > self.collect_kwargs["max_error_rate"] * report.n_requested:
                raise TooManyFailures(report, played, self.collect_kwargs["max_error_rate"])
            if trainer.is_world_process_zero():
                self.journal.append(episodes)
        self._num_planned += len(planned)
        self.num_episodes += len(episodes)
        self.num_steps += turns
        if episodes:
            trainer.log(self._metrics(episodes))

    def _play(self, numbers: range, max_turns: int | None) -> tuple[list[dict[str, Any]], CollectionReport]:
        args, kwargs = self.trainer.args, dict(self.collect_kwargs)
        policy: Policy = ModelPolicy(
            self.trainer.bare_model,
            self.trainer._tokenizer,
            max_new_tokens=args.collect_max_new_tokens,
            temperature=args.collect_temperature,
        )
        if args.collect_epsilon > 0:
            policy = EpsilonGreedyPolicy(policy, args.collect_epsilon)
        if kwargs.get("source") is not None:
            kwargs["source"] = NumberedStarts(kwargs["source"], numbers)
        # Whether too many have failed is judged of those of all processes.
        kwargs["max_error_rate"] = 1.0
        seeds = [episode_seed(number, kwargs["split"]) for number in numbers]
        episodes, report = collect_episodes(
            policy,
            self.environment,
            seeds=seeds,
            max_turns=max_turns,
            run_seed=args.seed,
            return_report=True,
            **kwargs,
        )
        return list(episodes.with_format(None)), report

    def _place(self, planned: range) -> Callable[[dict[str, Any]], int]:
        places = {episode_seed(number, self.collect_kwargs["split"]): number for number in planned}
        return lambda episode: places[episode["seed"]]

    def _add_usable(self, episodes: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[EpisodeFailure]]:
        """
        Adds the episodes of which rows can be made to the replay, and returns them; the others are failures. Such a
        one has a reply without any tokens, for instance, where the chat template adds none.
        """
        try:
            self._add(episodes)
            return episodes, []
        except ValueError:
            if self.prepare_replay is not None:  # which makes rows of all of them
                raise
        usable, failures = [], []
        for index, episode in enumerate(episodes):
            try:
                self._prepare(episodes_dataset([episode]))
                usable.append(episode)
            except ValueError as error:
                turns = len(episode["turn_rewards"])
                message = (
                    f"No rows to train on can be made of it: {error} It was played by the policy, which may have said "
                    "nothing: more training before it plays, a chat template that marks the end of a reply, or a "
                    "larger `max_error_rate` in `collect_kwargs` help then."
                )
                failures.append(
                    EpisodeFailure(episode["episode_id"], index, episode["seed"], turns, "error", "DATA", message)
                )
        self._add(usable)
        return usable, failures

    def _add(self, episodes: list[dict[str, Any]]) -> None:
        self.replay.extend(episodes)
        if self.mixer.offline is None:
            self.trainer.train_dataset = self.replay.rows  # what others take for the data

    def _metrics(self, episodes: list[dict[str, Any]]) -> dict[str, float]:
        rate = success_rate(episode["success"] for episode in episodes)
        return {
            "env/return": math.fsum(episode["return"] for episode in episodes) / len(episodes),
            **({} if rate is None else {"env/success_rate": rate}),
            "env/episodes": self.num_episodes,
            "env/steps": self.num_steps,
            "replay/size": len(self.replay),
        }

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save(self, checkpoint: str | Path) -> None:
        """Writes how far the replay has come; the episodes themselves are in its journal."""
        state = {
            "num_episodes": self.num_episodes,
            "num_planned": self._num_planned,
            "num_steps": self.num_steps,
            "fitted": self.trainer._fitted,
        }
        (Path(checkpoint) / self.file_name).write_text(json.dumps(state), encoding="utf-8")

    def load(self, checkpoint: str | Path) -> None:
        """Restores the replay as it was; episodes that were played later are dropped."""
        file = Path(checkpoint) / self.file_name
        if not file.is_file():
            raise ValueError(
                f"The checkpoint {str(checkpoint)!r} has no {self.file_name}: it is of a run without an "
                "`environment`. Resume without one, or start anew from its model."
            )
        state = json.loads(file.read_text(encoding="utf-8"))
        self.num_episodes, self.num_steps = state["num_episodes"], state["num_steps"]
        self._num_planned = state["num_planned"]
        episodes = [self.journal.resume(self.num_episodes) if self.trainer.is_world_process_zero() else None]
        broadcast_object_list(episodes)
        self.replay.clear()
        self._add(episodes[0] or [])
        # Without training data they were fitted to the first collection, which may have left the replay.
        self.trainer._fitted = state["fitted"]
        for name, value in state["fitted"].items():
            setattr(self.trainer, name, value)


__all__ = ["OnlineCollectionCallback", "check_online"]
