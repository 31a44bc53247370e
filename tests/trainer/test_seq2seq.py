# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Encoder-decoder models in the trainer."""

import copy
import importlib.util
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)
from trl import TrlParser

from hf_qrl import AutoModelForSeq2SeqLMWithILQLHeads, ILQLConfig, ILQLForSeq2SeqLM, ILQLTrainer
from hf_qrl.data import (
    DataCollatorForILQL,
    DataCollatorForSeq2SeqILQL,
    ILQLSeq2SeqBatch,
    conversation_text,
    make_experience_seq2seq,
)
from hf_qrl.losses.ilql import ilql_loss
from hf_qrl.trainer.callbacks import SampleTableCallback


EXAMPLE = Path(__file__).parents[2] / "examples" / "ilql.py"
VOCAB_SIZE = 24
EOS = 2
SIZES = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
BART_SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 24, "layerdrop": 0.5}
CHAT = {
    "messages": [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "c d"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f"},
    ],
    "rewards": [1.0, -1.0],
}
TEXT = {"prompt": ["a b", "c", "d e f", "g"], "completion": ["c d", "h i j k", "l", "m n o"], "reward": [1, 0, 2, 3.0]}


def draw_rows(num_rows: int, seed: int = 0) -> list[dict]:
    """Tokenised rows; every third is truncated, every second has a next state in another context."""
    generator = random.Random(seed)

    def tokens(low, high):
        return [generator.randrange(3, VOCAB_SIZE) for _ in range(generator.randint(low, high))]

    rows = []
    for i in range(num_rows):
        said = tokens(1, 6)
        next_ids = tokens(2, 8) if i % 2 else []
        rows.append(
            {
                "input_ids": tokens(2, 9),
                "decoder_input_ids": [0, *said],
                "rewards": [round(generator.gauss(0, 1), 3) for _ in said],
                "states_ixs": list(range(len(said) + 1)),
                "actions_ixs": list(range(len(said))),
                "dones": [1] * len(said) + [0],
                "truncated": i % 3 == 0 and not next_ids,
                "weight": round(generator.uniform(0.25, 2.0), 3),
                "next_input_ids": next_ids,
                "next_attention_mask": [1] * len(next_ids),
            }
        )
    return rows


ROWS = draw_rows(4)


@pytest.fixture(scope="session")
def make_seq2seq_base():
    def make(seed: int = 0, **config) -> T5ForConditionalGeneration:
        torch.manual_seed(seed)
        tokens = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "pad_token_id": 0, "decoder_start_token_id": 0}
        return T5ForConditionalGeneration(T5Config(**{**tokens, **SIZES, **config}))

    return make


@pytest.fixture(scope="session")
def make_seq2seq_model(make_seq2seq_base):
    def make(seed: int = 0, config: dict | None = None, **head_arguments) -> ILQLForSeq2SeqLM:
        base = make_seq2seq_base(seed, **(config or {}))
        return AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(base, **head_arguments)

    return make


@pytest.fixture
def make_seq2seq_trainer(make_trainer, make_seq2seq_model):
    def make(model=None, train_dataset=None, *args, **kwargs):
        model = make_seq2seq_model() if model is None else model
        train_dataset = Dataset.from_list(draw_rows(16)) if train_dataset is None else train_dataset
        return make_trainer(model, train_dataset, *args, **kwargs)

    return make


class Gradients(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None})


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


