# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import inspect
import json
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_qrl.data import ILQLBatch, ILQLSeq2SeqBatch
from hf_qrl.losses import autoregressive_q_learn
from hf_qrl.losses.conservative import sum_of_squares
from hf_qrl.losses.q_learning import autoregressive_q_terms, check_q_learning_options
from hf_qrl.losses.q_learning_from_states import (
    q_learning_loss_from_states,
    q_learning_metrics_from_sums,
)
from hf_qrl.losses.vocabulary import vocabulary_loss, vocabulary_maximum
from hf_qrl.models.heads import ILQLHeads


D, V = 5, 11
KINDS = ["mlp", "linear", "tied", "dueling"]
BASIC = {"gamma": 0.9, "q_min": -2.0, "conservative_scale": 0.5, "cloning_scale": 0.3}


# ------------------------------------------------------------------------------- the definition, against the golden


@pytest.fixture(scope="module")
def golden() -> dict:
    path = Path(__file__).parents[1] / "goldens" / "llama-qrlhf.json"
    return json.loads(path.read_text())["autoregressive_q_learn_table"]


@pytest.fixture
def table(golden):
    """Returns a function to the golden's arguments, by name; its models look a row of a table up for each token."""

    def make(dtype=torch.float64, **changes):
        inputs = golden["inputs"]
        online = torch.tensor(inputs["online_table"], dtype=dtype, requires_grad=True)
        target = torch.tensor(inputs["target_table"], dtype=dtype, requires_grad=True)
        return {
            "model": lambda tokens: online[tokens],
            "ema_model": lambda tokens: target[tokens],
            "states": torch.tensor(inputs["states"]),
            "prompt_len": torch.tensor(inputs["prompt_len"]),
            "next_states": torch.tensor(inputs["next_states"]),
            "rewards": torch.tensor(inputs["rewards"], dtype=dtype),
            "eos_id": inputs["eos_id"],
            "discount_gamma": inputs["gamma"],
            "tables": (online, target),
            **changes,
        }

    return make


def evaluate(function, arguments):
    return function(**{name: x for name, x in arguments.items() if name != "tables"})


class TestAutoregressiveQLearnOnGolden:
    def test_loss_equals_golden(self, golden, table):
        for dtype, name in ((torch.float64, "loss_float64"), (torch.float32, "loss")):
            loss = evaluate(autoregressive_q_learn, table(dtype))
            tolerance = 1e-9 if dtype == torch.float64 else 1e-6
            assert loss.item() == pytest.approx(golden["reference"][name], rel=0, abs=tolerance)

    def test_every_term_equals_golden(self, golden, table):
        terms, stored = evaluate(autoregressive_q_terms, table()), golden["reference"]
        act = torch.tensor(stored["action_mask"])
        assert torch.equal(terms.act, act)
        assert torch.equal(terms.term & act, torch.tensor(stored["terminal"]) & act)
        assert torch.equal(terms.ends, torch.tensor(stored["boundary"]))
        for got, name in ((terms.q, "q_pred"), (terms.y, "y"), (terms.losses, "losses")):
            expected = torch.tensor(stored[name], dtype=torch.float64)
            torch.testing.assert_close(got[act], expected[act], rtol=1e-6, atol=1e-6)


# -------------------------------------------------------------------------------- the definition, against a naive loop


def draw_rows(seed: int, b: int = 4, n: int = 7, tokens: int = 6):
    """Arguments of [`autoregressive_q_learn`] with models that read the whole context, and with padding of any id."""
    torch.manual_seed(seed)
    x = torch.randint(tokens, (b, n + 1))
    lengths = torch.randint(2, n + 2, (b,))
    tables = torch.randn(2, 3, tokens, tokens, dtype=torch.float64)

    def model(which, ids):
        # Q depends on the first token, on the last, and on how many there were.
        rows = tables[which]
        first = rows[0][ids[:, :1]].expand(-1, ids.shape[1], -1)
        return first + rows[1][ids] + 0.3 * rows[2].roll(1)[ids.cumsum(1) % tokens]

    return {
        "model": partial(model, 0),
        "ema_model": partial(model, 1),
        "states": x[:, :-1],
        "prompt_len": torch.randint(1, n + 2, (b,)),
        "next_states": x[:, -1],
        "rewards": torch.randn(b, n, dtype=torch.float64),
        "eos_id": 0,
        "discount_gamma": 0.8,
        "attention_mask": (torch.arange(n + 1) < lengths[:, None]).long(),
        "terminated": torch.rand(b) < 0.3,
    }


def loop_over_steps(
    model, ema_model, states, prompt_len, next_states, rewards, eos_id, discount_gamma, attention_mask, terminated,
    discount_on,
):  # fmt: skip
    """Mean squared error over 2, and (row, step, target) of each action, by following the text step by step."""
    x = torch.cat([states, next_states[:, None]], 1).tolist()
    q, q_bar = model(states), ema_model(torch.tensor(x))
    steps = []
    for i, row in enumerate(x):
        length = int(attention_mask[i].sum())
        t = max(int(prompt_len[i]), 1)  # position of the first generated token
        while t < length:
            ended = row[t] == eos_id
            last = ended or t == length - 1
            y = rewards[i, t - 1].item()
            if not (ended or (last and terminated[i])):
                discount = discount_gamma if last or discount_on == "token" else 1.0
                y += discount * max(q_bar[i, t].tolist())
            steps.append((i, t - 1, y, q[i, t - 1, row[t]].item()))
            t += 1
            if ended:
                break
    loss = sum((q_a - y) ** 2 / 2 for *_, y, q_a in steps) / max(1, len(steps))
    return loss, {(i, t): y for i, t, y, _ in steps}


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), discount_on=st.sampled_from(["utterance", "token"]))
def test_definition_equals_loop_over_steps(seed, discount_on):
    arguments = {**draw_rows(seed), "discount_on": discount_on}
    expected, targets = loop_over_steps(**arguments)
    terms = autoregressive_q_terms(**arguments)
    assert {tuple(step) for step in terms.act.nonzero().tolist()} == set(targets)
    for step, y in targets.items():
        assert terms.y[step].item() == pytest.approx(y, abs=1e-12)
    assert autoregressive_q_learn(**arguments).item() == pytest.approx(expected, abs=1e-12)


