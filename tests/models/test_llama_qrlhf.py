# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Weights of llama-qrlhf, against its forward pass written out position by position in float64."""

import json
import math
from pathlib import Path

import pytest
import torch

from hf_qrl import DuelingHead, LlamaDuelingQConfig, LlamaDuelingQForCausalLM


GOLDENS = Path(__file__).parents[1] / "goldens"
EPS = 2.0**-23  # PyTorch's for float32
SHAPES = [
    {"num_tokens": 13, "dim": 8, "depth": 2, "dim_head": 4, "heads": 2},
    {"num_tokens": 11, "dim": 10, "depth": 1, "dim_head": 6, "heads": 3, "ff_mult": 3},  # 10 is no multiple of 3
    {"num_tokens": 17, "dim": 6, "depth": 3, "dim_head": 8, "heads": 1, "dueling_q_head_expansion_factor": 3},
    {"num_tokens": 7, "dim": 12, "depth": 2, "dim_head": 2, "heads": 4, "dueling_q_head_expansion_factor": 1.5},
]


def random_weights(
    num_tokens, dim, depth, dim_head=64, heads=8, ff_mult=4, dueling_q_head_expansion_factor=2, seed=0
) -> dict[str, torch.Tensor]:
    """A state dict of llama-qrlhf's model, by the names that its modules give."""
    inner, hidden = int(dim * ff_mult * 2 / 3), int(dim * dueling_q_head_expansion_factor)
    shapes = {
        "token_emb.weight": (num_tokens, dim),
        "final_norm.weight": (dim,),
        "to_logits.weight": (num_tokens, dim),
        "to_logits.bias": (num_tokens,),
        "to_q.stem.0.weight": (hidden, dim),
        "to_q.stem.0.bias": (hidden,),
        "to_q.to_values.0.weight": (1, hidden),
        "to_q.to_values.0.bias": (1,),
        "to_q.to_advantages.0.weight": (num_tokens, hidden),
        "to_q.to_advantages.0.bias": (num_tokens,),
    }
    for i in range(depth):
        shapes |= {
            f"layers.{i}.0.to_qkv.0.weight": (dim,),
            f"layers.{i}.0.to_qkv.1.weight": (3 * heads * dim_head, dim),
            f"layers.{i}.0.to_out.1.weight": (dim, heads * dim_head),
            f"layers.{i}.1.0.weight": (dim,),
            f"layers.{i}.1.1.weight": (2 * inner, dim),
            f"layers.{i}.1.1.bias": (2 * inner,),
            f"layers.{i}.1.3.weight": (dim, inner),
            f"layers.{i}.1.3.bias": (dim,),
        }
    generator = torch.Generator().manual_seed(seed)
    weights = {name: 0.6 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights["rotary_emb.inv_freq"] = torch.tensor([10000 ** (-2 * j / dim_head) for j in range(dim_head // 2)])
    return weights


def normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / math.sqrt(sum(entry.item() ** 2 for entry in x) / len(x) + EPS)


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    """The j-th number of the first half and that of the second are a point of the plane, which is turned."""
    half = len(x) // 2
    points = torch.complex(x[:half], x[half:])
    angles = torch.tensor([position * 10000 ** (-2 * j / len(x)) for j in range(half)], dtype=torch.float64)
    points = points * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([points.real, points.imag])


def attended(states: list[torch.Tensor], qkv: torch.Tensor, out: torch.Tensor, heads: int) -> list[torch.Tensor]:
    width = len(qkv) // 3 // heads
    projected = [(qkv @ x).reshape(3, heads, width) for x in states]
    results = []
    for t, (queries, _, _) in enumerate(projected):
        joined = []
        for head in range(heads):
            query = rotated(queries[head], t)
            scores = [query @ rotated(projected[s][1][head], s) / math.sqrt(width) for s in range(t + 1)]
            weights = [math.exp(score) for score in scores]
            joined.append(sum(w * projected[s][2][head] for s, w in enumerate(weights)) / sum(weights))
        results.append(out @ torch.cat(joined))
    return results


def fed_forward(x, weights, layer: str) -> torch.Tensor:
    grown = weights[f"{layer}.1.weight"] @ x + weights[f"{layer}.1.bias"]
    content, gate = grown[: len(grown) // 2], grown[len(grown) // 2 :]
    gelu = gate * (1 + torch.erf(gate / math.sqrt(2))) / 2
    return weights[f"{layer}.3.weight"] @ (gelu * content) + weights[f"{layer}.3.bias"]


def llama_qrlhf(weights, row: list[int], depth: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and Q-values `(n, V)` of one row."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    states = [weights["token_emb.weight"][token] for token in row]
    for i in range(depth):
        layer = f"layers.{i}"
        qkv, out = weights[f"{layer}.0.to_qkv.1.weight"], weights[f"{layer}.0.to_out.1.weight"]
        inputs = [normalised(x, weights[f"{layer}.0.to_qkv.0.weight"]) for x in states]
        states = [x + y for x, y in zip(states, attended(inputs, qkv, out, heads), strict=True)]
        inputs = [normalised(x, weights[f"{layer}.1.0.weight"]) for x in states]
        states = [x + fed_forward(y, weights, f"{layer}.1") for x, y in zip(states, inputs, strict=True)]
    logits, q_values = [], []
    for x in states:
        h = normalised(x, weights["final_norm.weight"])
        logits.append(weights["to_logits.weight"] @ h + weights["to_logits.bias"])
        z = weights["to_q.stem.0.weight"] @ h + weights["to_q.stem.0.bias"]
        z = z / (1 + torch.exp(-z))
        advantages = weights["to_q.to_advantages.0.weight"] @ z + weights["to_q.to_advantages.0.bias"]
        value = weights["to_q.to_values.0.weight"][0] @ z + weights["to_q.to_values.0.bias"]
        q_values.append(value + advantages - advantages.sum() / len(advantages))
    return torch.stack(logits), torch.stack(q_values)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def rows() -> list[list[int]]:
    return [[3, 6, 1, 0, 5, 2], [4, 4, 2]]


class TestFromLlamaQRLHF:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_same_logits_and_q_values(self, shape, rows):
        weights = random_weights(**shape)
        model = LlamaDuelingQForCausalLM.from_llama_qrlhf(weights, **shape)
        assert not model.training
        for row in rows:
            logits, q_values = model(torch.tensor([row]), return_q_values=True, return_dict=False)
            expected = llama_qrlhf(weights, row, shape["depth"], shape["heads"])
            close(logits[0], expected[0])
            close(q_values[0], expected[1])
            # What the model acts by, cached and not, and what its target says.
            close(model(torch.tensor([row])).logits[0], expected[1])
            target = model.heads.target_q[0](model.hidden_states(input_ids=torch.tensor([row])))
            close(target[0], expected[1])

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
    def test_padding_is_not_seen(self, shape, side, rows):
        weights = random_weights(**shape)
        model = LlamaDuelingQForCausalLM.from_llama_qrlhf(weights, **shape)
        width = max(map(len, rows))
        before = {"left": 1, "right": 0}[side]
        ids = torch.tensor([[0] * before * (width - len(r)) + r + [0] * (1 - before) * (width - len(r)) for r in rows])
        mask = torch.tensor(
            [[0] * before * (width - len(r)) + [1] * len(r) + [0] * (1 - before) * (width - len(r)) for r in rows]
        )
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        output = model(ids, attention_mask=mask, position_ids=positions, return_q_values=True)
        for i, row in enumerate(rows):
            logits, q_values = llama_qrlhf(weights, row, shape["depth"], shape["heads"])
            close(output.logits[i][mask[i].bool()], logits)
            close(output.q_values[i][mask[i].bool()], q_values)

    def test_greedy_decoding_is_argmax_of_q(self, rows):
        shape = SHAPES[0]
        weights = random_weights(**shape)
        model = LlamaDuelingQForCausalLM.from_llama_qrlhf(weights, **shape)
        row = list(rows[1])
        for _ in range(5):
            row.append(llama_qrlhf(weights, row, shape["depth"], shape["heads"])[1][-1].argmax().item())
        new = model.generate(torch.tensor([rows[1]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert new[0].tolist() == row

    def test_defaults_are_those_of_llama_qrlhf(self):
        config = LlamaDuelingQConfig.from_llama_qrlhf(num_tokens=9, dim=24, depth=1)
        assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (64, 8, 8)
        assert (config.intermediate_size, config.head_expansion) == (64, 2)
        model = LlamaDuelingQForCausalLM(config)
        assert model.lm_head.bias is not None and model.model.layers[0].mlp.up_proj.bias is not None
        assert model.generation_config.eos_token_id is None

    def test_saves_and_loads(self, tmp_path, rows):
        model = LlamaDuelingQForCausalLM.from_llama_qrlhf(random_weights(**SHAPES[1]), **SHAPES[1])
        model.save_pretrained(tmp_path)
        loaded = LlamaDuelingQForCausalLM.from_pretrained(tmp_path)
        ids = torch.tensor(rows[:1])
        expected = model(ids, return_q_values=True)
        output = loaded(ids, return_q_values=True)
        assert torch.equal(output.logits, expected.logits) and torch.equal(output.q_values, expected.q_values)

    def test_further_fields(self):
        shape = SHAPES[0]
        model = LlamaDuelingQForCausalLM.from_llama_qrlhf(
            random_weights(**shape), **shape, eos_token_id=2, max_position_embeddings=77, policy="lm", beta=4
        )
        assert (model.config.eos_token_id, model.config.max_position_embeddings) == (2, 77)
        assert (model.config.policy, model.config.beta) == ("lm", 4.0)

    def test_half_precision_weights(self, rows):
        shape = SHAPES[0]
        weights = {name: tensor.bfloat16() for name, tensor in random_weights(**shape).items()}
        model = LlamaDuelingQForCausalLM.from_llama_qrlhf(weights, **shape)
        assert {x.dtype for x in model.parameters()} == {torch.float32}
        logits, q_values = llama_qrlhf(weights, rows[0], shape["depth"], shape["heads"])
        output = model(torch.tensor(rows[:1]), return_q_values=True)
        close(output.logits[0], logits)
        close(output.q_values[0], q_values)


class TestRefusals:
    def test_linear_head_raises(self):
        with pytest.raises(ValueError, match="`transformers.LlamaForCausalLM`"):
            LlamaDuelingQForCausalLM.from_llama_qrlhf({}, num_tokens=9, dim=8, depth=1, dueling_q_head=False)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"depth": 1}, r"8 are left over \(layers\.1\.0\.to_qkv\.0\.weight"),
            ({"depth": 3}, r"8 are missing \(layers\.2\.0\.to_qkv\.0\.weight"),
            ({"heads": 3}, r"to_qkv\.1\.weight has \(24, 8\), not \(36, 8\)"),
            ({"ff_mult": 2}, r"layers\.0\.1\.1\.weight has \(42, 8\), not \(20, 8\)"),
            ({"num_tokens": 12}, r"token_emb\.weight has \(13, 8\), not \(12, 8\)"),
            ({"dueling_q_head_expansion_factor": 3}, r"to_q\.stem\.0\.weight has \(16, 8\), not \(24, 8\)"),
        ],
        ids=str,
    )
    def test_other_arguments_raise(self, change, message):
        with pytest.raises(ValueError, match=message):
            LlamaDuelingQForCausalLM.from_llama_qrlhf(random_weights(**SHAPES[0]), **{**SHAPES[0], **change})

    def test_missing_and_left_over_weights_raise(self):
        weights = random_weights(**SHAPES[0])
        weights["to_q.weight"] = weights.pop("to_q.to_values.0.weight")
        with pytest.raises(
            ValueError, match=r"1 are missing \(to_q\.to_values\.0\.weight\); 1 are left over \(to_q\.weight\)"
        ):
            LlamaDuelingQForCausalLM.from_llama_qrlhf(weights, **SHAPES[0])

    def test_other_frequencies_raise(self):
        weights = random_weights(**SHAPES[0])
        weights["rotary_emb.inv_freq"] = weights["rotary_emb.inv_freq"] * torch.tensor([1.0, 0.5])
        with pytest.raises(ValueError, match="Other frequencies are not supported"):
            LlamaDuelingQForCausalLM.from_llama_qrlhf(weights, **SHAPES[0])

    def test_fields_that_follow_raise(self):
        with pytest.raises(ValueError, match=r"\['hidden_size'\] follow from"):
            LlamaDuelingQConfig.from_llama_qrlhf(num_tokens=9, dim=8, depth=1, hidden_size=8)


class TestDuelingHead:
    @pytest.mark.parametrize(("dtype", "key", "tolerance"), [("float32", "q", 1e-6), ("float64", "q_float64", 1e-9)])
    def test_golden(self, dtype, key, tolerance):
        golden = json.loads((GOLDENS / "llama-qrlhf.json").read_text())["dueling_head"]
        dtype = getattr(torch, dtype)
        head = DuelingHead(golden["dim"], golden["num_tokens"], golden["expansion_factor"]).to(dtype)
        # By the names that they have there.
        head.load_state_dict({name: torch.tensor(x, dtype=dtype) for name, x in golden["weights"].items()})
        q = head(torch.tensor(golden["x"], dtype=dtype))
        torch.testing.assert_close(q, torch.tensor(golden[key], dtype=dtype), rtol=tolerance, atol=tolerance)

    def test_own_names_load_too(self):
        torch.manual_seed(0)
        first, second, x = DuelingHead(dim=4, num_tokens=5), DuelingHead(dim=4, num_tokens=5), torch.randn(2, 4)
        assert not torch.equal(first(x), second(x))
        second.load_state_dict(first.state_dict())
        assert torch.equal(first(x), second(x))

    def test_mean_over_tokens_is_the_value(self):
        torch.manual_seed(0)
        head, x = DuelingHead(6, 11, 1.5), torch.randn(2, 3, 6)
        assert head.stem[0].weight.shape == (9, 6)
        torch.testing.assert_close(head(x).mean(-1), head.value(x), rtol=0, atol=1e-6)
