# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A small text game with two tools: the example of the tests."""

import random

from hf_qrl.environments import TextEnv


class TreasureHunt(TextEnv):
    """A treasure lies in one of the rooms of a corridor: walk there and dig. Digging elsewhere ends the game."""

    stop_strings = ["\n"]

    def __init__(self, rooms: int = 5, max_moves: int = 8):
        self.rooms, self.max_moves = rooms, max_moves

    def reset(self, *, seed, options=None):
        generator = random.Random(seed)
        self.treasure, self.room = generator.sample(range(self.rooms), 2)
        self.moves = 0
        return [
            {"role": "system", "content": "Say `walk left`, `walk right` or `dig`."},
            {"role": "user", "content": self._look()},
        ], {"treasure": self.treasure}

    def step(self, action):
        self.moves += 1
        truncated = self.moves >= self.max_moves
        if action.strip() == "dig":
            found = self.room == self.treasure
            return "Gold!" if found else "Sand.", float(found), True, False, {"success": found}
        if action.strip() not in self.legal_actions():
            return "You stumble. " + self._look(), -0.5, False, truncated, {"invalid_action": True}
        self.room += 1 if action.strip() == "walk right" else -1
        return self._look(), -0.1, False, truncated, {}

    def legal_actions(self):
        walks = ["walk left"] * (self.room > 0) + ["walk right"] * (self.room < self.rooms - 1)
        return [*walks, "dig"]

    def _look(self):
        return f"Room {self.room}. The map says {self.treasure}."


def hunt(observation: str) -> str:
    """The best reply to an observation of the game."""
    room, treasure = (int(word.strip(".")) for word in observation.split() if word.strip(".").isdigit())
    return "dig\n" if room == treasure else "walk right\n" if room < treasure else "walk left\n"