# --------------------------------------------------------------------------------------------------- faults of others


class TestFaultsNotRepeated:
    """Faults of llama-qrlhf. (That nothing could run at all, the first one, is what the golden tests.)"""

    def terms(self, arguments):
        return evaluate(autoregressive_q_terms, arguments)

    def test_target_network_reads_the_whole_context(self, table):
        seen = []
        arguments = table()
        network = arguments["ema_model"]
        arguments["ema_model"] = lambda tokens: seen.append(tokens) or network(tokens)
        self.terms(arguments)
        x = torch.cat([arguments["states"], arguments["next_states"][:, None]], 1)
        assert len(seen) == 1 and torch.equal(seen[0], x)

    def test_step_that_emits_eos_does_not_bootstrap(self, table):
        terms = self.terms(table())
        assert terms.y[0, 4].item() == 1.0 and terms.y[1, 2].item() == 1.0  # the reward alone, at the very end, too

    def test_steps_after_eos_leave_the_mean(self, table):
        arguments = table()
        expected = evaluate(autoregressive_q_learn, arguments)
        arguments["rewards"][1, 3:] = 1e6
        assert evaluate(autoregressive_q_learn, arguments) == expected

    def test_first_generated_token_is_an_action(self, table):
        terms = self.terms(table(prompt_len=torch.tensor([3, 1])))
        assert terms.act.nonzero().tolist() == [[0, 2], [0, 3], [0, 4], [1, 0], [1, 1], [1, 2]]

    def test_negative_and_zero_rewards_count(self, table):
        rewards = table()["rewards"]
        losses = [evaluate(autoregressive_q_learn, table(rewards=scale * rewards)) for scale in (1, 0, -1)]
        assert len({loss.item() for loss in losses}) == 3
        terms = self.terms(table(rewards=-rewards))
        assert terms.y[0, 4].item() == -1.0
        cut = {"eos_id": None, "rewards": 0 * rewards}
        with_discount, without = (self.terms(table(**cut, discount_gamma=gamma)).y for gamma in (0.5, 1.0))
        torch.testing.assert_close(with_discount[:, -1], 0.5 * without[:, -1])

    def test_reward_within_an_utterance_counts(self, table):
        rewards = table()["rewards"]
        rewards[0, 2] = -7.0
        y, without = self.terms(table(rewards=rewards)).y, self.terms(table()).y
        assert (y - without)[0].tolist() == pytest.approx([0, 0, -7, 0, 0])

    def test_eos_in_the_prompt_is_a_token_like_others(self, table):
        states = torch.tensor([[1, 0, 3, 4, 5], [0, 0, 4, 2, 3]])
        terms = self.terms(table(states=states, prompt_len=torch.tensor([2, 2])))
        assert terms.act.tolist() == [[False, True, True, True, True]] * 2
        assert terms.term.nonzero().tolist() == [[0, 4], [1, 4]]

    def test_padding_may_be_eos(self, table):
        """A row that was cut and is padded with eos bootstraps; its padding is no action."""
        arguments = table(
            states=torch.tensor([[2, 1, 4, 0, 0]]),
            next_states=torch.tensor([0]),
            prompt_len=torch.tensor([1]),
            rewards=torch.zeros(1, 5, dtype=torch.float64),
            attention_mask=torch.tensor([[1, 1, 1, 0, 0, 0]]),
        )
        terms = self.terms(arguments)
        assert terms.act.tolist() == [[True, True, False, False, False]] and not terms.term.any()
        assert terms.y[0, 1].item() == pytest.approx(0.9 * arguments["tables"][1][4].max().item())
        arguments["attention_mask"][0, 3] = 1  # now the first 0 was generated, and ends the row
        terms = self.terms(arguments)
        assert terms.act.sum() == 3 and terms.term.nonzero().tolist() == [[0, 2]]

    def test_no_action_is_zero_and_attached(self, table):
        arguments = table(prompt_len=torch.tensor([6, 6]))
        loss = evaluate(autoregressive_q_learn, arguments)
        loss.backward()
        assert loss.item() == 0.0 and not arguments["tables"][0].grad.any()

    def test_target_receives_no_gradient(self, table):
        arguments = table()
        evaluate(autoregressive_q_learn, arguments).backward()
        online, target = arguments["tables"]
        assert online.grad.any() and target.grad is None

    def test_q_values_are_read_by_name_and_logits_never(self, table):
        arguments = table()
        expected = evaluate(autoregressive_q_learn, arguments)
        for name in ("model", "ema_model"):
            network = arguments[name]
            arguments[name] = lambda tokens, network=network: SimpleNamespace(
                logits=torch.full((*tokens.shape, 6), 1e3), q_values=network(tokens)
            )
        assert evaluate(autoregressive_q_learn, arguments) == expected
        arguments["model"] = lambda tokens: SimpleNamespace(logits=torch.zeros(*tokens.shape, 6))
        with pytest.raises(ValueError, match="no Q-values: give it a Q-head"):
            evaluate(autoregressive_q_learn, arguments)

    def test_q_values_of_another_shape_raise(self, table):
        arguments = table()
        arguments["ema_model"] = lambda tokens: torch.zeros(2, 5, 6)
        with pytest.raises(
            ValueError, match=r"`ema_model` must return Q-values of shape .* \(2, 6\), got \(2, 5, 6\)"
        ):
            evaluate(autoregressive_q_learn, arguments)

    @pytest.mark.parametrize(
        ("name", "x"),
        [
            ("states", torch.zeros(5, dtype=torch.long)),
            ("prompt_len", torch.ones(2, 5, dtype=torch.long)),
            ("prompt_len", torch.tensor([0, 2])),
            ("prompt_len", torch.tensor([7, 2])),
            ("next_states", torch.zeros(2, 1, dtype=torch.long)),
            ("rewards", torch.zeros(2, 6)),
            ("attention_mask", torch.ones(2, 5)),
            ("attention_mask", torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])),
            ("terminated", torch.zeros(2, 5).bool()),
        ],
    )
    def test_tensors_that_do_not_fit_raise(self, table, name, x):
        with pytest.raises(ValueError, match=f"`{name}` must"):
            evaluate(autoregressive_q_learn, table(**{name: x}))

    def test_no_argument_is_inert(self):
        """Every argument of the training path changes the loss or what is computed in it."""
        arguments = inspect.signature(q_learning_loss_from_states).parameters
        tested = {"hidden_states", "heads", "lm_head", "batch", "next_hidden_state", *TestAgainstLoop.ARGUMENTS}
        assert set(arguments) == tested


