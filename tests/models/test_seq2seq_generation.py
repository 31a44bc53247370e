# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Decoding of encoder-decoder models against loops that have no cache, no padding and no code of transformers."""

import pytest
import torch

from hf_qrl import ILQLForSeq2SeqLM


PAD, NEW = 0, 6
# What the encoder reads; padded on the right, as tokenizers of these models do.
ROWS = [[5, 9, 30, 5, 9], [44, 17], [23, 58, 12, 8]]
MODELS = {
    "t5": {"head_type": "mlp"},
    "flan_t5": {"head_type": "tied", "q_reduction": "mean"},
    "bart": {"head_type": "dueling", "policy_top_k": 12},
}
MODES = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 0},
    "sampling, no cache": {"do_sample": True, "top_k": 0, "use_cache": False},
    "sampling, top-k": {"do_sample": True, "top_k": 4, "temperature": 0.7},
}


@torch.no_grad()
def policy(model: ILQLForSeq2SeqLM, row: list[int], said: list[int], beta: float | None = None) -> torch.Tensor:
    """Logits of the policy after `said`, put together from the values of one row without padding."""
    beta = model.config.beta if beta is None else beta
    decoder = torch.tensor([[model.config.decoder_start_token_id, *said]])
    output = model(torch.tensor([row]), decoder_input_ids=decoder, output_values=True, use_cache=False)
    lm_logits = output.logits[0, -1]
    targets = torch.stack(output.target_qs)[:, 0, -1]
    q = targets.amin(0) if model.config.q_reduction == "min" else targets.mean(0)
    scores = lm_logits + beta * (q - output.value[0, -1])
    if model.config.policy_top_k is not None:
        order = sorted(range(len(scores)), key=lambda v: -lm_logits[v].item())
        scores[order[model.config.policy_top_k :]] = -torch.inf
    forced = model.generation_config.forced_bos_token_id
    if forced is not None and not said:
        scores = torch.full_like(scores, -torch.inf)
        scores[forced] = 0.0
    return scores


def greedy(model, row, beta=None, new=NEW, eos=None) -> list[int]:
    said: list[int] = []
    while len(said) < new and (eos is None or eos not in said):
        said.append(policy(model, row, said, beta).argmax().item())
    return said


def sample(model, rows, seed, top_k=None, temperature=1.0) -> list[list[int]]:
    torch.manual_seed(seed)
    outs: list[list[int]] = [[] for _ in rows]
    for _ in range(NEW):
        scores = torch.stack([policy(model, row, said) for row, said in zip(rows, outs, strict=True)]) / temperature
        if top_k is not None:
            scores[scores < scores.topk(top_k).values[:, -1:]] = -torch.inf
        for said, token in zip(outs, torch.multinomial(torch.softmax(scores, -1), 1).tolist(), strict=True):
            said += token
    return outs


def beam_search(model, row, width) -> list[int]:
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(NEW):
        grown = []
        for total, said in beams:
            log_probs = torch.log_softmax(policy(model, row, said), -1)
            grown += [(total + value, [*said, token]) for token, value in enumerate(log_probs.tolist())]
        beams = sorted(grown, key=lambda beam: -beam[0])[:width]
    return beams[0][1]


