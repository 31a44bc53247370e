# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Training with adapters."""

import copy

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from peft import (
    LoraConfig,
    PeftModelForCausalLM,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_qrl import AutoModelForCausalLMWithILQLHeads, AutoModelForSeq2SeqLMWithILQLHeads, ILQLForCausalLM
from hf_qrl.trainer.adapters import put_adapter


VOCAB_SIZE = 24
# Large enough that a few steps move everything.
TRAINING = {"learning_rate": 1e-2, "alpha": 0.3, "lr_scheduler_type": "constant"}
LORA = LoraConfig(r=4, lora_alpha=8)


@pytest.fixture
def train(make_trainer):
    """Returns a function that makes a trainer with an adapter; keyword arguments as those of `make_trainer`."""

    def make(model=None, peft_config=LORA, trainer_kwargs=None, **args):
        return make_trainer(
            model, trainer_kwargs={**(trainer_kwargs or {}), "peft_config": peft_config}, **{**TRAINING, **args}
        )

    return make


def active(trainer) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in trainer.model.state_dict().items() if ".default." in name}


def frozen(trainer) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in trainer.model.state_dict().items() if ".default." not in name}


class TestWhatIsTrained:
    def test_adapter_and_heads_and_nothing_else(self, train, assert_same_bits):
        trainer = train(max_steps=3)
        assert isinstance(trainer.model, PeftModelForCausalLM) and type(trainer.bare_model) is ILQLForCausalLM
        before, rest = active(trainer), frozen(trainer)
        trainer.train()
        names = {id(x): name for name, x in trainer.model.named_parameters()}
        optimized = {names[id(x)] for group in trainer.optimizer.param_groups for x in group["params"]}
        online = [name for name in before if "target_q" not in name]
        assert optimized == {name for name, x in trainer.model.named_parameters() if ".default." in name}
        assert optimized == set(online)
        after = active(trainer)
        assert not [name for name in before if torch.equal(before[name], after[name])]  # targets too
        assert_same_bits(frozen(trainer), rest)
        # The heads that act without the adapter are none: they are in no file.
        assert not any(x.any() for x in trainer.bare_model.heads.original_module.state_dict().values())

    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_targets_are_the_average_of_the_active_heads(self, train, accumulation):
        trainer = train(max_steps=4, gradient_accumulation_steps=accumulation, per_device_train_batch_size=2)
        heads = trainer.bare_model.heads.modules_to_save["default"]
        pairs = [(heads.q[i].weight, heads.target_q[i].weight) for i in (0, 1)]
        expected = [target.clone() for _, target in pairs]
        step = trainer.create_optimizer().step

        def step_and_average(*args, **kwargs):
            step(*args, **kwargs)
            for (online, _), average in zip(pairs, expected, strict=True):
                average.lerp_(online.detach(), 0.3)

        trainer.optimizer.step = step_and_average
        starts = [average.clone() for average in expected]
        trainer.train()
        for (_, target), average, start in zip(pairs, expected, starts, strict=True):
            assert torch.equal(target, average) and not torch.allclose(target, start)

    def test_targets_are_never_trainable(self, train):
        model = train().model

        def check() -> None:
            assert not [name for name, _ in model.named_parameters() if "target" in name]
            assert not [name for name, x in model.named_buffers() if x.requires_grad]

        check()
        with model.disable_adapter():
            check()
        check()
        model.set_adapter("default")
        check()

    def test_heads_stay_float32_on_a_bfloat16_model(self, train, make_base, tmp_path):
        make_base().to(torch.bfloat16).save_pretrained(tmp_path / "base")
        trainer = train(str(tmp_path / "base"), model_init_kwargs={"dtype": "bfloat16"})
        trainer.train()
        heads = trainer.bare_model.heads.modules_to_save["default"]
        assert {x.dtype for x in heads.state_dict().values()} == {torch.float32}
        dtypes = {name: x.dtype for name, x in trainer.model.named_parameters()}
        assert {x for name, x in dtypes.items() if "lora" in name} == {torch.float32}
        assert {x for name, x in dtypes.items() if "base_layer" in name} == {torch.bfloat16}
        trainer.save_model()
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(trainer.args.output_dir)
        assert {x.dtype for x in loaded.get_base_model().heads.state_dict().values()} == {torch.float32}

    def test_a_whole_output_embedding_is_trained_where_it_is_asked_for(self, train, make_ids, tmp_path):
        trainer = train(peft_config=LoraConfig(modules_to_save=["lm_head"]), max_steps=2)
        head = trainer.bare_model.get_output_embeddings()
        before = head.original_module.weight.clone(), head.modules_to_save["default"].weight.clone()
        trainer.train()
        assert torch.equal(head.original_module.weight, before[0])
        assert not torch.allclose(head.modules_to_save["default"].weight, before[1])
        # The loss reads the copy: with it changed alone, the loss changes.
        loss = trainer.evaluate(trainer.train_dataset)["eval_loss/awac"]
        with torch.no_grad():
            head.modules_to_save["default"].weight.mul_(3.0)
        assert abs(trainer.evaluate(trainer.train_dataset)["eval_loss/awac"] - loss) > 0.01


