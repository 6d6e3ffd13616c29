"""The Fisher diagonal of any classifier, gradient by gradient, to hold closed forms against."""

import torch
from torch.func import functional_call, grad, vmap

from gems_flwr.radii.quality import two_sided


def fisher_diagonal(model, inputs, labels="exact", seed=0, chunk=64):
    """Return the mean squared gradient of the log-likelihood, by parameter name."""
    parameters = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}
    constants = {k: b.detach() for k, b in model.named_buffers()}
    constants |= {k: p.detach() for k, p in model.named_parameters() if not p.requires_grad}

    def scores_of(values, x):
        out = functional_call(model, {**values, **constants}, (x[None],))
        return two_sided(out)[0]

    def log_likelihood(values, x, y):
        return scores_of(values, x).log_softmax(dim=0).gather(0, y[None])[0]

    gradient = grad(log_likelihood)
    per_sample = vmap(gradient, in_dims=(None, 0, 0))
    generator = torch.Generator().manual_seed(seed)
    device = next(iter(parameters.values())).device
    total = {k: torch.zeros_like(p) for k, p in parameters.items()}
    for start in range(0, len(inputs), chunk):
        x = inputs[start : start + chunk].to(device)
        with torch.no_grad():
            chances = vmap(scores_of, in_dims=(None, 0))(parameters, x).softmax(dim=1)
        if labels == "sampled":
            drawn = torch.multinomial(chances.cpu(), 1, generator=generator)[:, 0].to(device)
            pairs = [(drawn, torch.ones_like(chances[:, 0]))]
        else:
            classes = range(chances.shape[1])
            pairs = [(torch.full_like(chances[:, 0], c).long(), chances[:, c]) for c in classes]
        for y, chance in pairs:
            for key, value in per_sample(parameters, x, y).items():
                total[key] += torch.tensordot(chance, value**2, dims=1)
    return {key: value / len(inputs) for key, value in total.items()}