def right_padded(rows) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = [row + [PAD] * (width - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generate(model, rows, **arguments) -> list[list[int]]:
    out = model.generate(**right_padded(rows), **{"max_new_tokens": NEW, "do_sample": False, **arguments})
    assert (out[:, 0] == model.config.decoder_start_token_id).all()
    return out[:, 1:].tolist()


@pytest.fixture
def endless_model(make_seq2seq_model):
    """Returns a function to models that never stop: all rows have the same length."""

    def make(name: str = "t5", **head_arguments) -> ILQLForSeq2SeqLM:
        model = make_seq2seq_model(name, **{"beta": 3.0, **head_arguments})
        for config in (model.generation_config, model.config, model.base.config):
            config.eos_token_id = None
        return model

    return make


class TestGenerate:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", MODELS)
    def test_generate_matches_reference(self, endless_model, name, mode):
        # Beams find more than greedy search where the policy is less sure.
        model, arguments = endless_model(name, **MODELS[name], beta=0.3 if mode == "beams" else 3.0), MODES[mode]
        if mode.startswith("sampling"):
            expected = sample(model, ROWS, 5, arguments["top_k"] or None, arguments.get("temperature", 1.0))
            torch.manual_seed(5)
        elif mode == "beams":
            expected = [beam_search(model, row, 3) for row in ROWS]
            assert expected != [greedy(model, row) for row in ROWS]
        else:
            expected = [greedy(model, row) for row in ROWS]
            assert expected != [greedy(model, row, beta=0.0) for row in ROWS]
        assert generate(model, ROWS, **arguments) == expected
        if name == "bart":
            assert {said[0] for said in expected} == {1}

    def test_rows_end_at_eos(self, make_seq2seq_model):
        model = make_seq2seq_model("t5", beta=3.0)
        # One of the tokens produced is declared to end a row.
        eos = greedy(model, ROWS[0])[2]
        expected = [greedy(model, row, eos=eos) for row in ROWS]
        assert len({len(said) for said in expected}) > 1
        width = max(map(len, expected))
        expected = [said + [PAD] * (width - len(said)) for said in expected]
        assert generate(model, ROWS, eos_token_id=eos) == expected

    def test_new_tokens_do_not_count_the_encoder(self, endless_model):
        model = endless_model()
        long = [list(range(3, 3 + 40))]
        assert len(generate(model, long, max_new_tokens=3)[0]) == 3
        assert len(generate(model, long, max_new_tokens=None, max_length=5)[0]) == 4

    def test_beta_paths(self, endless_model):
        model = endless_model(beta=1.0)
        expected = [greedy(model, row, beta=4.0) for row in ROWS]
        assert expected != [greedy(model, row, beta=1.0) for row in ROWS]
        for arguments in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
            assert generate(model, ROWS, beta=4.0, **arguments) == expected
        assert generate(model, ROWS, beta=0.0) == generate(model.base, ROWS)
        model.config.beta = 4.0
        assert generate(model, ROWS) == expected
        beams = [beam_search(model, row, 3) for row in ROWS]
        model.config.beta = 1.0
        assert generate(model, ROWS, beta=4.0, num_beams=3) == beams

    @pytest.mark.parametrize("name", ["t5", "bart"])
    def test_everything_is_returned(self, endless_model, name):
        model = endless_model(name, beta=2.0)
        model.set_attn_implementation("eager")
        output = model.generate(
            **right_padded(ROWS),
            max_new_tokens=3,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            output_hidden_states=True,
            output_attentions=True,
        )
        layers = 2
        assert len(output.encoder_hidden_states) == layers + 1 and len(output.encoder_attentions) == layers
        assert output.encoder_hidden_states[0].shape == (3, 5, 24)
        for step in range(3):
            assert len(output.decoder_hidden_states[step]) == layers + 1
            assert output.decoder_hidden_states[step][0].shape == (3, 1, 24)
            assert output.decoder_attentions[step][0].shape == (3, 2, 1, step + 1)
            assert output.cross_attentions[step][0].shape == (3, 2, 1, 5)
        model.generation_config.forced_bos_token_id = None  # which the raw logits do not know
        for i, row in enumerate(ROWS):
            said = output.sequences[i, 1:].tolist()
            for step in range(3):
                expected = policy(model, row, said[:step])
                torch.testing.assert_close(output.logits[step][i], expected, rtol=1e-4, atol=1e-4)

    def test_one_row_with_a_narrow_support(self, endless_model):
        model = endless_model("t5", policy_top_k=1, beta=8.0)
        model.config.policy_top_k = None
        expected = greedy(model, ROWS[0], beta=0.0)
        model.config.policy_top_k = 1
        assert generate(model, ROWS[:1], do_sample=True, top_k=0)[0] == expected
        with pytest.raises(ValueError, match="Raise `model.config.policy_top_k`"):
            generate(model, ROWS[:1], bad_words_ids=[[expected[0]]])

    def test_no_hook_stays_after_generation(self, endless_model):
        model = endless_model()
        generate(model, ROWS)
        assert not model.get_output_embeddings()._forward_pre_hooks