# ------------------------------------------------------------------------------------ the training path, against loops


def loop_over_batch(
    hidden, heads, lm_head, batch, next_hidden=None, *, num_items=None, target_hidden_states=None,
    target_next_hidden_state=None, gamma, discount_on="utterance", n_step=1, mc_floor=False,
    q_min, conservative_scale, cloning_scale, value_min=None, value_max=None, double_q=False, vocab_size=None,
):  # fmt: skip
    """The loss and the means of [`q_learning_loss_from_states`], one step after the other on dense Q-values."""
    lm_weight = lm_head.module.weight
    q = heads.q[0](hidden, lm_weight)
    logits = torch.nn.functional.linear(hidden * lm_head.scale, lm_weight, lm_head.module.bias)
    if lm_head.softcap is not None:
        logits = lm_head.softcap * torch.tanh(logits / lm_head.softcap)
    q_next = q_bar_next = None
    q_bar = heads.target_q[0](hidden if target_hidden_states is None else target_hidden_states, lm_weight).detach()
    if next_hidden is not None:
        of_target = next_hidden if target_next_hidden_state is None else target_next_hidden_state
        q_bar_next = heads.target_q[0](of_target, lm_weight).detach()
    if next_hidden is not None:
        q_next = heads.q[0](next_hidden, lm_weight).detach()
    allowed = V if vocab_size is None else vocab_size

    def best(of_online, of_target):
        """The value of a state, from its row of the online and of the target Q-values."""
        chooser = of_online if double_q else of_target
        return of_target[chooser[:allowed].argmax()].item()

    means = {"loss/td": [], "loss/conservative": [], "loss/cloning": [], "q/taken": [], "q/unseen": [], "q/max": []}
    means |= {"td_error/abs": []}
    rows = {"returns/mc": [], "overestimation": []}
    weights, truncated_rows = [], []
    for i in range(len(hidden)):
        steps = int(batch.dones[i].sum())
        states = batch.states_ixs[i].tolist()
        has_next = batch.next_attention_mask is not None and bool(batch.next_attention_mask[i].any())
        truncated = batch.truncated is not None and bool(batch.truncated[i])
        values = [best(q[i, p], q_bar[i, p]) for p in states[:steps]]
        if has_next:
            values.append(best(q_next[i], q_bar_next[i]))
        else:
            values.append(best(q[i, states[steps]], q_bar[i, states[steps]]) if truncated else 0.0)
        truncated_rows.append(truncated)
        rewards = batch.rewards[i].tolist()
        turns = batch.turn_ixs[i].tolist()
        ends = [j == steps - 1 or turns[j + 1] != turns[j] for j in range(steps)]
        discounts = [gamma if discount_on == "token" or end else 1.0 for end in ends]
        returns = [0.0] * (steps + 1)
        for j in reversed(range(steps)):
            returns[j] = rewards[j] + discounts[j] * returns[j + 1]
        for j in range(steps):
            y, c, k = 0.0, 1.0, j
            while k < min(j + n_step, steps):
                y, c, k = y + c * rewards[k], c * discounts[k], k + 1
            y += c * values[k]
            if mc_floor and not truncated and not has_next:
                y = max(y, returns[j])
            y = y if value_min is None else max(y, value_min)
            y = y if value_max is None else min(y, value_max)
            p, a = states[j], int(batch.input_ids[i, states[j] + 1])
            others = torch.stack([q[i, p, v] for v in range(allowed) if v != a])
            weights.append(1.0 if batch.weight is None else batch.weight[i].item())
            means["loss/td"].append((q[i, p, a] - y) ** 2 / 2)
            means["loss/conservative"].append((others - (q_min or 0.0)).square().mean())
            means["loss/cloning"].append(-logits[i, p].log_softmax(0)[a])
            means["q/taken"].append(q[i, p, a])
            means["q/unseen"].append(others.mean())
            means["q/max"].append(values[j])
            means["td_error/abs"].append((q[i, p, a] - y).abs())
        if steps and not truncated and not has_next:
            rows["returns/mc"].append(returns[0])
            rows["overestimation"].append(values[0] - returns[0])
    total = sum(weights)
    means = {name: sum(w * x for w, x in zip(weights, xs, strict=True)) for name, xs in means.items()}
    loss = (
        means["loss/td"] + conservative_scale / 2 * means["loss/conservative"] + cloning_scale * means["loss/cloning"]
    )
    loss = loss / (total if num_items is None else num_items)
    means = {name: float(x) / total for name, x in means.items()}
    means |= {name: sum(xs) / len(xs) for name, xs in rows.items() if xs}
    means["truncated_fraction"] = sum(truncated_rows) / len(truncated_rows)
    return loss, means


