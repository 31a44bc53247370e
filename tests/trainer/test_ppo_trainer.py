# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""PPO as a trainer: what it learns, whether its gradients are right, and that a run goes on as it would have."""

import copy
import math
import random
from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from transformers.utils import logging as transformers_logging

from hf_qrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, TextEnv
from hf_qrl.data import collate_ppo
from hf_qrl.environments import EpisodeSource
from hf_qrl.losses import ppo_loss
from hf_qrl.losses.advantages import adapted_kl_coef
from hf_qrl.trainer.ppo_rows import model_inputs
from tests.environments.nemo_style import Maths


SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *"ablrx:pu0123456789+="])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


@pytest.fixture
def make_base(tokenizer):
    def make(seed=0, **changes):
        torch.manual_seed(seed)
        config = LlamaConfig(
            **{
                "vocab_size": len(tokenizer),
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "max_position_embeddings": 128,
                "initializer_range": 0.1,
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
                **changes,
            }
        )
        return LlamaForCausalLM(config)

    return make


class Bandit(TextEnv):
    """Two arms that pay 1 with probability .2 and .8; anything else is no arm."""

    stop_strings = ["a", "b"]

    def reset(self, *, seed, options=None):
        self.generator = random.Random(seed)
        return "pull:", {}

    def step(self, action):
        chance = {"a": 0.2, "b": 0.8}.get(action, 0.0)
        return [], float(self.generator.random() < chance), True, False, {"success": chance == 0.8}

    def legal_actions(self):
        return ["a", "b"]


class Corridor(TextEnv):
    """
    A small decision process: "l" and "r" move between the states 0 to 3, the last of which pays 1 for "r" and ends it.
    "l" in state 0 pays a little, and ends it too: what is near is not what is best.
    """

    stop_strings = ["l", "r"]

    def reset(self, *, seed, options=None):
        self.state, self.moves = seed % 4, 0
        return f"{self.state}", {}

    def step(self, action):
        self.moves += 1
        if action == "l" and self.state == 0:
            return [], 0.1, True, False, {}
        if action == "r" and self.state == 3:
            return [], 1.0, True, False, {}
        self.state += {"l": -1, "r": 1}.get(action, 0)
        return f"{self.state}", -0.02, False, self.moves >= 12, {}


class Noted(TrainerCallback):
    """Gradients and weights as each optimizer step finds them, and the rollout it learns from."""

    def __init__(self):
        self.gradients, self.weights, self.stores = [], [], []
        self.trainer = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = dict(model.named_parameters())
        self.gradients.append({name: None if x.grad is None else x.grad.clone() for name, x in named.items()})
        self.weights.append({name: x.detach().clone() for name, x in named.items()})
        self.stores.append(copy.deepcopy(self.trainer.batches.store))


@pytest.fixture
def make_trainer(make_base, tokenizer, tmp_path):
    def make(model=None, folder="out", trainer_class=PPOTrainer, noted=None, **arguments):
        own = {
            name: arguments.pop(name)
            for name in list(arguments)
            if name not in PPOConfig.__dataclass_fields__ or name in ("reward_weights",)
        }
        defaults = {
            "max_steps": 4,
            "per_device_train_batch_size": 16,
            "episodes_per_rollout": 16,
            "max_completion_length": 1,
            "max_grad_norm": 0.0,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_steps": 1,
            "seed": 3,
        }
        args = PPOConfig(str(tmp_path / folder), **{**defaults, **arguments})
        if not {"environment", "reward_funcs", "reward_model"} & set(own):
            own["environment"] = Bandit
        trainer = trainer_class(
            make_base() if model is None else model, args, **{"processing_class": tokenizer, **own}
        )
        if noted is not None:
            noted.trainer = trainer
            trainer.add_callback(noted)
        return trainer

    return make


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# ---------------------------------------------------------------------------------- what it learns


FAST = {"learning_rate": 1e-2, "per_device_train_batch_size": 64, "episodes_per_rollout": 64, "kl_coef": 0.0}


def probabilities(model, tokenizer, prompt, actions):
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        probs = model(input_ids=ids).logits[0, -1].softmax(-1)
    return {action: probs[tokenizer.convert_tokens_to_ids(action)].item() for action in actions}


