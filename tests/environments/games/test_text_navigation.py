# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Text navigation against its published map and data mean, and a search that plays the text game itself."""

from collections import Counter, deque

import numpy as np
import pytest

from hf_qrl.environments.games.text_navigation import (
    EXITS,
    HALVES,
    MAX_COMMANDS,
    ROOMS,
    State,
    TextNavigationEnv,
    behaviour_policy,
    best_commands,
    distances,
    make_dataset,
    optimal_q_values,
    optimal_values,
    outcomes,
    success_probability,
)


def play(env, commands, start="living room"):
    env.reset(seed=0, options={"start": start})
    rewards = []
    for command in commands:
        text, reward, terminated, truncated, info = env.step(command)
        rewards.append(reward)
    return text, rewards, terminated, truncated, info


BEST = [
    "take stale food from table\n",
    "go west\n",
    "go west\n",
    "open fridge\n",
    "insert stale food into fridge\n",
    "close fridge\n",
]


class TestHouse:
    def test_is_the_published_one(self):
        published = """bedroom W-E living room; living room W-E dining room; dining room W-E kitchen; kitchen N-S
            garden; kitchen W-E backyard; living room S-N office; office E-W bathroom; bedroom S-N bathroom"""
        names = {"N": "north", "S": "south", "W": "west", "E": "east"}
        exits = {room: {} for room in ROOMS}
        for passage in published.split(";"):
            words = passage.split()
            i = next(i for i, word in enumerate(words) if "-" in word)
            one, other = " ".join(words[:i]), " ".join(words[i + 1 :])
            exits[one][names[words[i][0]]] = other
            exits[other][names[words[i][2]]] = one
        assert exits == EXITS and len(ROOMS) == 8


class TestGame:
    def test_best_way(self):
        text, rewards, terminated, truncated, info = play(TextNavigationEnv(), BEST)
        assert rewards == [0, 0, 0, 0, 0, 1]
        assert terminated and not truncated and info["success"]
        assert text == "The stale food is in the fridge, and the fridge is closed. You have won.\n"

    def test_observations(self):
        env = TextNavigationEnv()
        assert env.reset(seed=0, options={"start": "living room"})[0] == (
            "You are in the living room. There is stale food on the table. You carry nothing. Commands: go east, go "
            "west, go south, take stale food from table.\n"
        )
        hidden = TextNavigationEnv(partially_observed=True)
        assert hidden.reset(seed=0, options={"start": "dining room"})[0] == (
            "You are in a room. You carry nothing. Commands: go east, go west.\n"
        )
        assert play(env, BEST[:5])[0] == (
            "You are in the kitchen. The fridge is open, with stale food inside. You carry nothing. Commands: go "
            "east, go north, go west, close fridge, take stale food from fridge.\n"
        )

    def test_hidden_rooms_are_never_named(self):
        env = TextNavigationEnv(partially_observed=True)
        for state in distances():
            env.reset(seed=0, options={"start": state.room})
            env.state = state
            text = env.step("nonsense")[0]
            assert "You are in a room." in text and not any(room in text for room in ROOMS)

    def test_eating_fails(self):
        text, rewards, terminated, truncated, info = play(TextNavigationEnv(), [BEST[0], "eat stale food\n"])
        assert rewards == [0, 0] and terminated and not truncated and not info["success"]
        assert text == "You have eaten the stale food. You have lost.\n"

    def test_fifteen_commands(self):
        env = TextNavigationEnv()
        _, _, terminated, *_ = play(env, ["go east\n"] + ["dance\n"] * 13)
        assert not terminated
        text, reward, terminated, truncated, info = env.step("go west\n")
        assert (reward, terminated, truncated) == (0, True, False)
        assert text == "That was your last command of 15. You have lost.\n" and not info["success"]

    def test_the_fifteenth_command_may_win(self):
        _, rewards, terminated, *_ = play(TextNavigationEnv(), ["dance"] * 9 + BEST)
        assert terminated and rewards == [0] * 14 + [1]

    @pytest.mark.parametrize(
        "command", ["go north\n", "open fridge\n", "close fridge\n", "", "go", "eat stale food\n"]
    )
    def test_inadmissible_commands_change_nothing(self, command):
        env = TextNavigationEnv()
        env.reset(seed=0, options={"start": "living room"})
        before = env.state
        text, reward, terminated, _, info = env.step(command)
        assert env.state == before and info["invalid_action"] and reward == 0 and not terminated
        assert text.startswith("You cannot do that. You are in the living room.")

    def test_starts(self):
        env = TextNavigationEnv()
        counts = Counter(env.reset(seed=seed)[1]["room"] for seed in range(2000))
        assert set(counts) == set(ROOMS) and max(counts.values()) < 250 + 5 * 250**0.5
        assert TextNavigationEnv(start="office").reset(seed=1)[1]["room"] == "office"
        with pytest.raises(ValueError, match="one of the rooms"):
            TextNavigationEnv(start="cellar")

    def test_legal_actions_are_those_of_the_text(self):
        env = TextNavigationEnv()
        text, _ = env.reset(seed=0)
        assert [f"{command}\n" for command in text.split("Commands: ")[1][:-2].split(", ")] == env.legal_actions()


