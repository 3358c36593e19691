"""Guidance: diffusers' formula in one batched pass."""

import torch

from megatron_omni.models.base import TextCondition
from megatron_omni.sampling.guidance import Guidance
from tests.toy import SIZE, ToyModel, embeddings, noise


def inputs(guidance: Guidance):
    return guidance.inputs(noise(3), torch.tensor([0.9, 0.5, 0.2]), embeddings(3), embeddings(1, 5)[0], SIZE)


def test_batched_guidance_is_two_passes_and_the_rescaled_difference():
    guidance, model = Guidance(4.0), ToyModel()
    got = guidance.combine(guidance.forward(model, inputs(guidance)))
    sigma = torch.tensor([0.9, 0.5, 0.2])
    positive = model(noise(3), sigma, TextCondition.pad(embeddings(3)), SIZE)
    negative = model(noise(3), sigma, TextCondition.pad([embeddings(1, 5)[0]] * 3), SIZE)
    combined = negative + 4.0 * (positive - negative)
    # As in diffusers.QwenImagePipeline.__call__.
    norm = torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True)
    torch.testing.assert_close(got, combined * norm)


def test_both_branches_carry_gradient():
    guidance, model = Guidance(4.0), ToyModel()
    output = guidance.forward(model, inputs(guidance)).detach().requires_grad_()
    guidance.combine(output).square().sum().backward()
    positive, negative = output.grad.chunk(2)
    assert positive.abs().min() > 0
    assert negative.abs().sum() > 0


def test_batch_invariant_rows_do_not_depend_on_their_batch():
    guidance, model = Guidance(2.0, batch_invariant=True), ToyModel()
    together = guidance.combine(guidance.forward(model, inputs(guidance)))
    for i in range(3):
        sigma = torch.tensor([0.9, 0.5, 0.2])[i : i + 1]
        alone = guidance.inputs(noise(3)[i : i + 1], sigma, [embeddings(3)[i]], embeddings(1, 5)[0], SIZE)
        assert torch.equal(guidance.combine(guidance.forward(model, alone))[0], together[i])