def inputs(make_heads, make_lm_head, batch, kind="mlp", lm=(False, None, 1.0), next_rows=False, average=False, seed=0):
    """Positional arguments and those of an averaged model, and all tensors that get a gradient."""
    heads, lm_head = make_heads(kind, seed=seed), make_lm_head(*lm)
    torch.manual_seed(seed + 1)
    hidden = torch.randn(*batch.input_ids.shape, D, dtype=torch.float64).requires_grad_()
    next_hidden = torch.randn(len(hidden), D, dtype=torch.float64) if next_rows else None
    arguments = (hidden, heads, lm_head, batch, next_hidden)
    averaged = {}
    if average:
        averaged = {
            "target_hidden_states": hidden.detach() + 0.2 * torch.randn_like(hidden),
            "target_next_hidden_state": next_hidden + 0.1 if next_rows else None,
        }
    leaves = {"hidden": hidden, **{f"lm.{name}": x for name, x in lm_head.module.named_parameters()}}
    leaves |= {f"heads.{name}": x for name, x in heads.named_parameters()}
    return arguments, averaged, leaves


def with_gradients(function, arguments, leaves, **options):
    loss, others = function(*arguments, **options)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), gradients, strict=True)]
    return loss.detach(), dict(zip(leaves, zeros, strict=True)), others


def assert_equal_to_loop(arguments, averaged, leaves, **options):
    options = {**averaged, **options}
    expected, gradients, means = with_gradients(loop_over_batch, arguments, leaves, **options)
    loss, got, sums = with_gradients(q_learning_loss_from_states, arguments, leaves, **options)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-10, msg=name)
    scales = {name: options[name] for name in ("conservative_scale", "cloning_scale")}
    metrics = q_learning_metrics_from_sums({name: x.item() for name, x in sums.items()}, **scales)
    if not options["conservative_scale"]:
        means["loss/conservative"] = 0.0
    if not options["cloning_scale"]:
        means["loss/cloning"] = 0.0
    if options.get("num_items") is None:
        means["loss"] = expected.item()
    else:
        metrics.pop("loss")
    assert metrics == pytest.approx(means, rel=0, abs=1e-9)


class TestAgainstLoop:
    """`q_learning_loss_from_states` against the loop, gradients of hidden states, heads and LM head included."""

    OPTIONS = [
        {},
        {"conservative_scale": 0.0},
        {"conservative_scale": 0.0, "q_min": None},
        {"cloning_scale": 0.0},
        {"q_min": 0.5},
        {"discount_on": "token"},
        {"gamma": 0.0},
        {"gamma": 1.0, "discount_on": "token"},
        {"n_step": 3},
        {"n_step": 2, "mc_floor": True},
        {"mc_floor": True},
        {"value_min": -0.2, "value_max": 0.3},
        {"value_max": 0.1, "mc_floor": True},
        {"double_q": True},
        {"vocab_size": V - 3},
        {"vocab_size": V - 3, "double_q": True},
        {"num_items": 50.0},
        {"num_items": torch.tensor(50.0, dtype=torch.float64)},
    ]
    AVERAGE = {"target_hidden_states", "target_next_hidden_state"}
    ARGUMENTS = {*BASIC, *AVERAGE, *(name for options in OPTIONS for name in options)}

    def batch(self, make_batch, options, seed=0, truncated=True, weight=True, next_rows=True):
        batch = make_batch(seed, truncated=truncated, weight=weight, next_rows=next_rows)
        # The data holds no tokens that do not exist.
        return replace(batch, input_ids=batch.input_ids % (options.get("vocab_size") or V))

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    def test_equals_loop(self, make_batch, make_heads, make_lm_head, kind, options):
        batch = self.batch(make_batch, options)
        case = inputs(make_heads, make_lm_head, batch, kind, lm=(True, None, 1.0), next_rows=True)
        assert_equal_to_loop(*case, **{**BASIC, **options})

    @pytest.mark.parametrize("double_q", [False, True])
    @pytest.mark.parametrize("kind", KINDS)
    def test_equals_loop_with_an_average_of_the_whole_model(
        self, make_batch, make_heads, make_lm_head, kind, double_q
    ):
        batch = self.batch(make_batch, {}, seed=3)
        case = inputs(make_heads, make_lm_head, batch, kind, next_rows=True, average=True)
        assert_equal_to_loop(*case, **BASIC, double_q=double_q)

    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 1000),
        kind=st.sampled_from(KINDS),
        chunk_elements=st.sampled_from([1, V, 3 * V + 1, 1 << 20]),
        method=st.sampled_from(["gram", "rows", None]),
        lm=st.sampled_from([(False, None, 1.0), (False, 1.5, 0.25), (True, 2.0, 3.0)]),
        data=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        average=st.booleans(),
        options=st.fixed_dictionaries(
            {
                "gamma": st.sampled_from([0.0, 0.7, 1.0]),
                "discount_on": st.sampled_from(["token", "utterance"]),
                "n_step": st.integers(1, 4),
                "mc_floor": st.booleans(),
                "q_min": st.sampled_from([-3.0, 0.0, 0.4]),
                "conservative_scale": st.sampled_from([0.0, 0.7]),
                "cloning_scale": st.sampled_from([0.0, 0.3]),
                "value_min": st.sampled_from([None, -0.3]),
                "value_max": st.sampled_from([None, 0.5]),
                "double_q": st.booleans(),
                "vocab_size": st.sampled_from([None, V, V - 4]),
            }
        ),
    )
    def test_equals_loop_in_any_combination(
        self, make_batch, make_heads, make_lm_head, seed, kind, chunk_elements, method, lm, data, average, options
    ):
        truncated, weight, next_rows = data
        batch = self.batch(make_batch, options, seed, truncated, weight, next_rows)
        case = inputs(make_heads, make_lm_head, batch, kind, lm, next_rows, average, seed)
        with pytest.MonkeyPatch.context() as patch:
            for function in (vocabulary_loss, vocabulary_maximum, sum_of_squares):
                patch.setitem(function.__kwdefaults__, "chunk_elements", chunk_elements)
            patch.setitem(sum_of_squares.__kwdefaults__, "method", method)
            assert_equal_to_loop(*case, **options)