class TestModel:
    @pytest.mark.parametrize("heads", [False, True])
    def test_by_name(self, make_seq2seq_base, make_seq2seq_model, make_seq2seq_trainer, tmp_path, heads):
        saved = make_seq2seq_model(head_type="linear") if heads else make_seq2seq_base()
        saved.save_pretrained(tmp_path / "model")
        kwargs = {} if heads else {"model_init_kwargs": {"head_type": "linear", "beta": 2.5}}
        trainer = make_seq2seq_trainer(str(tmp_path / "model"), **kwargs)
        assert type(trainer.model) is ILQLForSeq2SeqLM
        assert trainer.model.config.head_type == "linear"
        assert isinstance(trainer.data_collator, DataCollatorForSeq2SeqILQL)
        assert torch.equal(trainer.model.get_input_embeddings().weight, saved.get_input_embeddings().weight)
        trainer.train()
        trainer.save_model()
        loaded = AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(trainer.args.output_dir)
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name

    def test_live_model_without_heads(self, make_seq2seq_base, make_seq2seq_trainer):
        base = make_seq2seq_base()
        trainer = make_seq2seq_trainer(base)
        assert type(trainer.model) is ILQLForSeq2SeqLM and trainer.model.base is base

    def test_decoder_start_must_be_known_and_one(self, make_seq2seq_model, make_seq2seq_trainer):
        model = make_seq2seq_model()
        model.generation_config.decoder_start_token_id = 3
        with pytest.raises(ValueError, match="one and the same token.* is 0, that of `model.generation_config` 3"):
            make_seq2seq_trainer(model)
        model = make_seq2seq_model()
        model.config.decoder_start_token_id = None
        with pytest.raises(ValueError, match="`model.config.decoder_start_token_id` is None"):
            make_seq2seq_trainer(model)

    def test_no_dropout_of_layers_either(self, make_seq2seq_trainer):
        sides = {f"{side}_{name}": x for side in ("encoder", "decoder") for name, x in BART_SIZES.items()}
        config = BartConfig(
            vocab_size=VOCAB_SIZE, pad_token_id=0, eos_token_id=2, d_model=16, max_position_embeddings=32,
            decoder_start_token_id=2, dropout=0.5, attention_dropout=0.5, activation_dropout=0.5, **sides,
        )  # fmt: skip
        base = BartForConditionalGeneration(config)
        data = Dataset.from_list([{**row, "decoder_input_ids": [2, *row["decoder_input_ids"][1:]]} for row in ROWS])
        for disable in (True, False):
            trainer = make_seq2seq_trainer(copy.deepcopy(base), data, disable_dropout=disable)
            model, batch = trainer.model.train(), trainer.data_collator(data.to_list())
            losses = {trainer.compute_loss(model, batch, num_items_in_batch=1).item() for _ in range(4)}
            assert (len(losses) == 1) == disable


class TestKinds:
    def test_rows_of_the_other_kind_raise(self, make_model, make_seq2seq_model, make_trainer, make_dataset):
        with pytest.raises(ValueError, match="have no `decoder_input_ids`, which an encoder-decoder model needs"):
            make_trainer(make_seq2seq_model(), make_dataset())
        with pytest.raises(ValueError, match="have `decoder_input_ids`, which a causal language model does not read"):
            make_trainer(make_model(), Dataset.from_list(draw_rows(4)))

    def test_collator_of_the_other_kind_raises(self, make_seq2seq_trainer, make_trainer):
        trainer = make_seq2seq_trainer(trainer_kwargs={"data_collator": DataCollatorForILQL()})
        with pytest.raises(ValueError, match="Collate them with `DataCollatorForSeq2SeqILQL`"):
            trainer.train()
        trainer = make_trainer(trainer_kwargs={"data_collator": DataCollatorForSeq2SeqILQL()})
        with pytest.raises(ValueError, match="use `DataCollatorForILQL` with a causal model"):
            trainer.train()

    def test_own_collator_without_the_decoder_raises(self, make_seq2seq_trainer):
        def collate(examples):
            batch = DataCollatorForSeq2SeqILQL()(examples)
            del batch["decoder_input_ids"]
            return batch

        trainer = make_seq2seq_trainer(trainer_kwargs={"data_collator": collate}, awac_scale=0.0, freeze_base=True)
        with pytest.raises(ValueError, match="the model needs `decoder_input_ids`"):
            trainer.train()

    def test_left_truncation_raises(self, make_seq2seq_trainer):
        with pytest.raises(ValueError, match='truncation_side="left" would cut the start'):
            make_seq2seq_trainer(truncation_side="left")