@pytest.fixture
def make_ids():
    return lambda: torch.arange(1, 13).reshape(2, 6)


class TestConfiguration:
    def test_defaults_are_filled_into_a_copy(self, train):
        config = LoraConfig(modules_to_save=["norm"])
        before = copy.deepcopy(config)
        used = train(peft_config=config).model.peft_config["default"]
        assert config == before
        assert used.modules_to_save == ["norm", "heads"]
        assert used.target_modules == r"base\..*\.(q_proj|v_proj)"
        assert used.task_type == "CAUSAL_LM"

    @pytest.mark.parametrize(
        ("model", "layers"),
        [
            (GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=24)), {"c_attn"}),
            (
                Qwen3ForCausalLM(
                    Qwen3Config(
                        vocab_size=24,
                        hidden_size=16,
                        intermediate_size=24,
                        num_hidden_layers=1,
                        num_attention_heads=2,
                        num_key_value_heads=2,
                        head_dim=8,
                        tie_word_embeddings=True,
                    )
                ),
                {"q_proj", "v_proj"},
            ),
        ],
        ids=["gpt2", "qwen3"],
    )
    def test_default_targets(self, model, layers):
        model = put_adapter(ILQLForCausalLM.from_base(copy.deepcopy(model)), LoraConfig())
        assert {name.split(".")[-1] for name in model.targeted_module_names} == layers

    @pytest.mark.parametrize("tie", [False, True])
    @pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], r".*\.(up|down)_proj"])
    def test_chosen_targets(self, train, make_model, targets, tie):
        model = make_model(config={"tie_word_embeddings": tie}, head_type="mlp")
        trainer = train(model, LoraConfig(target_modules=targets))
        names = {".".join(name.split(".")[-2:]) for name in trainer.model.targeted_module_names}
        assert all(name.startswith(("self_attn.", "mlp.")) for name in names)
        assert len(names) == {"all-linear": 7}.get(targets if isinstance(targets, str) else "", 2)
        trainer.train()

    def test_unknown_architecture_needs_targets(self):
        config = SmolLM3Config(
            vocab_size=24,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
        )
        model = ILQLForCausalLM.from_base(SmolLM3ForCausalLM(config))
        with pytest.raises(ValueError, match=r"no default for the `target_modules`.*'smollm3'.*all-linear"):
            put_adapter(model, LoraConfig())
        assert all(x.requires_grad for x in model.parameters())

    def test_revision_is_kept(self, make_model):
        assert put_adapter(make_model(), LoraConfig(), "v2").peft_config["default"].revision == "v2"


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PromptTuningConfig is not supported"),
            (PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PrefixTuningConfig is not supported"),
            (LoraConfig(target_modules=["q_proj", "lm_head"]), r"changes 'base\.lm_head'.*read that weight"),
            (LoraConfig(target_modules=["heads.q.0.stem.0", "q_proj"]), "names modules of the heads"),
            (LoraConfig(target_modules=r"heads\..*"), "names modules of the heads"),
            (LoraConfig(target_modules=["nothing"]), "No modules were targeted"),
            (LoraConfig(inference_mode=True), "adapter is frozen"),
            (LoraConfig(task_type="SEQ_CLS"), "`task_type` of the adapter must be 'CAUSAL_LM'"),
            ({"r": 4}, "must be a `peft.PeftConfig`.*got dict"),
        ],
    )
    def test_configurations(self, train, make_model, config, message):
        model = make_model()
        with pytest.raises(ValueError, match=message):
            train(model, config)
        # The model is as it was, and can be given a better one.
        assert all(x.requires_grad for x in model.parameters())
        train(model).train()

    @pytest.mark.parametrize(
        "config",
        [
            LoraConfig(target_modules=["q_proj", "embed_tokens"]),
            LoraConfig(modules_to_save=["lm_head"]),
            LoraConfig(trainable_token_indices=[3, 4]),
        ],
    )
    def test_tied_output_embedding(self, train, make_model, config):
        model = make_model(config={"tie_word_embeddings": True})
        with pytest.raises(ValueError, match="shares its weight with|ties to its input embedding"):
            train(model, config)

    def test_arguments(self, train):
        with pytest.raises(ValueError, match="`freeze_base=True` trains the heads only, and an adapter"):
            train(freeze_base=True)
        with pytest.raises(ValueError, match="nothing holds the language model to the data while its adapter"):
            train(awac_scale=0.0)

    def test_live_model_is_not_quantised(self, train):
        with pytest.raises(ValueError, match="`quantization_config` goes with a model given by name"):
            train(trainer_kwargs={"quantization_config": object()})

    def test_quantization_given_twice(self, train, make_base, tmp_path):
        make_base().save_pretrained(tmp_path / "base")
        with pytest.raises(ValueError, match="`quantization_config` is given twice"):
            train(
                str(tmp_path / "base"),
                trainer_kwargs={"quantization_config": object()},
                model_init_kwargs={"quantization_config": {}},
            )

    def test_quantised_model_without_an_adapter(self, train, make_base):
        base = make_base()
        base.is_loaded_in_8bit = True  # as its loading would have left it
        model = ILQLForCausalLM.from_base(base)
        with pytest.raises(ValueError, match="is quantised, and its weights cannot be trained"):
            train(model, None)
        train(model, None, freeze_base=True)
        assert train(ILQLForCausalLM.from_base(base)).bare_model.is_loaded_in_8bit

    def test_adapter_and_configuration(self, train, make_model):
        with pytest.raises(ValueError, match="has an adapter already, and `peft_config` asks for another"):
            train(put_adapter(make_model(), LORA))

    def test_adapter_on_a_model_without_heads(self, train, make_base):
        model = get_peft_model(make_base(), LoraConfig(task_type="CAUSAL_LM"))
        with pytest.raises(ValueError, match="on a LlamaForCausalLM without heads. Merge it"):
            train(model, None)

    def test_adapter_without_the_heads(self, train, make_model):
        model = get_peft_model(make_model(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
        with pytest.raises(ValueError, match=r'does not hold the heads.*modules_to_save=\["heads"\]'):
            train(model, None)

    def test_frozen_adapter(self, train, make_model):
        config = LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["heads"], inference_mode=True
        )
        model = get_peft_model(make_model(), config)
        with pytest.raises(ValueError, match="is frozen. Load it with `is_trainable=True`"):
            train(model, None)

    def test_other_and_several_adapters(self, train, make_model):
        config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["heads"])
        model = get_peft_model(make_model(), config)
        model.add_adapter("second", LoraConfig(target_modules=["v_proj"]))
        model.base_model.set_adapter(["default", "second"])
        with pytest.raises(ValueError, match=r"active ones are \['default', 'second'\]"):
            train(model, None)
        with pytest.raises(ValueError, match=r"active ones are \['mine'\]"):
            train(get_peft_model(make_model(), config, adapter_name="mine"), None)

    @pytest.mark.parametrize("peft_config", [None, LORA])
    def test_injected_adapters(self, train, make_model, peft_config):
        model = inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), make_model())
        with pytest.raises(ValueError, match="without a `peft.PeftModel` around it"):
            train(model, peft_config)

    def test_second_trainer_of_the_same_model(self, train, make_model):
        model = make_model()
        train(model)
        with pytest.raises(ValueError, match="Load the model anew"):
            train(model)


