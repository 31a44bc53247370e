# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
On a tiny MDP, with a language model that is a table, training ends where tabular dynamic programming on the counts of
the data does: at the fixed point of the expectile backup,

    Q(s, a) = mean over the data of r + d f V(s'),    V(s) = tau-expectile over the data's actions of Q(s, .).

The dynamic programming below is NumPy on lists of transitions and shares no code with the library.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from hf_qrl import ILQLForCausalLM
from hf_qrl.data.ilql_types import ILQLBatch
from hf_qrl.losses.ilql import ilql_loss_from_states


STATES, ACTIONS = 6, 3  # tokens 0..5 are states, 6..8 actions (two tokens per action: 6 and 7 its halves)
VOCAB = STATES + ACTIONS
# Short enough a horizon (1 / (1 - gamma) = 5 steps) for a few hundred updates, long enough for values to matter.
GAMMA = 0.8
HORIZON = 5
TOLERANCE = 1e-2  # on values in about [-1, 3]
SEED = 6  # an MDP whose best action is best by .3 or more, and not the most frequent one in most states


# ------------------------------------------------------------------------------------------------ the table-like model


class TableConfig(PreTrainedConfig):
    model_type = "hf_qrl_test_table"
    vocab_size = VOCAB
    tie_word_embeddings = False
    bos_token_id = eos_token_id = pad_token_id = None


class TableModel(PreTrainedModel):
    """
    The hidden state is a free vector per *state of the MDP*: the last state token and the action tokens after it, at
    most one of which is ever followed by another action token.
    """

    config_class = TableConfig

    def __init__(self, config: TableConfig):
        super().__init__(config)
        self.table = nn.Embedding(VOCAB * VOCAB, STATES * (1 + ACTIONS))

    def forward(self, input_ids, attention_mask=None, use_cache=None, **kwargs):
        return BaseModelOutputWithPast(last_hidden_state=self.table(table_index(input_ids)))


def table_index(input_ids: torch.Tensor) -> torch.Tensor:
    """A number for the state after each token: `s` after a state token, `(s, a)` after the first action token."""
    previous = input_ids.roll(1, dims=-1)
    return torch.where(input_ids < STATES, input_ids, previous * VOCAB + input_ids)


class TableForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TableConfig
    base_model_prefix = "model"

    def __init__(self, config: TableConfig):
        super().__init__(config)
        self.model = TableModel(config)
        self.lm_head = nn.Linear(self.model.table.embedding_dim, VOCAB)

    def get_input_embeddings(self):
        return self.model.table

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, use_cache=None, **kwargs):
        states = self.model(input_ids).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(states))


def make_model() -> ILQLForCausalLM:
    torch.manual_seed(0)
    base = TableForCausalLM(TableConfig())
    with torch.no_grad():
        # Unit vectors, disturbed: with them a linear head is a table with one row per state, and the problem as well
        # conditioned as it gets. The vectors are trained with everything else.
        base.model.table.weight.normal_(0, 0.1)
        rows = [*range(STATES), *(s * VOCAB + STATES + a for s in range(STATES) for a in range(ACTIONS))]
        base.model.table.weight[rows] += torch.eye(len(rows))
    return ILQLForCausalLM.from_base(base, head_type="linear", head_init="zero")


# -------------------------------------------------------------------------------------------------------- MDP and data


@dataclass
class Episode:
    tokens: list[int]  # state, action token(s), state, ..., state
    rewards: list[float]  # one per action token
    truncated: bool