class TestLoss:
    @pytest.mark.parametrize("head_type", ["mlp", "tied"])
    def test_loss_is_the_definition_on_rows_alone(self, make_seq2seq_trainer, make_seq2seq_model, head_type):
        rows = draw_rows(7)
        trainer = make_seq2seq_trainer(
            make_seq2seq_model(head_type=head_type), Dataset.from_list(rows), value_min=-9.0, value_max=9.0
        )
        model = trainer.model.eval()
        total = 0.0
        for row in rows:
            batch = ILQLSeq2SeqBatch(**DataCollatorForSeq2SeqILQL()([row]))
            with torch.no_grad():
                output = model(batch.input_ids, decoder_input_ids=batch.decoder_input_ids, output_values=True)
                next_value = torch.zeros(1)
                if row["next_input_ids"]:
                    start = torch.zeros(1, 1, dtype=torch.long)
                    next_value = model(batch.next_input_ids, decoder_input_ids=start, output_values=True).value[:, 0]
                loss, _ = ilql_loss(
                    output.logits,
                    tuple(q[:, :-1] for q in output.qs),
                    tuple(q[:, :-1] for q in output.target_qs),
                    output.value,
                    batch,
                    next_value=next_value,
                    value_min=-9.0,
                    value_max=9.0,
                    **{name: getattr(trainer.args, name) for name in ("tau", "gamma", "cql_scale", "awac_scale")},
                    awac_beta=trainer.args.awac_beta,
                )
            total += loss.item() * row["weight"] * len(row["rewards"])
        expected = total / sum(row["weight"] * len(row["rewards"]) for row in rows)
        with torch.no_grad():
            loss = trainer.compute_loss(model, trainer.data_collator(rows))
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        assert trainer.evaluate(Dataset.from_list(rows))["eval_loss"] == pytest.approx(expected, rel=1e-5)

    def test_gradient_accumulation_exact(self, make_seq2seq_trainer, state_of, relative_error):
        runs = []
        for batch_size, accumulation in ((16, 1), (4, 4)):
            recorder = Gradients()
            trainer = make_seq2seq_trainer(
                train_dataset=Dataset.from_list(draw_rows(40)),
                trainer_kwargs={"callbacks": [recorder]},
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
                optim="sgd",
                learning_rate=0.1,
                max_steps=4,
                logging_strategy="steps",
                logging_steps=1,
            )
            trainer.train()
            runs.append((recorder.steps, state_of(trainer), [x for x in trainer.state.log_history if "loss" in x]))
        (gradients, state, log), (other_gradients, other_state, other_log) = runs
        assert len(gradients) == len(other_gradients) == len(log) == 4
        assert {"loss/q", "loss/awac", "truncated_fraction"} <= log[0].keys()
        for got, expected in zip(other_gradients, gradients, strict=True):
            assert relative_error(got, expected) <= 1e-5
        assert relative_error(other_state, state) <= 1e-5
        for ours, theirs in zip(other_log, log, strict=True):
            # The batches of an epoch are counted another way.
            assert {**ours, "epoch": 0} == pytest.approx({**theirs, "epoch": 0}, rel=1e-4, abs=1e-5)

    def test_resume_exact(self, make_seq2seq_trainer, make_seq2seq_model, tmp_path, state_of, assert_same_bits):
        def train(output_dir, callbacks=(), resume=None):
            trainer = make_seq2seq_trainer(
                make_seq2seq_model(config={"dropout_rate": 0.2}),
                Dataset.from_list(draw_rows(13)),
                tmp_path / output_dir,
                {"callbacks": list(callbacks)},
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                save_strategy="steps",
                save_steps=3,
                max_steps=6,
                learning_rate=1e-2,
                alpha=0.1,
                disable_dropout=False,
            )
            trainer.train(resume_from_checkpoint=resume)
            return state_of(trainer)

        state = train("unbroken")
        half = train("broken", [StopAt(3)])
        assert any(not torch.equal(half[name], state[name]) for name in state)
        assert_same_bits(train("broken", resume=True), state)


class TestEvaluation:
    def test_independent_of_batch_size(self, make_seq2seq_trainer):
        data = Dataset.from_list(draw_rows(11, seed=5))
        results = []
        for batch_size in (2, 11):
            metrics = make_seq2seq_trainer(per_device_eval_batch_size=batch_size).evaluate(data)
            results.append({k: x for k, x in metrics.items() if k == "eval_loss" or "/" in k or "fraction" in k})
        assert results[0] == pytest.approx(results[1], rel=1e-5, abs=1e-6)

    def test_compute_metrics_gets_the_decoder(self, make_seq2seq_trainer, make_seq2seq_model):
        rows = draw_rows(5)
        seen = []

        def compute_metrics(prediction):
            seen.append(prediction)
            return {"rows": len(prediction.predictions)}

        model = make_seq2seq_model(beta=2.0)
        trainer = make_seq2seq_trainer(
            model,
            trainer_kwargs={"compute_metrics": compute_metrics, "eval_dataset": Dataset.from_list(rows)},
            per_device_eval_batch_size=2,
        )
        assert trainer.evaluate()["eval_rows"] == 5
        (prediction,) = seen
        width = max(len(row["decoder_input_ids"]) for row in rows)
        assert prediction.predictions.shape == (5, width, VOCAB_SIZE) and prediction.label_ids.shape == (5, width)
        for row, logits, labels in zip(rows, prediction.predictions, prediction.label_ids, strict=True):
            said = row["decoder_input_ids"]
            assert labels.tolist() == [-100, *said[1:]] + [-100] * (width - len(said))
            decoder, encoder = torch.tensor([said]), torch.tensor([row["input_ids"]])
            with torch.no_grad():
                expected = model(encoder, decoder_input_ids=decoder).logits[0]
            np.testing.assert_allclose(logits[: len(said)], expected, rtol=1e-4, atol=1e-4)