@pytest.mark.parametrize("seed", range(3))
def test_bandit(make_trainer, make_base, tokenizer, seed):
    trainer = make_trainer(make_base(seed), seed=seed, max_steps=60, logging_steps=20, **FAST)
    trainer.train()
    assert probabilities(trainer.model.eval(), tokenizer, "pull:", "ab")["b"] > 0.9
    assert logged(trainer, "env/success_rate")[-1] > 0.8
    assert logged(trainer, "env/episodes")[-1] == trainer.batches.progress.episodes == 15 * 64


@pytest.mark.parametrize("seed", range(3))
def test_decision_process(make_trainer, make_base, tokenizer, seed):
    trainer = make_trainer(
        make_base(seed),
        seed=seed,
        environment=Corridor,
        max_steps=80,
        logging_steps=20,
        gamma=0.95,
        discount_on="utterance",
        history_window=1,
        vf_coef=0.5,
        entropy_coef=0.03,
        **{**FAST, "per_device_train_batch_size": 256, "learning_rate": 5e-3},
    )
    trainer.train()
    # Value iteration: "r" is best everywhere, from state 0 too (.95^3 - .02 (1 + .95 + .95^2) = .8 > .1).
    model = trainer.model.eval()
    for state in range(4):
        chances = probabilities(model, tokenizer, str(state), "lr")
        assert chances["r"] > 0.9, (state, chances)
    assert max(logged(trainer, "values/explained_variance")) > 0.3


# ---------------------------------------------------------------------------------- whether it is right


def dense_gradients(trainer, store, weights):
    """Gradients of the loss over all turns of a rollout, from the logits of the model, row by row."""
    args = trainer.args
    model = copy.deepcopy(trainer.bare_model).double()
    model.load_state_dict({name: x.double() for name, x in weights.items()})
    model.zero_grad()
    total, rows = sum(len(element.response_tensor) for element in store.elements), []
    for element in store.elements:
        q, r = len(element.query_tensor), len(element.response_tensor)
        ids = torch.cat([element.query_tensor, element.response_tensor]).unsqueeze(0)
        output = model(input_ids=ids, output_values=True)
        logprobs = (output.logits[0, q - 1 : q + r - 1] / args.temperature).log_softmax(-1)
        taken = logprobs.gather(1, element.response_tensor.unsqueeze(1)).T
        loss, _ = ppo_loss(
            taken, output.value[:, q - 1 : q + r - 1], element.logprobs.double()[None],
            element.values.double()[None], element.advantages.double()[None], element.returns.double()[None],
            torch.ones(1, r), cliprange=args.cliprange, cliprange_value=args.cliprange_value, vf_coef=args.vf_coef,
        )  # fmt: skip
        entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
        rows.append((loss - args.entropy_coef * entropy) * r / total)
    sum(rows).backward()
    return {name: x.grad for name, x in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
        # Steps of 16 turns in micro-batches of 5 and 6, of which a rollout of 16 fills not all.
        {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 20},
        {"temperature": 0.7, "entropy_coef": 0.1, "cliprange": 0.05, "cliprange_value": None},
        {"environment": Corridor, "max_turns": 3, "per_device_train_batch_size": 64, "max_completion_length": 2},
    ],
)
def test_gradients_are_those_of_autograd(make_trainer, options):
    noted = Noted()
    trainer = make_trainer(noted=noted, optim="sgd", learning_rate=1.0, max_steps=3, ppo_epochs=3, **options)
    trainer.train()
    assert len(noted.gradients) == 3
    for gradients, weights, store in zip(noted.gradients, noted.weights, noted.stores, strict=True):
        expected = dense_gradients(trainer, store, weights)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-3, atol=1e-6, msg=name)


def test_the_first_step_starts_from_what_was_sampled(make_trainer):
    trainer = make_trainer(max_steps=1, ppo_epochs=1)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "policy/kl" in entry]
    assert entry["policy/kl"] == pytest.approx(0, abs=1e-6)
    assert entry["policy/ratio"] == pytest.approx(1, abs=1e-5)
    assert entry["policy/clipfrac"] == 0
    assert entry["policy/sampling_difference"] < 1e-5
    assert entry["policy/kl_ref"] == pytest.approx(0, abs=1e-5)


