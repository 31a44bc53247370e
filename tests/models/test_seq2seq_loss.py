# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The chunked loss of encoder-decoder models against the definition, on dense values of rows without padding."""

import pytest
import torch
from torch import nn

from hf_qrl.data import DataCollatorForSeq2SeqILQL, ILQLSeq2SeqBatch
from hf_qrl.losses.ilql import ilql_loss, ilql_loss_from_states


OPTIONS = {"tau": 0.8, "gamma": 0.9, "cql_scale": 0.3, "awac_scale": 0.7, "awac_beta": 0.4}
MODELS = [("t5", kind) for kind in ("mlp", "linear", "tied", "dueling")]
MODELS += [("flan_t5", "tied"), ("flan_t5", "mlp"), ("mt5", "linear"), ("bart", "tied"), ("bart", "mlp")]


def element(encoder, decoder, rewards, truncated=False, weight=1.0, next_ids=()) -> dict:
    steps = range(len(decoder) - 1)
    return {
        "input_ids": encoder,
        "decoder_input_ids": decoder,
        "rewards": rewards,
        "states_ixs": list(range(len(decoder))),
        "actions_ixs": list(steps),
        "dones": [1] * len(steps) + [0],
        "turn_ixs": [0] * len(steps),
        "truncated": truncated,
        "weight": weight,
        "next_input_ids": list(next_ids),
        "next_attention_mask": [1] * len(next_ids),
    }


def draw_batch(start: int, pad_to_multiple_of: int | None = None) -> ILQLSeq2SeqBatch:
    rows = [
        element([5, 9, 30, 5, 9], [start, 7, 12, 2], [0.0, -0.5, 1.0]),
        element([44, 17], [start, 7, 8, 33, 2], [0.25, 0.0, 0.0, 0.5], weight=2.0, next_ids=[44, 17, 3, 6]),
        element([23, 58, 12], [start, 40], [0.75], truncated=True, weight=0.5),
    ]
    return ILQLSeq2SeqBatch(**DataCollatorForSeq2SeqILQL(60, pad_to_multiple_of)(rows))


def chunked(model, batch, **options):
    def loss_fn(hidden_states, heads, lm_head, next_hidden_state):
        loss, sums = ilql_loss_from_states(
            hidden_states, heads, lm_head, batch, next_hidden_state, **{**OPTIONS, **options}
        )
        model.sums = sums
        return loss

    return model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        decoder_input_ids=batch.decoder_input_ids,
        next_input_ids=batch.next_input_ids,
        next_attention_mask=batch.next_attention_mask,
        loss_fn=loss_fn,
    ).loss