class TestAgainstDefinition:
    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 10_000), discount_on=st.sampled_from(["utterance", "token"]), kind=st.sampled_from(KINDS)
    )
    def test_equals_definition_on_rows_of_one_utterance(self, make_heads, make_lm_head, seed, discount_on, kind):
        rows = draw_rows(seed, tokens=V)
        heads, lm_head = make_heads(kind, seed=seed), make_lm_head()
        x = torch.cat([rows["states"], rows["next_states"][:, None]], 1)
        hidden = torch.randn(*x.shape, D, dtype=torch.float64).requires_grad_()

        def network(head, tokens):
            return head(hidden[:, : tokens.shape[1]], lm_head.module.weight)

        rows |= {"model": partial(network, heads.q[0]), "ema_model": partial(network, heads.target_q[0])}
        terms = autoregressive_q_terms(**rows, discount_on=discount_on)
        counts = terms.act.sum(1)
        width = max(1, int(counts.max()))
        actions, rewards = torch.zeros(len(x), width, dtype=torch.long), torch.zeros(len(x), width).double()
        states, dones = (torch.zeros(len(x), width + 1, dtype=torch.long) for _ in range(2))
        for i, t in enumerate(counts.tolist()):
            steps = terms.act[i].nonzero().squeeze(1)
            actions[i, :t], states[i, :t], dones[i, :t], rewards[i, :t] = steps, steps, 1, rows["rewards"][i, steps]
            states[i, t] = steps[-1] + 1 if t else 0
        batch = ILQLBatch(x, rows["attention_mask"], rewards, states, actions, dones, truncated=~terms.term.any(1))
        options = {"gamma": rows["discount_gamma"], "discount_on": discount_on}
        options |= {"q_min": 0.0, "conservative_scale": 0.0, "cloning_scale": 0.0}
        loss, _ = q_learning_loss_from_states(hidden, heads, lm_head, batch, **options)
        expected = autoregressive_q_learn(**rows, discount_on=discount_on)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        parameters = [hidden, *heads.q[0].parameters()]
        pairs = zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True)
        for got, gradient in pairs:
            torch.testing.assert_close(got, gradient, rtol=0, atol=1e-10)


