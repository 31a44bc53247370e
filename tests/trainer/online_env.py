# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A game for trainers that play, and the template that its episodes are read with."""

import random

from hf_qrl.environments import TextEnv


TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} <eos>{% endgeneration %}"
    "{% else %} {{ message['content'] }} {% endif %}{% endfor %}"
)


class Letters(TextEnv):
    """Says a letter, which the seed draws; each `a` in a reply pays 1. Over after three turns."""

    def reset(self, *, seed, options=None):
        random.random()  # from global random state, as it should not
        self.letters = [random.Random(seed + turn).choice("bcdefgh") for turn in range(4)]
        self.turn = 0
        return self.letters[0], {}

    def step(self, action):
        self.turn += 1
        over = self.turn == 3
        info = {"success": "a" in action} if over else {}
        return self.letters[self.turn], float(action.count("a")) - 1.0, over, False, info

    def legal_actions(self):
        return ["a", "b"]


class Broken(Letters):
    """Fails at the second turn of every other episode."""

    def step(self, action):
        if self.turn == 1 and self.letters[0] in "bcd":
            raise RuntimeError("the server is gone")
        return super().step(action)
