# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Adapters on models with heads: what is saved, what comes back, and what is refused."""

import importlib.util
import json
import shutil

import peft
import pytest
import torch
from huggingface_hub import constants
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from hf_qrl import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForSeq2SeqLMWithILQLHeads,
    ILQLForCausalLM,
    ILQLForSeq2SeqLM,
)
from hf_qrl.trainer.adapters import put_adapter
from tests.hub.fixtures import hub, hub_environment  # noqa: F401


HEAD = {"head_type": "dueling", "head_stem": "relu", "beta": 2.5, "q_reduction": "mean", "history_window": 3}
ROWS = [("llama", "plain"), ("llama_tied", "plain"), ("gpt2", "plain"), ("llama", "heads"), ("llama_tied", "heads")]


@pytest.fixture
def save_base(make_base, make_model, tmp_path):
    """Returns a function that saves a plain language model, or one with heads, and returns its directory."""

    def save(architecture: str = "llama", kind: str = "plain", name: str = "base", **head_arguments) -> str:
        make = make_base if kind == "plain" else make_model
        make(architecture, **head_arguments).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


@torch.no_grad()
def scramble_adapter(model: PeftModel, seed: int = 1) -> PeftModel:
    """Gives every tensor of the adapter random values, the targets others than the heads, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if ".default." in name:
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model


@pytest.fixture
def make_adapter():
    """Returns a function from a directory to an adapter on the model in it, with random weights."""

    def make(directory: str, auto=AutoModelForCausalLMWithILQLHeads, config=None, **head_arguments) -> PeftModel:
        model = auto.from_pretrained(directory, **head_arguments)
        return scramble_adapter(put_adapter(model, config or LoraConfig(r=4))).eval()

    return make


def values(model, **inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        output = model(**inputs, output_values=True)
        return [model(**inputs).logits, output.logits, output.value, *output.qs, *output.target_qs]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rewrite(directory, change) -> None:
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


class TestRoundTrip:
    @pytest.mark.parametrize(("architecture", "kind"), ROWS)
    def test_adapter_directory_loads_alone(self, save_base, make_adapter, make_ids, architecture, kind, tmp_path):
        base = save_base(architecture, kind, **(HEAD if kind == "heads" else {}))
        model = make_adapter(base, **(HEAD if kind == "plain" else {}))
        expected = values(model, input_ids=make_ids())
        model.save_pretrained(tmp_path / "adapter")
        for _ in range(2):  # nothing of it is random
            loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")
            assert isinstance(loaded, peft.PeftModelForCausalLM) and not loaded.training
            assert type(loaded.get_base_model()) is ILQLForCausalLM
            assert {name: getattr(loaded.config, name) for name in HEAD} == HEAD
            assert_same(values(loaded, input_ids=make_ids()), expected)
            assert not [name for name, x in loaded.named_parameters() if x.requires_grad]
        if kind == "heads":
            for other in (
                AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter")),
                PeftModel.from_pretrained(ILQLForCausalLM.from_pretrained(base), str(tmp_path / "adapter")),
            ):
                assert_same(values(other, input_ids=make_ids()), expected)

    @pytest.mark.parametrize(("architecture", "kind"), ROWS)
    def test_without_the_adapter_it_is_the_base(self, save_base, make_adapter, make_ids, architecture, kind, tmp_path):
        base = save_base(architecture, kind, **(HEAD if kind == "heads" else {}))
        make_adapter(base, **(HEAD if kind == "plain" else {})).save_pretrained(tmp_path / "adapter")
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")
        plain = AutoModelForCausalLM.from_pretrained(base)  # with heads or without
        with loaded.disable_adapter():
            assert torch.equal(loaded(input_ids=make_ids()).logits, plain(make_ids()).logits)
        assert not torch.allclose(loaded(input_ids=make_ids()).logits, plain(make_ids()).logits, atol=0.1)

    def test_files_and_keys(self, save_base, make_adapter, tmp_path):
        make_adapter(save_base(), head_type="mlp").save_pretrained(tmp_path / "adapter")
        files = {path.name for path in (tmp_path / "adapter").iterdir()}
        weights = {"adapter_config.json", "adapter_model.safetensors"}
        assert files == weights | {"README.md", "config.json", "generation_config.json"}
        projections = ("q_proj", "v_proj")
        lora = {
            f"base.model.layers.{layer}.self_attn.{projection}.lora_{side}.weight"
            for layer in (0, 1)
            for projection in projections
            for side in "AB"
        }
        q = ("weight", "bias", "stem.0.weight", "stem.0.bias")
        heads = {f"heads.{kind}.{i}.{tensor}" for kind in ("q", "target_q") for i in (0, 1) for tensor in q}
        heads |= {f"heads.v.{tensor}" for tensor in ("stem.0.weight", "stem.0.bias", "projection.weight")}
        heads |= {"heads.v.projection.bias"}
        keys = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
        assert {key.removeprefix("base_model.model.") for key in keys} == lora | heads
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(tmp_path / "base")

    def test_generates_by_the_policy(self, save_base, make_adapter, make_ids, tmp_path):
        model = make_adapter(save_base(), beta=3.0)
        model.base_model.model.generation_config.max_new_tokens = 6
        model.save_pretrained(tmp_path / "adapter")
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")
        prompt = {"input_ids": make_ids(), "attention_mask": torch.ones_like(make_ids())}
        expected = model.get_base_model().generate(**prompt, max_new_tokens=6)
        assert torch.equal(loaded.generate(**prompt), expected)  # the number of tokens was saved
        assert not torch.equal(loaded.generate(**prompt, beta=0.0), expected)
        with loaded.disable_adapter():
            plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
            assert torch.equal(loaded.generate(**prompt), plain.generate(**prompt, max_new_tokens=6))

    @pytest.mark.parametrize("architecture", ["llama", "llama_tied", "gpt2"])
    def test_merged_model_saves_and_loads(self, save_base, make_adapter, make_ids, architecture, tmp_path):
        make_adapter(save_base(architecture), **HEAD).save_pretrained(tmp_path / "adapter")
        # In float64, where merging leaves no rounding that would hide a fault.
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter").double()
        expected = values(loaded, input_ids=make_ids())
        merged = loaded.merge_and_unload()
        assert type(merged) is ILQLForCausalLM
        assert merged.config._name_or_path == ""  # these weights are those of no file
        for x, y in zip(values(merged, input_ids=make_ids()), expected, strict=True):
            assert torch.allclose(x, y, rtol=0, atol=1e-9)
        merged.float().save_pretrained(tmp_path / "merged")
        again = ILQLForCausalLM.from_pretrained(tmp_path / "merged")
        assert_same(values(again, input_ids=make_ids()), values(merged, input_ids=make_ids()))

    def test_encoder_decoder(self, make_ids, make_adapter, tmp_path):
        sizes = {"d_model": 24, "d_ff": 32, "d_kv": 12, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
        config = T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0, initializer_factor=3.0)
        torch.manual_seed(0)
        AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "base")
        model = make_adapter(str(tmp_path / "base"), AutoModelForSeq2SeqLMWithILQLHeads, beta=2.0)
        assert model.peft_config["default"].task_type == "SEQ_2_SEQ_LM"
        inputs = {"input_ids": make_ids(), "decoder_input_ids": make_ids(length=5, seed=1)}
        expected = values(model, **inputs)
        model.save_pretrained(tmp_path / "adapter")
        loaded = AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(tmp_path / "adapter")
        assert isinstance(loaded, peft.PeftModelForSeq2SeqLM)
        assert type(loaded.get_base_model()) is ILQLForSeq2SeqLM
        assert_same(values(loaded, **inputs), expected)
        # In float64, where the order of sums does not matter.
        loaded.double()
        expected = loaded(**inputs).logits
        with loaded.disable_adapter():
            plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base").double()
            assert torch.allclose(loaded(**inputs).logits, plain(**inputs).logits, rtol=0, atol=1e-9)
        assert torch.allclose(loaded.merge_and_unload()(**inputs).logits, expected, rtol=0, atol=1e-9)


class TestLoadingArguments:
    def test_trainable_on_request(self, save_base, make_adapter, head_type, tmp_path):
        make_adapter(save_base(), head_type=head_type).save_pretrained(tmp_path / "adapter")
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter", is_trainable=True)

        def trained() -> set[str]:
            return {name for name, x in loaded.named_parameters() if x.requires_grad}

        def check() -> None:
            assert trained() == expected
            assert not [name for name, x in loaded.named_buffers() if x.requires_grad]

        expected = {name for name, _ in loaded.named_parameters() if ".default." in name}
        assert [name for name in expected if "heads.modules_to_save" in name]
        assert [name for name in expected if "lora_A" in name]
        assert not [name for name in expected if "target" in name]
        check()
        with loaded.disable_adapter():
            assert not trained()
        check()
        loaded.set_adapter("default")
        check()

    def test_head_arguments_override(self, save_base, make_adapter, make_ids, tmp_path):
        model = make_adapter(save_base(), beta=1.0)
        model.save_pretrained(tmp_path / "adapter")
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter", beta=4.0, policy_top_k=5)
        assert (loaded.config.beta, loaded.config.policy_top_k) == (4.0, 5)
        loaded.config.policy_top_k = None
        assert torch.equal(loaded(input_ids=make_ids()).logits, model(input_ids=make_ids(), beta=4.0).logits)

    def test_other_arguments_go_to_the_base(self, save_base, make_adapter, make_ids, tmp_path):
        make_adapter(save_base()).save_pretrained(tmp_path / "adapter")
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(
            tmp_path / "adapter", dtype=torch.bfloat16, attn_implementation="eager"
        )
        base = loaded.get_base_model()
        assert base.base.lm_head.weight.dtype == torch.bfloat16
        assert base.base.config._attn_implementation == "eager"
        assert {x.dtype for x in (*base.heads.parameters(), *base.heads.buffers())} == {torch.float32}
        assert loaded(input_ids=make_ids()).logits.isfinite().all()

    def test_base_that_moved(self, save_base, make_adapter, make_ids, tmp_path):
        base = save_base()
        model = make_adapter(base)
        model.save_pretrained(tmp_path / "adapter")
        shutil.move(base, tmp_path / "moved")
        with pytest.raises(OSError, match=rf"was trained on '{base}', which cannot.*`base_model_name_or_path="):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(
            tmp_path / "adapter", base_model_name_or_path=tmp_path / "moved"
        )
        assert torch.equal(loaded(input_ids=make_ids()).logits, model(input_ids=make_ids()).logits)
        with pytest.raises(ValueError, match="goes with an adapter"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "moved", base_model_name_or_path="x")

    def test_base_is_loaded_at_the_revision_of_the_adapter(self, save_base, make_adapter, monkeypatch, tmp_path):
        model = make_adapter(save_base())
        model.peft_config["default"].revision = "v2"
        model.save_pretrained(tmp_path / "adapter")
        seen = []
        load = AutoModelForCausalLM.from_pretrained

        def spy(*args, revision=None, **kwargs):
            seen.append(revision)
            return load(*args, **kwargs)

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
        AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter", revision="main")
        assert seen == ["v2"]

    def test_subfolder(self, save_base, make_adapter, make_ids, tmp_path):
        model = make_adapter(save_base())
        model.save_pretrained(tmp_path / "repository" / "adapter")
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "repository", subfolder="adapter")
        assert torch.equal(loaded(input_ids=make_ids()).logits, model(input_ids=make_ids()).logits)

    def test_adapter_of_another_name_brings_its_configuration(self, save_base, make_ids, tmp_path):
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(save_base("llama", "heads", **HEAD))
        config = LoraConfig(target_modules=["q_proj"], modules_to_save=["heads"], task_type="CAUSAL_LM")
        adapted = put_adapter(model, config)
        adapted.add_adapter("second", config)
        adapted.save_pretrained(tmp_path / "adapter")
        for folder in ("", "second"):
            assert (tmp_path / "adapter" / folder / "config.json").is_file()
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter", subfolder="second")
        assert loaded.config.head_type == "dueling"


class TestHub:
    def test_adapter_and_base_from_the_hub(self, hub, save_base, make_adapter, make_ids, monkeypatch):  # noqa: F811
        load = AutoModelForCausalLMWithILQLHeads.from_pretrained
        AutoModelForCausalLM.from_pretrained(save_base()).push_to_hub("user/base")
        model = make_adapter("user/base", head_type="linear", beta=3.0)
        assert model.peft_config["default"].base_model_name_or_path == "user/base"
        expected = model(input_ids=make_ids()).logits
        model.push_to_hub("user/adapter")
        files = {"adapter_config.json", "adapter_model.safetensors", "config.json", "generation_config.json"}
        assert set(hub.files("user/adapter")) == files | {"README.md"}
        first = hub.repos["user/adapter"].refs["main"]
        loaded = load("user/adapter")
        assert loaded.config.head_type == "linear"
        assert torch.equal(loaded(input_ids=make_ids()).logits, expected)
        # The first adapter is found by its revision, which says nothing of the base's.
        scramble_adapter(model, seed=2).push_to_hub("user/adapter")
        assert torch.equal(load("user/adapter", revision=first)(input_ids=make_ids()).logits, expected)
        changed = load("user/adapter")(input_ids=make_ids()).logits
        assert torch.equal(changed, model(input_ids=make_ids()).logits) and not torch.equal(changed, expected)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert torch.equal(load("user/adapter")(input_ids=make_ids()).logits, changed)


class TestRefusals:
    def test_adapters_are_not_combined(self, save_base, make_adapter):
        model = make_adapter(save_base())
        with pytest.raises(ValueError, match="would combine their layers and leave the heads"):
            model.add_weighted_adapter(["default"], [1.0], "combined")

    def test_only_the_active_adapter_is_merged(self, save_base, make_adapter):
        model = make_adapter(save_base())
        model.add_adapter("second", model.peft_config["default"])
        with pytest.raises(ValueError, match=r"heads are those of the active adapter \['default'\].*second"):
            model.merge_and_unload(adapter_names=["second"])

    @pytest.mark.parametrize("key", ["heads.q.0.stem.0.weight", "heads.target_q.1.bias", "heads.v.projection.bias"])
    def test_missing_head_tensor(self, save_base, make_adapter, key, tmp_path):
        make_adapter(save_base()).save_pretrained(tmp_path / "adapter")
        rewrite(tmp_path / "adapter", lambda tensors: tensors.pop(f"base_model.model.{key}"))
        with pytest.raises(ValueError, match=rf"does not hold these heads: 1 weights are missing \({key}\)"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")

    @pytest.mark.parametrize(
        ("saved", "loaded", "message"),
        [
            ({"num_q_heads": 2}, {"num_q_heads": 1}, r"are left over \(heads\.q\.1\."),
            ({"num_q_heads": 1}, {"num_q_heads": 2}, r"are missing \(heads\.q\.1\."),
            ({"head_type": "mlp"}, {"head_type": "tied"}, r"\{'head_type': 'tied'\} is asked for"),
            # Tensors of the same names and shapes.
            ({"head_type": "mlp"}, {"head_stem": "silu"}, r"\{'head_stem': 'silu'\} is asked for"),
            ({"head_expansion": 2}, {"head_expansion": 3}, r"\{'head_expansion': 3\} is asked for"),
        ],
    )
    def test_other_heads(self, save_base, make_adapter, saved, loaded, message, tmp_path):
        make_adapter(save_base(), **saved).save_pretrained(tmp_path / "adapter")
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter", **loaded)

    @pytest.mark.parametrize("change", ["missing", "left over"])
    def test_other_layers(self, save_base, make_adapter, change, tmp_path):
        make_adapter(save_base()).save_pretrained(tmp_path / "adapter")
        key = "base_model.model.base.model.layers.0.self_attn.q_proj.lora_A.weight"

        def edit(tensors):
            tensor = tensors[key]
            if change == "missing":
                del tensors[key]
            else:
                tensors[key.replace("layers.0", "layers.7")] = tensor.clone()

        rewrite(tmp_path / "adapter", edit)
        with pytest.raises(ValueError, match="does not fit"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")

    def test_adapter_without_heads(self, save_base, tmp_path):
        plain = AutoModelForCausalLM.from_pretrained(save_base())
        get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "adapter")
        with pytest.raises(ValueError, match=r"has no heads.*merge it.*peft_config="):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")

    def test_no_configuration_beside_an_adapter_on_a_plain_base(self, save_base, make_adapter, tmp_path):
        make_adapter(save_base()).save_pretrained(tmp_path / "adapter")
        (tmp_path / "adapter" / "config.json").unlink()
        with pytest.raises(ValueError, match=r"no 'config.json' of a model with heads.*is unknown"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")

    def test_no_configuration_is_needed_where_the_base_has_heads(self, save_base, make_adapter, make_ids, tmp_path):
        model = make_adapter(save_base("llama", "heads", **HEAD))
        model.save_pretrained(tmp_path / "adapter")
        (tmp_path / "adapter" / "config.json").unlink()
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")
        assert torch.equal(loaded(input_ids=make_ids()).logits, model(input_ids=make_ids()).logits)

    def test_base_without_a_name(self, make_model, tmp_path):
        put_adapter(make_model(), LoraConfig()).save_pretrained(tmp_path / "adapter")
        with pytest.raises(ValueError, match=r"does not say which model.*base_model_name_or_path="):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")

    def test_base_that_is_an_adapter(self, save_base, make_adapter, tmp_path):
        make_adapter(save_base()).save_pretrained(tmp_path / "first")
        shutil.copytree(tmp_path / "first", tmp_path / "second")
        with pytest.raises(ValueError, match="is an adapter itself. Merge that one"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(
                tmp_path / "second", base_model_name_or_path=tmp_path / "first"
            )

    @pytest.mark.parametrize("head_type", ["mlp", "tied"])
    def test_resized_vocabulary(self, save_base, make_adapter, head_type, tmp_path):
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(save_base(), head_type=head_type)
        model.resize_token_embeddings(70)
        put_adapter(model, LoraConfig()).save_pretrained(tmp_path / "adapter")
        with pytest.raises(ValueError, match="a vocabulary of 70 tokens, and .* has 61"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")

    def test_directory_with_a_whole_model_too(self, save_base, make_adapter, make_model, tmp_path):
        make_adapter(save_base()).save_pretrained(tmp_path / "both")
        make_model().save_pretrained(tmp_path / "both")
        with pytest.raises(ValueError, match="holds both an adapter"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "both")


class TestQuantization:
    def test_heads_are_left_alone(self, make_model):
        # What bitsandbytes would convert in a checkpoint with heads, decided as its quantizers do.
        model = make_model("llama", head_type="mlp")
        for skip in (None, ["lm_head"]):
            kept = HfQuantizer.get_modules_to_not_convert(model, skip, model._keep_in_fp32_modules)
            linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
            converted = [name for name in linear if should_convert_module(name, kept)]
            assert converted and all(name.startswith("base.model.layers") for name in converted)

    @pytest.mark.skipif(
        importlib.util.find_spec("bitsandbytes") is None or not torch.cuda.is_available(),
        reason="needs bitsandbytes and a GPU",
    )
    @pytest.mark.parametrize("kind", ["plain", "heads"])
    def test_four_bits(self, save_base, make_ids, kind, tmp_path):
        from transformers import BitsAndBytesConfig

        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(
            save_base("llama", kind), quantization_config=quantization, device_map={"": 0}
        )
        assert type(model.base.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
        assert {x.dtype for x in (*model.heads.parameters(), *model.heads.buffers())} == {torch.float32}
        adapted = scramble_adapter(put_adapter(model, LoraConfig())).eval()
        adapted.save_pretrained(tmp_path / "adapter")
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(
            tmp_path / "adapter", quantization_config=quantization, device_map={"": 0}
        )
        ids = make_ids().cuda()
        assert torch.equal(loaded(input_ids=ids).logits, adapted(input_ids=ids).logits)