class TestTraining:
    def test_sums_add_up_over_micro_batches(self, make_batch, make_heads, make_lm_head):
        """The gradient of a batch is the sum of those of its parts, given the number of actions of all."""
        batch = make_batch(4, truncated=True, weight=True)
        count = (batch.dones[:, :-1] * batch.weight.double()[:, None]).sum()
        (hidden, heads, lm_head, _, _), _, _ = inputs(make_heads, make_lm_head, batch)
        parameters = [*heads.q[0].parameters(), *lm_head.module.parameters()]

        def gradients(part: slice) -> list[torch.Tensor]:
            fields = {name: x if x is None else x[part] for name, x in vars(batch).items()}
            loss, sums = q_learning_loss_from_states(
                hidden[part], heads, lm_head, ILQLBatch(**fields), num_items=count, **BASIC
            )
            return [*torch.autograd.grad(loss, parameters), loss.detach(), torch.stack([*sums.values()])]

        whole, first, second = (gradients(part) for part in (slice(0, 4), slice(0, 1), slice(1, 4)))
        for x, y, z in zip(whole, first, second, strict=True):
            torch.testing.assert_close(x, y + z, rtol=0, atol=1e-12)

    def test_actions_of_an_encoder_decoder_are_tokens_of_the_decoder(self, make_batch, make_heads, make_lm_head):
        batch = make_batch(2, truncated=True)
        (hidden, heads, lm_head, _, _), _, _ = inputs(make_heads, make_lm_head, batch)
        fields = {**vars(batch), "decoder_input_ids": batch.input_ids, "input_ids": torch.zeros(4, 3).long()}
        seq2seq = ILQLSeq2SeqBatch(**fields)
        losses = [q_learning_loss_from_states(hidden, heads, lm_head, x, **BASIC)[0] for x in (batch, seq2seq)]
        assert losses[0] == losses[1]

    @pytest.mark.parametrize("kind", KINDS)
    def test_no_actions_is_zero_and_attached(self, make_batch, make_heads, make_lm_head, kind):
        batch = make_batch(3, truncated=True)
        batch = replace(batch, dones=torch.zeros_like(batch.dones))
        (hidden, heads, lm_head, _, _), _, _ = inputs(make_heads, make_lm_head, batch, kind)
        loss, sums = q_learning_loss_from_states(hidden, heads, lm_head, batch, **BASIC)
        loss.backward()
        assert loss.item() == 0.0 and sums["actions"].item() == 0
        for x in (hidden, *heads.q[0].parameters(), *lm_head.module.parameters()):
            assert x.grad is not None and not x.grad.any()
        scales = {"conservative_scale": 0.5, "cloning_scale": 0.3}
        metrics = q_learning_metrics_from_sums({name: x.item() for name, x in sums.items()}, **scales)
        assert metrics["loss"] == 0.0 and "overestimation" not in metrics

    @pytest.mark.parametrize("average", [False, True])
    def test_targets_receive_no_gradient(self, make_batch, make_heads, make_lm_head, average):
        case, averaged, _ = inputs(make_heads, make_lm_head, make_batch(0, truncated=True), average=average)
        for buffer in case[1].target_q.buffers():
            buffer.requires_grad_()
        targets = [*case[1].target_q.buffers()]
        if average:
            averaged["target_hidden_states"].requires_grad_()
            targets += [averaged["target_hidden_states"]]
        loss, _ = q_learning_loss_from_states(*case, **averaged, **BASIC)
        loss.backward()
        assert all(x.grad is None for x in targets)

    def test_padding_does_not_matter(self, make_batch, make_heads, make_lm_head):
        """Whatever stands on padding, its hidden states, tokens and rewards leave loss and gradients as they are."""
        batch = make_batch(5, truncated=True)
        (hidden, heads, lm_head, _, _), _, _ = inputs(make_heads, make_lm_head, batch)
        padding = batch.attention_mask == 0
        assert padding.any() and (batch.dones[:, :-1] == 0).any()
        other = replace(
            batch,
            input_ids=batch.input_ids.masked_fill(padding, V - 1),
            rewards=batch.rewards.masked_fill(batch.dones[:, :-1] == 0, 1e6),
        )
        parameters = [*heads.q[0].parameters(), *lm_head.module.parameters()]
        results = []
        for states, data in ((hidden, batch), (hidden.masked_fill(padding[..., None], 1e3), other)):
            loss, _ = q_learning_loss_from_states(states, heads, lm_head, data, mc_floor=True, **BASIC)
            results.append([loss.detach(), *torch.autograd.grad(loss, parameters)])
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)

    def test_tokens_that_do_not_exist_take_no_part(self, make_batch, make_heads, make_lm_head):
        """Rows that fill the projection up change nothing, however large, and get no gradient."""
        batch = make_batch(6, truncated=True)
        batch = replace(batch, input_ids=batch.input_ids % 8)
        options = {**BASIC, "cloning_scale": 0.0, "vocab_size": 8}
        losses = []
        for value in (0.0, 1e3):
            (hidden, heads, lm_head, _, _), _, _ = inputs(make_heads, make_lm_head, batch)
            for head in (heads.q[0], heads.target_q[0]):
                head.weight.data[8:], head.bias.data[8:] = value, value
            loss, _ = q_learning_loss_from_states(hidden, heads, lm_head, batch, **options)
            loss.backward()
            assert not heads.q[0].weight.grad[8:].any() and not heads.q[0].bias.grad[8:].any()
            losses.append(loss.item())
        assert losses[0] == losses[1]

    def test_floor_holds_for_terminated_rows_only(self, make_batch, make_heads, make_lm_head):
        """A row that was cut may have a return below what it was paid so far."""
        batch = make_batch(0)
        batch = replace(batch, rewards=batch.rewards.abs() + 100)
        case, _, _ = inputs(make_heads, make_lm_head, batch)
        options = {**BASIC, "n_step": 2}
        for truncated in (torch.zeros(4).bool(), torch.ones(4).bool()):
            cut = (*case[:3], replace(batch, truncated=truncated), None)
            with_floor, without = (q_learning_loss_from_states(*cut, mc_floor=x, **options)[0] for x in (True, False))
            assert (with_floor == without) == bool(truncated.all())

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("double_q", [False, True])
    def test_no_tensor_of_actions_times_vocabulary(self, make_batch, make_lm_head, kind, double_q):
        vocab, hidden_size, rows, length = 3001, 4, 16, 32
        stem = {"mlp": "relu", "linear": "identity", "tied": "linear", "dueling": "silu"}[kind]
        batch = make_batch(0, rows=rows, length=length, truncated=True)
        num_actions = int(batch.dones.sum())
        assert num_actions > 8 * hidden_size
        heads = ILQLHeads(hidden_size, vocab, kind, stem, 2, 1, "min").double()
        heads.reset("default")
        lm_head = make_lm_head(vocab_size=vocab, hidden_size=hidden_size)
        hidden = torch.randn(rows, length, hidden_size, dtype=torch.float64, requires_grad=True)
        with pytest.MonkeyPatch.context() as patch, LargestTensor() as largest:
            for function in (vocabulary_loss, vocabulary_maximum, sum_of_squares):
                patch.setitem(function.__kwdefaults__, "chunk_elements", 8 * vocab)
            loss, _ = q_learning_loss_from_states(hidden, heads, lm_head, batch, double_q=double_q, **BASIC)
            loss.backward()
        # A chunk may be rounded up by one row; the projections and their gradients are (V, 2 d).
        assert largest.elements <= max(9, 2 * hidden_size) * vocab < num_actions * vocab

    @pytest.mark.parametrize("kind", ["mlp", "tied", "dueling"])
    def test_values_stay_in_float32_under_autocast(self, make_batch, make_heads, make_lm_head, kind):
        batch = make_batch(1)
        batch = replace(batch, rewards=batch.rewards.float())
        heads, lm_head = make_heads(kind).float(), make_lm_head()
        lm_head.module.float()
        hidden = torch.randn(*batch.input_ids.shape, D)

        def evaluate():
            parameters = [*heads.q[0].parameters(), *lm_head.module.parameters()]
            loss, sums = q_learning_loss_from_states(hidden, heads, lm_head, batch, **BASIC)
            return loss, torch.autograd.grad(loss, parameters), sums

        loss, gradients, sums = evaluate()
        with torch.autocast("cpu", torch.bfloat16):
            mixed_loss, mixed_gradients, mixed_sums = evaluate()
        for name in set(sums) - {"loss/cloning"}:
            torch.testing.assert_close(mixed_sums[name], sums[name], rtol=1e-6, atol=1e-6)
        assert mixed_sums["loss/cloning"] != sums["loss/cloning"]
        torch.testing.assert_close(mixed_loss, loss, rtol=1e-2, atol=0)
        for x, y in zip(mixed_gradients, gradients, strict=True):
            assert x.dtype == torch.float32
            torch.testing.assert_close(x, y, rtol=5e-2, atol=1e-2)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"discount_on": "word"}, "`discount_on` must be"),
            ({"n_step": 0}, "at least 1"),
            ({"conservative_scale": -1.0}, "`conservative_scale` must be at least 0"),
            ({"cloning_scale": float("nan")}, "`cloning_scale` must be at least 0"),
            ({"conservative_scale": 1.0, "q_min": None}, "below every return-to-go"),
            ({"conservative_scale": 1.0, "q_min": float("-inf")}, "below every return-to-go"),
        ],
    )
    def test_option_without_sense_raises(self, make_batch, make_heads, make_lm_head, options, message):
        with pytest.raises(ValueError, match=message):
            check_q_learning_options(**options)
        case, _, _ = inputs(make_heads, make_lm_head, make_batch(0))
        with pytest.raises(ValueError, match=message):
            q_learning_loss_from_states(*case, **{**BASIC, **options})

    def test_missing_part_of_an_average_raises(self, make_batch, make_heads, make_lm_head):
        batch = make_batch(0, next_rows=True)
        case, averaged, _ = inputs(make_heads, make_lm_head, batch, next_rows=True, average=True)
        with pytest.raises(ValueError, match="got no `target_next_hidden_state`"):
            q_learning_loss_from_states(*case, **{**averaged, "target_next_hidden_state": None}, **BASIC)

    def test_double_q_needs_the_next_states_of_both_models(self, make_batch, make_heads, make_lm_head):
        batch = make_batch(0, next_rows=True)
        case, averaged, _ = inputs(make_heads, make_lm_head, batch, next_rows=True, average=True)
        q_learning_loss_from_states(*case[:4], None, **averaged, **BASIC)
        with pytest.raises(ValueError, match="got no `next_hidden_state`"):
            q_learning_loss_from_states(*case[:4], None, **averaged, **BASIC, double_q=True)

    def test_missing_next_state_raises(self, make_batch, make_heads, make_lm_head):
        case, _, _ = inputs(make_heads, make_lm_head, make_batch(0, next_rows=True))
        with pytest.raises(ValueError, match="got no `next_hidden_state`"):
            q_learning_loss_from_states(*case, **BASIC)


