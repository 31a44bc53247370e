# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The table of the README, model family by capability. What is peculiar to a capability has tests of its own."""

import copy

import pytest
import torch
from peft import LoraConfig

from hf_qrl import AutoModelForCausalLMWithILQLHeads, AutoModelForSeq2SeqLMWithILQLHeads
from tests.hub.fixtures import hub, hub_environment  # noqa: F401


@pytest.fixture
def auto_class(model):
    return AutoModelForSeq2SeqLMWithILQLHeads if model.config.is_encoder_decoder else AutoModelForCausalLMWithILQLHeads


def snapshot(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(got[name], expected[name])]


def test_train(make_trainer, model):
    before = snapshot(model)
    trainer = make_trainer(logging_strategy="steps", logging_steps=1)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(0 < loss < 1e3 for loss in losses)
    after = snapshot(model)
    still = [name for name in before if torch.equal(before[name], after[name])]
    # What no row touches: positions beyond the longest row, and biases that nothing depends on.
    assert not [name for name in still if name.startswith("heads.")], still
    assert len(still) < len(before) / 4, still


def test_generate(model, inputs):
    prompt = {name: x for name, x in inputs.items() if name != "decoder_input_ids"}
    tokens = model.generate(**prompt, max_new_tokens=5, do_sample=False, beta=3.0)
    # A loop without a cache, over the logits that `forward` returns.
    seq2seq = model.config.is_encoder_decoder
    ids = torch.full((2, 1), model.config.decoder_start_token_id) if seq2seq else prompt["input_ids"]
    ends, ended = model.generation_config.eos_token_id, torch.zeros(2, dtype=torch.bool)
    for step in range(5):
        arguments = {**prompt, "decoder_input_ids": ids} if seq2seq else {"input_ids": ids}
        chosen = model(**arguments, beta=3.0).logits[:, -1].argmax(-1)
        if seq2seq and step == 0 and model.generation_config.forced_bos_token_id is not None:
            chosen = torch.full_like(chosen, model.generation_config.forced_bos_token_id)
        chosen = torch.where(ended, model.config.pad_token_id, chosen)
        ended |= chosen == ends
        ids = torch.cat([ids, chosen[:, None]], 1)
    assert torch.equal(tokens, ids[:, : tokens.shape[1]])


def test_save_and_load(model, auto_class, tmp_path):
    model.save_pretrained(tmp_path)
    assert_same_bits(snapshot(auto_class.from_pretrained(tmp_path)), snapshot(model))


def test_lora(make_trainer, base, auto_class, inputs, tmp_path):
    base.save_pretrained(tmp_path / "base")
    trainer = make_trainer(auto_class.from_pretrained(tmp_path / "base"), LoraConfig(target_modules="all-linear", r=4))
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    trainer.model.eval()
    loaded = auto_class.from_pretrained(tmp_path / "adapter")
    for beta in (0.0, 3.0):
        assert torch.equal(loaded(**inputs, beta=beta).logits, trainer.model(**inputs, beta=beta).logits)
    expected = loaded(**inputs, beta=3.0).logits
    assert not torch.allclose(expected, auto_class.from_pretrained(tmp_path / "base")(**inputs, beta=0.0).logits)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(**inputs, beta=3.0).logits, expected, rtol=1e-3, atol=1e-3)


def test_resume(make_trainer, model, tmp_path):
    start = copy.deepcopy(model)
    unbroken = make_trainer(copy.deepcopy(start), output_dir=tmp_path / "unbroken")
    unbroken.train()
    arguments = {"output_dir": tmp_path / "broken", "save_strategy": "steps", "save_steps": 1}
    make_trainer(copy.deepcopy(start), **arguments, lr_scheduler_type="linear").train()
    (tmp_path / "broken" / "checkpoint-2" / "trainer_state.json").unlink()
    resumed = make_trainer(copy.deepcopy(start), **arguments)
    resumed.train(resume_from_checkpoint=True)
    assert_same_bits(snapshot(resumed.model), snapshot(unbroken.model))


def test_hub(model, auto_class, hub):  # noqa: F811
    model.push_to_hub("user/policy")
    assert_same_bits(snapshot(auto_class.from_pretrained("user/policy")), snapshot(model))
