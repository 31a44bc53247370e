# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Training by autoregressive Q-learning, against a loop over rows, actions and steps that is written out here."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModelForCausalLM
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

from hf_qrl import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForSeq2SeqLMWithILQLHeads,
    ILQLConfig,
    ILQLForCausalLM,
    ILQLForSeq2SeqLM,
    ILQLTrainer,
    LlamaDuelingQForCausalLM,
    QRLHFConfig,
    QRLHFTrainer,
)
from hf_qrl.losses import autoregressive_q_learn, conservative_regularization_loss
from hf_qrl.trainer.callbacks import SampleTableCallback
from hf_qrl.trainer.targets import ModelAverage


VOCAB_SIZE = 24
QUIET = {
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "per_device_train_batch_size": 4,
    "max_steps": 2,
}
SGD = {
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "train_sampling_strategy": "sequential",
}
# Options under which every term and every target matters.
BASIC = {"gamma": 0.9, "conservative_scale": 0.4, "cloning_scale": 0.7, "ema_beta": 0.6, "q_min": -12.0}
WIDE = {"value_min": -99.0, "value_max": 99.0}
TEXT = {
    "prompt": ["a b", "c", "d e f", "g"] * 2,
    "completion": [" c d", " h i j k", " l", " m n o"] * 2,
    "reward": [1.0, -0.5, 0.25, 2.0, 3.0, 0.0, 1.5, -1.0],
}
TALK = {
    "messages": [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "c d"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f g h"},
    ],
    "rewards": [1.0, -2.0],
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}b "
    "{% generation %}{{ message['content'] }} <eos>{% endgeneration %} "
    "{% else %}a {{ message['content'] }} {% endif %}{% endfor %}{% if add_generation_prompt %}b {% endif %}"
)
LOGGED = [
    "loss/td", "loss/conservative", "loss/cloning", "q/taken", "q/unseen", "q/max", "td_error/abs", "returns/mc",
    "overestimation", "truncated_fraction",
]  # fmt: skip
TARGET_NETWORKS = ["head", "model"]


@pytest.fixture(scope="module")
def make_dueling(make_base):
    """Returns a function to a tiny Llama with a dueling Q-head, the same at every call."""

    def make(seed: int = 0, config: dict | None = None, **fields) -> LlamaDuelingQForCausalLM:
        base = make_base(seed, initializer_range=0.3, **(config or {}))
        return LlamaDuelingQForCausalLM.from_base(base, **fields)

    return make


@pytest.fixture
def make_trainer(tmp_path, make_dueling, make_dataset):
    """Returns a function that makes a trainer; keyword arguments that `QRLHFTrainer` lacks go into its `args`."""

    def make(model=None, train_dataset=None, output_dir=None, trainer_kwargs=None, **args) -> QRLHFTrainer:
        return QRLHFTrainer(
            make_dueling() if model is None else model,
            args=QRLHFConfig(str(output_dir or tmp_path / "out"), **{**QUIET, **args}),
            train_dataset=make_dataset() if train_dataset is None else train_dataset,
            **(trainer_kwargs or {}),
        )

    return make


@pytest.fixture
def chat_tokenizer(tokenizer):
    made = copy.deepcopy(tokenizer)
    made.chat_template = CHAT_TEMPLATE
    return made


def make_seq2seq_base() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB_SIZE}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2))


def make_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": VOCAB_SIZE}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def changed(trainer, before: dict[str, torch.Tensor]) -> set[str]:
    return {k for k, x in trainer.model.state_dict().items() if not torch.equal(x, before[k])}


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


# -------------------------------------------------------------------------------------------------------- written out