def make_episodes(episodes: int, tokens_per_action: int) -> list[Episode]:
    """
    Random walks in a random MDP with rewards of both signs, two successors per action, and endings of both kinds.

    Every state is an ordinary one: a *terminal* transition shows a state whose value is not 0, so that bootstrapping
    from it by mistake would be seen; what ends an episode is the action, with some probability.
    """
    rng = np.random.default_rng(SEED)
    choices = ACTIONS if tokens_per_action == 1 else 4
    successors = rng.integers(STATES, size=(STATES, choices, 2))
    reward = rng.uniform(-1, 1, size=(STATES, choices)).round(1)
    ends = rng.random((STATES, choices)) < 0.4
    # A skewed behaviour, so that expectiles differ from means, which leaves out one choice in every second state, so
    # that the data's support is not everything.
    behaviour = rng.dirichlet(np.full(choices, 2.0), size=STATES)
    behaviour[np.arange(0, STATES, 2), rng.integers(choices, size=STATES // 2)] = 0
    behaviour /= behaviour.sum(1, keepdims=True)
    result = []
    for episode in range(episodes):
        state, tokens, rewards, done = episode % STATES, [episode % STATES], [], False
        for _ in range(HORIZON):
            choice = rng.choice(choices, p=behaviour[state])
            done = ends[state, choice] and rng.random() < 0.5
            halves = [choice] if tokens_per_action == 1 else list(divmod(choice, 2))
            rewards += [0.2 * halves[0]] * (tokens_per_action - 1)  # a reward inside the utterance, too
            rewards += [float(reward[state, choice])]
            state = int(successors[state, choice, rng.integers(2)])
            tokens += [STATES + half for half in halves] + [state]
            if done:
                break
        result.append(Episode(tokens, rewards, truncated=not done))
    return result


def make_batch(episodes: list[Episode], tokens_per_action: int) -> ILQLBatch:
    """All episodes in one batch, padded on the right."""
    n, t = max(len(e.tokens) for e in episodes), max(len(e.rewards) for e in episodes)
    fields = {name: torch.zeros(len(episodes), n, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    fields |= {name: torch.zeros(len(episodes), t + 1, dtype=torch.long) for name in ("states_ixs", "dones")}
    fields |= {name: torch.zeros(len(episodes), t, dtype=torch.long) for name in ("actions_ixs", "turn_ixs")}
    rewards = torch.zeros(len(episodes), t)
    for i, e in enumerate(episodes):
        length, steps = len(e.tokens), len(e.rewards)
        ixs = [p for p in range(length - 1) if e.tokens[p + 1] >= STATES]
        fields["input_ids"][i, :length] = torch.tensor(e.tokens)
        fields["attention_mask"][i, :length] = 1
        fields["actions_ixs"][i, :steps] = torch.tensor(ixs)
        fields["states_ixs"][i, : steps + 1] = torch.tensor([*ixs, length - 1])
        fields["turn_ixs"][i, :steps] = torch.arange(steps) // tokens_per_action
        fields["dones"][i, :steps] = 1
        rewards[i, :steps] = torch.tensor(e.rewards)
    return ILQLBatch(rewards=rewards, truncated=torch.tensor([e.truncated for e in episodes]), **fields)


# ----------------------------------------------------------------------------------------- tabular dynamic programming


def transitions(episodes: list[Episode], discount_on: str, truncated_as=None, terminal_as=None) -> dict:
    """
    `{(state, action): [(reward, discount, next state), ...]}`, where a state is a tuple of tokens and a discount of 0
    ends an episode. `truncated_as` and `terminal_as` say whether the two kinds of ending bootstrap, by mistake.
    """
    found = defaultdict(list)
    for e in episodes:
        bootstraps = (True if truncated_as is None else truncated_as) if e.truncated else bool(terminal_as)
        step, state = 0, (e.tokens[0],)
        for p, token in enumerate(e.tokens[1:], start=1):
            if token < STATES:
                state = (token,)
                continue
            utterance_ends = e.tokens[p + 1] < STATES
            following = (e.tokens[p + 1],) if utterance_ends else (*state, token)
            discount = GAMMA if utterance_ends or discount_on == "token" else 1.0
            if p + 2 == len(e.tokens) and not bootstraps:
                discount = 0.0
            found[state, token].append((e.rewards[step], discount, following))
            step, state = step + 1, following
        assert step == len(e.rewards)
    acted = {state for state, _ in found}
    assert all(d == 0 or following in acted for steps in found.values() for _, d, following in steps), (
        "A value is bootstrapped in a state in which no action was taken, where nothing trains it."
    )
    return dict(found)


def expectile(x: np.ndarray, weights: np.ndarray, tau: float) -> float:
    """The root of `sum w |tau - [x < v]| (x - v)`: piecewise linear in v, so Newton's method ends after few steps."""
    v = np.average(x, weights=weights)
    for _ in range(len(x)):
        v = np.average(x, weights=weights * np.where(x >= v, tau, 1 - tau))
    return v


def fixed_point(data: dict, tau: float | None) -> tuple[dict, dict]:
    """Q and V on the support of the data; `tau=None` is value iteration, with the maximum over the data's actions."""
    actions = defaultdict(list)
    for state, token in data:
        actions[state].append(token)
    counts = {state: np.array([len(data[state, token]) for token in tokens]) for state, tokens in actions.items()}
    outcomes = {key: Counter(steps) for key, steps in data.items()}
    v = dict.fromkeys(actions, 0.0)
    for _ in range(120):  # 0.8 ** 120 is 1e-12, and 0.8 ** 60 is 1e-6 where a half of an action is not discounted
        q = {
            key: sum(n * (r + d * v.get(s, 0.0)) for (r, d, s), n in steps.items()) / steps.total()
            for key, steps in outcomes.items()
        }
        for state, tokens in actions.items():
            values = np.array([q[state, token] for token in tokens])
            v[state] = values.max() if tau is None else expectile(values, counts[state], tau)
    return q, v


# ------------------------------------------------------------------------------------------------------------ training


def train(batch: ILQLBatch, steps: int = 300, **options) -> ILQLForCausalLM:
    """
    Full-batch Adam with a step that falls to 0: the gradient has no noise, so what is left is the fixed point. 300
    steps of .03 bring the errors of these tables to about 2e-3 (800 steps of .02 to 1e-6), well below the tolerance.
    Targets move half-way at each step: fast, and unlike a copy it would show an update that goes too far.
    """
    model = make_model().train()
    options = {"gamma": GAMMA, "cql_scale": 0.0, "awac_scale": 0.0, "awac_beta": 0.0, **options}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 - step / steps) ** 2)

    def loss_fn(hidden_states, heads, lm_head, next_hidden_state):
        return ilql_loss_from_states(hidden_states, heads, lm_head, batch, next_hidden_state, **options)[0]

    for _ in range(steps):
        optimizer.zero_grad()
        model(batch.input_ids, attention_mask=batch.attention_mask, loss_fn=loss_fn).loss.backward()
        optimizer.step()
        schedule.step()
        model.heads.update_targets(0.5)
    return model.eval()


@torch.no_grad()
def learned(model: ILQLForCausalLM, state: tuple[int, ...]) -> tuple[list[torch.Tensor], float]:
    """Every Q-function of the model in a state, online and target, and V."""
    output = model(torch.tensor([state]), output_values=True)
    return [q[0, -1] for q in (*output.qs, *output.target_qs)], output.value[0, -1].item()


def error(model: ILQLForCausalLM, values: tuple[dict, dict]) -> float:
    """Largest distance of the model from tabular `(q, v)` on the support."""
    q, v = values
    errors = [abs(head[token].item() - x) for (state, token), x in q.items() for head in learned(model, state)[0]]
    return max(*errors, *(abs(learned(model, state)[1] - x) for state, x in v.items()))


def best_actions(q: dict, margin: float) -> dict:
    """The best action of every state, which must be best by `margin`."""
    ranked = defaultdict(list)
    for (state, token), x in q.items():
        ranked[state].append((x, token))
    for values in ranked.values():
        values.sort(reverse=True)
        assert len(values) == 1 or values[0][0] - values[1][0] > margin
    return {state: values[0][1] for state, values in ranked.items()}


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def episodes():
    return make_episodes(60, tokens_per_action=1)


@pytest.fixture(scope="module")
def data(episodes):
    return transitions(episodes, "token")


def test_data_cover_part_of_the_mdp_and_all_kinds_of_endings(episodes, data):
    assert len(data) == STATES * ACTIONS - STATES // 2
    assert any(e.truncated for e in episodes) and any(not e.truncated for e in episodes)
    assert any(len(e.rewards) < HORIZON for e in episodes)
    rewards = [r for e in episodes for r in e.rewards]
    assert min(rewards) < -0.5 and max(rewards) > 0.5
    # Transitions are random.
    assert sum(len({following for _, _, following in steps}) > 1 for steps in data.values()) > len(data) / 2


@pytest.fixture(scope="module")
def model_at(episodes):
    """Returns a function from tau to the model trained with it, once."""
    return cache(lambda tau: train(make_batch(episodes, 1), tau=tau))


# The middle, the default, and one near the maximum, where rare good actions decide.
@pytest.mark.parametrize("tau", [0.5, 0.7, 0.95])
class TestOneTokenPerAction:
    def test_q_and_v_are_the_fixed_point(self, data, model_at, tau):
        assert error(model_at(tau), fixed_point(data, tau)) < TOLERANCE

    def test_another_expectile_is_told_apart(self, data, model_at, tau):
        for other in {0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97} - {tau}:
            assert error(model_at(tau), fixed_point(data, other)) > 5 * TOLERANCE

    def test_truncated_ends_bootstrap_and_terminal_ends_do_not(self, episodes, model_at, tau):
        for mistake in ({"truncated_as": False}, {"terminal_as": True}):
            wrong = fixed_point(transitions(episodes, "token", **mistake), tau)
            assert error(model_at(tau), wrong) > 10 * TOLERANCE


def test_greedy_actions_match_value_iteration_for_a_high_expectile(data, model_at):
    for state, token in best_actions(fixed_point(data, None)[0], margin=0.2).items():
        # Without CQL nothing says what actions outside of the support are worth.
        covered = [a for s, a in data if s == state]
        assert all(covered[head[covered].argmax()] == token for head in learned(model_at(0.95), state)[0])


def test_with_cql_greedy_actions_match_value_iteration(episodes, data):
    best = best_actions(fixed_point(data, None)[0], margin=0.2)
    frequent = {s: max((a for t, a in data if t == s), key=lambda a: len(data[s, a])) for s, _ in data}
    assert sum(best[state] != frequent[state] for state in best) >= STATES // 2  # cloning would not do
    # .1 is trlX's weight: enough to push down what was never tried, too little to turn a difference of .2 over.
    model = train(make_batch(episodes, 1), tau=0.95, cql_scale=0.1)
    for state, token in best.items():
        assert all(head.argmax() == token for head in learned(model, state)[0])  # over the whole vocabulary


def test_two_tokens_per_action_discounted_by_utterance():
    # More episodes and steps than above: the first half of an action leads to a state of its own, so there are three
    # times as many states to learn, with fewer data each, and values travel half an action per backup.
    episodes, tau = make_episodes(120, tokens_per_action=2), 0.7
    model = train(make_batch(episodes, 2), steps=800, tau=tau, discount_on="utterance")
    assert error(model, fixed_point(transitions(episodes, "utterance"), tau)) < TOLERANCE
    assert error(model, fixed_point(transitions(episodes, "token"), tau)) > 10 * TOLERANCE
    for mistake in ({"truncated_as": False}, {"terminal_as": True}):
        assert error(model, fixed_point(transitions(episodes, "utterance", **mistake), tau)) > 10 * TOLERANCE