# ------------------------------------------------------------------------------------------------ dynamic programming


STATES, ACTIONS, GAMMA = 4, 3, 0.8  # tokens 0..2 are actions, 3..6 states of an MDP; one or two tokens to an action
SEED = 23  # an MDP whose best tokens are best by .2 or more


def walk(tokens_per_action: int, episodes: int = 160, all_actions: bool = True):
    """
    Random walks in a random MDP with rewards of both signs, within actions, too, and endings of both kinds, as a list
    of `(tokens, rewards, contexts, truncated)`. A context is the last state and the tokens of the action so far. Every
    state is an ordinary one, so that a bootstrap where there should be none is seen.
    """
    rng = np.random.default_rng(SEED)
    shape = (STATES,) + (ACTIONS,) * tokens_per_action
    successors, reward = rng.integers(STATES, size=(*shape, 2)), rng.uniform(-1, 1, size=shape).round(1)
    ends, known = rng.random(shape) < 0.4, rng.integers(ACTIONS, size=STATES)
    rows = []
    for episode in range(episodes):
        state, done = episode % STATES, False
        tokens, rewards, contexts = [ACTIONS + state], [], [(state,)]
        for _ in range(4):
            # A skewed behaviour, which leaves one first token out in each state where that is asked for.
            action = tuple(rng.choice(ACTIONS, p=[0.5, 0.3, 0.2]) for _ in range(tokens_per_action))
            if not all_actions and action[0] == known[state]:
                action = ((action[0] + 1) % ACTIONS, *action[1:])
            done = bool(ends[(state, *action)] and rng.random() < 0.5)
            rewards += [0.2 * a for a in action[:-1]] + [reward[(state, *action)]]
            contexts += [(state, *action[: i + 1]) for i in range(tokens_per_action)]
            state = int(successors[(state, *action, rng.integers(2))])
            tokens, contexts = [*tokens, *action, ACTIONS + state], [*contexts, (state,)]
            if done:
                break
        rows.append((tokens, rewards, contexts, not done))
    return rows


