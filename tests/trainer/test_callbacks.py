# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM

from hf_qrl import AutoModelForCausalLMWithILQLHeads, ILQLTrainer
from hf_qrl.trainer.callbacks import SampleTableCallback


TABLE = {
    "log_completions": True,
    "log_completions_steps": 2,
    "num_completions_to_print": 2,
    "max_completion_length": 5,
}
RAW = {
    "prompt": ["a b", "c", "d e f", "g"],
    "completion": [" c d", " h i j k", " l", " m n o"],
    "reward": [1, 0, 2, 3.0],
}


@pytest.fixture
def train(make_trainer, make_model, tokenizer):
    def run(eval_dataset=None, **args):
        trainer = make_trainer(
            make_model(config={"attention_dropout": 0.2}),
            Dataset.from_dict(RAW),
            trainer_kwargs={"processing_class": tokenizer, "eval_dataset": eval_dataset},
            **{
                "per_device_train_batch_size": 1,
                "max_steps": 5,
                "disable_dropout": False,
                "learning_rate": 1e-2,
                **args,
            },
        )
        trainer.train()
        return trainer

    return run


class TestSampleTable:
    def test_prints_table_at_its_steps(self, train, capsys):
        train(**TABLE)
        out = capsys.readouterr().out
        assert "Completions at step 2" in out and "Completions at step 4" in out and "at step 3" not in out
        for word in ("Prompt", "Completion", "V", "Q", "a b"):
            assert word in out

    def test_leaves_training_as_it_is(self, train, state_of, assert_same_bits, capsys):
        assert_same_bits(state_of(train(**TABLE)), state_of(train()))

    @pytest.mark.parametrize("kind", ["none", "set", "dict", "stream"])
    def test_prompts_come_from_evaluation_data_if_any(self, train, kind):
        other = Dataset.from_dict({"prompt": ["q r"], "completion": [" s"], "reward": [1.0]})
        eval_dataset = {"none": None, "set": other, "dict": {"x": other}, "stream": other.to_iterable_dataset()}[kind]
        trainer = train(eval_dataset)
        rows = SampleTableCallback(trainer, 1, 3, 4).sample()
        assert [row[0] for row in rows] == (["a b", "c", "d e f"] if kind == "none" else ["q r"])

    def test_sample_keeps_random_state_and_mode(self, train):
        trainer = train()
        trainer.model.train()
        state = torch.get_rng_state()
        first, second = (SampleTableCallback(trainer, 1, 2, 6).sample() for _ in range(2))
        assert first == second
        assert torch.equal(torch.get_rng_state(), state)
        assert trainer.model.training

    @pytest.mark.parametrize("head_type", ["mlp", "linear", "tied", "dueling"])
    def test_score_equals_dense_values(self, make_model, head_type):
        model = make_model(head_type=head_type).eval()
        tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
        value, q = SampleTableCallback.score(model, tokens, 2, ILQLTrainer.state_values)
        output = model(tokens, output_values=True)
        taken = torch.stack(output.target_qs).amin(0)[0, 1:-1].gather(1, tokens[0, 2:, None])
        assert value == pytest.approx(output.value[0, 1].item(), abs=1e-6)
        assert q == pytest.approx(taken.mean().item(), abs=1e-6)

    def test_score_is_in_units_of_the_rewards(self, make_model):
        model = make_model().eval()
        tokens = torch.tensor([[3, 4, 5, 6]])
        value, q = SampleTableCallback.score(model, tokens, 2, ILQLTrainer.state_values)
        model.config.reward_mean, model.config.reward_std = 10.0, 2.0
        scaled = SampleTableCallback.score(model, tokens, 2, ILQLTrainer.state_values)
        assert scaled == pytest.approx((2 * value + 10, 2 * q + 10))

    def test_without_tokenizer_raises(self, make_trainer):
        with pytest.raises(ValueError, match="`log_completions` needs a `processing_class`"):
            make_trainer(**TABLE)


class ScaledLlamaForCausalLM(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output


class CentredLlamaForCausalLM(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits - output.logits.mean(-1, keepdim=True)
        return output


class TestLMHeadCheck:
    @pytest.mark.parametrize("broken", [ScaledLlamaForCausalLM, CentredLlamaForCausalLM])
    def test_unknown_outputs_are_refused_before_the_first_step(self, make_base, make_trainer, state_of, broken):
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(broken(make_base(initializer_range=0.3).config))
        trainer = make_trainer(model)
        before = state_of(trainer)
        with pytest.raises(ValueError, match=f"logits of {broken.__name__} are not the projection"):
            trainer.train()
        assert trainer.state.global_step == 0
        assert all(torch.equal(before[name], tensor) for name, tensor in state_of(trainer).items())

    @pytest.mark.parametrize("head_arguments", [{}, {"head_type": "tied", "policy_top_k": 3}])
    def test_known_outputs_pass(self, make_model, make_trainer, head_arguments):
        trainer = make_trainer(make_model(**head_arguments))
        trainer.train()
        assert trainer.state.global_step == 2
        assert trainer.model.training