def test_rewards_of_an_untrained_policy_are_those_of_the_environment(make_trainer):
    trainer = make_trainer(environment=Corridor, max_turns=4, reward_scale=2.0, kl_coef=0.5)
    store = trainer.rollout(trainer.batches.progress)
    for row in trainer.latest_episodes:
        own = [i for i, name in enumerate(store.episode_ids) if name == row["episode_id"]]
        found = [store.elements[i].rewards.sum().item() for i in own]
        assert found == pytest.approx([2 * reward for reward in row["turn_rewards"]], abs=1e-4)
        assert (row["episode_id"] in store.bootstrap_values) == row["truncated"]


def test_truncated_episodes_go_on_in_their_last_observation(make_trainer, tokenizer):
    trainer = make_trainer(environment=Corridor, max_turns=2)
    store = trainer.rollout(trainer.batches.progress)
    checked = 0
    for row in trainer.latest_episodes:
        if row["truncated"]:
            text = "".join(message["content"] for message in row["messages"])
            output = trainer.model(
                **tokenizer(text, return_tensors="pt", add_special_tokens=False), output_values=True
            )
            assert store.bootstrap_values[row["episode_id"]] == pytest.approx(output.value[0, -1].item(), abs=1e-5)
            checked += 1
    assert checked > 0


class Silent(TextEnv):
    """Says nothing after its first question, and stops after two replies."""

    def reset(self, *, seed, options=None):
        self.turn = 0
        return "a:", {}

    def step(self, action):
        self.turn += 1
        return [], 0.5, False, True, {}


class Talkative(Silent):
    """Its last words do not fit the model."""

    def step(self, action):
        return "b" * 200, 0.5, False, True, {}


@pytest.mark.parametrize("environment", [Silent, Talkative])
def test_truncated_episodes_without_an_observation_to_act_on(make_trainer, environment):
    trainer = make_trainer(environment=environment, max_completion_length=3)
    store = trainer.rollout(trainer.batches.progress)
    for row in trainer.latest_episodes:
        ids = torch.tensor([row["turn_prompt_ids"][-1] + row["turn_token_ids"][-1]])
        expected = trainer.model(input_ids=ids, output_values=True).value[0, -1].item()
        assert store.bootstrap_values[row["episode_id"]] == pytest.approx(expected, abs=1e-5)


