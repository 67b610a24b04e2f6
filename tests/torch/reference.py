"""Training in one process as the reference of distributed training: a network, batches, a loop."""

import torch
from torch import nn

STEPS = 4


def network(seed=0, width=7):
    """Return a network whose parameters fill several buckets and shards of unequal size."""
    torch.manual_seed(seed)
    layers = nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 3)
    return nn.Sequential(*layers)


def batch(rank, step, num_examples=4):
    """Return the inputs that a rank has in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(num_examples, 5, generator=generator)


def loss_of(output):
    return output.square().mean()


def parameters_of(model):
    """Return copies of the parameters, whole ones where the model has shards. **Collective**."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name.removeprefix("module.")] = whole.detach().clone()
    return found


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def train(model, rank, optimizer=None, steps=STEPS):
    """Train on the batches of one rank, and return the parameters."""
    optimizer = optimizer or adam(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()
    return parameters_of(model)


def train_alone(model, size, steps=STEPS):
    """Train on the batches of all ranks in this process, and return the parameters."""
    optimizer = adam(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(model(batch(rank, step))) for rank in range(size)) / size).backward()
        optimizer.step()
    return parameters_of(model)


def close(ours, theirs, tolerance=1e-5):
    """Check that two sets of parameters are the same but for rounding."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=tolerance, rtol=tolerance)
