# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""TextArena's games, seen by one player, as text environments."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ..text_env import Observation, TextEnv, TextEnvFactory, TextStep
from .private_random import PrivateRandomTextEnv


# A player's move in reply to what it observed.
Opponent = Callable[[str], str]


class TextArenaTextEnv(TextEnv):
    """
    Plays one seat of a game. See [`from_textarena`] for the arguments.
    """

    def __init__(self, make_env: Callable[[], Any], player: int, num_players: int, opponent: Opponent | None) -> None:
        self.make_env = make_env
        self.player = player
        self.num_players = num_players
        self.opponent = opponent
        self.env: Any = None
        self._pending = ""

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        # Made anew: the observation wrappers keep what they have seen through a reset.
        self.env = self.make_env()
        self.env.reset(num_players=self.num_players, seed=seed)
        self._pending = ""
        if self._play_opponents(False):
            raise RuntimeError(f"The game was over before player {self.player} could move.")
        return self._pending, {}

    def step(self, action: str) -> TextStep:
        done, info = self.env.step(action=action)
        self._pending = ""
        if not self._play_opponents(done):
            return self._pending, 0.0, False, False, dict(info)
        # Rewards are known at the end only.
        rewards, game_info = self.env.close()
        own_info = dict(game_info[self.player])
        return own_info.get("reason") or [], float(rewards[self.player]), True, False, own_info

    def _play_opponents(self, done: bool) -> bool:
        """Plays until it is this player's turn, whose observation is then pending, or the game is over."""
        while not done:
            player, observation = self.env.get_observation()
            text = observation if isinstance(observation, str) else _describe(observation, player, self.env)
            if player == self.player:
                self._pending = text
                return False
            if self.opponent is None:
                raise RuntimeError(f"It is the turn of player {player}: pass an `opponent` who plays it.")
            done, _ = self.env.step(action=self.opponent(text))
        return True


def from_textarena(
    env: str | Callable[[], Any],
    *,
    player: int = 0,
    num_players: int = 1,
    opponent: Opponent | None = None,
) -> TextEnvFactory:
    """
    Makes a text environment of a TextArena game, in which the policy has one seat.

    The reward comes on the last turn, when the game says who has won; an invalid move that ends the game ends it for
    the player who made it. TextArena seeds Python's global generator; each game here has that state to itself
    ([`~hf_qrl.environments.adapters.with_private_random`]), which holds within a thread: with threads use processes.

    Args:
        env (`str` or `Callable[[], textarena.Env]`):
            Name for `textarena.make`, or a function that makes a game. Names that end with `"-raw"` observe what is
            new in each turn. The wrappers of other names may repeat the whole game, which the conversation holds
            anyway.
        player (`int`, *optional*, defaults to 0):
            Seat of the policy.
        num_players (`int`, *optional*, defaults to 1):
            Number of seats.
        opponent (`Callable[[str], str]`, *optional*):
            Plays the other seats: from an observation to a move. It must be deterministic, or draw from `random`.

    Returns:
        `Callable[[], TextEnv]`: makes text environments.

    Raises:
        ValueError: If the seat does not exist, or several seats have no `opponent`.
    """
    if not 0 <= player < num_players:
        raise ValueError(f"There is no seat {player} in a game of {num_players}: `player` counts from 0.")
    if num_players > 1 and opponent is None:
        raise ValueError(f"A game of {num_players} needs an `opponent` for the other seats.")
    make_env = partial(_make_game, env) if isinstance(env, str) else env
    return partial(_make, make_env, player, num_players, opponent)


def _make(make_env: Callable[[], Any], player: int, num_players: int, opponent: Opponent | None) -> TextEnv:
    return PrivateRandomTextEnv(TextArenaTextEnv(make_env, player, num_players, opponent))


def _make_game(name: str) -> Any:
    import textarena

    return textarena.make(name)


def _describe(entries: list[tuple[int, str, Any]], player: int, env: Any) -> str:
    """Writes the new entries of a raw observation, without the echo of the player's own moves."""
    names = env.state.role_mapping
    lines = []
    for sender, text, _ in entries:
        if sender != player:
            lines.append(f"[{names.get(sender, f'Player {sender}')}] {text}")
    return "\n".join(lines)