def dense(model, batch, **options):
    """[`ilql_loss`] of outputs that were made row by row, without padding."""
    rows = []
    for i in range(len(batch.input_ids)):
        length, decoder_length = batch.attention_mask[i].sum(), batch.states_ixs[i].max() + 1
        rows.append(
            model(
                batch.input_ids[i : i + 1, :length],
                decoder_input_ids=batch.decoder_input_ids[i : i + 1, :decoder_length],
                output_values=True,
            )
        )

    def padded(tensors, width):
        return torch.cat([nn.functional.pad(x, (0, 0, 0, width - x.shape[1])) for x in tensors])

    width = batch.dones.shape[1]
    values = padded([row.value[..., None] for row in rows], width)
    qs, target_qs = (
        tuple(padded([getattr(row, name)[k] for row in rows], width)[:, :-1] for k in range(2))
        for name in ("qs", "target_qs")
    )
    logits = padded([row.logits for row in rows], batch.decoder_input_ids.shape[1])
    next_value = torch.zeros(len(rows), dtype=values.dtype)
    for i, mask in enumerate(batch.next_attention_mask):
        if mask.any():
            start = torch.tensor([[model.config.decoder_start_token_id]])
            ids = batch.next_input_ids[i : i + 1, : mask.sum()]
            next_value[i] = model(ids, decoder_input_ids=start, output_values=True).value[0, 0].detach()
    return ilql_loss(logits, qs, target_qs, values, batch, next_value=next_value, **{**OPTIONS, **options})[0]


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class TestLoss:
    @pytest.mark.parametrize("options", [{}, {"target": "utterance", "discount_on": "utterance"}], ids=["td", "utt"])
    @pytest.mark.parametrize(("name", "head_type"), MODELS)
    def test_chunked_equals_dense(self, make_seq2seq_model, name, head_type, options):
        model = make_seq2seq_model(name, head_type=head_type).double()
        batch = draw_batch(model.config.decoder_start_token_id)
        loss, expected = chunked(model, batch, **options), dense(model, batch, **options)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        got, reference = gradients(model, loss), gradients(model, expected)
        # Every parameter is trained, in the encoder too; the targets are buffers.
        assert got.keys() == reference.keys() == {name for name, _ in model.named_parameters()}
        for parameter, gradient in reference.items():
            torch.testing.assert_close(got[parameter], gradient, rtol=1e-7, atol=1e-9)
            assert gradient.any(), parameter

    def test_next_state_matters_where_there_is_one(self, make_seq2seq_model):
        model = make_seq2seq_model().double()
        losses = []
        for row, token in ((1, 3), (1, 4), (0, 3), (0, 4)):
            batch = draw_batch(0)
            batch.next_input_ids[row, 2] = token
            losses.append(chunked(model, batch).item())
        assert losses[0] != losses[1]
        assert losses[2] == losses[3] == losses[0]

    def test_padding_does_not_matter(self, make_seq2seq_model, seq2seq_architecture):
        model = make_seq2seq_model(seq2seq_architecture).double()
        start = model.config.decoder_start_token_id
        narrow, wide = (draw_batch(start, multiple) for multiple in (None, 16))
        assert wide.input_ids.shape == wide.decoder_input_ids.shape == (3, 16)
        torch.testing.assert_close(chunked(model, wide), chunked(model, narrow), rtol=1e-10, atol=1e-10)

    def test_first_output_token_is_trained(self, make_seq2seq_model):
        model = make_seq2seq_model(head_type="linear").double()
        batch = draw_batch(0)
        first = batch.decoder_input_ids[:, 1].tolist()
        assert first == [7, 7, 40]
        loss = chunked(model, batch, cql_scale=0.0, awac_scale=0.0)
        moved = gradients(model, loss)["heads.q.0.weight"].abs().sum(1)
        # Token 40 is taken once, as the first of an output.
        assert moved[40] > 1e-3 and moved[7] > 1e-3
        assert not moved[[x for x in range(61) if x not in {7, 12, 2, 8, 33, 40}]].any()
        assert model.sums["actions"] == 3 * 1.0 + 4 * 2.0 + 1 * 0.5
        batch.decoder_input_ids[2, 1] = 41
        assert chunked(model, batch) != loss

    def test_state_after_a_truncated_row_is_its_own_last(self, make_seq2seq_model):
        model = make_seq2seq_model().double()
        bootstrapped, ended = draw_batch(0), draw_batch(0)
        ended.truncated[2] = False
        assert chunked(model, bootstrapped) != chunked(model, ended)

    def test_frozen_base_trains_the_heads_alone(self, make_seq2seq_model):
        model = make_seq2seq_model().double()
        model.base.requires_grad_(False)
        loss = chunked(model, draw_batch(0), awac_scale=0.0)
        assert set(gradients(model, loss)) == {name for name, _ in model.named_parameters() if "heads." in name}

    def test_activation_checkpointing_equals_without(self, make_seq2seq_model, seq2seq_architecture):
        model = make_seq2seq_model(seq2seq_architecture).double().train()
        batch = draw_batch(model.config.decoder_start_token_id)
        plain = gradients(model, chunked(model, batch))
        calls = []
        layers = next(module for module in model.base.get_encoder().modules() if isinstance(module, nn.ModuleList))
        # Hooks of a layer itself stay outside its checkpoint, those of what is in it do not.
        part = next(module for module in layers[0].modules() if isinstance(module, nn.Linear))
        part.register_forward_pre_hook(lambda module, args: calls.append(1))
        model.activation_checkpointing_enable()
        checkpointed = gradients(model, chunked(model, batch))
        assert len(calls) == 3  # forward, the next states without gradient, and again in backward
        for name, gradient in plain.items():
            torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-9, atol=1e-10)
