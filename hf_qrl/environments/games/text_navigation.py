# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Text navigation, after LMRL-Gym (Abdulhai et al., 2023): find food in a house and bring it to the fridge.

The house, the goal and the behaviour policies are LMRL-Gym's; the sentences are our own.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from ..text_env import TextEnv
from .episodes import draw_seed, play_episode


EXITS: dict[str, dict[str, str]] = {
    "bedroom": {"west": "living room", "south": "bathroom"},
    "living room": {"east": "bedroom", "west": "dining room", "south": "office"},
    "dining room": {"east": "living room", "west": "kitchen"},
    "kitchen": {"east": "dining room", "north": "garden", "west": "backyard"},
    "garden": {"south": "kitchen"},
    "backyard": {"east": "kitchen"},
    "office": {"north": "living room", "east": "bathroom"},
    "bathroom": {"west": "office", "north": "bedroom"},
}
ROOMS = tuple(EXITS)
# Each behaviour policy of the data knows what to do in one half of the house.
HALVES = (
    frozenset({"office", "bathroom", "garden", "backyard"}),
    frozenset({"bedroom", "living room", "dining room", "kitchen"}),
)
MAX_COMMANDS = 15


# The world


class State(NamedTuple):
    """
    Where things are.

    Args:
        room (`str`):
            The player's room.
        food (`str`):
            `"table"` (in the living room), `"player"`, `"fridge"` (in the kitchen) or `"eaten"`.
        fridge_open (`bool`):
            Whether the fridge is open.
    """

    room: str
    food: str = "table"
    fridge_open: bool = False

    @property
    def solved(self) -> bool:
        return self.food == "fridge" and not self.fridge_open

    @property
    def over(self) -> bool:
        return self.solved or self.food == "eaten"


def outcomes(state: State) -> dict[str, State]:
    """The admissible commands of a state, each with the state it leads to."""
    room, food, fridge_open = state
    found = {f"go {exit}": state._replace(room=target) for exit, target in EXITS[room].items()}
    if room == "kitchen":
        found["close fridge" if fridge_open else "open fridge"] = state._replace(fridge_open=not fridge_open)
    if food == "player":
        found["eat stale food"] = state._replace(food="eaten")
        if room == "living room":
            found["put stale food on table"] = state._replace(food="table")
        if room == "kitchen" and fridge_open:
            found["insert stale food into fridge"] = state._replace(food="fridge")
    elif food == "table" and room == "living room":
        found["take stale food from table"] = state._replace(food="player")
    elif food == "fridge" and room == "kitchen" and fridge_open:
        found["take stale food from fridge"] = state._replace(food="player")
    return found


def describe(state: State, partially_observed: bool = False) -> str:
    """What the player reads, without the newline."""
    room, food, fridge_open = state
    sentences = ["You are in a room." if partially_observed else f"You are in the {room}."]
    if room == "living room":
        sentences.append(f"There is {'stale food' if food == 'table' else 'nothing'} on the table.")
    if room == "kitchen":
        content = ", with stale food inside" if food == "fridge" else ", and empty"
        sentences.append(f"The fridge is {'open' + content if fridge_open else 'closed'}.")
    sentences.append(f"You carry {'stale food' if food == 'player' else 'nothing'}.")
    sentences.append(f"Commands: {', '.join(outcomes(state))}.")
    return " ".join(sentences)


# The game


class TextNavigationEnv(TextEnv):
    """
    Take the stale food from the table in the living room, put it into the fridge in the kitchen, and close that.

    The command that closes the fridge on the food earns 1 and ends the game, everything else 0. Eating the food loses
    the game, and so do 15 commands; one that is not admissible counts and changes nothing. Blanks and newlines around
    a command do not matter.

    Args:
        partially_observed (`bool`, *optional*, defaults to `False`):
            Whether the name of the room is hidden.
        start (`str`, *optional*):
            Room in which episodes start. By default the seed draws one of the eight. `reset(options={"start": ...})`
            overrules it for one episode.
    """

    stop_strings = ["\n"]

    def __init__(self, partially_observed: bool = False, start: str | None = None):
        self.partially_observed = partially_observed
        self.start = None if start is None else _check_room(start)
        self.state: State | None = None
        self._commands = 0

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode; `options` may hold a `start`."""
        start = (options or {}).get("start")
        start = self.start if start is None else _check_room(start)
        self.state = State(random.Random(seed).choice(ROOMS) if start is None else start)
        self._commands = 0
        return describe(self.state, self.partially_observed) + "\n", {"room": self.state.room}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carries out one command."""
        if self.state is None:
            raise RuntimeError("There is no episode under way: call `reset` before `step`.")
        self._commands += 1
        found = outcomes(self.state)
        legal = action.strip() in found
        state = found.get(action.strip(), self.state)
        over = state.over or self._commands == MAX_COMMANDS
        self.state = None if over else state
        if state.solved:
            text = "The stale food is in the fridge, and the fridge is closed. You have won."
        elif state.food == "eaten":
            text = "You have eaten the stale food. You have lost."
        elif over:
            text = f"That was your last command of {MAX_COMMANDS}. You have lost."
        else:
            text = ("" if legal else "You cannot do that. ") + describe(state, self.partially_observed)
        info = {"room": state.room, "success": state.solved, "invalid_action": not legal}
        return text + "\n", float(state.solved), over, False, info

    def legal_actions(self) -> list[str] | None:
        """The admissible commands, each with its newline; `None` when no episode is under way."""
        return None if self.state is None else [command + "\n" for command in outcomes(self.state)]


