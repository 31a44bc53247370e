# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Every way of decoding against loops that have no cache, no padding and no decoding code of transformers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import ContinuousBatchingConfig, PreTrainedTokenizerFast, pipeline

from hf_qrl import ILQLForCausalLM


PAD, EOS, NEW = 0, 2, 7
ROWS = [[5, 9, 30, 5, 9], [44, 17], [23, 58, 12, 8]]


@torch.no_grad()
def policy(model: ILQLForCausalLM, row: list[int], beta: float | None = None) -> torch.Tensor:
    """Logits of the policy after `row`, put together from the values of one row without padding."""
    beta = model.config.beta if beta is None else beta
    output = model(torch.tensor([row]), output_values=True, use_cache=False)
    lm_logits = output.logits[0, -1]
    if model.config.q_reduction == "min":
        q = torch.minimum(output.target_qs[0], output.target_qs[1])[0, -1]
    else:
        q = (output.target_qs[0] + output.target_qs[1])[0, -1] / 2
    scores = lm_logits + beta * (q - output.value[0, -1])
    if model.config.policy_top_k is not None:
        order = sorted(range(len(scores)), key=lambda v: -lm_logits[v].item())
        scores[order[model.config.policy_top_k :]] = -torch.inf
    return scores


def greedy(model, row, beta=None, new=NEW, eos=None) -> list[int]:
    out = list(row)
    while len(out) < len(row) + new and (eos is None or out == row or out[-1] != eos):
        out.append(policy(model, out, beta).argmax().item())
    return out[len(row) :]


def sample(model, rows, seed, top_k=None, temperature=1.0, beta=None, new=NEW) -> list[list[int]]:
    torch.manual_seed(seed)
    outs = [list(row) for row in rows]
    for _ in range(new):
        scores = torch.stack([policy(model, out, beta) for out in outs]) / temperature
        if top_k is not None:
            scores[scores < scores.topk(top_k).values[:, -1:]] = -torch.inf
        for out, token in zip(outs, torch.multinomial(torch.softmax(scores, -1), 1).tolist(), strict=True):
            out += token
    return [out[len(row) :] for out, row in zip(outs, rows, strict=True)]


def beam_search(model, row, width, new=NEW) -> list[int]:
    beams = [(0.0, list(row))]
    for _ in range(new):
        grown = []
        for total, out in beams:
            log_probs = torch.log_softmax(policy(model, out), -1)
            grown += [(total + value, [*out, token]) for token, value in enumerate(log_probs.tolist())]
        beams = sorted(grown, key=lambda beam: -beam[0])[:width]
    return beams[0][1][len(row) :]


def left_padded(rows) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = [[PAD] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generate(model, rows, **arguments) -> list[list[int]]:
    inputs = left_padded(rows)
    out = model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **arguments})
    return out[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture
def endless_model(make_model):
    """Returns a function to models that never stop: all rows have the same length."""

    def make(name: str, **head_arguments) -> ILQLForCausalLM:
        model = make_model(name, **{"beta": 3.0, **head_arguments})
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        model.base.config.eos_token_id = None
        return model

    return make


MODES = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "assisted": {"assistant_model": None},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 0},
    "sampling, no cache": {"do_sample": True, "top_k": 0, "use_cache": False},
    "sampling, top-k": {"do_sample": True, "top_k": 4, "temperature": 0.7},
}