def value_iteration(rows, tokens_per_action: int) -> dict:
    """`{context: {token: Q}}` on the data: within an action no discount, at its end gamma, the maximum everywhere."""
    outcomes = defaultdict(list)
    for tokens, rewards, contexts, truncated in rows:
        steps = [p for p in range(len(tokens) - 1) if tokens[p + 1] < ACTIONS]
        for j, (p, reward) in enumerate(zip(steps, rewards, strict=True)):
            at_end = j % tokens_per_action == tokens_per_action - 1
            following = contexts[p + 2] if at_end else contexts[p + 1]
            discount = 0.0 if j == len(steps) - 1 and not truncated else GAMMA if at_end else 1.0
            outcomes[contexts[p], tokens[p + 1]].append((reward, discount, following))
    q = defaultdict(dict)
    for _ in range(200):
        for (context, token), found in outcomes.items():
            q[context][token] = np.mean([r + (d and d * max(q[s].values(), default=0.0)) for r, d, s in found])
    return dict(q)


def train_table(rows, tokens_per_action: int, steps: int, start: float = 0.0, **options):
    """Trains a linear head, at first `start` everywhere, on a free vector per context; Q of every token by context."""
    contexts = sorted({context for row in rows for context in row[2]})
    length, width = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    index = torch.zeros(len(rows), length, dtype=torch.long)
    fields = {name: torch.zeros_like(index) for name in ("input_ids", "attention_mask")}
    fields |= {name: torch.zeros(len(rows), width + 1, dtype=torch.long) for name in ("states_ixs", "dones")}
    fields["rewards"] = torch.zeros(len(rows), width)
    for i, (tokens, rewards, visited, _) in enumerate(rows):
        n, t = len(tokens), len(rewards)
        fields["input_ids"][i, :n], fields["attention_mask"][i, :n] = torch.tensor(tokens), 1
        index[i, :n] = torch.tensor([contexts.index(context) for context in visited])
        states = [p for p in range(n - 1) if tokens[p + 1] < ACTIONS] + [n - 1]
        fields["states_ixs"][i, : t + 1], fields["dones"][i, :t] = torch.tensor(states), 1
        fields["rewards"][i, :t] = torch.tensor(rewards)
    turns = torch.arange(width).expand(len(rows), -1) // tokens_per_action
    truncated = torch.tensor([row[3] for row in rows])
    batch = ILQLBatch(actions_ixs=fields["states_ixs"][:, :-1], turn_ixs=turns, truncated=truncated, **fields)

    torch.manual_seed(0)
    heads = ILQLHeads(len(contexts), ACTIONS + STATES, "linear", "identity", 1, 1, "min")
    heads.reset("zero")
    heads.q[0].weight.data.fill_(start)
    heads.update_targets(1.0)
    # Unit vectors, disturbed: the problem is as well conditioned as it gets. They are trained with the head.
    table = torch.nn.Parameter(torch.eye(len(contexts)) + 0.1 * torch.randn(len(contexts), len(contexts)))
    optimizer = torch.optim.Adam([table, *heads.q.parameters()], lr=0.03, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 - step / steps) ** 2)
    for _ in range(steps):
        optimizer.zero_grad()
        q_learning_loss_from_states(table[index], heads, None, batch, gamma=GAMMA, cloning_scale=0.0, **options)[
            0
        ].backward()
        optimizer.step()
        schedule.step()
        heads.update_targets(0.5)
    return dict(zip(contexts, heads.q[0](table).detach().numpy(), strict=True))


@pytest.mark.parametrize(("tokens_per_action", "steps"), [(1, 300), (2, 1000)])
def test_table_equals_value_iteration_where_the_data_hold_every_action(tokens_per_action, steps):
    rows = walk(tokens_per_action)
    expected = value_iteration(rows, tokens_per_action)
    assert len(expected) == STATES * sum(ACTIONS**i for i in range(tokens_per_action))
    assert all(len(values) == ACTIONS for values in expected.values())
    learned = train_table(rows, tokens_per_action, steps, q_min=None, conservative_scale=0.0, vocab_size=ACTIONS)
    errors = [abs(learned[context][a] - q) for context, values in expected.items() for a, q in values.items()]
    assert max(errors) < 1e-2


@pytest.mark.parametrize(("tokens_per_action", "steps"), [(1, 300), (2, 400)])
def test_regularised_greedy_actions_are_best_where_the_data_miss_some(tokens_per_action, steps):
    """Over the whole vocabulary, most of which was never taken and is thought too much of at first."""
    rows = walk(tokens_per_action, all_actions=False)
    expected = value_iteration(rows, tokens_per_action)
    assert all(len(expected[state,]) == ACTIONS - 1 for state in range(STATES))
    assert min(x for values in expected.values() for x in values.values()) > -2.0

    def wrong(scale: float) -> list:
        learned = train_table(rows, tokens_per_action, steps, start=1.0, q_min=-2.0, conservative_scale=scale)
        best = {context: max(values, key=values.get) for context, values in expected.items()}
        return [context for context, token in best.items() if learned[context].argmax() != token]

    assert wrong(0.02) == []
    assert wrong(0.0) != []