class TestCheckpoints:
    def test_resume_is_exact(self, train, assert_same_bits, tmp_path):
        args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "disable_dropout": False}
        whole = train(output_dir=tmp_path / "whole", **args)
        whole.train()
        stopped = train(output_dir=tmp_path / "resumed", **{**args, "max_steps": 2})
        stopped.train()
        resumed = train(output_dir=tmp_path / "resumed", **args)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 4
        assert_same_bits(active(resumed), active(whole))
        assert_same_bits(frozen(resumed), frozen(whole))

    def test_best_model_is_restored_with_its_targets(self, train, make_dataset, assert_same_bits):
        trainer = train(
            max_steps=4,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="q/mean",
            greater_is_better=False,
            trainer_kwargs={"eval_dataset": make_dataset(6, seed=5)},
        )
        trainer.train()
        best = trainer.state.best_model_checkpoint
        saved = load_file(f"{best}/adapter_model.safetensors")
        heads = {
            name.removeprefix("base_model.model.heads."): x
            for name, x in saved.items()
            if name.startswith("base_model.model.heads.")
        }
        assert [name for name in heads if "target_q" in name]
        assert_same_bits(trainer.bare_model.heads.modules_to_save["default"].state_dict(), heads)
        assert trainer.evaluate()["eval_q/mean"] == pytest.approx(trainer.state.best_metric, rel=1e-5)

    def test_resuming_beside_the_weights_of_another_run_is_refused(self, train, make_model, tmp_path):
        args = {"save_strategy": "steps", "save_steps": 2, "output_dir": tmp_path / "out"}
        train(**args).train()
        make_model().save_pretrained(tmp_path / "out" / "checkpoint-2")
        with pytest.raises(ValueError, match="holds both an adapter"):
            train(**args, max_steps=4).train(resume_from_checkpoint=True)

    def test_saved_model_loads_alone_and_trains_on(self, train, make_base, make_ids, assert_same_bits, tmp_path):
        make_base().save_pretrained(tmp_path / "base")
        trainer = train(
            str(tmp_path / "base"), history_window=None, model_init_kwargs={"head_type": "tied", "beta": 3.0}
        )
        trainer.train()
        trainer.save_model()
        out = tmp_path / "out"
        files = {path.name for path in out.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "config.json", "README.md"} <= files
        assert not [name for name in files if name.startswith("model")]
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(out)
        assert (loaded.config.head_type, loaded.config.beta) == ("tied", 3.0)
        trainer.model.eval()
        assert torch.equal(loaded(input_ids=make_ids()).logits, trainer.model(input_ids=make_ids()).logits)
        # By name, or live.
        for model in (str(out), AutoModelForCausalLMWithILQLHeads.from_pretrained(out, is_trainable=True)):
            again = train(model, None, output_dir=tmp_path / "again")
            assert_same_bits(active(again), active(trainer))
            again.train()
            assert not [name for name, x in active(again).items() if torch.equal(x, active(trainer)[name])]
        again.save_model()
        config = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "again").peft_config["default"]
        assert config.base_model_name_or_path == str(tmp_path / "base")

    def test_model_card_is_ours(self, train):
        trainer = train()
        trainer.train()
        trainer.save_model()
        card = ModelCard.load(f"{trainer.args.output_dir}/README.md")
        assert {"hf_qrl", "ilql"} <= set(card.data.tags)
        assert card.data.library_name == "hf_qrl"
        assert "ILQL" in card.text and "More Information Needed" not in card.text

    def test_adapter_made_with_peft_alone_is_trained_and_saved(self, train, make_base, make_ids, tmp_path):
        make_base().save_pretrained(tmp_path / "base")
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "base", head_type="linear")
        model = get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["heads"])
        )
        trainer = train(model, None)
        trainer.train()
        trainer.save_model()
        trainer.model.eval()
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(trainer.args.output_dir)
        assert torch.equal(loaded(input_ids=make_ids()).logits, trainer.model(input_ids=make_ids()).logits)
        with trainer.model.disable_adapter(), loaded.disable_adapter():
            expected = make_base().eval()(make_ids()).logits
            assert torch.equal(loaded(input_ids=make_ids()).logits, expected)
            assert torch.equal(trainer.model(input_ids=make_ids()).logits, expected)

    def test_adapter_on_trained_heads(self, train, make_trainer, make_ids, tmp_path):
        first = make_trainer(output_dir=tmp_path / "first", **TRAINING)
        first.train()
        first.save_model()
        trainer = train(str(tmp_path / "first"))
        start = active(trainer)["base_model.model.heads.modules_to_save.default.target_q.0.weight"]
        assert torch.equal(start, first.bare_model.heads.target_q[0].weight)
        trainer.train()
        trainer.save_model()
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(trainer.args.output_dir)
        with loaded.disable_adapter():
            expected = ILQLForCausalLM.from_pretrained(tmp_path / "first")(make_ids()).logits
            assert torch.equal(loaded(input_ids=make_ids()).logits, expected)

    def test_merged_model_trains_on(self, train, make_trainer, make_base, make_ids, tmp_path):
        make_base().save_pretrained(tmp_path / "base")
        trainer = train(str(tmp_path / "base"))
        trainer.train()
        trainer.model.eval()
        expected = trainer.model(input_ids=make_ids()).logits
        merged = trainer.model.merge_and_unload()
        assert torch.allclose(merged(input_ids=make_ids()).logits, expected, atol=1e-5)
        merged.save_pretrained(tmp_path / "merged")
        again = make_trainer(str(tmp_path / "merged"), output_dir=tmp_path / "again", **TRAINING)
        again.train()
        assert not torch.allclose(again.bare_model(input_ids=make_ids()).logits, expected, atol=1e-3)


