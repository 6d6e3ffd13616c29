"""The Fisher diagonal of any classifier, gradient by gradient, to hold closed forms against."""

import torch
from torch.func import functional_call, grad, vmap

from gems_flwr.spaces.ball import two_sided


def fisher_diagonal(model, inputs, labels="exact", seed=0, chunk=64):
    """Return the mean squared gradient of the log-likelihood, by parameter name."""
    parameters = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}
    constants = dict(model.named_buffers())
    constants |= {k: p.detach() for k, p in model.named_parameters() if not p.requires_grad}

    def scores_of(values, x):
        return two_sided(functional_call(model, {**values, **constants}, (x[None],)))[0]

    def log_likelihood(values, x, y):
        return scores_of(values, x).log_softmax(dim=0).gather(0, y[None])[0]

    per_sample = vmap(grad(log_likelihood), in_dims=(None, 0, 0))
    generator = torch.Generator().manual_seed(seed)
    total = {k: torch.zeros_like(p) for k, p in parameters.items()}
    for x in inputs.split(chunk):
        with torch.no_grad():
            chances = vmap(scores_of, in_dims=(None, 0))(parameters, x).softmax(dim=1)
        classes = [torch.full((len(x),), c) for c in range(chances.shape[1])]
        pairs = list(zip(classes, chances.T, strict=True))
        if labels == "sampled":
            drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
            pairs = [(drawn, torch.ones(len(x), dtype=chances.dtype))]
        for y, chance in pairs:
            for key, value in per_sample(parameters, x, y).items():
                total[key] += torch.tensordot(chance, value**2, dims=1)
    return {key: value / len(inputs) for key, value in total.items()}
