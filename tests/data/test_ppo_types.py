# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Elements and batches of PPO."""

from dataclasses import fields

import pytest
import torch

from hf_qrl.data import PPORLBatch, PPORLElement, collate_ppo


PAD = 9
FIELDS = ["query_tensor", "response_tensor", "logprobs", "values", "rewards"]


def element(query, response, extra=False):
    numbers = [torch.arange(1.0, len(response) + 1) * k for k in (1, 10, 100, 1000, 10000)]
    return PPORLElement(torch.tensor(query), torch.tensor(response), *numbers[: 5 if extra else 3])


def test_fields_are_those_of_trlx_first():
    assert [x.name for x in fields(PPORLElement)][:5] == FIELDS
    assert [x.name for x in fields(PPORLBatch)][:5] == ["query_tensors", "response_tensors", *FIELDS[2:]]


@pytest.mark.parametrize("extra", [False, True])
def test_collation(extra):
    batch = collate_ppo([element([1, 2, 3], [4], extra), element([5], [6, PAD], extra)], PAD)
    assert batch.query_tensors.tolist() == [[1, 2, 3], [PAD, PAD, 5]]
    assert batch.response_tensors.tolist() == [[4, PAD], [6, PAD]]
    assert batch.query_mask.tolist() == [[True] * 3, [False, False, True]]
    # The second response ends with a token that pads, too.
    assert batch.response_mask.tolist() == [[True, False], [True, True]]
    for name, k in {"logprobs": 1, "values": 10, "rewards": 100, "advantages": 1000, "returns": 10000}.items():
        if k > 100 and not extra:
            assert getattr(batch, name) is None
        else:
            assert getattr(batch, name).tolist() == [[k, 0], [k, 2 * k]]


def test_masks_from_the_padding_alone():
    zeros = torch.zeros(2, 3)
    queries = torch.tensor([[PAD, 1, 2], [PAD, PAD, 3]])
    # A pad token inside of a row is a token like any other.
    responses = torch.tensor([[4, PAD, 5], [6, PAD, PAD]])
    query_mask, response_mask = PPORLBatch(queries, responses, zeros, zeros, zeros).masks(PAD)
    assert query_mask.tolist() == [[False, True, True], [False, False, True]]
    assert response_mask.tolist() == [[True] * 3, [True, False, False]]
    whole = collate_ppo([element([1], [PAD])], PAD)
    assert [x.tolist() for x in whole.masks(PAD)] == [[[True]], [[True]]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_tensor": torch.tensor([], dtype=torch.long)}, "`response_tensor` must be a row"),
        ({"query_tensor": torch.tensor([[1, 2]])}, "`query_tensor` must be a row"),
        ({"query_tensor": torch.tensor([1.0])}, "`query_tensor` must be a row"),
        ({"values": torch.zeros(3)}, "`values` must have one number to each of the 2"),
        ({"returns": torch.zeros(2, 1)}, "`returns` must have one number"),
    ],
)
def test_malformed_elements(changes, message):
    good = {"query_tensor": torch.tensor([1]), "response_tensor": torch.tensor([2, 3])}
    good |= dict.fromkeys(("logprobs", "values", "rewards"), torch.zeros(2))
    PPORLElement(**good)
    with pytest.raises(ValueError, match=message):
        PPORLElement(**{**good, **changes})


def test_collations_that_make_no_sense():
    with pytest.raises(ValueError, match="no elements"):
        collate_ppo([], PAD)
    with pytest.raises(ValueError, match="have no `advantages`, and others do"):
        collate_ppo([element([1], [2]), element([1], [2], extra=True)], PAD)