def test_a_model_that_samples_by_other_logits(make_trainer, make_base):
    base = make_base()
    forward = base.forward

    def hotter(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = 3 * output.logits
        return output

    base.forward = hotter
    with pytest.raises(ValueError, match="it is not supported"):
        make_trainer(base).train()


def test_rows_of_uneven_turns(tokenizer, make_base):
    """What the model reads of a batch is each row as it would be alone."""
    trainer_elements = []
    generator = torch.Generator().manual_seed(0)
    from hf_qrl.data import PPORLElement

    for _ in range(6):
        q, r = torch.randint(1, 6, (2,), generator=generator).tolist()
        tokens = [torch.randint(3, 50, (n,), generator=generator) for n in (q, r)]
        trainer_elements.append(PPORLElement(*tokens, *torch.zeros(3, r)))
    batch = collate_ppo(trainer_elements, tokenizer.pad_token_id)
    inputs, positions = model_inputs(batch, tokenizer.pad_token_id)
    for i, element in enumerate(trainer_elements):
        q, r = len(element.query_tensor), len(element.response_tensor)
        whole = torch.cat([element.query_tensor, element.response_tensor])[:-1]
        assert inputs["input_ids"][i, : q + r - 1].tolist() == whole.tolist()
        assert inputs["attention_mask"][i].sum() == q + r - 1
        assert positions[i, :r].tolist() == list(range(q - 1, q + r - 1))


# ---------------------------------------------------------------------------------- the reference policy


@pytest.mark.parametrize("kind", ["copy", "lower layers", "adapter", "ref_model"])
def test_reference_policy_is_the_start(make_trainer, make_base, kind):
    base = make_base(tie_word_embeddings=kind == "lower layers")
    start = copy.deepcopy(base)
    arguments = {
        "copy": {},
        "lower layers": {"num_layers_unfrozen": 1},
        "adapter": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
        "ref_model": {"ref_model": copy.deepcopy(base)},
    }[kind]
    trainer = make_trainer(base, learning_rate=0.05, max_steps=4, kl_coef=0.1, **arguments)
    trainer.train()
    trainer.batches.store = None
    store = trainer.rollout(trainer.batches.progress)
    assert logged(trainer, "policy/kl_ref")[0] == pytest.approx(0, abs=1e-5)
    moved = 0.0
    for element, reference in zip(store.elements, store.ref_logprobs, strict=True):
        q = len(element.query_tensor)
        with torch.no_grad():
            ids = torch.cat([element.query_tensor, element.response_tensor]).unsqueeze(0)
            logprobs = start(input_ids=ids).logits[0, q - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, element.response_tensor.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(reference, expected, rtol=0, atol=1e-4)
        moved = max(moved, (element.logprobs - reference).abs().max().item())
    assert moved > 0.1, "the policy is another one by now"
    if kind == "lower layers":
        names = list(trainer.reference.copy.weights)
        assert names and all("layers.1." in name or name.endswith("model.norm.weight") for name in names)


@pytest.mark.parametrize("changes", [{"bias": "all"}, {"init_lora_weights": False}, {"init_lora_weights": "pissa"}])
def test_reference_policy_of_adapters_that_change_the_model(make_trainer, make_base, changes):
    """What is penalised is the distance from the policy that training begins with, whatever PEFT did to get there."""
    peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **changes)
    trainer = make_trainer(make_base(), peft_config=peft_config, learning_rate=0.05, max_steps=8)
    before = trainer.rollout(trainer.batches.progress)
    for element, reference in zip(before.elements, before.ref_logprobs, strict=True):
        torch.testing.assert_close(reference, element.logprobs, rtol=0, atol=1e-4)
    trainer.train()
    again = trainer.experience.scorer.scores(before.elements)
    for score, reference in zip(again, before.ref_logprobs, strict=True):
        torch.testing.assert_close(score.ref_logprobs, reference, rtol=0, atol=1e-4)
    assert max((score.logprobs - score.ref_logprobs).abs().max() for score in again) > 0.01


def test_a_reference_that_is_the_model_itself(make_trainer, make_base):
    base = make_base()
    with pytest.raises(ValueError, match="shares weights with the model in training"):
        make_trainer(base, ref_model=base)


def test_no_reference_without_a_penalty(make_trainer):
    trainer = make_trainer(kl_coef=0.0)
    assert trainer.reference is None
    trainer.train()
    assert set(logged(trainer, "policy/kl_ref")) == {0.0}


def test_penalty_is_adapted(make_trainer):
    options = {"target": 0.01, "horizon": 100}
    trainer = make_trainer(kl_coef=0.1, kl_target=0.01, kl_horizon=100, learning_rate=0.05, max_steps=12)
    trainer.train()
    expected, coefficients = 0.1, []
    for kl in logged(trainer, "policy/kl_ref"):
        coefficients.append(expected)
        expected = adapted_kl_coef(expected, kl, **options, num_items=16)
    assert logged(trainer, "kl_coef") == pytest.approx(coefficients)
    assert trainer.batches.progress.kl_coef == pytest.approx(expected)
    assert len(set(coefficients)) == 3


# ---------------------------------------------------------------------------------- prompts and rewards


PROMPTS = Dataset.from_list([{"prompt": f"{i}:", "answer": "ab"[i % 2]} for i in range(8)])


def right(prompts, completions, answer, **kwargs):
    return [float(completion == x) for completion, x in zip(completions, answer, strict=True)]


def test_reward_functions(make_trainer):
    calls = []

    def length(prompts, completions, completion_ids, **kwargs):
        calls.append((prompts, completions, completion_ids, kwargs))
        return [
            None if completion == "x" else len(ids)
            for completion, ids in zip(completions, completion_ids, strict=True)
        ]

    trainer = make_trainer(
        reward_funcs=[right, length], reward_weights=[1.0, 0.5], train_dataset=PROMPTS, max_completion_length=3,
        max_steps=-1, num_train_epochs=4, ppo_epochs=2,
    )  # fmt: skip
    # 32 prompts are two rollouts of 16, each one step to a pass.
    assert trainer.args.max_steps == 4
    trainer.train()
    assert len(calls) == 2
    for prompts, completions, completion_ids, kwargs in calls:
        assert sorted(prompts) == sorted(list(PROMPTS["prompt"]) * 2), "every prompt twice"
        assert kwargs.keys() == {"answer"}
        assert len(completions) == len(completion_ids) == 16
    by_hand = [
        (0.5 * len(row["turn_token_ids"][0]))
        + right(None, [row["messages"][-1]["content"]], [PROMPTS[row["seed"] % 8]["answer"]])[0]
        for row in trainer.latest_episodes
    ]
    assert [row["return"] for row in trainer.latest_episodes] == pytest.approx(by_hand)
    for name in ("right", "length"):
        scores = [row["turn_reward_components"][0].get(name) for row in trainer.latest_episodes]
        scores = [score for score in scores if score is not None]
        assert logged(trainer, f"rewards/{name}/mean")[-1] == pytest.approx(sum(scores) / len(scores))


def test_a_training_that_ends_before_its_first_rollout_does_is_told(make_trainer, caplog):
    transformers_logging.enable_propagation()
    try:
        make_trainer(max_steps=3, per_device_train_batch_size=8).train()
    finally:
        transformers_logging.disable_propagation()
    assert "which are 8 optimizer steps in 4 passes, and `max_steps` is 3" in caplog.text


def test_learns_from_reward_functions(make_trainer, make_base, tokenizer):
    trainer = make_trainer(
        make_base(), reward_funcs=right, train_dataset=PROMPTS.select(range(2)), max_steps=100, **FAST
    )
    trainer.train()
    assert logged(trainer, "env/return")[-1] > 0.9


def test_reward_functions_of_one_name(make_trainer):
    functions = [lambda prompts, value=value, **kwargs: [value] * len(prompts) for value in (1.0, 2.0, 4.0)]
    trainer = make_trainer(reward_funcs=functions, reward_weights=[1.0, 10.0, 100.0], train_dataset=PROMPTS)
    trainer.rollout(trainer.batches.progress)
    assert {row["return"] for row in trainer.latest_episodes} == {421.0}


def test_a_reward_model_without_a_head(make_trainer, make_base, tokenizer, tmp_path):
    make_base().save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="lacks weights of a reward model"):
        make_trainer(reward_model=str(tmp_path / "plain"), train_dataset=PROMPTS)