class TestTraining:
    @pytest.mark.parametrize("use_reentrant", [None, False, True])
    def test_gradient_checkpointing_changes_nothing(self, train, relative_error, use_reentrant, tmp_path):
        plain = train(max_steps=3, output_dir=tmp_path / "plain")
        plain.train()
        kwargs = None if use_reentrant is None else {"use_reentrant": use_reentrant}
        trainer = train(max_steps=3, activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)
        calls = []
        layer = trainer.bare_model.base.model.layers[0].self_attn
        layer.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        trainer.train()
        assert relative_error(active(trainer), active(plain)) < 1e-5
        # Each layer ran a second time in the backward passes.
        assert len(calls) > 3 * 2

    def test_what_zero_3_needs(self, train, make_base, monkeypatch):
        monkeypatch.setattr("hf_qrl.trainer.adapters.is_deepspeed_zero3_enabled", lambda: True)
        trainer = train(ILQLForCausalLM.from_base(make_base().to(torch.bfloat16)), activation_checkpointing=True)
        assert trainer.args.activation_checkpointing_kwargs == {"use_reentrant": True}
        dtypes = {(name.split(".")[2], x.dtype) for name, x in trainer.model.named_parameters()}
        assert dtypes == {("base", torch.bfloat16), ("heads", torch.float32)}

    def test_encoder_decoder(self, train, tokenizer, tmp_path):
        sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB_SIZE}
        torch.manual_seed(0)
        config = T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2)
        T5ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        data = Dataset.from_list([{"prompt": "a b", "completion": "c d", "reward": 1.0}] * 4)
        trainer = train(str(tmp_path / "base"), train_dataset=data, max_steps=2)
        assert trainer.model.peft_config["default"].target_modules == r"base\..*\.(q|v)"
        before, rest = active(trainer), frozen(trainer)
        trainer.train()
        assert not [name for name, x in frozen(trainer).items() if not torch.equal(x, rest[name])]
        assert [name for name, x in active(trainer).items() if "lora_A" in name and not torch.equal(x, before[name])]
        trainer.save_model()
        loaded = AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(trainer.args.output_dir)
        inputs = {"input_ids": torch.tensor([[3, 4, 2]]), "decoder_input_ids": torch.tensor([[0, 5]])}
        trainer.model.eval()
        assert torch.equal(loaded(**inputs).logits, trainer.model(**inputs).logits)
        again = train(trainer.args.output_dir, None, train_dataset=data, output_dir=tmp_path / "again")
        again.train()

    def test_accumulation_changes_nothing(self, train, relative_error, tmp_path):
        # With SGD, for Adam divides by gradients that are almost zero.
        args = {"optim": "sgd", "max_steps": 3, "max_grad_norm": 0.0}
        whole = train(output_dir=tmp_path / "whole", per_device_train_batch_size=8, **args)
        parts = train(
            output_dir=tmp_path / "parts", per_device_train_batch_size=2, gradient_accumulation_steps=4, **args
        )
        start = active(whole)
        for trainer in (whole, parts):
            trainer.train()
        moved = [{name: x - start[name] for name, x in active(trainer).items()} for trainer in (parts, whole)]
        assert relative_error(*moved) < 1e-4

    def test_texts_evaluation_and_tables(self, train, make_base, tokenizer, tmp_path, capsys):
        make_base().save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        rows = [
            {"prompt": "a b", "completion": " c d", "reward": 1.0},
            {"prompt": "a", "completion": " e", "reward": 0.0},
        ]
        data = Dataset.from_list(rows * 4)
        trainer = train(
            str(tmp_path / "base"),
            train_dataset=data,
            trainer_kwargs={
                "eval_dataset": data,
                "compute_metrics": lambda p: {"finite": float((p.predictions > -1e9).all())},
            },
            eval_strategy="steps",
            eval_steps=2,
            log_completions=True,
            log_completions_steps=2,
            max_completion_length=3,
        )
        trainer.train()
        assert "Completions at step 2" in capsys.readouterr().out
        metrics = trainer.evaluate()
        assert metrics["eval_finite"] == 1.0 and metrics["eval_loss/q"] > 0
        trainer.save_model()
        # An adapter brings its own tokenizer.
        (tmp_path / "base" / "tokenizer.json").unlink()
        (tmp_path / "base" / "tokenizer_config.json").unlink()
        train(trainer.args.output_dir, None, train_dataset=data, output_dir=tmp_path / "again").train()


