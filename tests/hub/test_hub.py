# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Models that go to the Hub and come back."""

import json

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load, save
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_qrl import AutoModelForCausalLMWithILQLHeads, ILQLForCausalLM
from tests.hub.hub_server import card_errors


REPO = "user/policy"
FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
LOADERS = [AutoModelForCausalLMWithILQLHeads, AutoModelForCausalLM, AutoModel, ILQLForCausalLM]


def uploads(hub) -> int:
    """Number of attempts to send the content of a large file."""
    return sum(line.startswith("PUT /storage/") for line in hub.requests)


@pytest.fixture
def model(make_model):
    return make_model("llama", head_type="mlp", beta=2.5)


class TestRoundTrip:
    @pytest.mark.parametrize("head_type", ["mlp", "linear", "tied", "dueling"])
    def test_pushed_model_loads_bit_equal(self, hub, make_model, make_ids, assert_same_bits, head_type):
        model = make_model("llama_tied", head_type=head_type, beta=2.5)
        model.push_to_hub(REPO)
        assert set(hub.files(REPO)) == FILES
        for loader in LOADERS:
            loaded = loader.from_pretrained(REPO)
            assert type(loaded) is ILQLForCausalLM
            assert_same_bits(loaded, model)
            assert loaded.config.beta == 2.5 and loaded.config.head_type == head_type
            assert torch.equal(loaded(make_ids()).logits, model(make_ids()).logits)

    def test_repository_is_named_after_its_owner(self, hub, model):
        model.push_to_hub("policy", private=True)
        assert hub.repos["user/policy"].private

    def test_sharded_model_loads_bit_equal(self, hub, model, assert_same_bits):
        model.push_to_hub(REPO, max_shard_size="10KB")
        files = hub.files(REPO)
        shards = set(json.loads(files["model.safetensors.index.json"])["weight_map"].values())
        assert len(shards) > 2
        assert set(files) == FILES - {"model.safetensors"} | shards | {"model.safetensors.index.json"}
        assert_same_bits(AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO), model)

    def test_save_pretrained_pushes_too(self, hub, model, tmp_path, assert_same_bits):
        model.save_pretrained(tmp_path / "policy", push_to_hub=True)
        assert FILES == set(hub.files(REPO)) == {path.name for path in (tmp_path / "policy").iterdir()}
        assert_same_bits(AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO), model)

    def test_exported_language_model_needs_no_heads(self, hub, model, make_ids):
        model.base.push_to_hub("user/base")
        loaded = AutoModelForCausalLM.from_pretrained("user/base")
        assert type(loaded) is type(model.base)
        assert torch.equal(loaded(make_ids()).logits, model(make_ids(), beta=0.0).logits)


class TestRevisions:
    def test_old_weights_come_by_commit_tag_and_branch(self, hub, api, model, make_model, scramble_heads, tmp_path):
        old = {name: x.clone() for name, x in model.state_dict().items()}
        first = model.push_to_hub(REPO).oid
        api.create_tag(REPO, tag="v1", revision=first)
        api.create_branch(REPO, branch="old", revision=first)
        scramble_heads(model, seed=1)
        model.config.beta = 7.0
        model.push_to_hub(REPO)
        for revision, beta in [(first, 2.5), ("v1", 2.5), ("old", 2.5), ("main", 7.0), (None, 7.0)]:
            loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO, revision=revision)
            expected = old if beta == 2.5 else model.state_dict()
            assert loaded.config.beta == beta
            assert all(torch.equal(x, expected[name]) for name, x in loaded.state_dict().items())

    def test_push_goes_to_a_branch(self, hub, model, assert_same_bits):
        model.push_to_hub(REPO, revision="candidate")
        assert hub.files(REPO, "main") == {} and set(hub.files(REPO, "candidate")) == FILES
        assert_same_bits(AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO, revision="candidate"), model)

    def test_plain_model_gets_fresh_heads_at_a_revision(self, hub, make_base):
        base = make_base("llama")
        old = {name: x.clone() for name, x in base.state_dict().items()}
        first = base.push_to_hub("user/base").oid
        with torch.no_grad():
            base.model.norm.weight.add_(1.0)
        base.push_to_hub("user/base")
        for revision, expected in [(first, old), (None, base.state_dict())]:
            model = AutoModelForCausalLMWithILQLHeads.from_pretrained("user/base", revision=revision, beta=3.0)
            assert type(model) is ILQLForCausalLM and model.config.beta == 3.0
            assert all(torch.equal(x, expected[name]) for name, x in model.base.state_dict().items())

    def test_unknown_revision_is_named(self, hub, model):
        model.push_to_hub(REPO)
        with pytest.raises(OSError, match="v9 is not a valid git identifier"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO, revision="v9")