def test_evaluation_hands_out_token_ids_and_fails_aloud(make_trainer):
    def needs_ids(prompts, completions, completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    options = {"train_dataset": PROMPTS, "eval_dataset": PROMPTS, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(reward_funcs=needs_ids, max_steps=1, max_completion_length=2, **options)
    trainer.train()
    assert 0 < logged(trainer, "eval_env/return")[-1] <= 2
    with pytest.raises(ValueError, match="`evaluate` plays what the trainer was made"):
        trainer.evaluate(PROMPTS)

    def fails_later(prompts, completions, **kwargs):
        if len(prompts) == 1:  # as in evaluation
            raise RuntimeError("the judge is gone")
        return [0.0] * len(prompts)

    with pytest.raises(RuntimeError, match="the judge is gone"):
        make_trainer(reward_funcs=fails_later, max_steps=1, **options).train()


def test_reward_model(make_trainer, make_base, tokenizer, tmp_path):
    config = make_base().config
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**{**config.to_dict(), "num_labels": 1}))
    model.save_pretrained(tmp_path / "reward")
    tokenizer.save_pretrained(tmp_path / "reward")
    trainer = make_trainer(reward_model=str(tmp_path / "reward"), train_dataset=PROMPTS, max_completion_length=3)
    trainer.rollout(trainer.batches.progress)
    for row in trainer.latest_episodes:
        text = row["messages"][0]["content"] + row["messages"][1]["content"]
        with torch.no_grad():
            expected = model.eval()(**tokenizer(text, return_tensors="pt")).logits[0, 0].item()
        assert row["return"] == pytest.approx(expected, abs=1e-4)
    assert not any(x.requires_grad for x in trainer.prompts.reward_funcs[0].model.parameters())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompts, completions, **kwargs: [1.0], "one number per completion, 16"),
        (lambda prompts, completions, **kwargs: 1.0, "one number per completion"),
        (lambda prompts, completions, **kwargs: [float("nan")] * len(prompts), "returned nan"),
        (lambda prompts, completions, **kwargs: [None] * len(prompts), "No reward function has a score"),
    ],
)
def test_reward_functions_that_make_no_sense(make_trainer, function, message):
    trainer = make_trainer(reward_funcs=function, train_dataset=PROMPTS)
    with pytest.raises(ValueError, match=message):
        trainer.train()