class TestExactValues:
    def test_distances_agree_with_a_search_of_the_text_game(self):
        env = TextNavigationEnv()

        def shortest(start):
            seen, queue = set(), deque([()])
            while queue:
                path = queue.popleft()
                text, _ = env.reset(seed=0, options={"start": start})
                for command in path:
                    text, reward, over, *_ = env.step(command)
                    if reward == 1:
                        return len(path)
                if text not in seen and not (path and over):
                    seen.add(text)
                    queue.extend((*path, command) for command in env.legal_actions())

        lengths = {room: distances()[State(room)] for room in ROOMS}
        assert lengths == {room: shortest(room) for room in ROOMS}
        assert lengths["living room"] == len(BEST)
        assert max(lengths.values()) <= MAX_COMMANDS

    @pytest.mark.parametrize("gamma", [1.0, 0.9])
    def test_value_iteration_agrees(self, gamma):
        values = dict.fromkeys(distances(), 0.0)
        for _ in range(50):
            values = {
                state: max(1.0 if t.solved else 0.0 if t.over else gamma * values[t] for t in outcomes(state).values())
                for state in values
            }
        assert optimal_values(gamma) == pytest.approx(values)
        for state, q_values in optimal_q_values(gamma).items():
            assert set(q_values) == set(outcomes(state))
            assert max(q_values.values()) == pytest.approx(values[state])
            if gamma < 1:
                best = {command for command, value in q_values.items() if value == pytest.approx(values[state])}
                assert best == set(best_commands(state))

    def test_success_of_the_best_policy(self):
        assert set(success_probability(lambda state: {best_commands(state)[0]: 1.0}).values()) == {1.0}
        assert set(success_probability(lambda state: {}).values()) == {0.0}


@pytest.fixture(scope="module")
def episodes():
    return make_dataset()


class TestData:
    def test_mean_is_the_published_one(self, episodes):
        outskirts, rest = (
            np.mean(list(success_probability(lambda s, half=half: behaviour_policy(s, half)).values()))
            for half in HALVES
        )
        exact = 0.75 * outskirts + 0.25 * rest
        assert exact == pytest.approx(0.26, abs=0.01)
        # Nearly all of it is a quarter that always wins, which does not scatter.
        assert np.mean([episode["return"] for episode in episodes]) == pytest.approx(exact, abs=0.003)

    def test_policies(self, episodes):
        env = TextNavigationEnv()
        counts = Counter(episode["half"] for episode in episodes)
        assert counts == {0: 1875, 1: 625}
        wandered = set()
        for episode in episodes[:200]:
            env.reset(seed=episode["seed"])
            for message in episode["messages"]:
                if message["role"] == "assistant":
                    state, command = env.state, message["content"].strip()
                    assert command in outcomes(state)
                    if state.room in HALVES[episode["half"]]:
                        assert command in best_commands(state)
                    else:
                        wandered.add(command in best_commands(state))
                    env.step(message["content"])
        assert wandered == {True, False}

    def test_halves(self):
        assert HALVES[0] | HALVES[1] == set(ROOMS) and not HALVES[0] & HALVES[1]

    def test_every_command_that_matters_is_seen(self, episodes):
        seen = {message["content"].strip() for episode in episodes for message in episode["messages"][1::2]}
        assert seen == {command for state in distances() for command in outcomes(state)}

    def test_hidden_rooms_do_not_change_the_commands(self, episodes):
        for episode, hidden in zip(episodes, make_dataset(40, partially_observed=True), strict=False):
            assert episode["messages"][1::2] == hidden["messages"][1::2]
            assert episode["turn_rewards"] == hidden["turn_rewards"]