class TestInterruptedUpload:
    @pytest.mark.parametrize("fault", ["drop", 500, 503])
    def test_lost_upload_is_repeated_by_the_client(self, hub, model, assert_same_bits, fault):
        hub.fail("PUT /storage/", fault, times=2)
        model.push_to_hub(REPO)
        assert uploads(hub) == 3
        assert_same_bits(AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO), model)

    @pytest.mark.parametrize(
        ("pattern", "fault", "error"),
        [
            ("PUT /storage/", "drop", "Error while uploading 'model"),
            ("PUT /storage/", 500, "Error while uploading 'model"),
            ("/commit/", "drop", "disconnected"),
            ("/commit/", 500, "Server error '500"),
            ("/commit/", 503, "Server error '503"),
        ],
    )
    def test_failed_push_shows_nothing_and_can_be_repeated(
        self, hub, model, scramble_heads, assert_same_bits, pattern, fault, error
    ):
        """Of several shards the first arrives; readers see the old model until the whole new one is there."""
        model.push_to_hub(REPO, max_shard_size="10KB")
        before, messages = hub.files(REPO), hub.messages(REPO)
        old = ILQLForCausalLM.from_pretrained(REPO)
        scramble_heads(model, seed=1)
        # More often than the client tries for all shards together.
        hub.fail(pattern, fault, times=1000, skip=1 if "PUT" in pattern else 0)
        with pytest.raises(Exception, match=error):
            model.push_to_hub(REPO, max_shard_size="10KB")
        hub.faults.clear()
        assert hub.files(REPO) == before and hub.messages(REPO) == messages
        assert_same_bits(AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO), old)

        model.push_to_hub(REPO, max_shard_size="10KB")
        assert len(hub.messages(REPO)) == len(messages) + 1
        assert_same_bits(AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO), model)

    def test_failed_first_push_is_no_model(self, hub, model, assert_same_bits):
        hub.fail("/commit/", 503)
        with pytest.raises(Exception, match="Server error '503"):
            model.push_to_hub(REPO)
        assert hub.files(REPO) == {}
        with pytest.raises(ValueError, match="Unrecognized model in user/policy.* config.json"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO)
        assert uploads(hub) == 1
        model.push_to_hub(REPO)
        # The weights had arrived before the commit failed, and are not sent again.
        assert uploads(hub) == 1
        assert_same_bits(AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO), model)

    def test_lost_download_goes_on(self, hub, model, assert_same_bits):
        model.push_to_hub(REPO)
        hub.fail("GET /storage/", "drop")
        assert_same_bits(AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO), model)


class TestPrivateRepository:
    def test_without_a_token_the_error_says_what_to_do(self, hub, model, monkeypatch):
        model.push_to_hub(REPO, private=True)
        monkeypatch.delenv("HF_TOKEN")
        for loader in (AutoModelForCausalLMWithILQLHeads, ILQLForCausalLM):
            with pytest.raises(OSError, match=r"(?s)user/policy is not .*pass a token .*`hf auth login`"):
                loader.from_pretrained(REPO)

    @pytest.mark.parametrize("heads", [True, False])
    def test_token_reaches_configuration_and_weights(
        self, hub, model, monkeypatch, assert_same_bits, hub_environment, heads
    ):
        (model if heads else model.base).push_to_hub(REPO, private=True)
        monkeypatch.delenv("HF_TOKEN")
        hub.requests.clear()
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO, token=hub_environment["HF_TOKEN"])
        assert_same_bits(*((loaded, model) if heads else (loaded.base, model.base)))
        assert any("config.json" in line for line in hub.requests)
        assert any("model.safetensors" in line for line in hub.requests)

    def test_push_without_a_token_is_refused(self, hub, model, monkeypatch):
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(Exception, match="401"):
            model.push_to_hub(REPO)
        assert not hub.repos