class TestGenerate:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        ("architecture", "head_arguments"),
        [
            ("gpt2", {"head_type": "mlp"}),
            ("llama_tied", {"head_type": "tied", "q_reduction": "mean"}),
            ("gemma3", {"head_type": "dueling", "policy_top_k": 6}),
        ],
    )
    def test_generate_matches_reference(self, endless_model, architecture, head_arguments, mode):
        model, arguments = endless_model(architecture, **head_arguments), dict(MODES[mode])
        # Drafts are made for one row at a time.
        rows = ROWS[:1] if mode in ("prompt lookup", "assisted") else ROWS
        if mode == "assisted":
            arguments["assistant_model"] = model.base
        if mode.startswith("sampling"):
            top_k, temperature = arguments["top_k"] or None, arguments.get("temperature", 1.0)
            expected = sample(model, rows, 5, top_k, temperature)
            torch.manual_seed(5)
        elif mode == "beams":
            expected = [beam_search(model, row, 3) for row in rows]
            assert expected != [greedy(model, row) for row in rows]
        else:
            expected = [greedy(model, row) for row in rows]
            assert expected != [greedy(model, row, beta=0.0) for row in rows]
        assert generate(model, rows, **arguments) == expected

    def test_greedy_matches_reference(self, endless_model, architecture, head_type):
        model = endless_model(architecture, head_type=head_type)
        assert generate(model, ROWS) == [greedy(model, row) for row in ROWS]

    def test_rows_end_at_eos(self, make_model):
        model = make_model("llama", beta=3.0)
        free = [greedy(model, row) for row in ROWS]
        # One of the tokens produced is declared to end a row.
        eos = free[0][2]
        expected = [greedy(model, row, eos=eos) for row in ROWS]
        assert len({len(row) for row in expected}) > 1
        width = max(map(len, expected))
        expected = [row + [PAD] * (width - len(row)) for row in expected]
        assert generate(model, ROWS, eos_token_id=eos) == expected

    @pytest.mark.parametrize("mode", ["beams", "sampling", "greedy"])
    def test_policy_top_k_restricts_every_mode(self, endless_model, mode):
        model = endless_model("llama", policy_top_k=2, beta=8.0)
        torch.manual_seed(0)
        for row, new in zip(ROWS, generate(model, ROWS, **MODES[mode]), strict=True):
            for i, token in enumerate(new):
                lm_logits = model.base(torch.tensor([row + new[:i]])).logits[0, -1]
                assert token in lm_logits.topk(2).indices.tolist()
        model.config.policy_top_k = None
        torch.manual_seed(0)
        restricted = [
            token in model.base(torch.tensor([row + new[:i]])).logits[0, -1].topk(2).indices.tolist()
            for row, new in zip(ROWS, generate(model, ROWS, **MODES[mode]), strict=True)
            for i, token in enumerate(new)
        ]
        assert not all(restricted)

    def test_top_k_acts_on_perturbed_logits(self, endless_model):
        # With one token left, sampling is greedy decoding of the policy, not of the language model.
        model = endless_model("llama")
        expected = [greedy(model, row) for row in ROWS]
        assert generate(model, ROWS, do_sample=True, top_k=1) == expected
        assert expected != [greedy(model, row, beta=0.0) for row in ROWS]

    def test_beta_zero_is_the_language_model(self, endless_model):
        model = endless_model("gpt2")
        assert generate(model, ROWS, beta=0.0) == generate(model.base, ROWS)

    def test_scores_are_policy_logits(self, endless_model):
        model = endless_model("gpt2")
        inputs = left_padded(ROWS)
        output = model.generate(
            **inputs, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        for i, row in enumerate(ROWS):
            new = output.sequences[i, inputs["input_ids"].shape[1] :].tolist()
            for step in range(3):
                torch.testing.assert_close(
                    output.logits[step][i], policy(model, row + new[:step]), rtol=1e-4, atol=1e-4
                )

    def test_hidden_states_are_returned(self, endless_model):
        output = endless_model("gpt2").generate(
            **left_padded(ROWS), max_new_tokens=2, return_dict_in_generate=True, output_hidden_states=True
        )
        assert len(output.hidden_states) == 2 and len(output.hidden_states[0]) == 3

    def test_attentions_are_returned(self, endless_model):
        model = endless_model("gpt2")
        model.set_attn_implementation("eager")
        output = model.generate(
            **left_padded(ROWS), max_new_tokens=2, return_dict_in_generate=True, output_attentions=True
        )
        assert len(output.attentions) == 2 and len(output.attentions[0]) == 2

    def test_no_hook_stays_after_generation(self, endless_model):
        model = endless_model("gpt2")
        generate(model, ROWS)
        assert not model.get_output_embeddings()._forward_pre_hooks


class TestBeta:
    def test_beta_paths(self, endless_model):
        model = endless_model("llama", beta=1.0)
        expected = [greedy(model, row, beta=4.0) for row in ROWS]
        assert expected != [greedy(model, row, beta=1.0) for row in ROWS]
        # By call, in every mode that hands it on.
        assert generate(model, ROWS, beta=4.0) == expected
        assert generate(model, ROWS, beta=4) == expected
        assert generate(model, ROWS, beta=4.0, use_cache=False) == expected
        assert generate(model, ROWS, beta=4.0, cache_implementation="static") == expected
        assert generate(model, ROWS[:1], beta=4.0, prompt_lookup_num_tokens=2) == expected[:1]
        torch.manual_seed(3)
        assert generate(model, ROWS, beta=4.0, do_sample=True, top_k=0) == sample(model, ROWS, 3, beta=4.0)
        # By configuration, which takes effect at once and everywhere.
        model.config.beta = 4.0
        assert generate(model, ROWS) == expected
        assert generate(model, ROWS, beta=None) == expected
        assert generate(model, ROWS[:1], assistant_model=model.base) == expected[:1]
        beams = [beam_search(model, row, 3) for row in ROWS]
        model.config.beta = 1.0
        assert generate(model, ROWS, beta=4.0, num_beams=3) == beams

    def test_beta_refused_with_assistant(self, endless_model):
        model = endless_model("llama")
        with pytest.raises(ValueError, match="which has no `beta`; set `model.config.beta` instead"):
            generate(model, ROWS[:1], assistant_model=model.base, beta=4.0)

    def test_beta_refused_by_generate_batch(self, endless_model):
        with pytest.raises(ValueError, match="would ignore `beta`; set `model.config.beta` instead"):
            endless_model("llama").generate_batch(ROWS, beta=4.0)

    def test_beta_reaches_no_other_keyword(self, endless_model):
        with pytest.raises(ValueError, match="bta"):
            generate(endless_model("llama"), ROWS, bta=4.0)


class TestContinuousBatching:
    @pytest.mark.parametrize("policy_top_k", [None, 6])
    def test_generate_batch_matches_reference(self, endless_model, policy_top_k):
        model = endless_model("llama", policy_top_k=policy_top_k)
        expected = [greedy(model, row) for row in ROWS]
        model.generation_config.do_sample = False
        model.generation_config.max_new_tokens = NEW
        model.generation_config.eos_token_id = -1
        # A cache of a few pages, for by default it takes most of the memory.
        small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)
        outputs = model.generate_batch(ROWS, continuous_batching_config=small, warmup=False)
        assert [output.generated_tokens for output in outputs.values()] == expected


