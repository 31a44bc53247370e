# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM

from hf_qrl import AutoModelForCausalLMWithILQLHeads, ILQLForCausalLM


LOADERS = [ILQLForCausalLM, AutoModel, AutoModelForCausalLM, AutoModelForCausalLMWithILQLHeads]
# Sizes of the files: everything in one, and a few tensors in each.
SIZES = {"one file": "1GB", "sharded": "10KB"}
# Every architecture and every kind of head, but not every pair.
ARCHITECTURES = ["gpt2", "llama", "llama_tied", "qwen3_tied", "gemma3", "opt", "gpt_neox", "cohere", "granite"]
ROWS = [(name, "mlp") for name in ARCHITECTURES] + [("llama_tied", kind) for kind in ("linear", "tied", "dueling")]


def weight_files(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("model*")}


def values(model: ILQLForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    output = model(ids, output_values=True)
    return [model(ids).logits, output.logits, output.value, *output.qs, *output.target_qs]


def assert_same_values(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rewrite(directory: Path, change) -> None:
    """Applies `change` to the dictionary of tensors of a checkpoint of one file."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


class TestSaveLoad:
    @pytest.mark.parametrize("files", SIZES)
    @pytest.mark.parametrize(("architecture", "head_type"), ROWS)
    def test_save_load_bit_equal(self, make_model, make_ids, architecture, head_type, files, tmp_path):
        model = make_model(architecture, head_type=head_type, beta=2.5, num_q_heads=2)
        expected = values(model, make_ids())
        # The targets are not copies of the online heads, so exchanging the two would show.
        assert not torch.allclose(expected[3], expected[5])
        model.save_pretrained(tmp_path, max_shard_size=SIZES[files])
        names = {path.name for path in tmp_path.iterdir()}
        assert all(name.endswith((".json", ".safetensors")) for name in names)
        assert ("model.safetensors" in names) == (files == "one file")
        assert ("model.safetensors.index.json" in names) == (files == "sharded")
        for loader in LOADERS:
            loaded = loader.from_pretrained(tmp_path)
            assert type(loaded) is ILQLForCausalLM and not loaded.training
            assert loaded.config.beta == 2.5
            assert_same_values(values(loaded, make_ids()), expected)
            assert loaded.state_dict().keys() == model.state_dict().keys()
            embeddings = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
            assert (embeddings[0] is embeddings[1]) == model.config.tie_word_embeddings

    def test_targets_have_no_grad_after_reload(self, make_model, head_type, tmp_path):
        make_model("llama", head_type=head_type).save_pretrained(tmp_path)
        loaded = ILQLForCausalLM.from_pretrained(tmp_path)
        assert not [name for name, _ in loaded.named_parameters() if "target" in name]
        targets = [buffer for name, buffer in loaded.named_buffers() if name.startswith("heads.target_q")]
        assert targets and not any(buffer.requires_grad for buffer in targets)
        assert all(parameter.requires_grad for parameter in loaded.heads.parameters())

    def test_loading_twice_gives_the_same(self, make_model, make_ids, tmp_path):
        make_model("gpt2").save_pretrained(tmp_path)
        first, second = (values(ILQLForCausalLM.from_pretrained(tmp_path), make_ids()) for _ in range(2))
        assert_same_values(first, second)

    def test_config_fields_override_when_loading(self, make_model, make_ids, tmp_path):
        model = make_model("llama", beta=1.0)
        model.save_pretrained(tmp_path)
        for loader in LOADERS:
            loaded = loader.from_pretrained(tmp_path, beta=3.0, policy_top_k=5)
            assert (loaded.config.beta, loaded.config.policy_top_k) == (3.0, 5)
            assert loaded(make_ids()).logits[0, 0].isfinite().sum() == 5
            loaded.config.policy_top_k = None
            assert torch.equal(loaded(make_ids()).logits, model(make_ids(), beta=3.0).logits)

    def test_heads_keep_generation_config(self, make_base, tmp_path):
        base = make_base("llama")
        base.generation_config.max_new_tokens = 17
        base.save_pretrained(tmp_path / "base")
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "base")
        assert model.generation_config.max_new_tokens == 17
        model.save_pretrained(tmp_path / "heads")
        assert ILQLForCausalLM.from_pretrained(tmp_path / "heads").generation_config.max_new_tokens == 17

    def test_loading_info_on_request(self, make_model, tmp_path):
        make_model("llama").save_pretrained(tmp_path)
        model, info = ILQLForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert type(model) is ILQLForCausalLM
        assert not info["missing_keys"] and not info["unexpected_keys"]

    def test_export_trunk_round_trip(self, make_model, make_ids, architecture, tmp_path):
        model = make_model(architecture)
        model.base.save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path).model_type == model.base.config.model_type
        base = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(base) is type(model.base)
        assert torch.equal(base(make_ids()).logits, model.base(make_ids()).logits)

    def test_base_checkpoint_loads_without_report(self, make_base, make_model, tmp_path):
        # A table of missing weights would frighten a user who did nothing wrong.
        make_base("llama").save_pretrained(tmp_path / "base")
        make_model("llama").save_pretrained(tmp_path / "heads")
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logger = logging.getLogger("transformers")
        logger.addHandler(handler)
        try:
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "base")
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "heads")
            assert not [record for record in records if "REPORT" in record]
            # The handler would have seen it.
            LlamaForCausalLM.from_pretrained(tmp_path / "heads")
            assert [record for record in records if "REPORT" in record]
        finally:
            logger.removeHandler(handler)


class TestRefusals:
    def test_missing_heads_raise(self, make_base, make_model, tmp_path):
        # A plain language model under the configuration of one with heads.
        make_base("llama").save_pretrained(tmp_path)
        rewrite(tmp_path, lambda tensors: [tensors.update({f"base.{k}": tensors.pop(k)}) for k in list(tensors)])
        make_model("llama").config.save_pretrained(tmp_path)
        for loader in LOADERS[::2]:
            with pytest.raises(ValueError, match=r"weights are missing \(heads\.q\.0.*puts fresh heads on it"):
                loader.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        "key", ["heads.target_q.1.bias", "heads.q.0.stem.0.weight", "heads.v.projection.bias", "base.lm_head.weight"]
    )
    def test_partial_heads_raise(self, make_model, key, tmp_path):
        make_model("llama").save_pretrained(tmp_path)
        rewrite(tmp_path, lambda tensors: tensors.pop(key))
        with pytest.raises(ValueError, match=rf"1 weights are missing \({key}\)"):
            ILQLForCausalLM.from_pretrained(tmp_path)

    def test_missing_head_in_shards_raises(self, make_model, tmp_path):
        make_model("llama").save_pretrained(tmp_path, max_shard_size=SIZES["sharded"])
        index = tmp_path / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        file = tmp_path / content["weight_map"].pop("heads.q.1.weight")
        tensors = load_file(file)
        tensors.pop("heads.q.1.weight")
        save_file(tensors, file, metadata={"format": "pt"})
        index.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"missing \(heads\.q\.1\.weight\)"):
            AutoModelForCausalLM.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("saved", "asked"),
        [
            ({}, {"head_stem": "silu"}),
            ({"head_type": "linear"}, {"head_type": "dueling", "head_stem": "identity"}),
            ({}, {"head_expansion": 3}),
        ],
    )
    def test_other_kind_of_heads_raises(self, make_model, saved, asked, tmp_path):
        """Some kinds have tensors of the same names and shapes."""
        make_model("llama", **saved).save_pretrained(tmp_path)
        for loader in (ILQLForCausalLM, AutoModelForCausalLMWithILQLHeads, AutoModelForCausalLM):
            with pytest.raises(ValueError, match="is asked for. Load them without it"):
                loader.from_pretrained(tmp_path, **asked)
        assert ILQLForCausalLM.from_pretrained(tmp_path, beta=3.0, **saved).config.beta == 3.0

    def test_fields_beside_a_configuration_raise(self, make_model, tmp_path):
        model = make_model("llama")
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"\['beta'\] are set in the configuration"):
            ILQLForCausalLM.from_pretrained(tmp_path, config=model.config, beta=2.0)

    @pytest.mark.parametrize(
        ("saved", "configured", "message"),
        [
            ({"num_q_heads": 1}, {"num_q_heads": 2}, r"missing \(heads\.q\.1\."),
            ({"num_q_heads": 2}, {"num_q_heads": 1}, r"of heads are left over \(heads\.q\.1\."),
            ({"head_type": "mlp"}, {"head_type": "tied"}, r"missing \(heads\.q\.0\.offset"),
            ({"head_type": "dueling"}, {"head_type": "mlp"}, r"left over \(heads\.q\.0\.offset"),
            ({"head_expansion": 2}, {"head_expansion": 3}, r"15 weights have another shape \(heads\.q\.0\."),
            ({"head_type": "linear"}, {"head_type": "mlp"}, r"missing \(.*have another shape \(heads\.q\.0\."),
        ],
    )
    @pytest.mark.parametrize("ignore_mismatched_sizes", [False, True])
    def test_other_heads_raise(self, make_model, saved, configured, message, ignore_mismatched_sizes, tmp_path):
        make_model("llama", **saved).save_pretrained(tmp_path)
        make_model("llama", **configured).config.save_pretrained(tmp_path)
        for loader in LOADERS[::2]:
            with pytest.raises(ValueError, match=message):
                loader.from_pretrained(tmp_path, ignore_mismatched_sizes=ignore_mismatched_sizes)

    def test_trunk_of_another_shape_raises_unless_ignored(self, make_model, tmp_path):
        model = make_model("llama")
        model.save_pretrained(tmp_path)
        model.config.text_config.intermediate_size = 40
        model.config.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"6 weights have another shape \(base\.model\.layers\.0\.mlp"):
            ILQLForCausalLM.from_pretrained(tmp_path)
        loaded = ILQLForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
        assert loaded.base.config.intermediate_size == 40


class TestSavingAgain:
    @pytest.mark.parametrize("second", SIZES)
    @pytest.mark.parametrize("first", [*SIZES, "more shards"])
    def test_saving_over_a_checkpoint_replaces_it(self, make_model, make_ids, scramble_heads, first, second, tmp_path):
        model = make_model("llama_tied")
        model.save_pretrained(tmp_path, max_shard_size={**SIZES, "more shards": "4KB"}[first])
        (tmp_path / "trainer_state.json").write_text("{}")
        scramble_heads(model, seed=1)
        model.save_pretrained(tmp_path, max_shard_size=SIZES[second])
        # Nothing of the old checkpoint is left, and whatever does not belong to the model stays.
        left = {path.name for path in tmp_path.iterdir()}
        others = {"config.json", "generation_config.json", "trainer_state.json"}
        index = tmp_path / "model.safetensors.index.json"
        if second == "one file":
            assert left == {*others, "model.safetensors"}
        else:
            assert left == {*others, index.name, *json.loads(index.read_text())["weight_map"].values()}
        for loader in LOADERS[::2]:
            assert_same_values(values(loader.from_pretrained(tmp_path), make_ids()), values(model, make_ids()))

    def test_saving_a_variant_keeps_the_plain_checkpoint(self, make_model, make_ids, scramble_heads, tmp_path):
        model = make_model("llama")
        plain = values(model, make_ids())
        model.save_pretrained(tmp_path)
        for seed, files in enumerate(("sharded", "one file", "sharded"), start=1):
            scramble_heads(model, seed)
            model.save_pretrained(tmp_path, variant="v2", max_shard_size=SIZES[files])
            loaded = ILQLForCausalLM.from_pretrained(tmp_path, variant="v2")
            assert_same_values(values(loaded, make_ids()), values(model, make_ids()))
            assert_same_values(values(ILQLForCausalLM.from_pretrained(tmp_path), make_ids()), plain)

    def test_path_that_is_a_file_is_left_alone(self, make_model, tmp_path):
        file = tmp_path / "file"
        file.write_text("text")
        make_model().save_pretrained(file)
        assert file.read_text() == "text"

    def test_other_processes_write_nothing(self, make_model, tmp_path):
        make_model().save_pretrained(tmp_path, is_main_process=False)
        assert not list(tmp_path.iterdir())


class Interruption(BaseException):
    """Not an `Exception`: nothing between here and the test may catch it."""


KILLED_WHILE_SAVING = """
import os, signal, sys
import torch, transformers
from hf_qrl import ILQLForCausalLM

directory, max_shard_size, allowed = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = ILQLForCausalLM.from_pretrained(directory)
with torch.no_grad():
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.add_(1.0) if tensor.is_floating_point() else None
save_file = transformers.modeling_utils.safe_save_file
written = []

def save_some_then_die(tensors, file, *args, **kwargs):
    save_file(tensors, file, *args, **kwargs)
    written.append(file)
    if len(written) > allowed:
        with open(file, "r+b") as half:
            half.truncate(os.path.getsize(file) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

transformers.modeling_utils.safe_save_file = save_some_then_die
model.save_pretrained(directory, max_shard_size=max_shard_size)
"""


class TestInterruptedSave:
    @pytest.mark.parametrize("first", SIZES)
    @pytest.mark.parametrize(("second", "allowed"), [("one file", 0), ("sharded", 0), ("sharded", 2)])
    def test_failure_while_writing_keeps_previous(
        self, make_model, make_ids, scramble_heads, first, second, allowed, tmp_path, monkeypatch
    ):
        model = make_model("llama_tied")
        model.save_pretrained(tmp_path, max_shard_size=SIZES[first])
        expected, files = values(model, make_ids()), {path.name for path in tmp_path.iterdir()}
        scramble_heads(model, seed=1)
        save, written = transformers.modeling_utils.safe_save_file, []

        def save_some_then_fail(tensors, file, *args, **kwargs):
            if len(written) >= allowed:
                Path(file).write_bytes(b"half")
                raise Interruption
            written.append(file)
            save(tensors, file, *args, **kwargs)

        monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", save_some_then_fail)
        with pytest.raises(Interruption):
            model.save_pretrained(tmp_path, max_shard_size=SIZES[second])
        assert len(written) == allowed
        assert {path.name for path in tmp_path.iterdir()} == files
        for loader in LOADERS[::2]:
            assert_same_values(values(loader.from_pretrained(tmp_path), make_ids()), expected)
        monkeypatch.undo()
        model.save_pretrained(tmp_path, max_shard_size=SIZES[second])
        assert_same_values(values(ILQLForCausalLM.from_pretrained(tmp_path), make_ids()), values(model, make_ids()))

    @pytest.mark.parametrize("second", SIZES)
    @pytest.mark.parametrize("first", SIZES)
    def test_failure_while_moving_leaves_one_of_the_two(
        self, make_model, make_ids, scramble_heads, first, second, tmp_path, monkeypatch
    ):
        model, replace = make_model("llama_tied"), os.replace
        old = values(model, make_ids())
        new = values(scramble_heads(model, seed=1), make_ids())
        outcomes = []
        for allowed in range(100):
            directory, moved = tmp_path / str(allowed), []
            scramble_heads(model, seed=0).save_pretrained(directory, max_shard_size=SIZES[first])
            scramble_heads(model, seed=1)

            def move_some_then_fail(source, target, allowed=allowed, moved=moved):
                if len(moved) == allowed:
                    raise Interruption
                moved.append(target)
                replace(source, target)

            monkeypatch.setattr(os, "replace", move_some_then_fail)
            try:
                model.save_pretrained(directory, max_shard_size=SIZES[second])
                finished = True
            except Interruption:
                finished = False
            monkeypatch.undo()
            loaded = values(ILQLForCausalLM.from_pretrained(directory), make_ids())
            outcomes.append(torch.equal(loaded[5], new[5]))
            assert_same_values(loaded, new if outcomes[-1] else old)
            if finished:
                break
        assert len(outcomes) > 2 and outcomes[-1] and not outcomes[0]
        # Once the new one is there it stays.
        assert outcomes == sorted(outcomes)

    def test_kill_while_saving_keeps_previous(self, make_model, make_ids, tmp_path):
        files, allowed = "sharded", 3
        model = make_model("llama_tied")
        model.save_pretrained(tmp_path, max_shard_size=SIZES[files])
        expected = values(model, make_ids())
        before = weight_files(tmp_path)
        process = subprocess.run(
            [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path), SIZES[files], str(allowed)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert process.returncode == -signal.SIGKILL, process.stderr
        # It died with some of the new files written, somewhere in the directory.
        assert len(list(tmp_path.rglob("model*.safetensors"))) == len(list(tmp_path.glob("model*.safetensors"))) + (
            allowed + 1
        )
        assert weight_files(tmp_path) == before
        for loader in LOADERS[::2]:
            assert_same_values(values(loader.from_pretrained(tmp_path), make_ids()), expected)
        model.save_pretrained(tmp_path, max_shard_size=SIZES[files])
        assert_same_values(values(ILQLForCausalLM.from_pretrained(tmp_path), make_ids()), expected)


class TestOtherHeads:
    def test_loading_with_another_head_type_raises(self, make_model, tmp_path):
        make_model("llama", head_type="mlp").save_pretrained(tmp_path)
        for load in (AutoModelForCausalLMWithILQLHeads, ILQLForCausalLM, AutoModelForCausalLM):
            for head_type in ("linear", "tied", "dueling"):
                with pytest.raises(ValueError, match="head_stem|does not hold this"):
                    load.from_pretrained(tmp_path, head_type=head_type)