def outputs(model, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the language model and Q-values of the online head `(n, V)`, with other weights in the model."""
    ask = {"return_q_values": True} if isinstance(model, LlamaDuelingQForCausalLM) else {"output_values": True}
    output = functional_call(model, weights, (ids,), ask)
    q = output.q_values if "return_q_values" in ask else output.qs[0]
    return output.logits[0], q[0]


def loss_of_rows(
    model, target_weights, rows, *, gamma, conservative_scale, cloning_scale, q_min, discount_on="utterance", n_step=1,
    mc_floor=False, double_q=False, value_min=-math.inf, value_max=math.inf,
):  # fmt: skip
    """The loss, action by action. `target_weights` are those of the target network, its online head for the target."""
    total = count = 0.0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        logits, q = outputs(model, {}, ids)
        with torch.no_grad():
            q_target = outputs(model, target_weights, ids)[1]
        states, actions, rewards = row["states_ixs"], row["actions_ixs"], row["rewards"]
        num = len(actions)
        best = [q_target[s, int((q if double_q else q_target)[s].argmax())].item() for s in states]
        best[num] = best[num] if row.get("truncated") else 0.0
        discounts = [
            gamma if discount_on == "token" or j == num - 1 or row["turn_ixs"][j] != row["turn_ixs"][j + 1] else 1.0
            for j in range(num)
        ]
        for j in range(num):
            y, d = 0.0, 1.0
            for k in range(j, min(j + n_step, num)):
                y, d = y + d * rewards[k], d * discounts[k]
            y += d * best[min(j + n_step, num)]
            if mc_floor and not row.get("truncated"):
                g = 0.0
                for k in reversed(range(j, num)):
                    g = rewards[k] + discounts[k] * g
                y = max(y, g)
            y = min(max(y, value_min), value_max)
            q_j, token = q[actions[j]], row["input_ids"][actions[j] + 1]
            others = torch.cat([q_j[:token], q_j[token + 1 :]])
            loss = (q_j[token] - y) ** 2 / 2 + conservative_scale / 2 * ((others - q_min) ** 2).mean()
            loss = loss - cloning_scale * logits[actions[j]].log_softmax(-1)[token]
            total, count = total + row.get("weight", 1.0) * loss, count + row.get("weight", 1.0)
    return total / count


class ByHand:
    """SGD on `loss_of_rows`, and the moving average of every weight, in float64."""

    def __init__(self, model, learning_rate, beta, every=1, warmup=0, target_network="head"):
        self.model = copy.deepcopy(model)
        self.learning_rate, self.beta, self.every, self.warmup = learning_rate, beta, every, warmup
        self.whole = target_network == "model"
        self.parameters = {name: x for name, x in self.model.named_parameters() if x.requires_grad}
        self.average = {name: x.detach().double() for name, x in self.parameters.items()}
        self.losses, self.steps = [], 0

    def target_weights(self):
        return {name: x.float() for name, x in self.average.items() if self.whole or name.startswith("heads.")}

    def step(self, rows, **options):
        loss = loss_of_rows(self.model, self.target_weights(), rows, **options)
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        self.steps += 1
        copies = self.steps <= self.warmup
        with torch.no_grad():
            for (name, x), gradient in zip(self.parameters.items(), gradients, strict=True):
                x.sub_(self.learning_rate * gradient)
                if copies:
                    self.average[name] = x.double()
                elif self.steps % self.every == 0:
                    self.average[name] = self.beta * self.average[name] + (1 - self.beta) * x.double()
        self.losses.append(loss.item())


def q_of_target_head(model, states: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.heads.target_q[0](states)


class TestStepsWrittenOut:
    STEPS = 5

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"target_network": "model"},
            {"target_network": "model", "ema_warmup_steps": 2, "ema_update_every": 2},
            {"ema_warmup_steps": 1, "ema_update_every": 3, "double_q": True},
            {"target_network": "model", "double_q": True, "mc_floor": True, "n_step": 3},
            {"discount_on": "token", "n_step": 2, "value_min": -0.5, "value_max": 0.25},
            {"mc_floor": True, "conservative_scale": 0.0},
            {"cloning_scale": 0.0, "target_network": "model", "q_min": -9.0},
        ],
        ids=str,
    )
    def test_weights_targets_and_losses(self, make_trainer, make_dueling, make_dataset, relative_error, options):
        data = make_dataset(16, weight=True, truncated=True)
        options = {**BASIC, **WIDE, **options}
        model = make_dueling()
        schedule = {name: options[name] for name in ("ema_warmup_steps", "ema_update_every") if name in options}
        reference = ByHand(
            model,
            SGD["learning_rate"],
            options["ema_beta"],
            schedule.get("ema_update_every", 1),
            schedule.get("ema_warmup_steps", 0),
            options.get("target_network", "head"),
        )
        if options["cloning_scale"] == 0:
            reference.parameters.pop("lm_head.weight")
        trainer = make_trainer(
            model, data, max_steps=self.STEPS, logging_strategy="steps", logging_steps=1, **SGD, **options
        )
        trainer.train()
        of_loss = {k: x for k, x in options.items() if k not in ("target_network", "ema_beta", *schedule)}
        rows = data.to_list()
        for i in range(self.STEPS):
            reference.step([rows[(4 * i + j) % 16] for j in range(4)], **of_loss)

        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses == pytest.approx(reference.losses, rel=1e-4)
        got = {name: x.detach() for name, x in trainer.model.named_parameters()}
        start = {name: x.detach() for name, x in make_dueling().named_parameters()}
        assert relative_error(got, start) > 1e-2
        assert relative_error(got, dict(reference.model.named_parameters())) <= 1e-5
        # The target head is the average of the online one, in another form.
        states = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
        averaged = {k.removeprefix("heads.q.0."): x.float() for k, x in reference.average.items() if "heads." in k}
        expected = functional_call(trainer.model.heads.q[0], averaged, (states,))
        torch.testing.assert_close(q_of_target_head(trainer.model, states), expected, rtol=1e-4, atol=1e-4)
        if options.get("target_network") == "model":
            average = {k: x for k, x in reference.average.items() if not k.startswith("heads.")}
            assert relative_error(trainer.average.weights, average) <= 1e-5
            assert {x.dtype for x in trainer.average.weights.values()} == {torch.float32}

    @pytest.mark.parametrize("head_type", ["mlp", "linear", "tied", "dueling"])
    def test_heads_of_ilql(self, make_trainer, make_base, make_dataset, relative_error, head_type):
        base = make_base(initializer_range=0.3)
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(base, head_type=head_type, num_q_heads=1)
        network = "head" if head_type == "tied" else "model"
        trainer = make_trainer(
            model, make_dataset(8), target_network=network, max_steps=2, logging_strategy="steps", logging_steps=1,
            **SGD, **BASIC, **WIDE,
        )  # fmt: skip
        reference = ByHand(trainer.model, SGD["learning_rate"], BASIC["ema_beta"], target_network=network)
        trainer.train()
        rows = make_dataset(8).to_list()
        for i in range(2):
            of_loss = {name: x for name, x in BASIC.items() if name != "ema_beta"}
            reference.step(rows[4 * i : 4 * i + 4], **of_loss)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses == pytest.approx(reference.losses, rel=1e-4)
        got = {name: x.detach() for name, x in trainer.model.named_parameters()}
        assert relative_error(got, dict(reference.model.named_parameters())) <= 1e-5


class TestDefinition:
    @pytest.mark.parametrize("discount_on", ["utterance", "token"])
    def test_loss_is_that_of_the_definitions(self, make_trainer, make_dueling, tokenizer, discount_on):
        """Rows of one utterance, through the public functions on dense Q-values; the target head is another one."""
        model = make_dueling()
        for buffer in model.heads.target_q.buffers():
            buffer.add_(0.3 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1)))
        trainer = make_trainer(
            model, Dataset.from_dict(TEXT), discount_on=discount_on, max_length=5,
            trainer_kwargs={"processing_class": tokenizer}, **BASIC, **WIDE,
        )  # fmt: skip
        assert 0 < sum(trainer.train_dataset["truncated"]) < len(trainer.train_dataset)
        batch = trainer.data_collator(trainer.train_dataset.to_list())
        x, real = batch["input_ids"], batch["attention_mask"].bool()
        rewards = torch.zeros(x[:, 1:].shape)
        mask = torch.zeros_like(rewards).bool()
        for i, row in enumerate(trainer.train_dataset):
            rewards[i, row["actions_ixs"]] = torch.tensor(row["rewards"])
            mask[i, row["actions_ixs"]] = True

        def online(ids):
            return model(ids, attention_mask=real[:, : ids.shape[1]].long(), return_q_values=True)

        def target(ids):
            return q_of_target_head(model, model.hidden_states(input_ids=ids, attention_mask=real.long()))

        model.eval()
        td = autoregressive_q_learn(
            online, target, x[:, :-1], batch["actions_ixs"][:, 0] + 1, x[:, -1], rewards,
            discount_gamma=BASIC["gamma"], attention_mask=real.long(), discount_on=discount_on,
            terminated=~batch["truncated"].bool(),
        )  # fmt: skip
        output = online(x[:, :-1])
        conservative = conservative_regularization_loss(output.q_values, x[:, 1:], mask, BASIC["q_min"])
        cloning = torch.nn.functional.cross_entropy(output.logits[mask], x[:, 1:][mask])
        expected = td + BASIC["conservative_scale"] / 2 * conservative + BASIC["cloning_scale"] * cloning
        loss = trainer.compute_loss(model, dict(batch))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        metrics = trainer.evaluate(Dataset.from_dict(TEXT))
        terms = {"td": td, "conservative": conservative, "cloning": cloning}
        for name, term in terms.items():
            assert metrics[f"eval_loss/{name}"] == pytest.approx(term.item(), rel=1e-5), name
        assert metrics["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)

    def test_padding_changes_nothing(self, make_trainer, make_dataset):
        trainer = make_trainer(**BASIC, **WIDE)
        rows = make_dataset(4, truncated=True).to_list()
        together = trainer.compute_loss(trainer.model.eval(), trainer.data_collator(rows))
        counts = [len(row["actions_ixs"]) for row in rows]
        alone = [trainer.compute_loss(trainer.model, trainer.data_collator([row])) for row in rows]
        expected = sum(n * x for n, x in zip(counts, alone, strict=True)) / sum(counts)
        torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def weights_after(make_dueling, make_dataset, tmp_path_factory):
    """Returns a function from options to the weights after some steps, and the average where there is one."""
    known = {}

    def train(**options) -> list[torch.Tensor]:
        key = str(options)
        if key not in known:
            args = QRLHFConfig(
                str(tmp_path_factory.mktemp("out")), **{**QUIET, **SGD, **BASIC, "max_steps": 4, **options}
            )
            trainer = QRLHFTrainer(make_dueling(), args=args, train_dataset=make_dataset(16, truncated=True))
            trainer.train()
            average = trainer.average.weights.values() if trainer.average else []
            known[key] = [
                torch.cat([x.detach().flatten() for x in tensors or [torch.zeros(1)]])
                for tensors in (list(trainer.model.parameters()), list(average))
            ]
        return known[key]

    return train


class TestNoArgumentIsInert:
    @pytest.mark.parametrize(
        "change",
        [
            {"ema_warmup_steps": 2}, {"ema_update_every": 2}, {"ema_beta": 0.1}, {"double_q": True},
            {"mc_floor": True}, {"n_step": 2}, {"q_min": -13.0}, {"conservative_scale": 0.8}, {"cloning_scale": 0.2},
            {"gamma": 0.5}, {"discount_on": "token"}, {"value_min": -0.1}, {"value_max": 0.1},
            {"target_network": "model"},
        ],
        ids=lambda change: next(iter(change)),
    )  # fmt: skip
    def test_weights_change(self, weights_after, change):
        (weights, _), (others, _) = weights_after(), weights_after(**change)
        assert (weights - others).norm() > 1e-5 * weights.norm()

    @pytest.mark.parametrize("change", [{"ema_warmup_steps": 2}, {"ema_update_every": 3}, {"ema_beta": 0.1}], ids=str)
    def test_the_average_of_the_model_changes(self, weights_after, change):
        (_, average), (_, other) = (weights_after(target_network="model", **x) for x in ({}, change))
        assert (average - other).norm() > 1e-5 * average.norm()

    def test_frozen_model_has_no_average_of_its_own(self, make_trainer):
        with pytest.raises(ValueError, match="which `freeze_base=True` leaves as it is"):
            make_trainer(target_network="model", freeze_base=True)


class TestModel:
    @pytest.mark.parametrize("by_name", [True, False])
    def test_llama_gets_a_dueling_head(self, make_trainer, make_base, tmp_path, by_name):
        base = make_base()
        base.save_pretrained(tmp_path / "base")
        weight = base.get_input_embeddings().weight.detach().clone()
        trainer = make_trainer(
            str(tmp_path / "base") if by_name else base, model_init_kwargs={"policy": "lm", "beta": 2.0}
        )
        assert type(trainer.model) is LlamaDuelingQForCausalLM
        assert (trainer.model.config.policy, trainer.model.config.beta) == ("lm", 2.0)
        assert torch.equal(trainer.model.get_input_embeddings().weight, weight)
        before = {k: x.clone() for k, x in trainer.model.state_dict().items()}
        trainer.train()
        assert changed(trainer, before) == set(before)

    def test_dtype_of_named_model_casts_base_only(self, make_trainer, make_base, tmp_path):
        make_base().save_pretrained(tmp_path / "base")
        trainer = make_trainer(
            str(tmp_path / "base"), model_init_kwargs={"dtype": "bfloat16"}, target_network="model", max_steps=1
        )
        assert {x.dtype for x in trainer.model.model.parameters()} == {torch.bfloat16}
        assert {x.dtype for x in trainer.model.heads.state_dict().values()} == {torch.float32}
        trainer.train()
        assert {x.dtype for x in trainer.average.weights.values()} == {torch.float32}

    def test_fresh_head_follows_the_seed(self, make_trainer, make_base):
        heads = [make_trainer(make_base(), seed=seed).model.heads.q[0].weight.detach() for seed in (0, 0, 1)]
        assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])

    def test_saved_model_continues(self, make_trainer, tmp_path, state_of, assert_same_bits):
        first = make_trainer()
        first.train()
        first.save_model(tmp_path / "saved")
        again = make_trainer(str(tmp_path / "saved"))
        assert type(again.model) is LlamaDuelingQForCausalLM
        assert_same_bits(state_of(again), state_of(first))

    @pytest.mark.parametrize("by_name", [True, False])
    def test_other_architecture_gets_one_dueling_ilql_head(self, make_trainer, tmp_path, by_name):
        make_gpt2().save_pretrained(tmp_path / "base")
        trainer = make_trainer(str(tmp_path / "base") if by_name else make_gpt2(), max_steps=3)
        assert type(trainer.model) is ILQLForCausalLM
        assert (trainer.model.config.head_type, trainer.model.config.num_q_heads) == ("dueling", 1)
        before = {k: x.clone() for k, x in trainer.model.state_dict().items()}
        trainer.train()
        assert changed(trainer, before) == {k for k in before if not k.startswith("heads.v.")}
        held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        assert not held & {id(p) for p in trainer.model.heads.v.parameters()}

    @pytest.mark.parametrize("head_type", ["mlp", "linear", "tied", "dueling"])
    def test_ilql_model_with_one_head(self, make_trainer, make_model, make_dataset, head_type):
        data = make_dataset(4)
        trainer = make_trainer(
            make_model(head_type=head_type, num_q_heads=1), data, learning_rate=1e-2, max_steps=30, gamma=0.9
        )
        before = trainer.evaluate(data)
        trainer.train()
        after = trainer.evaluate(data)
        for name in ("eval_loss", "eval_loss/conservative", "eval_loss/cloning"):
            assert after[name] < 0.8 * before[name], name

    def test_two_heads_are_refused(self, make_trainer, make_model, tmp_path):
        with pytest.raises(ValueError, match="trains one Q-head, and the model has 2.*`num_q_heads=1`"):
            make_trainer(make_model(num_q_heads=2))
        make_model(num_q_heads=2).save_pretrained(tmp_path / "two")
        with pytest.raises(ValueError, match="trains one Q-head"):
            make_trainer(str(tmp_path / "two"))

    def test_encoder_decoder(self, make_trainer, tokenizer, tmp_path):
        base = make_seq2seq_base()
        base.save_pretrained(tmp_path / "base")
        data = Dataset.from_list([{**TALK, "rewards": [1.0, 0.5]}] * 4)
        for model in (base, str(tmp_path / "base")):
            trainer = make_trainer(
                model, data, tmp_path / "policy", {"processing_class": tokenizer}, target_network="model", max_steps=3
            )
            assert type(trainer.model) is ILQLForSeq2SeqLM and trainer.model.config.head_type == "dueling"
            assert any(trainer.train_dataset["next_input_ids"])
            before = {k: x.clone() for k, x in trainer.model.state_dict().items()}
            trainer.train()
            assert changed(trainer, before) == {k for k in before if not k.startswith("heads.v.")}
        trainer.save_model()
        loaded = AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(tmp_path / "policy")
        inputs = {"input_ids": torch.tensor([[3, 4]]), "decoder_input_ids": torch.tensor([[0, 5]])}
        assert torch.equal(loaded(**inputs).logits, trainer.model.eval()(**inputs).logits)

    def test_tied_head_has_no_averaged_embedding(self, make_trainer, make_model):
        with pytest.raises(ValueError, match='type "tied" reads the output embedding of the model in training'):
            make_trainer(make_model(head_type="tied", num_q_heads=1), target_network="model")

    def test_init_kwargs_with_live_heads_raise(self, make_trainer):
        with pytest.raises(ValueError, match="`model_init_kwargs` goes with a model given by name"):
            make_trainer(model_init_kwargs={"policy": "lm"})

    def test_half_precision_targets_raise(self, make_trainer, make_dueling):
        with pytest.raises(ValueError, match="must be float32"):
            make_trainer(make_dueling().to(torch.bfloat16))

    def test_args_are_optional(self, make_dueling, make_dataset, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        trainer = QRLHFTrainer(make_dueling(), train_dataset=make_dataset())
        assert type(trainer.args) is QRLHFConfig and trainer.args.output_dir.endswith("-QRLHF")
        assert {"hf_qrl", "qrlhf"} <= set(trainer.model.model_tags)

    def test_zero_heads_start_at_mean_return(self, make_trainer, make_dueling, make_dataset):
        trainer = make_trainer(make_dueling(head_init="zero"), make_dataset(8, seed=4), gamma=0.9, discount_on="token")
        returns = []
        for row in make_dataset(8, seed=4):
            y = 0.0
            for reward in reversed(row["rewards"]):
                y = reward + 0.9 * y
                returns.append(y)
        q = trainer.model(torch.tensor([[3, 4, 5]]), return_q_values=True).q_values
        torch.testing.assert_close(q, torch.full_like(q, sum(returns) / len(returns)), rtol=0, atol=1e-5)


class TestIlqlTrainer:
    def test_refuses_a_model_without_value_head(self, make_dueling, make_dataset, tmp_path):
        args = ILQLConfig(str(tmp_path / "out"), **QUIET)
        with pytest.raises(ValueError, match="LlamaDuelingQForCausalLM has no value head.*`QRLHFTrainer`"):
            ILQLTrainer(make_dueling(), args=args, train_dataset=make_dataset())
        make_dueling().save_pretrained(tmp_path / "saved")
        with pytest.raises(ValueError, match="already has Q-learning heads"):
            ILQLTrainer(str(tmp_path / "saved"), args=args, train_dataset=make_dataset())

    @pytest.mark.parametrize("peft_config", [None, LoraConfig(r=2)], ids=["model", "adapter"])
    def test_trains_the_value_head_that_was_left_alone(self, make_trainer, make_model, make_dataset, tmp_path,
                                                       peft_config):  # fmt: skip
        first = make_trainer(make_model(num_q_heads=1), trainer_kwargs={"peft_config": peft_config})
        first.train()
        make_trainer(first.model).train()
        args = ILQLConfig(str(tmp_path / "out"), **QUIET)
        trainer = ILQLTrainer(first.model, args=args, train_dataset=make_dataset())
        before = {k: x.clone() for k, x in trainer.model.state_dict().items()}
        trainer.train()
        trained = {k for k in before if ".v." in k and "original_module" not in k}
        assert trained and trained <= changed(trainer, before)

    def test_arguments_of_the_other_trainer_are_refused(self, make_dueling, make_dataset, tmp_path):
        with pytest.raises(ValueError, match="`args` must be a `QRLHFConfig`, got ILQLConfig"):
            QRLHFTrainer(make_dueling(), args=ILQLConfig(str(tmp_path), **QUIET), train_dataset=make_dataset())


class TestQMin:
    def smallest_return(self, data, gamma, discount_on):
        smallest = math.inf
        for row in data:
            g, turn = 0.0, None
            for reward, turn_of in zip(reversed(row["rewards"]), reversed(row["turn_ixs"]), strict=True):
                g = reward + (gamma if discount_on == "token" or turn != turn_of else 1.0) * g
                turn, smallest = turn_of, min(smallest, g)
        return smallest

    @pytest.mark.parametrize("discount_on", ["utterance", "token"])
    def test_smallest_discounted_return_by_default(self, make_trainer, make_dataset, discount_on):
        data = make_dataset(16)
        trainer = make_trainer(train_dataset=data, gamma=0.5, discount_on=discount_on)
        assert trainer.q_min == pytest.approx(self.smallest_return(data, 0.5, discount_on))
        assert self.smallest_return(data, 0.5, "utterance") != self.smallest_return(data, 0.5, "token")

    def test_it_is_where_the_loss_pulls_to(self, make_trainer, make_dataset):
        data = make_dataset(4)
        derived = make_trainer(train_dataset=data)
        given = make_trainer(train_dataset=data, q_min=derived.q_min)
        lower = make_trainer(train_dataset=data, q_min=derived.q_min - 1)
        losses = [x.evaluate(data)["eval_loss/conservative"] for x in (derived, given, lower)]
        assert losses[0] == losses[1] != losses[2]

    def test_above_the_smallest_return_is_refused(self, make_trainer, make_dataset):
        data = make_dataset(16)
        smallest = self.smallest_return(data, 0.998, "utterance")
        with pytest.raises(ValueError, match=f"a return-to-go of the data is {smallest}.* {smallest} or less"):
            make_trainer(train_dataset=data, q_min=smallest + 1e-6)
        make_trainer(train_dataset=data, q_min=smallest)
        make_trainer(train_dataset=data, q_min=smallest + 1.0, conservative_scale=0.0).train()

    def test_stream(self, make_trainer, make_dataset):
        stream = make_dataset(16).to_iterable_dataset()
        with pytest.raises(ValueError, match="not known beforehand of a stream.*set `q_min`"):
            make_trainer(train_dataset=stream)
        make_trainer(train_dataset=stream, conservative_scale=0.0).train()
        trainer = make_trainer(train_dataset=stream, q_min=-7.5, max_steps=6)
        assert (trainer.q_min, trainer.value_min, trainer.value_max) == (-7.5, None, None)
        trainer.train()
        assert trainer.state.global_step == 6

    def test_rows_of_one_turn(self, make_trainer, chat_tokenizer):
        data = Dataset.from_list([TALK] * 4)
        kwargs = {"train_dataset": data, "trainer_kwargs": {"processing_class": chat_tokenizer}, "history_window": 1}
        trainer = make_trainer(gamma=0.5, **kwargs)
        assert trainer.model.config.history_window == 1 and len(trainer.train_dataset) == 8
        # The first turn's row says 1.0; what its episode was worth it does not say, but what it can be.
        assert trainer.q_min == trainer.value_min == -4.0
        trainer.train()
        with pytest.raises(ValueError, match="single turns of undiscounted episodes.*`q_min`"):
            make_trainer(gamma=1.0, **kwargs)
        assert make_trainer(gamma=1.0, q_min=-2.0, **kwargs).q_min == -2.0
        make_trainer(gamma=1.0, conservative_scale=0.0, **kwargs)

    def test_standardised_rewards(self, make_trainer, tokenizer):
        trainer = make_trainer(
            train_dataset=Dataset.from_dict(TEXT), trainer_kwargs={"processing_class": tokenizer}, gamma=1.0,
            reward_scaling="standardize",
        )  # fmt: skip
        rewards = torch.tensor(TEXT["reward"], dtype=torch.float64)
        assert trainer.q_min == pytest.approx(((rewards.min() - rewards.mean()) / rewards.std()).item())
        assert trainer.model.config.reward_std == pytest.approx(rewards.std().item())


class TestAccumulation:
    @pytest.mark.parametrize("target_network", TARGET_NETWORKS)
    def test_sixteen_rows_in_any_number_of_parts(self, make_trainer, make_dataset, state_of, relative_error,
                                                 target_network):  # fmt: skip
        runs = []
        for batch_size, accumulation in ((16, 1), (4, 4)):
            trainer = make_trainer(
                train_dataset=make_dataset(40, weight=True, truncated=True),
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
                target_network=target_network,
                max_steps=4,
                logging_strategy="steps",
                logging_steps=1,
                **SGD,
                **BASIC,
            )
            trainer.train()
            average = {} if trainer.average is None else trainer.average.weights
            runs.append(({**state_of(trainer), **average}, [x for x in trainer.state.log_history if "loss" in x]))
        (state, log), (other, other_log) = runs
        assert relative_error(other, state) <= 1e-6
        targets = [{name: x for name, x in s.items() if "target_q" in name} for s in (other, state)]
        assert targets[0] and relative_error(*targets) <= 1e-6
        assert len(log) == 4
        for ours, theirs in zip(other_log, log, strict=True):
            assert {**ours, "epoch": 0} == pytest.approx({**theirs, "epoch": 0}, rel=2e-5, abs=1e-6)


class TestCheckpoints:
    ARGS = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-2,
        "ema_beta": 0.7,
        "disable_dropout": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    }

    @pytest.mark.parametrize("warmup", [0, 3])
    @pytest.mark.parametrize("target_network", TARGET_NETWORKS)
    def test_resume_is_exact(self, make_trainer, make_dueling, make_dataset, tmp_path, state_of, assert_same_bits,
                             target_network, warmup):  # fmt: skip
        def train(output_dir, callbacks=(), resume=None):
            trainer = make_trainer(
                make_dueling(config={"attention_dropout": 0.2}), make_dataset(13, weight=True), tmp_path / output_dir,
                {"callbacks": list(callbacks)}, target_network=target_network, ema_warmup_steps=warmup, **self.ARGS,
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=resume)
            average = {} if trainer.average is None else trainer.average.weights
            return {**state_of(trainer), **{f"average.{name}": x for name, x in average.items()}}

        whole = train("whole")
        half = train("broken", [StopAt(2)])
        assert any(name.startswith("average.") for name in whole) == (target_network == "model")
        assert all(not torch.equal(half[name], x) for name, x in whole.items())
        assert_same_bits(train("broken", resume=True), whole)

    def test_checkpoint_without_the_average_is_refused(self, make_trainer):
        make_trainer(**self.ARGS).train()
        trainer = make_trainer(target_network="model", **{**self.ARGS, "max_steps": 6})
        with pytest.raises(ValueError, match="does not hold the averaged weights of this model"):
            trainer.train(resume_from_checkpoint=True)

    def test_checkpoint_is_a_model_and_the_average_lies_beside_it(self, make_trainer, state_of, assert_same_bits):
        trainer = make_trainer(target_network="model", **self.ARGS)
        trainer.train()
        checkpoint = Path(trainer.args.output_dir) / "checkpoint-4"
        assert_same_bits(load_file(checkpoint / ModelAverage.file_name), trainer.average.weights)
        model = LlamaDuelingQForCausalLM.from_pretrained(checkpoint)
        assert_same_bits(dict(model.state_dict()), state_of(trainer))
        trainer.save_model()
        assert not (Path(trainer.args.output_dir) / ModelAverage.file_name).exists()

    @pytest.mark.parametrize("target_network", TARGET_NETWORKS)
    def test_best_model_is_restored_with_its_target_network(self, make_trainer, make_dataset, target_network):
        trainer = make_trainer(
            trainer_kwargs={"eval_dataset": make_dataset(6, seed=3)}, target_network=target_network, max_steps=5,
            eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
            metric_for_best_model="eval_loss/td", learning_rate=0.02, ema_beta=0.7, lr_scheduler_type="constant",
        )  # fmt: skip
        assert trainer.args.greater_is_better is False
        trainer.train()
        history = {e["step"]: e["eval_loss/td"] for e in trainer.state.log_history if "eval_loss/td" in e}
        best = min(history, key=history.get)
        assert sorted(history) == [1, 2, 3, 4, 5] and best != 5
        assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
        assert trainer.evaluate()["eval_loss/td"] == pytest.approx(history[best], rel=1e-6)


class TestEvaluation:
    @pytest.mark.parametrize("target_network", TARGET_NETWORKS)
    def test_independent_of_batch_size(self, make_trainer, make_dataset, target_network):
        data = make_dataset(11, seed=5, weight=True, truncated=True)
        trainer = make_trainer(target_network=target_network, learning_rate=1e-2)
        trainer.train()
        results = []
        for batch_size in (2, 4, 11):
            trainer.args.per_device_eval_batch_size = batch_size
            metrics = trainer.evaluate(data)
            results.append({k: x for k, x in metrics.items() if k == "eval_loss" or "/" in k or "fraction" in k})
        assert {f"eval_{name}" for name in [*LOGGED[:-2], "overestimation"] if "/" in name} <= results[0].keys()
        assert results[0]["eval_truncated_fraction"] == pytest.approx(4 / 11)
        for other in results[1:]:
            assert other == pytest.approx(results[0], rel=1e-5, abs=1e-6)

    @pytest.mark.parametrize("target_network", TARGET_NETWORKS)
    def test_evaluation_leaves_training_as_it_is(self, make_trainer, make_dataset, state_of, assert_same_bits,
                                                 target_network):  # fmt: skip
        states = []
        for strategy in ("no", "steps"):
            trainer = make_trainer(
                max_steps=3, eval_strategy=strategy, eval_steps=1, target_network=target_network,
                trainer_kwargs={"eval_dataset": {"a": make_dataset(5), "b": make_dataset(3, seed=1)}},
            )  # fmt: skip
            trainer.train()
            states.append({**state_of(trainer), **(trainer.average.weights if trainer.average else {})})
        assert_same_bits(*states)
        assert {"eval_a_loss/td", "eval_b_loss/td"} <= set().union(*trainer.state.log_history)

    def test_predictions_are_logits_of_the_policy(self, make_trainer, make_dataset):
        trainer = make_trainer()
        row = make_dataset(1).to_list()[0]
        output = trainer.predict(Dataset.from_list([row]))
        with torch.no_grad():
            q = trainer.model.eval()(torch.tensor([row["input_ids"]]), return_q_values=True).q_values[0]
        torch.testing.assert_close(torch.tensor(output.predictions[0]), q)
        positions = [p + 1 for p in row["actions_ixs"]]
        assert output.label_ids[0][positions].tolist() == [row["input_ids"][p] for p in positions]
        assert (output.label_ids[0] != -100).sum() == len(positions)


class TestLogs:
    def test_every_documented_name(self, make_trainer, make_dataset):
        trainer = make_trainer(
            train_dataset=make_dataset(truncated=True), logging_strategy="steps", logging_steps=2, max_steps=4
        )
        trainer.train()
        entries = [x for x in trainer.state.log_history if "loss" in x]
        assert [x["step"] for x in entries] == [2, 4]
        for entry in entries:
            assert set(LOGGED) <= entry.keys()
            assert all(isinstance(entry[name], float) for name in LOGGED)

    def test_averages_over_actions_of_the_interval(self, make_trainer, make_dataset):
        """With nothing learned, the log of an epoch is the evaluation of its data, uneven as the batches are."""
        data = make_dataset(14, weight=True, truncated=True)
        trainer = make_trainer(
            train_dataset=data, logging_strategy="steps", logging_steps=4, max_steps=8, learning_rate=0.0,
            conservative_scale=0.3, cloning_scale=0.7,
        )  # fmt: skip
        trainer.train()
        entries = [x for x in trainer.state.log_history if "loss" in x]
        expected = trainer.evaluate(data)
        terms = (
            expected["eval_loss/td"] + 0.15 * expected["eval_loss/conservative"] + 0.7 * expected["eval_loss/cloning"]
        )
        assert expected["eval_loss"] == pytest.approx(terms, rel=1e-6)
        assert len(entries) == 2
        for entry in entries:
            for name in LOGGED:
                assert entry[name] == pytest.approx(expected[f"eval_{name}"], rel=1e-5, abs=1e-6), name

    def test_table_of_completions(self, make_trainer, make_dueling, tokenizer, capsys):
        trainer = make_trainer(
            make_dueling(), Dataset.from_dict(TEXT), trainer_kwargs={"processing_class": tokenizer},
            log_completions=True, log_completions_steps=2, num_completions_to_print=2, max_completion_length=4,
        )  # fmt: skip
        trainer.train()
        out = capsys.readouterr().out
        assert "Completions at step 2" in out and "a b" in out and "Q (mean)" in out

    def test_scores_of_the_table(self, make_dueling):
        model = make_dueling().eval()
        for buffer in model.heads.target_q.buffers():
            buffer.add_(0.1)
        tokens = torch.tensor([[3, 4, 5, 6, 7]])
        value, q = SampleTableCallback.score(model, tokens, 2, QRLHFTrainer.state_values)
        target = q_of_target_head(model, model.hidden_states(input_ids=tokens))[0]
        assert value == pytest.approx(target[1].max().item(), abs=1e-5)
        assert q == pytest.approx(target[1:-1].gather(1, tokens[0, 2:, None]).mean().item(), abs=1e-5)


class TestData:
    def test_text(self, make_trainer, tokenizer):
        trainer = make_trainer(train_dataset=Dataset.from_dict(TEXT), trainer_kwargs={"processing_class": tokenizer})
        assert sum(map(sum, trainer.train_dataset["rewards"])) == pytest.approx(sum(TEXT["reward"]))
        assert trainer.q_min == -1.0 and (trainer.value_min, trainer.value_max) == (-1.0, 3.0)
        trainer.train()

    def test_rewards_of_turns(self, make_trainer, make_dueling, chat_tokenizer):
        """The discount of the default counts turns: the first one is worth 1 - 2 gamma however long it is."""
        trainer = make_trainer(
            train_dataset=Dataset.from_list([TALK] * 4), trainer_kwargs={"processing_class": chat_tokenizer},
            gamma=0.5, mc_floor=True,
        )  # fmt: skip
        row = trainer.train_dataset[0]
        assert [x for x in row["rewards"] if x] == [1.0, -2.0] and max(row["turn_ixs"]) == 1
        assert trainer.evaluate(Dataset.from_list([TALK]))["eval_returns/mc"] == pytest.approx(1 - 2 * 0.5)
        assert trainer.q_min == -2.0
        trainer.train()

    def test_trlx_samples(self, make_trainer, tokenizer):
        data = Dataset.from_dict({"samples": [["a b", " c d"], ["e", " f"]] * 2, "rewards": [1.0, 0.0] * 2})
        make_trainer(train_dataset=data, trainer_kwargs={"processing_class": tokenizer}).train()

    def test_stream_of_text(self, make_trainer, tokenizer):
        trainer = make_trainer(
            train_dataset=Dataset.from_dict(TEXT).to_iterable_dataset(), q_min=-1.0, max_steps=5,
            trainer_kwargs={"processing_class": tokenizer},
        )  # fmt: skip
        trainer.train()
        assert trainer.state.global_step == 5

    def test_stream_trains_as_the_same_rows_in_order(self, make_trainer, make_dataset, state_of):
        data, given = make_dataset(8), {"q_min": -9.0, "value_min": -5.0, "value_max": 5.0}
        stream = make_trainer(train_dataset=data.to_iterable_dataset(), **given)
        mapped = make_trainer(train_dataset=data, train_sampling_strategy="sequential", **given)
        for trainer in (stream, mapped):
            trainer.train()
        for name, x in state_of(mapped).items():
            torch.testing.assert_close(state_of(stream)[name], x)

    def test_wrong_type_raises(self, make_trainer):
        with pytest.raises(ValueError, match="`train_dataset` must be a `datasets.Dataset`"):
            make_trainer(train_dataset=[{"prompt": "a"}])


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [{"bf16": True}, {"activation_checkpointing": True}, {"freeze_base": True, "cloning_scale": 0.0}],
        ids=str,
    )
    def test_trains(self, make_trainer, options):
        if "freeze_base" not in options:
            options = {**options, "target_network": "model"}
        trainer = make_trainer(**options)
        before = {k: x.clone() for k, x in trainer.model.state_dict().items()}
        trainer.train()
        assert all(torch.isfinite(x).all() for x in trainer.model.state_dict().values())
        frozen = {k for k in before if not k.startswith("heads.")} if "freeze_base" in options else set()
        assert changed(trainer, before) == set(before) - frozen
        assert not torch.is_autocast_enabled("cpu")

    def test_average_in_mixed_precision(self, make_trainer):
        """In the first step the average is the model, and so it is in bfloat16."""
        losses = []
        for target_network in TARGET_NETWORKS:
            trainer = make_trainer(
                bf16=True, max_steps=2, logging_strategy="steps", logging_steps=1, target_network=target_network,
                **SGD, **BASIC,
            )  # fmt: skip
            trainer.train()
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert losses[0][0] == losses[1][0] and losses[0][1] != losses[1][1]

    def test_activation_checkpointing_changes_nothing(self, make_trainer, state_of, relative_error):
        states = []
        for on in (True, False):
            trainer = make_trainer(activation_checkpointing=on, target_network="model", **SGD, **BASIC)
            trainer.train()
            states.append(state_of(trainer))
        assert relative_error(*states) <= 1e-6

    def test_policy_of_the_language_model_needs_cloning_or_a_frozen_model(self, make_trainer, make_dueling):
        for fields in ({"policy": "lm"}, {"policy_top_k": 3}):
            with pytest.raises(ValueError, match="`cloning_scale=0` nothing holds the language model to the data"):
                make_trainer(make_dueling(**fields), cloning_scale=0.0)
            make_trainer(make_dueling(**fields), cloning_scale=0.0, freeze_base=True)

    def test_policy_of_q_can_do_without_cloning(self, make_trainer, make_dueling):
        trainer = make_trainer(make_dueling(policy="q"), cloning_scale=0.0, max_steps=3)
        before = {k: x.clone() for k, x in trainer.model.state_dict().items()}
        trainer.train()
        assert changed(trainer, before) == set(before) - {"lm_head.weight"}

    @pytest.mark.parametrize("sharding", ["zero3", "fsdp", "fsdp of accelerate launch"])
    def test_whole_weights_are_needed_to_average_them(self, make_trainer, monkeypatch, sharding):
        if sharding == "zero3":
            monkeypatch.setattr("hf_qrl.trainer.qrlhf_trainer.is_deepspeed_zero3_enabled", lambda: True)
        elif sharding == "fsdp of accelerate launch":
            monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
            monkeypatch.setenv("FSDP_VERSION", "2")
        options = {"fsdp": True, "fsdp_config": {"version": 2}} if sharding == "fsdp" else {}
        with pytest.raises(ValueError, match="which ZeRO-3 and FSDP spread over the processes"):
            make_trainer(target_network="model", **options)


LORA = LoraConfig(r=4, lora_alpha=8)
PEFT = {"learning_rate": 1e-2, "ema_beta": 0.7, "lr_scheduler_type": "constant"}


class TestAdapter:
    @pytest.fixture
    def base(self, make_base, tmp_path) -> str:
        make_base(initializer_range=0.3).save_pretrained(tmp_path / "base")
        return str(tmp_path / "base")

    @pytest.fixture
    def train(self, make_trainer, base):
        def make(model=None, peft_config=LORA, trainer_kwargs=None, **args):
            trainer = make_trainer(
                model or base,
                trainer_kwargs={"peft_config": peft_config, **(trainer_kwargs or {})},
                **{**PEFT, **args},
            )
            return trainer

        return make

    def active(self, trainer) -> dict[str, torch.Tensor]:
        return {name: x.detach().clone() for name, x in trainer.model.state_dict().items() if ".default." in name}

    IDS = torch.arange(1, 13).reshape(2, 6)

    def test_adapter_and_heads_and_nothing_else(self, train, assert_same_bits):
        trainer = train(max_steps=3)
        assert isinstance(trainer.model, PeftModelForCausalLM)
        assert type(trainer.bare_model) is LlamaDuelingQForCausalLM
        config = trainer.model.peft_config["default"]
        assert config.target_modules == r"model\..*\.(q_proj|v_proj)" and config.modules_to_save == ["heads"]
        before = {name: x.clone() for name, x in trainer.model.state_dict().items()}
        trainer.train()
        assert changed(trainer, before) == {name for name in before if ".default." in name}

    @pytest.mark.parametrize("loader", [LlamaDuelingQForCausalLM, AutoModelForCausalLM], ids=lambda x: x.__name__)
    def test_adapter_loads_alone(self, train, loader):
        trainer = train(model_init_kwargs={"policy": "lm", "beta": 3.0})
        trainer.train()
        trainer.save_model()
        out = Path(trainer.args.output_dir)
        assert {"adapter_config.json", "config.json", "README.md"} <= {path.name for path in out.iterdir()}
        assert not list(out.glob("model*"))
        expected = trainer.model.eval()(input_ids=self.IDS).logits
        loaded = loader.from_pretrained(out)
        assert isinstance(loaded, PeftModelForCausalLM)
        assert (loaded.config.policy, loaded.config.beta) == ("lm", 3.0)
        assert torch.equal(loaded(input_ids=self.IDS).logits, expected)
        other = loader.from_pretrained(out, beta=5.0, attn_implementation="eager")
        assert (other.config.beta, other.config._attn_implementation) == (5.0, "eager")
        merged = loaded.merge_and_unload()
        assert type(merged) is LlamaDuelingQForCausalLM
        torch.testing.assert_close(merged(input_ids=self.IDS).logits, expected, rtol=1e-4, atol=1e-4)
        merged.save_pretrained(out / "merged")
        again = loader.from_pretrained(out / "merged")
        assert torch.equal(again(input_ids=self.IDS).logits, merged(input_ids=self.IDS).logits)

    def test_trains_on_from_its_files(self, train, assert_same_bits, tmp_path):
        first = train()
        first.train()
        first.save_model()
        again = train(first.args.output_dir, None, output_dir=tmp_path / "again", target_network="model")
        assert type(again.bare_model) is LlamaDuelingQForCausalLM
        assert_same_bits(self.active(again), self.active(first))
        again.train()
        assert not [name for name, x in self.active(again).items() if torch.equal(x, self.active(first)[name])]

    @pytest.mark.parametrize("target_network", TARGET_NETWORKS)
    def test_resume_is_exact(self, train, assert_same_bits, tmp_path, target_network):
        args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "target_network": target_network}
        whole = train(output_dir=tmp_path / "whole", **args)
        whole.train()
        train(output_dir=tmp_path / "resumed", **{**args, "max_steps": 2}).train()
        resumed = train(output_dir=tmp_path / "resumed", **args)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 4
        assert_same_bits(self.active(resumed), self.active(whole))
        if target_network == "model":
            assert_same_bits(resumed.average.weights, whole.average.weights)

    def test_only_the_adapter_is_kept_twice(self, train):
        trainer = train(target_network="model", max_steps=3)
        before = {name: x.clone() for name, x in trainer.model.named_parameters() if "lora_" in name}
        trainer.train()
        weights = dict(trainer.model.named_parameters())
        assert before and trainer.average.weights.keys() == before.keys()
        for name, average in trainer.average.weights.items():
            assert not torch.equal(average, before[name]) or not average.any()
            assert not torch.equal(average, weights[name].detach())

    def test_average_of_an_adapter_is_another_model(self, train, make_dataset):
        trainer = train(target_network="model", max_steps=3)
        trainer.train()
        batch = trainer.data_collator(make_dataset(3).to_list())
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        model = trainer.model.eval()
        averaged, _ = trainer.average.hidden_states(**inputs)
        assert not torch.allclose(averaged, trainer.bare_model.hidden_states(**inputs))
        with torch.no_grad():
            for name, x in model.named_parameters():
                if name in trainer.average.weights:
                    x.copy_(trainer.average.weights[name])
        torch.testing.assert_close(averaged, trainer.bare_model.hidden_states(**inputs))

    def test_cloning_holds_the_policy_of_the_language_model(self, train):
        with pytest.raises(ValueError, match="`cloning_scale=0` nothing holds the language model to the data while"):
            train(cloning_scale=0.0, model_init_kwargs={"policy": "lm"})
        train(cloning_scale=0.0).train()

    def test_other_architectures(self, make_trainer, tmp_path):
        make_gpt2().save_pretrained(tmp_path / "base")
        trainer = make_trainer(str(tmp_path / "base"), trainer_kwargs={"peft_config": LORA}, **PEFT)
        before = self.active(trainer)
        trainer.train()
        after = self.active(trainer)
        same = {name for name, x in after.items() if torch.equal(x, before[name])}
        assert same == {name for name in after if ".heads." in name and ".v." in name}
        trainer.save_model()
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(trainer.args.output_dir)
        assert torch.equal(loaded(input_ids=self.IDS).logits, trainer.model.eval()(input_ids=self.IDS).logits)


class TestSavedModel:
    def test_auto_class_loads_and_generates(self, make_trainer, make_dueling, tmp_path):
        trainer = make_trainer(make_dueling(), learning_rate=1e-2, target_network="model")
        trainer.train()
        trainer.save_model(tmp_path / "saved")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert type(loaded) is LlamaDuelingQForCausalLM
        ids = torch.tensor([[3, 4, 5]])
        out = loaded.generate(ids, max_new_tokens=4, do_sample=False)
        # Greedy is the best token by Q.
        for i in range(3, out.shape[1]):
            q = loaded(out[:, :i], return_q_values=True).q_values
            assert out[0, i] == q[0, -1].argmax()
        config = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert config["model_type"] == "hf_qrl_llama_dueling_q"
        plain = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
        assert torch.equal(plain(ids).logits, trainer.model.eval()(ids, policy="lm", beta=0.0).logits)

    def test_policy_says_what_was_rewarded(self, make_trainer, make_dueling, tokenizer):
        """The data says both answers to each question equally often; which one is rewarded depends on the question."""
        right = {"a": "q", "b": "r s", "c": "q", "d": "r s"}
        rows = [
            {"prompt": question, "completion": f" {answer}", "reward": float(answer == right[question])}
            for question in right
            for answer in ("q", "r s")
        ]
        trainer = make_trainer(
            make_dueling(), Dataset.from_list(rows), trainer_kwargs={"processing_class": tokenizer},
            per_device_train_batch_size=8, max_steps=80, learning_rate=1e-2, lr_scheduler_type="constant",
            ema_beta=0.8, conservative_scale=0.1,
        )  # fmt: skip
        trainer.train()
        inputs = tokenizer(list(right), return_tensors="pt")["input_ids"]
        said = trainer.model.eval().generate(inputs, do_sample=False, max_new_tokens=4, eos_token_id=2, pad_token_id=0)
        assert tokenizer.batch_decode(said[:, 1:], skip_special_tokens=True) == list(right.values())


class TestModelCard:
    @pytest.mark.parametrize("kind", ["q", "lm", "wrapper", "adapter", "conversation"])
    def test_use(self, make_trainer, make_base, make_dueling, tokenizer, chat_tokenizer, tmp_path, kind):
        make_base().save_pretrained(tmp_path / "base")
        model = make_gpt2() if kind == "wrapper" else make_dueling(policy="lm" if kind == "lm" else "q", beta=2.5)
        data = Dataset.from_list([TALK] * 4) if kind == "conversation" else Dataset.from_dict(TEXT)
        trainer = make_trainer(
            str(tmp_path / "base") if kind == "adapter" else model, data, tmp_path / "policy",
            {
                "processing_class": chat_tokenizer if kind == "conversation" else tokenizer,
                "peft_config": LORA if kind == "adapter" else None,
            },
            max_steps=1, ema_beta=0.75, logging_strategy="steps", logging_steps=1,
        )  # fmt: skip
        trainer.train()
        trainer.save_model()
        card = ModelCard.load(tmp_path / "policy" / "README.md")
        assert {"hf_qrl", "qrlhf"} <= set(card.data.tags) and "2309.10150" in card.text and "QRLHF" in card.text
        assert "| ema_beta | `0.75` |" in card.text and "| loss/td |" in card.text and "| tau |" not in card.text
        by_q = kind in ("q", "adapter", "conversation")
        assert f"`softmax({'Q / temperature' if by_q else 'logits + beta * (Q - V)'})`" in card.text
        code = card.text.split("```python\n")[1].split("```")[0]
        name = "AutoModelForCausalLMWithILQLHeads" if kind == "wrapper" else "LlamaDuelingQForCausalLM"
        assert f"import {name}" in code
        scope = {"path": tmp_path / "policy"}
        exec(code.replace('from_pretrained("policy")', "from_pretrained(path)"), scope)
        assert scope["output"].shape[1] > scope["inputs"]["input_ids"].shape[1]
        # What it says of values holds.
        call = "model(**inputs, " + card.text.split("`model(**inputs, ")[1].split("`")[0]
        values = eval(call, scope)
        assert (values.qs[0] if kind == "wrapper" else values).shape[-1] == VOCAB_SIZE

    def test_every_checkpoint_has_one(self, make_trainer):
        trainer = make_trainer(save_strategy="steps", save_steps=1, max_steps=2)
        trainer.train()
        for step in (1, 2):
            card = ModelCard.load(Path(trainer.args.output_dir) / f"checkpoint-{step}" / "README.md")
            assert f"Steps: {step}." in card.text