# ---------------------------------------------------------------------------------- other models


def test_encoder_decoder(make_trainer, tokenizer):
    torch.manual_seed(0)
    base = BartForConditionalGeneration(
        BartConfig(
            vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
            init_std=0.1, pad_token_id=0, bos_token_id=None, eos_token_id=2, decoder_start_token_id=2,
            forced_eos_token_id=None,
        )
    )  # fmt: skip
    trainer = make_trainer(base, max_steps=100, logging_steps=20, **FAST)
    trainer.train()
    assert logged(trainer, "policy/sampling_difference")[0] < 1e-5
    assert logged(trainer, "env/success_rate")[-1] > 0.7


def test_adapter_is_saved_and_loaded(make_trainer, make_base, tmp_path):
    make_base().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trainer = make_trainer(base, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), learning_rate=0.05)
    before = {name: x.detach().clone() for name, x in trainer.bare_model.base.named_parameters() if "lora" not in name}
    trainer.train()
    for name, x in trainer.bare_model.base.named_parameters():
        if "lora" not in name:
            assert torch.equal(x, before[name]), name
    trainer.save_model(str(tmp_path / "adapter"))
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7]])
    for ours, theirs in zip(
        *(
            (output.logits, output.value)
            for output in (m.eval()(input_ids=ids, output_values=True) for m in (again, trainer.model))
        ),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_environments_of_nemo(make_trainer):
    rows = [
        {"messages": [{"role": "user", "content": f"{i}+1="}], "metadata": {"ground_truth": str(i + 1)}}
        for i in range(5)
    ]
    trainer = make_trainer(environment=Maths, source=EpisodeSource(rows), max_turns=1, episodes_per_rollout=3)
    asked = []
    for _ in range(3):
        trainer.rollout(trainer.batches.progress)
        trainer.batches.progress.rollouts += 1
        asked += [row["messages"][0]["content"] for row in trainer.latest_episodes]
    assert asked == [f"{i % 5}+1=" for i in range(9)], "each rollout goes on where the last one ended"


# ---------------------------------------------------------------------------------- logs, evaluation, checkpoints


def test_logs(make_trainer):
    trainer = make_trainer(environment=Corridor, max_turns=3, max_steps=6, ppo_epochs=2, log_completions=True)
    trainer.train()
    names = {
        "loss", "loss/policy", "loss/value", "policy/kl", "policy/clipfrac", "policy/ratio", "policy/entropy",
        "policy/kl_ref", "values/mean", "values/explained_variance", "env/return", "env/turns", "env/truncated",
        "env/episodes", "env/steps", "completions/mean_length", "completions/clipped_ratio", "kl_coef",
    }  # fmt: skip
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert names <= set(first)
    assert logged(trainer, "env/episodes")[-1] == trainer.batches.progress.episodes
    assert logged(trainer, "env/steps")[-1] == trainer.batches.progress.steps
    # Steps between two rollouts say nothing of the environment.
    assert any("env/return" not in entry for entry in trainer.state.log_history if "loss" in entry)


def test_table_of_episodes(make_trainer, capsys):
    trainer = make_trainer(log_completions=True, max_steps=2, num_completions_to_print=2)
    trainer.train()
    text = capsys.readouterr().out
    assert text.count("Episodes at step") == 2 and text.count("pull:") == 4


@pytest.mark.parametrize("kind", ["environment", "prompts"])
def test_evaluation_and_the_best_model(make_trainer, kind):
    arguments = {
        "environment": {"environment": Bandit, "eval_episodes": 12},
        "prompts": {"reward_funcs": right, "train_dataset": PROMPTS, "eval_dataset": PROMPTS.select(range(4))},
    }[kind]
    trainer = make_trainer(
        max_steps=4, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        metric_for_best_model="eval_env/return", greater_is_better=True, load_best_model_at_end=True,
        learning_rate=0.02, **arguments,
    )  # fmt: skip
    trainer.train()
    returns = logged(trainer, "eval_env/return")
    assert len(returns) == 2
    assert trainer.state.best_metric == max(returns)
    assert trainer.evaluate()["eval_env/return"] == max(returns)


@pytest.mark.parametrize(
    "changes",
    [{"episodes_per_rollout": 8}, {"per_device_train_batch_size": 4}, {"kl_coef": 0.5}, {"ppo_epochs": 2}],
)
def test_a_run_that_would_go_on_elsewhere_is_refused(make_trainer, changes):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_trainer(**options).train()
    with pytest.raises(ValueError, match="of a run with other settings"):
        make_trainer(**{**options, **changes}).train(resume_from_checkpoint=True)


def test_training_again_begins_anew(make_trainer):
    trainer = make_trainer(max_steps=2, learning_rate=0.05)
    trainer.train()
    trainer.train()
    ratios = logged(trainer, "policy/ratio")
    assert ratios[0] == pytest.approx(1, abs=1e-5), "from what the policy of now has played"


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step
        return control


@pytest.mark.parametrize("stop", [2, 3, 4, 5])
def test_a_run_that_goes_on(make_trainer, make_base, stop):
    """Stopped in the middle of a rollout, at its end, and in between: it ends with the weights it would have had."""
    options = {
        "environment": Corridor, "max_turns": 3, "per_device_train_batch_size": 24, "max_steps": 7, "ppo_epochs": 2,
        "episodes_per_rollout": 12, "learning_rate": 0.01, "save_strategy": "steps", "save_steps": 1,
        "kl_target": 0.01, "kl_horizon": 50,
    }  # fmt: skip
    whole = make_trainer(folder="whole", **options)
    whole.train()
    broken = make_trainer(folder="broken", **options)
    broken.add_callback(Stop(stop))
    broken.train()
    assert broken.state.global_step == stop
    resumed = make_trainer(folder="broken", **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 7
    for (name, x), y in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-7, msg=name)
    assert resumed.batches.progress == whole.batches.progress


def test_checkpoints_of_other_trainers_are_refused(make_trainer, tmp_path):
    trainer = make_trainer(save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    (tmp_path / "out" / "checkpoint-2" / "ppo_progress.json").unlink()
    with pytest.raises(ValueError, match="of no `PPOTrainer`"):
        make_trainer(max_steps=4).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_checkpoints_of_q_learning_are_refused(make_trainer, make_base, tmp_path):
    from hf_qrl import AutoModelForCausalLMWithILQLHeads

    trainer = make_trainer(save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    AutoModelForCausalLMWithILQLHeads.from_pretrained(make_base()).save_pretrained(checkpoint)
    with pytest.raises(ValueError, match="is of a model with other heads"):
        make_trainer(max_steps=4).train(resume_from_checkpoint=str(checkpoint))


def test_model_card(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=2)
    trainer.train()
    trainer.save_model()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "PPO" in card and "AutoModelForCausalLMWithValueHead" in card and "cliprange" in card
    assert "beta" not in card.split("## Versions")[0].split("## Training")[0]
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "out")
    for (name, x), y in zip(trainer.model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(x, y), name


# ---------------------------------------------------------------------------------- refusals


class Broken(Bandit):
    def step(self, action):
        raise RuntimeError("broken arm")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"environment": None}, ValueError, "either an `environment`, or `reward_funcs`"),
        ({"environment": Bandit, "reward_funcs": right}, ValueError, "Got both"),
        ({"reward_funcs": right}, ValueError, "`train_dataset` of prompts"),
        ({"environment": Bandit, "train_dataset": PROMPTS}, ValueError, "starts its episodes itself"),
        (
            {"reward_funcs": right, "train_dataset": PROMPTS.rename_column("prompt", "text")},
            ValueError,
            "column `prompt`",
        ),
        (
            {"reward_funcs": [right], "reward_weights": [1.0, 2.0], "train_dataset": PROMPTS},
            ValueError,
            "2 `reward_weights`",
        ),
        ({"environment": Bandit, "max_steps": -1}, ValueError, "set `max_steps`"),
        ({"ref_model": "somewhere", "kl_coef": 0.0}, ValueError, "leave out `ref_model`"),
        (
            {"num_layers_unfrozen": 1, "peft_config": LoraConfig(target_modules=["q_proj"])},
            ValueError,
            "Leave out one",
        ),
        ({"reward_funcs": right, "train_dataset": PROMPTS, "eval_strategy": "steps"}, ValueError, "`eval_dataset`"),
        ({"environment": Bandit, "reward_weights": [1.0]}, ValueError, "belong to reward functions"),
        ({"environment": Bandit, "eval_dataset": PROMPTS}, ValueError, "belong to reward functions"),
        (
            {"reward_funcs": right, "reward_weights": [math.nan], "train_dataset": PROMPTS},
            ValueError,
            "finite numbers",
        ),
        ({"kl_target": 1.0, "kl_coef": 0.0}, ValueError, "Leave out one"),
        ({"collect_kwargs": {"max_turns": 3, "seeds": [1]}}, ValueError, "which other arguments of PPO decide"),
        ({"cliprange": 0.0}, ValueError, "`cliprange` must be finite and above 0"),
        ({"gamma": 1.5}, ValueError, "`gamma` must lie between"),
        ({"kl_estimator": "k4"}, ValueError, "`kl_estimator` must be one of"),
        ({"ppo_epochs": 0}, ValueError, "`ppo_epochs` must be at least 1"),
        ({"reward_scale": 0.0}, ValueError, "`reward_scale` must be finite and not 0"),
    ],
)
def test_arguments_that_make_no_sense(make_trainer, arguments, error, message):
    with pytest.raises(error, match=message):
        make_trainer(**arguments)


