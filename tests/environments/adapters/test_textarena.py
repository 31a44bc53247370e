# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import random
from types import SimpleNamespace

import pytest

from hf_qrl.environments import EnvironmentFailure, as_environment, call_reset, call_step, from_textarena, replay


class Highest:
    """The shape of TextArena's games: players in turn add a number to a sum; whoever passes the target wins."""

    def __init__(self, wrapped=False):
        self.wrapped = wrapped

    def reset(self, num_players, seed=None):
        random.seed(seed)
        self.target, self.sum, self.player, self.num_players = random.randint(8, 12), 0, 0, num_players
        self.state = SimpleNamespace(role_mapping={-1: "GAME", 0: "Ann", 1: "Bob"})
        self.news = {player: [(-1, f"Pass {self.target}.", None)] for player in range(num_players)}

    def get_observation(self):
        news, self.news[self.player] = self.news[self.player], []
        return self.player, str(news) if self.wrapped else news

    def step(self, action):
        for news in self.news.values():
            news.append((self.player, action, None))
        self.sum += int(action) + random.randint(0, 1)
        if self.sum > self.target:
            self.winner = self.player
            return True, {}
        self.player = (self.player + 1) % self.num_players
        return False, {"sum": self.sum}

    def close(self):
        players = range(self.num_players)
        return {p: 1 if p == self.winner else -1 for p in players}, {
            p: {"reason": f"{self.winner} won"} for p in players
        }


def play_out(factory, seed, action):
    """Repeats an action to the end of the game."""
    env, turns = factory(), 0
    env.reset(seed=seed)
    while True:
        turns += 1
        if env.step(action)[2]:
            return replay(factory(), seed, [action] * turns)


def test_alone():
    played = play_out(from_textarena(Highest), 4, "4")
    assert played.messages[0]["content"].startswith("[GAME] Pass") and 2 <= len(played.rewards) <= 4
    assert played.messages[2] == {"role": "user", "content": ""}  # its own move is not told again
    assert played.messages[-1] == {"role": "user", "content": "0 won"} and played.terminated
    assert played.rewards[-1] == 1.0 and set(played.rewards[:-1]) == {0.0}


@pytest.mark.parametrize("player", [0, 1])
def test_against_an_opponent(player):
    seen = []

    def opponent(observation):
        seen.append(observation)
        return str(random.randint(4, 5))

    factory = from_textarena(Highest, player=player, num_players=2, opponent=opponent)
    played = play_out(factory, 1, "0")
    assert played.rewards[-1] in (-1.0, 1.0) and played.terminated and set(played.rewards[:-1]) <= {0.0}
    assert seen[0].startswith("[GAME] Pass")
    assert ("[Ann] " in played.messages[0]["content"]) == (player == 1)
    assert play_out(factory, 1, "0") == played


def test_wrapped_observations_pass_through():
    assert "None)]" in replay(from_textarena(lambda: Highest(wrapped=True))(), 0, []).messages[0]["content"]


def test_the_callers_random_state_stays():
    random.seed(0)
    expected = random.random()
    random.seed(0)
    play_out(from_textarena(Highest), 4, "3")
    assert random.random() == expected


def test_bad_seats():
    with pytest.raises(ValueError, match="There is no seat 1 in a game of 1"):
        from_textarena(Highest, player=1)
    with pytest.raises(ValueError, match="A game of 2 needs an `opponent`"):
        from_textarena(Highest, num_players=2)


def test_guess_the_number():
    pytest.importorskip("textarena", reason="textarena is not a dependency: it needs GPL packages")
    env = as_environment(from_textarena("GuessTheNumber-v0-raw"))
    logs, metadata, _ = call_reset(env, [1, 2])
    low, high = 1, 20
    log, state, turns = logs[0], metadata[0], []
    while True:
        guess = (low + high) // 2
        log = [*log, {"role": "assistant", "content": f"[{guess}]"}]
        result = call_step(env, [log], [state])
        log, state = log + result.observations[0], result.metadata[0]
        turns.append(result.rewards.item())
        if result.terminateds.item():
            break
        answer = result.observations[0][0]["content"]
        low, high = (guess + 1, high) if "higher" in answer else (low, guess - 1)
    assert turns[-1] == 1.0 and set(turns[:-1]) <= {0.0} and len(turns) <= 5
    replies = [message["content"] for message in log if message["role"] == "assistant"]
    again = replay(from_textarena("GuessTheNumber-v0-raw")(), 1, replies)
    assert again.messages == log and again.rewards == turns


def test_tic_tac_toe_against_a_random_player():
    pytest.importorskip("textarena", reason="textarena is not a dependency: it needs GPL packages")
    factory = from_textarena(
        "TicTacToe-v0-raw", player=1, num_players=2, opponent=lambda text: f"[{random.randrange(9)}]"
    )
    env, outcomes = as_environment(factory), set()
    for seed in range(6):
        logs, metadata, _ = call_reset(env, [seed])
        log = logs[0]
        for cell in (4, 0, 8, 2, 6, 1, 3, 5, 7) * 2:
            log = [*log, {"role": "assistant", "content": f"[{cell}]"}]
            result = call_step(env, [log], metadata)
            log, metadata = log + result.observations[0], result.metadata
            if result.terminateds.item():
                break
        assert result.terminateds.item() and result.rewards.item() in (-1.0, 0.0, 1.0)
        outcomes.add(result.rewards.item())
    assert len(outcomes) > 1 and len(env) == 0


def test_a_broken_game_is_a_failure():
    class Broken(Highest):
        def close(self):
            return None, {}

    env = as_environment(from_textarena(Broken))
    logs, metadata, _ = call_reset(env, [4])
    with pytest.raises(EnvironmentFailure, match="TypeError|KeyError"):
        call_step(env, [[*logs[0], {"role": "assistant", "content": "99"}]], metadata)
