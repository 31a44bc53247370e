# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What PPO learns from: the turns of played episodes, as the tokens that were sampled, and their advantages."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..data.ppo_types import PPORLElement
from ..losses.advantages import KLEstimator, generalized_advantage_estimation, kl_estimate, whiten


_TOKENS = ("query_tensor", "response_tensor")
_NUMBERS = ("logprobs", "values", "rewards", "advantages", "returns")


class RolloutStore:
    """
    Turns of episodes that were played with `keep_tokens=True`, one element each: its query is what the policy read,
    its response what it sampled. Nothing is tokenised again, and what the environment says is context, never an
    action.

    Elements of one episode follow each other. How they hang together is in `episode_ids` and `turns`: advantages run
    over all the tokens of an episode.

    Attributes:
        elements (`list[PPORLElement]`):
            The turns.
        episode_ids (`list[str]`), turns (`list[int]`):
            Episode of each element, and its number there.
        turn_rewards (`list[float]`):
            What the environment gave for each.
        ref_logprobs (`list[torch.Tensor]` of shape `(R,)`):
            Log-probabilities under the reference policy.
        num_turns (`dict[str, int]`):
            Number of the turns of each episode.
        bootstrap_values (`dict[str, float]`):
            Value of the state after the last turn, of the episodes that were truncated.
    """

    def __init__(self) -> None:
        self.elements: list[PPORLElement] = []
        self.episode_ids: list[str] = []
        self.turns: list[int] = []
        self.turn_rewards: list[float] = []
        self.ref_logprobs: list[torch.Tensor] = []
        self.num_turns: dict[str, int] = {}
        self.bootstrap_values: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.elements)

    @classmethod
    def from_episodes(cls, episodes: Iterable[Mapping[str, Any]]) -> "RolloutStore":
        """
        Takes the turns of episodes. Log-probabilities are those of sampling, values and advantages are still missing;
        truncated episodes bootstrap from 0 until they have a value.

        Args:
            episodes (`Dataset`, or an iterable of its rows):
                What [`collect_episodes`] returns with `keep_tokens=True`.

        Raises:
            ValueError: If tokens were not kept, or nothing was sampled in a turn.
        """
        store = cls()
        for episode in episodes:
            name = episode["episode_id"]
            columns: list[Any] = [
                episode.get(column) for column in ("turn_prompt_ids", "turn_token_ids", "turn_logprobs")
            ]
            if any(column is None for column in columns):
                raise ValueError(
                    f"Episode {name!r} was stored without its tokens: collect with `keep_tokens=True` and a policy "
                    "that samples tokens, such as `ModelPolicy`."
                )
            if name in store.num_turns:
                raise ValueError(f"Episode {name!r} is there twice.")
            store.num_turns[name] = len(episode["turn_rewards"])
            for turn, (prompt, tokens, logprobs, reward) in enumerate(
                zip(*columns, episode["turn_rewards"], strict=True)
            ):
                if not tokens:
                    raise ValueError(f"Nothing was sampled in turn {turn} of episode {name!r}: there is no action.")
                store._append(name, turn, prompt, tokens, logprobs, reward)
            if episode["truncated"]:
                store.bootstrap_values[name] = 0.0
        return store

    def _append(
        self, name: str, turn: int, prompt: list[int], tokens: list[int], logprobs: list[float], reward: float
    ) -> None:
        sampled = torch.tensor(logprobs, dtype=torch.float32)
        rewards = torch.zeros_like(sampled)
        rewards[-1] = reward
        self.elements.append(
            PPORLElement(torch.tensor(prompt), torch.tensor(tokens), sampled, torch.zeros_like(sampled), rewards)
        )
        self.episode_ids.append(name)
        self.turns.append(turn)
        self.turn_rewards.append(float(reward))
        self.ref_logprobs.append(sampled)

    def set_scores(
        self, index: int, logprobs: torch.Tensor, values: torch.Tensor, ref_logprobs: torch.Tensor | None = None
    ) -> None:
        """
        Says what a model makes of an element.

        Args:
            index (`int`): Number of the element.
            logprobs (`torch.Tensor` of shape `(R,)`): Log-probabilities under the policy that is about to be trained.
            values (`torch.Tensor` of shape `(R,)`): Values of the states.
            ref_logprobs (`torch.Tensor` of shape `(R,)`, *optional*): Log-probabilities under the reference policy.

        Raises:
            ValueError: If there is not one number to each token.
        """
        old = self.elements[index]
        if ref_logprobs is not None and ref_logprobs.shape != old.response_tensor.shape:
            raise ValueError(
                f"`ref_logprobs` must have one number to each of the {len(old.response_tensor)} response tokens, got "
                f"shape {tuple(ref_logprobs.shape)}."
            )
        self.elements[index] = PPORLElement(old.query_tensor, old.response_tensor, logprobs, values, old.rewards)
        self.ref_logprobs[index] = logprobs if ref_logprobs is None else ref_logprobs

    def compute_advantages(
        self,
        *,
        gamma: float = 1.0,
        lam: float = 0.95,
        discount_on: str = "token",
        reward_scale: float = 1.0,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k1",
        whiten_advantages: bool = True,
    ) -> None:
        """
        Gives every element its rewards, advantages and returns.

        The reward of a token is `-kl_coef` times its divergence from the reference policy and, at the last token of a
        turn, what the environment gave. The step after it is the first token of the next turn, in which an episode
        that was truncated has its bootstrap value, and one that terminated nothing.

        Args:
            gamma (`float`, *optional*, defaults to 1.0): Discount.
            lam (`float`, *optional*, defaults to 0.95): Lambda of [`generalized_advantage_estimation`].
            discount_on (`str`, *optional*, defaults to `"token"`):
                `"token"` discounts after each token, `"utterance"` after the last one of each turn.
            reward_scale (`float`, *optional*, defaults to 1.0): What the environment's rewards are multiplied by.
            kl_coef (`float`, *optional*, defaults to 0.0): Weight of the divergence.
            kl_estimator (`str`, *optional*, defaults to `"k1"`): As in [`kl_estimate`].
            whiten_advantages (`bool`, *optional*, defaults to `True`):
                Whether advantages have mean 0 and variance 1 over all tokens. Returns are those before.

        Raises:
            ValueError: If a turn of an episode is missing, or `discount_on` is neither.
        """
        if discount_on not in ("token", "utterance"):
            raise ValueError(f'`discount_on` must be "token" or "utterance", got {discount_on!r}.')
        if not self.elements:
            return
        rewards = []
        for element, reference, reward in zip(self.elements, self.ref_logprobs, self.turn_rewards, strict=True):
            of_turn = -kl_coef * kl_estimate(element.logprobs, reference, kl_estimator)
            of_turn[-1] += reward_scale * reward
            rewards.append(of_turn)
        episodes = self._episodes()
        columns: dict[str, list[torch.Tensor]] = {"values": [], "rewards": [], "discounts": [], "mask": []}
        for episode in episodes:
            values = torch.cat([self.elements[i].values for i in episode]).double()
            ends = torch.tensor([len(self.elements[i].response_tensor) for i in episode]).cumsum(0)
            discounts = torch.ones_like(values) if discount_on == "utterance" else torch.full_like(values, gamma)
            discounts[ends - 1] = gamma
            columns["values"].append(values)
            columns["rewards"].append(torch.cat([rewards[i] for i in episode]).double())
            columns["discounts"].append(discounts)
            columns["mask"].append(torch.ones_like(values))
        steps = {name: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for name, rows in columns.items()}
        last = [self.bootstrap_values.get(self.episode_ids[episode[0]], 0.0) for episode in episodes]
        both = generalized_advantage_estimation(
            *(steps["values"], steps["rewards"], steps["discounts"], lam, steps["mask"]),
            last_values=torch.tensor(last, dtype=torch.float64),
        )
        # The mask picks the tokens in the order of the elements.
        sizes = [len(element.response_tensor) for element in self.elements]
        of_tokens = [x[steps["mask"] > 0] for x in both]
        if whiten_advantages:
            of_tokens[0] = whiten(of_tokens[0])
        if not all(bool(x.float().isfinite().all()) for x in of_tokens):
            raise ValueError(
                "Advantages or returns are not finite: rewards, values or log-probabilities are too large, or NaN. "
                "Scale the rewards (`reward_scale`), or lower the learning rate."
            )
        advantages, returns = (x.float().split(sizes) for x in of_tokens)
        for i, old in enumerate(self.elements):
            self.elements[i] = PPORLElement(
                *(old.query_tensor, old.response_tensor, old.logprobs, old.values, rewards[i]),
                advantages[i],
                returns[i],
            )

    def _episodes(self) -> list[list[int]]:
        """Numbers of the elements of each episode, in the order of its turns."""
        episodes: list[list[int]] = []
        for i, turn in enumerate(self.turns):
            if turn == 0:
                episodes.append([])
            elif i == 0 or (self.episode_ids[i], turn) != (self.episode_ids[i - 1], self.turns[i - 1] + 1):
                raise ValueError(f"Turn {turn} of episode {self.episode_ids[i]!r} does not follow the one before it.")
            episodes[-1].append(i)
        for episode in episodes:
            name = self.episode_ids[episode[0]]
            if len(episode) != self.num_turns[name]:
                raise ValueError(f"Episode {name!r} has {self.num_turns[name]} turns, and {len(episode)} are here.")
        return episodes

    # -------------------------------------------------------------------------------------------------------- on disk

    def save(self, path: str | os.PathLike) -> None:
        """
        Writes the store as one safetensors file, beside the old one and over it when complete.

        Raises:
            ValueError: If some elements have advantages and others do not.
        """
        path = Path(path)
        tensors = {
            "turns": torch.tensor(self.turns),
            "turn_rewards": torch.tensor(self.turn_rewards, dtype=torch.float64),
        }
        columns = {name: [getattr(element, name) for element in self.elements] for name in (*_TOKENS, *_NUMBERS)}
        for name, rows in {**columns, "ref_logprobs": self.ref_logprobs}.items():
            present = [row for row in rows if row is not None]
            if present and len(present) < len(rows):
                raise ValueError(f"Some of the elements have no `{name}`, and others do.")
            if present:
                tensors[name] = torch.cat(present)
        for name in _TOKENS:
            tensors[f"{name}_lengths"] = torch.tensor([len(row) for row in columns[name]])
        metadata = {
            "episode_ids": json.dumps(self.episode_ids),
            "num_turns": json.dumps(self.num_turns),
            "bootstrap": json.dumps(self.bootstrap_values),
        }
        part = path.with_name(f"{path.name}.part")
        save_file(tensors, part, metadata=metadata)
        os.replace(part, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "RolloutStore":
        """Reads what [`~RolloutStore.save`] wrote."""
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        store = cls()
        store.episode_ids = json.loads(metadata["episode_ids"])
        store.num_turns = json.loads(metadata["num_turns"])
        store.bootstrap_values = json.loads(metadata["bootstrap"])
        store.turns, store.turn_rewards = tensors["turns"].tolist(), tensors["turn_rewards"].tolist()
        lengths = {name: tensors[f"{name}_lengths"].tolist() for name in _TOKENS}
        responses = lengths["response_tensor"]
        columns = {
            name: tensors[name].split(lengths.get(name, responses))
            for name in (*_TOKENS, *_NUMBERS, "ref_logprobs")
            if name in tensors
        }
        store.ref_logprobs = list(columns.pop("ref_logprobs", ()))
        store.elements = [
            PPORLElement(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)
        ]
        return store