def test_an_environment_that_fails_is_told(make_trainer):
    with pytest.raises(RuntimeError, match="broken arm"):
        make_trainer(environment=Broken).train()


def test_a_model_with_other_heads_is_refused(make_trainer, make_base):
    from hf_qrl import AutoModelForCausalLMWithILQLHeads

    with pytest.raises(ValueError, match=r"start from its language model \(`model.base`\)"):
        make_trainer(AutoModelForCausalLMWithILQLHeads.from_pretrained(make_base()))


def test_a_policy_that_could_not_change_is_refused(make_trainer, make_base):
    with pytest.raises(ValueError, match="the policy could not change"):
        make_trainer(make_base().requires_grad_(False))


def test_layers_are_thawed_for_the_next_trainer(make_trainer, make_base):
    base = make_base()
    make_trainer(base, num_layers_unfrozen=1)
    trainer = make_trainer(base, num_layers_unfrozen=2)
    trained = {name for name, x in trainer.bare_model.base.named_parameters() if x.requires_grad}
    assert any("layers.0." in name for name in trained)


def test_settings_that_change_the_probabilities_are_refused(make_trainer, make_base):
    base = make_base()
    base.generation_config.repetition_penalty = 1.02
    with pytest.raises(ValueError, match="by other probabilities than those"):
        make_trainer(base)


def test_a_pad_token_outside_the_vocabulary(make_trainer, tokenizer):
    larger = copy.deepcopy(tokenizer)
    larger.add_special_tokens({"pad_token": "<padding>"})
    with pytest.raises(ValueError, match="lies outside the model's vocabulary"):
        make_trainer(processing_class=larger)


class Careless(Bandit):
    """Draws from global random state, which it should not."""

    drawn = []

    def reset(self, *, seed, options=None):
        self.drawn.append(random.random())
        return super().reset(seed=seed)


def test_environments_with_global_random_state_are_not_repeated(make_trainer):
    trainer = make_trainer(environment=Careless, max_steps=12, episodes_per_rollout=4)
    Careless.drawn.clear()
    before = random.getstate()
    trainer.train()
    assert len(set(Careless.drawn)) == len(Careless.drawn) == 12
    assert random.getstate() == before


def test_factories_and_executors(make_trainer):
    from hf_qrl.distributed.executors import LocalExecutor

    trainer = make_trainer(environment=partial(Corridor), executor=LocalExecutor, max_turns=2, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
