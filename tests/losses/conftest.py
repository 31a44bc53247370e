# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Batches of every shape the losses know, in float64."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_qrl.data import ILQLBatch
from hf_qrl.losses.vocabulary import vocabulary_loss
from hf_qrl.models.heads import ILQLHeads
from hf_qrl.models.lm_head import LMHead


D, V = 5, 11
STEMS = {"mlp": "relu", "linear": "identity", "tied": "linear", "dueling": "silu"}


@pytest.fixture(scope="session")
def golden() -> dict:
    return json.loads((Path(__file__).parents[1] / "goldens" / "trlx-ilql.json").read_text())


@pytest.fixture
def chunks_of(monkeypatch):
    """Returns a function that sets the size of the chunks of the vocabulary losses."""

    def set_size(elements: int) -> None:
        monkeypatch.setitem(vocabulary_loss.__kwdefaults__, "chunk_elements", elements)

    return set_size


@pytest.fixture(scope="session")
def make_batch():
    """Returns a function that draws a batch of rows of uneven lengths, with at least one padded action."""

    def make(
        seed: int,
        rows: int = 4,
        length: int = 9,
        truncated: bool = False,
        weight: bool = False,
        next_rows: bool = False,
        turns: bool = True,
    ) -> ILQLBatch:
        generator = torch.Generator().manual_seed(seed)

        def integer(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        lengths = [length - 1] + [integer(3, length - 1) for _ in range(rows - 1)]
        counts = [integer(1, n) for n in lengths]
        width = max(counts) + 1
        fields = {
            "input_ids": torch.randint(0, V, (rows, length), generator=generator),
            "attention_mask": torch.zeros(rows, length, dtype=torch.long),
            "rewards": torch.zeros(rows, width, dtype=torch.float64),
            "states_ixs": torch.zeros(rows, width + 1, dtype=torch.long),
            "actions_ixs": torch.zeros(rows, width, dtype=torch.long),
            "dones": torch.zeros(rows, width + 1, dtype=torch.long),
            "turn_ixs": torch.zeros(rows, width, dtype=torch.long),
        }
        for i, (n, t) in enumerate(zip(lengths, counts, strict=True)):
            actions = torch.randperm(n - 1, generator=generator)[:t].sort().values
            t = len(actions)
            fields["attention_mask"][i, :n] = 1
            fields["actions_ixs"][i, :t] = actions
            fields["states_ixs"][i, :t] = actions
            fields["states_ixs"][i, t] = n - 1
            fields["dones"][i, :t] = 1
            fields["rewards"][i, :t] = torch.randn(t, generator=generator, dtype=torch.float64)
            fields["turn_ixs"][i, 1:t] = (torch.rand(t - 1, generator=generator) < 0.4).long().cumsum(0)
        if not turns:
            del fields["turn_ixs"]
        if truncated:
            fields["truncated"] = torch.arange(rows) % 2 == 0
        if weight:
            fields["weight"] = torch.rand(rows, generator=generator) + 0.5
        if next_rows:
            fields["next_input_ids"] = torch.randint(0, V, (rows, 4), generator=generator)
            fields["next_attention_mask"] = torch.ones(rows, 4, dtype=torch.long)
            fields["next_attention_mask"][1::2] = 0
        return ILQLBatch(**fields)

    return make


@pytest.fixture(scope="session")
def make_heads():
    """Returns a function that makes float64 heads whose targets differ from the online heads."""

    def make(kind: str = "mlp", num_q_heads: int = 2, q_reduction: str = "min", seed: int = 0) -> ILQLHeads:
        torch.manual_seed(seed)
        heads = ILQLHeads(D, V, kind, STEMS[kind], 2, num_q_heads, q_reduction).double()
        heads.reset("default")
        for buffer in heads.target_q.buffers():
            buffer += 0.3 * torch.randn_like(buffer)
        return heads

    return make


@pytest.fixture(scope="session")
def make_lm_head():
    """Returns a function that makes the LM head of a language model that is nothing else."""

    def make(
        bias: bool = False, softcap: float | None = None, scale: float = 1.0, vocab_size: int = V, hidden_size: int = D
    ) -> LMHead:
        torch.manual_seed(3)
        module = nn.Linear(hidden_size, vocab_size, bias=bias).double()
        config = SimpleNamespace(final_logit_softcapping=softcap, logit_scale=scale)
        config.get_text_config = lambda: config
        base = SimpleNamespace(
            get_output_embeddings=lambda: module,
            get_input_embeddings=lambda: None,
            config=config,
            named_buffers=lambda recurse: iter(()),
        )
        return LMHead(base)

    return make