class TestData:
    def test_conversations(self, make_seq2seq_trainer, tokenizer):
        trainer = make_seq2seq_trainer(
            train_dataset=Dataset.from_list([CHAT] * 4), trainer_kwargs={"processing_class": tokenizer}, gamma=0.5
        )
        assert trainer.train_dataset.num_rows == 8
        first, second = trainer.train_dataset[0], trainer.train_dataset[1]
        ids = tokenizer(conversation_text(CHAT["messages"][:1]))["input_ids"]
        assert first["input_ids"] == ids
        assert first["next_input_ids"] == second["input_ids"]
        assert (trainer.value_min, trainer.value_max) == (-2.0, 2.0)
        trainer.train()
        assert trainer.state.global_step == 2

    def test_window_is_stored(self, make_seq2seq_trainer, tokenizer):
        trainer = make_seq2seq_trainer(
            train_dataset=Dataset.from_list([CHAT]), trainer_kwargs={"processing_class": tokenizer}, history_window=1
        )
        assert trainer.model.config.history_window == 1
        assert trainer.train_dataset[1]["input_ids"] == tokenizer("user: e")["input_ids"]

    def test_monte_carlo_wants_whole_episodes(self, make_seq2seq_trainer, make_seq2seq_model, tokenizer):
        kwargs = {"trainer_kwargs": {"processing_class": tokenizer}, "target": "mc"}
        model = make_seq2seq_model(num_q_heads=1)
        with pytest.raises(ValueError, match="which a row of one turn does not hold"):
            make_seq2seq_trainer(model, Dataset.from_list([CHAT]), **kwargs)
        make_seq2seq_trainer(model, Dataset.from_dict(TEXT), **kwargs).train()

    def test_standardised_stream_and_trlx(self, make_seq2seq_trainer, tokenizer):
        kwargs = {"trainer_kwargs": {"processing_class": tokenizer}}
        trainer = make_seq2seq_trainer(train_dataset=Dataset.from_dict(TEXT), reward_scaling="standardize", **kwargs)
        ends = [row["rewards"][-1] for row in trainer.train_dataset]
        assert np.mean(ends) == pytest.approx(0.0, abs=1e-9) and np.std(ends, ddof=1) == pytest.approx(1.0)
        stream = Dataset.from_dict(TEXT).to_iterable_dataset()
        make_seq2seq_trainer(train_dataset=stream, value_min=0.0, value_max=3.0, **kwargs).train()
        samples = [["a b", "c d"], ["e", "f g h"]]
        elements = make_experience_seq2seq(samples, [1.0, 0.0], tokenizer, decoder_start_token_id=0)
        make_seq2seq_trainer(train_dataset=Dataset.from_list([vars(x) for x in elements])).train()


