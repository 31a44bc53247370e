# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A trainer that pushes what it trained."""

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback

from hf_qrl import (
    AutoModelForCausalLMWithILQLHeads,
    ILQLCausalLMConfig,
    ILQLConfig,
    ILQLForCausalLM,
    ILQLTrainer,
    LlamaDuelingQForCausalLM,
    QRLHFConfig,
    QRLHFTrainer,
)
from tests.hub.hub_server import TOKEN, card_errors


REPO = "user/walker"
MODEL = {"README.md", "config.json", "generation_config.json", "model.safetensors", "training_args.bin"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
CODE = {"configuration_ilql.py", "modeling_ilql.py", "heads.py"}
ROWS = [{"prompt": "a b", "completion": " c d", "reward": 1.0}, {"prompt": "a", "completion": " b", "reward": -1.0}]
QUIET = {
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "per_device_train_batch_size": 2,
    "save_strategy": "no",
    "logging_strategy": "no",
    "max_steps": 2,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *"abcdefgh"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")


@pytest.fixture
def make_trainer(hub, make_model, tokenizer, tmp_path):
    """Returns a function that makes a trainer; keyword arguments go into its `args`."""

    def make(model=None, output_dir="walker", **args) -> ILQLTrainer:
        return ILQLTrainer(
            model or make_model("llama"),
            args=ILQLConfig(str(tmp_path / output_dir), **{**QUIET, **args}),
            train_dataset=Dataset.from_list(ROWS * 4),
            eval_dataset=Dataset.from_list(ROWS),
            processing_class=tokenizer,
        )

    return make


@pytest.fixture
def with_code(monkeypatch):
    """Models save their code; the mark is taken off the classes again."""
    for cls, auto_class in [(ILQLCausalLMConfig, "AutoConfig"), (ILQLForCausalLM, "AutoModelForCausalLM")]:
        monkeypatch.setattr(cls, "_auto_class", None)
        cls.register_for_auto_class(auto_class)


def card_of(hub, repo_id: str = REPO, revision: str = "main") -> ModelCard:
    content = hub.files(repo_id, revision)["README.md"].decode()
    assert not card_errors(content)
    return ModelCard(content)


class TestPush:
    def test_pushed_policy_loads_and_generates(self, make_trainer, hub, assert_same_bits):
        trainer = make_trainer()
        trainer.train()
        trainer.push_to_hub(dataset_name="user/walks")
        assert set(hub.files(REPO)) == MODEL | TOKENIZER
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO)
        assert_same_bits(model, trainer.model)
        inputs = AutoTokenizer.from_pretrained(REPO)("a b", return_tensors="pt")
        output, expected = (x.eval().generate(**inputs, max_new_tokens=3, beta=4.0) for x in (model, trainer.model))
        assert torch.equal(output, expected) and output.shape[1] > inputs["input_ids"].shape[1]

    def test_pushed_llama_with_a_q_head_loads_and_generates(
        self, make_base, hub, tokenizer, assert_same_bits, tmp_path
    ):
        make_base("llama").push_to_hub("user/base")
        trainer = QRLHFTrainer(
            "user/base",
            args=QRLHFConfig(str(tmp_path / "walker"), target_network="model", **QUIET),
            train_dataset=Dataset.from_list(ROWS * 4),
            processing_class=tokenizer,
        )
        trainer.train()
        trainer.push_to_hub(dataset_name="user/walks")
        assert set(hub.files(REPO)) == MODEL | TOKENIZER
        data = card_of(hub).data
        assert (data.library_name, data.base_model, data.datasets) == ("hf_qrl", "user/base", ["user/walks"])
        assert {"hf_qrl", "qrlhf"} <= set(data.tags)
        model = AutoModelForCausalLM.from_pretrained(REPO)
        assert type(model) is LlamaDuelingQForCausalLM
        assert_same_bits(model, trainer.model)
        inputs = AutoTokenizer.from_pretrained(REPO)("a b", return_tensors="pt")
        output, expected = (x.eval().generate(**inputs, max_new_tokens=3) for x in (model, trainer.model))
        assert torch.equal(output, expected) and output.shape[1] > inputs["input_ids"].shape[1]

    def test_card_tells_what_was_trained(self, make_trainer, make_base, hub, tokenizer):
        make_base("llama").push_to_hub("user/base")
        tokenizer.push_to_hub("user/base")
        trainer = make_trainer("user/base", logging_strategy="steps", logging_steps=1)
        trainer.train()
        evaluation = trainer.evaluate()
        trainer.push_to_hub(dataset_name="user/walks", tags="walks", license="mit", language="en")
        card = ModelCard.load(REPO)
        assert card.content == card_of(hub).content
        data = card.data
        assert (data.library_name, data.pipeline_tag) == ("hf_qrl", "text-generation")
        assert (data.base_model, data.datasets, data.license, data.language) == (
            "user/base",
            ["user/walks"],
            "mit",
            "en",
        )
        assert set(data.tags) == {"hf_qrl", "ilql", "walks"}
        assert data.model_name == "walker"
        results = {result.metric_type: result for result in data.eval_results}
        for name in ("eval_loss", "eval_loss/q", "eval_values/mean"):
            assert results[name].metric_value == pytest.approx(evaluation[name])
            assert (results[name].dataset_type, results[name].task_type) == ("user/walks", "text-generation")
        assert f'from_pretrained("{REPO}")' in card.text
        # The metadata are the same after having been read and written.
        assert ModelCard(str(card)).data.to_dict() == data.to_dict()

    def test_model_with_its_code_needs_transformers_only(self, with_code, make_trainer, hub):
        make_trainer().push_to_hub()
        assert CODE < set(hub.files(REPO))
        assert card_of(hub).data.library_name == "transformers"

    def test_further_training_descends_from_the_policy(self, make_trainer, make_base, hub):
        make_base("llama").push_to_hub("user/base")
        first = make_trainer("user/base")
        first.push_to_hub()
        assert card_of(hub).data.base_model == "user/base"
        second = make_trainer(REPO, output_dir="runner")
        second.push_to_hub()
        assert card_of(hub, "user/runner").data.base_model == REPO

    def test_local_names_are_no_names_of_the_hub(self, make_trainer, make_base, hub, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        make_base("llama").save_pretrained("base")
        (tmp_path / "dialogues.jsonl").touch()
        for base, data in [("base", "dialogues.jsonl"), (str(tmp_path / "base"), str(tmp_path / "dialogues.jsonl"))]:
            trainer = make_trainer(base)
            trainer.evaluate()
            trainer.push_to_hub(dataset_name=[data, "user/walks"])
            card = card_of(hub)
            assert card.data.base_model is None and card.data.datasets == ["user/walks"]
            assert "Data: dialogues.jsonl, user/walks, 8 rows." in card.text
            assert str(tmp_path) not in card.content
            # Which of the two the evaluation rows came from is not known.
            assert {result.dataset_type for result in card.data.eval_results} == {"evaluation"}

    def test_metric_that_is_not_finite_is_left_out(self, make_trainer, hub):
        trainer = make_trainer()
        trainer.state.log_history = [{"eval_loss": 1.0, "eval_loss/q": float("nan"), "step": 0}]
        trainer.push_to_hub()
        assert [result.metric_type for result in card_of(hub).data.eval_results] == ["eval_loss"]

    def test_private_repository_of_a_name_and_token(self, make_trainer, hub, monkeypatch):
        monkeypatch.delenv("HF_TOKEN")
        trainer = make_trainer(hub_model_id="user/secret", hub_private_repo=True, hub_token=TOKEN)
        trainer.push_to_hub()
        assert hub.repos["user/secret"].private
        assert 'from_pretrained("user/secret")' in card_of(hub, "user/secret").text

    def test_failed_push_can_be_repeated(self, make_trainer, hub, assert_same_bits):
        trainer = make_trainer()
        hub.fail("/commit/", 503)
        with pytest.raises(Exception, match="503"):
            trainer.push_to_hub()
        assert hub.files(REPO) == {}
        trainer.push_to_hub()
        assert set(hub.files(REPO)) == MODEL | TOKENIZER
        assert_same_bits(AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO), trainer.model)

    def test_unknown_argument_is_refused(self, make_trainer):
        with pytest.raises(TypeError, match="datset_name"):
            make_trainer().push_to_hub(datset_name="user/walks")


class WaitForPush(TrainerCallback):
    """Lets no step begin before the last one's push has ended; a push that is not waited for may be skipped."""

    def __init__(self, trainer: ILQLTrainer):
        self.trainer = trainer

    def on_save(self, args, state, control, **kwargs):
        self.trainer._finish_current_push()


class TestPushWhileTraining:
    SAVING = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 1}

    def test_every_save_is_a_model_with_its_card(self, make_trainer, hub, assert_same_bits, tmp_path):
        trainer = make_trainer(**self.SAVING, hub_strategy="every_save", hub_model_id="user/steps")
        trainer.add_callback(WaitForPush(trainer))
        trainer.train()
        assert hub.messages("user/steps")[1:] == [f"Training in progress, step {step}" for step in (1, 2)]
        for step, commit in zip((1, 2), list(hub.repos["user/steps"].commits)[1:], strict=True):
            assert set(hub.files("user/steps", commit)) == MODEL | TOKENIZER
            assert f"Steps: {step}." in card_of(hub, "user/steps", commit).text
            pushed = AutoModelForCausalLMWithILQLHeads.from_pretrained("user/steps", revision=commit)
            saved = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "walker" / f"checkpoint-{step}")
            assert_same_bits(pushed, saved)

    def test_every_save_brings_the_code_along(self, with_code, make_trainer, hub):
        trainer = make_trainer(**self.SAVING, hub_strategy="every_save", max_steps=1)
        trainer.train()
        assert hub.messages(REPO)[1:] == ["Training in progress, step 1"]
        assert MODEL | TOKENIZER | CODE < set(hub.files(REPO))

    def test_pushed_checkpoint_can_be_resumed(self, make_trainer, hub, api, tmp_path, assert_same_bits):
        whole = make_trainer(output_dir="whole", max_steps=3, lr_scheduler_type="constant")
        whole.train()
        trainer = make_trainer(**self.SAVING, hub_strategy="checkpoint", lr_scheduler_type="constant")
        trainer.add_callback(WaitForPush(trainer))
        trainer.train()
        api.snapshot_download(REPO, local_dir=tmp_path / "fetched")
        resumed = make_trainer(output_dir="resumed", max_steps=3, lr_scheduler_type="constant")
        resumed.train(resume_from_checkpoint=str(tmp_path / "fetched" / "last-checkpoint"))
        assert resumed.state.global_step == 3
        assert_same_bits(resumed.model, whole.model)

    def test_saving_pushes_at_the_end(self, make_trainer, hub, assert_same_bits):
        trainer = make_trainer(push_to_hub=True, hub_strategy="end")
        trainer.train()
        assert hub.files(REPO) == {}
        trainer.save_model()
        assert hub.messages(REPO)[1:] == ["Model save"]
        assert_same_bits(AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO), trainer.model)