class TestPipeline:
    def test_pipeline_matches_reference(self, endless_model, tmp_path):
        words = {"<pad>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, 61)}}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
            pad_token="<pad>",
            unk_token="<unk>",
            padding_side="left",
        )
        tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
        model = endless_model("llama")
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        prompts = [" ".join(f"w{token}" for token in row) for row in ROWS]
        generator = pipeline("text-generation", model=str(tmp_path))
        assert type(generator.model) is ILQLForCausalLM
        for batch_size in (1, 3):
            outputs = generator(
                prompts, max_new_tokens=NEW, do_sample=False, return_full_text=False, batch_size=batch_size
            )
            for row, (output,) in zip(ROWS, outputs, strict=True):
                assert output["generated_text"].split() == [f"w{token}" for token in greedy(model, row)]


class TestSupport:
    @pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
    def test_forbidden_support_raises(self, endless_model, options):
        model = endless_model("llama", policy_top_k=2)
        row = torch.tensor([ROWS[0]])
        support = model.base(row).logits[0, -1].topk(2).indices.tolist()
        inputs = {"input_ids": row, "attention_mask": torch.ones_like(row), "max_new_tokens": 1, **options}
        with pytest.raises(ValueError, match="Raise `model.config.policy_top_k`"):
            model.generate(**inputs, bad_words_ids=[[token] for token in support])
        allowed = model.generate(**inputs, bad_words_ids=[support[:1]])
        assert allowed[0, -1].item() == support[1]


class TestThreads:
    def test_threads_do_not_see_each_other(self, endless_model, head_type):
        model = endless_model("llama", beta=4.0, head_type=head_type)
        torch.manual_seed(0)
        batches = [torch.randint(3, 40, (1, 12)) for _ in range(2)]
        with torch.no_grad():
            expected = [model(batch).logits for batch in batches]

        def wrong(i: int) -> int:
            with torch.no_grad():
                return sum(not torch.equal(model(batches[i]).logits, expected[i]) for _ in range(200))

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(wrong, range(2))) == [0, 0]