class TestWhatWouldBeLost:
    @pytest.mark.parametrize("target", ["wte", "embed_in"])
    def test_tied_input_embedding_under_any_name(self, make_trainer, target):
        sizes = {"vocab_size": 24, "bos_token_id": None, "eos_token_id": None}
        if target == "wte":
            base = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, **sizes))
        else:
            neox = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
            base = GPTNeoXForCausalLM(GPTNeoXConfig(tie_word_embeddings=True, **neox, **sizes))
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(base)
        with pytest.raises(ValueError, match=f"{target}.*shares its weight with"):
            make_trainer(model, trainer_kwargs={"peft_config": LoraConfig(target_modules=[target])})

    def test_adapter_on_a_model_trained_before_names_no_base(self, make_trainer, make_base, tmp_path):
        make_base().save_pretrained(tmp_path / "base")
        trained = make_trainer(str(tmp_path / "base"))
        assert trained.model.config._name_or_path == str(tmp_path / "base")
        trained.train()
        trainer = make_trainer(trained.model, trainer_kwargs={"peft_config": LORA}, output_dir=tmp_path / "adapter")
        assert trainer.model.peft_config["default"].base_model_name_or_path is None
        trainer.save_model()
        with pytest.raises(ValueError, match="does not say which model it was trained on"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")

    def test_heads_that_cannot_learn_are_refused(self, make_trainer, make_model, make_base, tmp_path):
        make_base().save_pretrained(tmp_path / "base")
        model = make_trainer(str(tmp_path / "base"), trainer_kwargs={"peft_config": LORA}).model
        with torch.no_grad():
            for tensor in model.get_base_model().heads.modules_to_save["default"].state_dict().values():
                tensor.zero_()
        with pytest.raises(ValueError, match="heads of the adapter are all zero"):
            make_trainer(model)
