# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The output embedding, wherever it lies when heads and losses ask for it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate import cpu_offload, disk_offload

from hf_qrl.models.lm_head import LMHead


class TestOffloadedWeight:
    @pytest.mark.parametrize("offload", ["cpu", "disk"])
    def test_same_policy_and_values(self, make_model, make_ids, head_type, offload, tmp_path):
        model, ids = make_model("llama", head_type=head_type), make_ids()
        policy, output = model(ids, beta=2.0).logits, model(ids, output_values=True)
        if offload == "cpu":
            cpu_offload(model, execution_device="cpu")
        else:
            disk_offload(model, str(tmp_path), execution_device="cpu")
        assert model.base.lm_head.weight.device.type == "meta"
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(model(ids, beta=2.0).logits, policy)
                again = model(ids, output_values=True)
                for got, expected in zip((*again.qs, *again.target_qs), (*output.qs, *output.target_qs), strict=True):
                    assert torch.equal(got, expected)
        assert model.base.lm_head.weight.device.type == "meta"

    def test_threads_and_errors_leave_the_layer_as_it_was(self, make_model, make_ids):
        model, ids = make_model("llama", head_type="tied"), make_ids()
        expected = model.base(ids).logits
        cpu_offload(model, execution_device="cpu")
        layer, lm_head = model.base.lm_head, LMHead(model.base)
        before = dict(vars(layer))

        def fail(rows, weight):
            raise RuntimeError("inside")

        with pytest.raises(RuntimeError, match="inside"):
            lm_head.lend(torch.zeros(1, 24), fail)
        assert vars(layer) == before

        def use(i: int) -> int:
            with torch.no_grad():
                return sum(not torch.equal(model(ids, beta=0.0 if i else 2.0).logits, (expected, policy)[i == 0])
                           for _ in range(20))  # fmt: skip

        with torch.no_grad():
            policy = model(ids, beta=2.0).logits
            with ThreadPoolExecutor(1) as pool:
                assert list(pool.map(use, [0, 1])) == [0, 0]
        assert vars(layer) == before


@pytest.mark.slow
def test_compiled_forward_equals_plain(make_model, make_ids, head_type):
    model, ids = make_model("llama", head_type=head_type), make_ids()
    with torch.no_grad():
        expected = model(ids, beta=2.0).logits
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(ids, beta=2.0).logits, expected)


def test_positions_and_kept_logits_contradict(make_model, make_ids):
    model, ids = make_model("llama"), make_ids()
    ixs = torch.tensor([[0, 1], [0, 1]])
    with pytest.raises(ValueError, match="`logits_to_keep` leaves a part"):
        model(ids, output_values=True, states_ixs=ixs, logits_to_keep=2)