def _check_room(room: Any) -> str:
    if room not in EXITS:
        raise ValueError(f"`start` must be one of the rooms {', '.join(ROOMS)}, got {room!r}.")
    return room


# Exact values. Except for `success_probability` they do not know of the limit of 15 commands, within which the best
# player wins from every room.


@cache
def distances() -> dict[State, int]:
    """Number of commands from every state that can come up, and is not over, to the win."""
    before: dict[State, list[State]] = {}
    reached = {State(room) for room in ROOMS}
    queue = deque(reached)
    while queue:
        state = queue.popleft()
        for target in outcomes(state).values():
            before.setdefault(target, []).append(state)
            if target not in reached:
                reached.add(target)
                if not target.over:
                    queue.append(target)
    found = {state: 0 for state in reached if state.solved}
    queue = deque(found)
    while queue:
        target = queue.popleft()
        for state in before[target]:
            if state not in found:
                found[state] = found[target] + 1
                queue.append(state)
    return {state: length for state, length in found.items() if not state.over}


def optimal_values(gamma: float = 1.0) -> dict[State, float]:
    """V*: the best return from each state, discounted by `gamma` for every command."""
    return {state: gamma ** (length - 1) for state, length in distances().items()}


def optimal_q_values(gamma: float = 1.0) -> dict[State, dict[str, float]]:
    """Q*: the best return from each state after each of its admissible commands."""
    values = optimal_values(gamma)
    return {
        state: {
            command: float(target.solved) if target.over else gamma * values[target]
            for command, target in outcomes(state).items()
        }
        for state in values
    }


def best_commands(state: State) -> list[str]:
    """The admissible commands that are the first of a shortest way to the win."""
    length = distances()
    return [
        command
        for command, target in outcomes(state).items()
        if target.solved or (not target.over and length[target] < length[state])
    ]


def success_probability(policy: Callable[[State], Mapping[str, float]]) -> dict[str, float]:
    """
    Exact probability of the win within 15 commands, hence expected return, of a policy that looks at the state only.

    Args:
        policy (`Callable[[State], Mapping[str, float]]`):
            Probability of each admissible command. What is missing to 1 is the probability of a command that is not
            admissible.

    Returns:
        `dict[str, float]`: the probability for each start room.
    """
    moves = {state: (outcomes(state), policy(state)) for state in distances()}
    value = dict.fromkeys(moves, 0.0)
    for _ in range(MAX_COMMANDS):
        value = {
            state: (1 - sum(chances.values())) * value[state]
            + sum(
                chance * (float(found[command].solved) if found[command].over else value[found[command]])
                for command, chance in chances.items()
            )
            for state, (found, chances) in moves.items()
        }
    return {room: value[State(room)] for room in ROOMS}


# The data


def behaviour_policy(state: State, half: frozenset[str]) -> dict[str, float]:
    """A best command in the rooms of `half`, any admissible command elsewhere, as probabilities."""
    commands = best_commands(state) if state.room in half else list(outcomes(state))
    return dict.fromkeys(commands, 1 / len(commands))


def make_dataset(num_episodes: int = 2500, seed: int = 0, *, partially_observed: bool = False) -> list[dict[str, Any]]:
    """
    Plays episodes by two behaviour policies, each of which knows what to do in one half of the house.

    Three of four episodes are by the policy that knows the outskirts (office, bathroom, garden, backyard), one is by
    that which knows the rest. In its half a policy always follows a best command, as LMRL-Gym's paper has it.

    Args:
        num_episodes (`int`, *optional*, defaults to 2500):
            Number of episodes.
        seed (`int`, *optional*, defaults to 0):
            Seed. The commands are the same whatever the observations.
        partially_observed (`bool`, *optional*, defaults to `False`):
            Whether the names of the rooms are hidden.

    Returns:
        `list[dict]`: rows as of [`~hf_qrl.environments.games.episodes.play_episode`], with the index of the `half`
        that the policy knows.
    """
    rng = random.Random(seed)
    env = TextNavigationEnv(partially_observed)
    episodes = []
    for index in range(num_episodes):
        number = 1 if index % 4 == 3 else 0

        def act(half: frozenset[str] = HALVES[number]) -> str:
            assert env.state is not None
            return rng.choice(list(behaviour_policy(env.state, half))) + "\n"

        episodes.append({**play_episode(env, act, seed=draw_seed(rng)), "half": number})
    return episodes