class TestIncompleteRepository:
    def test_missing_weights_are_named(self, hub, api, model):
        model.push_to_hub(REPO)
        api.delete_file("model.safetensors", REPO)
        with pytest.raises(OSError, match="user/policy does not appear to have a file named .*model.safetensors"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO)

    def test_missing_shard_is_named(self, hub, api, model):
        model.push_to_hub(REPO, max_shard_size="10KB")
        shard = min(path for path in hub.files(REPO) if path.endswith(".safetensors"))
        api.delete_file(shard, REPO)
        with pytest.raises(OSError, match=shard):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO)

    def test_missing_heads_are_refused(self, hub, api, model):
        model.push_to_hub(REPO)
        tensors = load(hub.files(REPO)["model.safetensors"])
        trunk = {name: x for name, x in tensors.items() if not name.startswith("heads.")}
        assert len(trunk) < len(tensors)
        content = save(trunk, metadata={"format": "pt"})
        api.upload_file(path_or_fileobj=content, path_in_repo="model.safetensors", repo_id=REPO)
        for loader in LOADERS:
            with pytest.raises(ValueError, match="'user/policy' does not hold this ILQLForCausalLM.*are missing"):
                loader.from_pretrained(REPO)

    def test_missing_repository_is_named(self, hub):
        with pytest.raises(OSError, match="user/nothing is not a local folder and is not a valid model identifier"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained("user/nothing")


class TestCache:
    def test_loaded_model_loads_again_offline(self, hub, model, monkeypatch, assert_same_bits):
        model.push_to_hub(REPO)
        AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        hub.requests.clear()
        assert_same_bits(AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO), model)
        assert_same_bits(AutoModelForCausalLM.from_pretrained(REPO), model)
        with pytest.raises(OSError, match="couldn't connect to .* and couldn't find them in the cached files"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained("user/other")
        assert not hub.requests

    def test_second_load_fetches_no_weights(self, hub, model):
        model.push_to_hub(REPO)
        AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO)
        hub.requests.clear()
        AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO)
        assert not [line for line in hub.requests if line.startswith("GET /storage/")]

    def test_new_commit_is_seen(self, hub, model, scramble_heads, assert_same_bits):
        model.push_to_hub(REPO)
        AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO)
        model.push_to_hub(REPO)
        scramble_heads(model, seed=2).push_to_hub(REPO)
        assert_same_bits(AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO), model)


class TestCard:
    @pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
    def test_push_without_a_trainer_writes_a_card(self, hub, model, way, tmp_path):
        if way == "push_to_hub":
            model.push_to_hub(REPO, tags="mine")
        else:
            model.save_pretrained(tmp_path / "policy", push_to_hub=True, repo_id=REPO)
        content = hub.files(REPO)["README.md"].decode()
        assert not card_errors(content)
        data = ModelCard(content).data
        assert data.library_name == "hf_qrl"
        assert set(data.tags) == {"hf_qrl", "ilql"} | ({"mine"} if way == "push_to_hub" else set())

    def test_push_keeps_the_card_that_is_there(self, hub, api, model):
        model.push_to_hub(REPO)
        text = "---\ntags:\n- mine\n---\n# A card of my own\n"
        api.upload_file(path_or_fileobj=text.encode(), path_in_repo="README.md", repo_id=REPO)
        model.push_to_hub(REPO)
        card = ModelCard.load(REPO)
        assert "# A card of my own" in card.text
        assert {"mine", "hf_qrl"} <= set(card.data.tags)

    def test_configuration_of_a_pushed_model_tells_its_kind(self, hub, model):
        model.push_to_hub(REPO)
        config = AutoConfig.from_pretrained(REPO)
        assert config.model_type == "hf_qrl_ilql_causal_lm" and config.text_config.model_type == "llama"