class TestSampleTable:
    def test_sample(self, make_seq2seq_trainer, tokenizer, capsys):
        trainer = make_seq2seq_trainer(
            train_dataset=Dataset.from_dict(TEXT),
            trainer_kwargs={"processing_class": tokenizer},
            log_completions=True,
            log_completions_steps=1,
            num_completions_to_print=2,
            max_completion_length=5,
            max_steps=1,
        )
        trainer.train()
        assert "Completions at step 1" in capsys.readouterr().out
        rows = SampleTableCallback(trainer, 1, 3, 5).sample()
        assert [row[0] for row in rows] == TEXT["prompt"][:3]
        assert all(0 <= len(row[1].split()) <= 5 for row in rows) and any(row[1] for row in rows)

    @pytest.mark.parametrize("head_type", ["mlp", "tied"])
    def test_score_equals_dense_values(self, make_seq2seq_model, head_type):
        model = make_seq2seq_model(head_type=head_type).eval()
        encoder, said = torch.tensor([[3, 4, 5]]), torch.tensor([[0, 7, 8, EOS]])
        value, q = SampleTableCallback.score(model, said, 1, ILQLTrainer.state_values, encoder)
        output = model(encoder, decoder_input_ids=said, output_values=True)
        taken = torch.stack(output.target_qs).amin(0)[0, :-1].gather(1, said[0, 1:, None])
        assert value == pytest.approx(output.value[0, 0].item(), abs=1e-6)
        assert q == pytest.approx(taken.mean().item(), abs=1e-6)


class TestLearning:
    def test_policy_says_what_was_rewarded(self, make_seq2seq_trainer, make_seq2seq_model, tokenizer):
        """The data says both answers to each question equally often; which one is rewarded depends on the question."""
        questions, (low, high) = "abcd", ("q", "r s")
        right = {question: (low, high)[i % 2] for i, question in enumerate(questions)}
        rows = [
            {"prompt": question, "completion": answer, "reward": float(answer == right[question])}
            for question in questions
            for answer in (low, high)
        ]
        trainer = make_seq2seq_trainer(
            make_seq2seq_model(config={"num_layers": 1, "d_model": 32}),
            Dataset.from_list(rows),
            trainer_kwargs={"processing_class": tokenizer},
            per_device_train_batch_size=8,
            max_steps=150,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            alpha=0.1,
            gamma=1.0,
        )
        trainer.train()
        model = trainer.model.eval()
        inputs = tokenizer(list(questions), return_tensors="pt")

        def share(beta: float) -> float:
            torch.manual_seed(0)
            said = model.generate(
                inputs["input_ids"].repeat(50, 1), beta=beta, do_sample=True, top_k=0, max_new_tokens=4
            )
            texts = tokenizer.batch_decode(said, skip_special_tokens=True)
            return np.mean([text == right[q] for text, q in zip(texts, list(questions) * 50, strict=True)])

        assert 0.35 < share(0.0) < 0.65
        assert share(8.0) > 0.9


class TestExample:
    def test_command_line_script(self, make_seq2seq_base, tokenizer, tmp_path):
        make_seq2seq_base().save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(CHAT) for _ in range(4)))
        spec = importlib.util.spec_from_file_location("ilql_example", EXAMPLE)
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        options = (
            f"--model_name_or_path {tmp_path}/base --dataset {tmp_path}/data.jsonl --output_dir {tmp_path}/policy"
        )
        options += " --max_steps 2 --head_type tied --beta 3.5 --report_to none --use_cpu --disable_tqdm true"
        parser = TrlParser((example.ScriptArguments, ILQLConfig))
        trainer = example.main(*parser.parse_args_and_config(options.split()))
        assert trainer.train_dataset.num_rows == 8
        model = AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(tmp_path / "policy")
        assert (model.config.head_type, model.config.beta) == ("tied", 3.5)
        inputs = AutoTokenizer.from_pretrained(tmp_path / "policy")("user: a b", return_tensors="pt")
        said = model.generate(input_ids=inputs["input_ids"], max_new_tokens=3, do_sample=True)
        assert said[0, 0] == 0 and said.shape[1] > 1


class TestModelCard:
    @pytest.mark.parametrize("conversational", [True, False])
    def test_use(self, make_seq2seq_trainer, tokenizer, conversational, tmp_path):
        data = Dataset.from_list([CHAT]) if conversational else Dataset.from_dict(TEXT)
        trainer = make_seq2seq_trainer(
            train_dataset=data, trainer_kwargs={"processing_class": tokenizer}, output_dir=tmp_path / "policy"
        )
        trainer.save_model()
        card = (tmp_path / "policy" / "README.md").read_text()
        code = (
            card.split("```python\n")[1].split("```")[0].replace('from_pretrained("policy")', "from_pretrained(path)")
        )
        assert ("conversation_text" in code) == conversational
        assert "AutoModelForSeq2SeqLMWithILQLHeads" in code and "apply_chat_template" not in code
        exec(code, {"path": tmp_path / "policy"})
