"""Training in one process: where the versions for several processes begin."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
image = torch.randn(512, 1, 8, 8)
dataset = TensorDataset(image, image.mean(dim=(1, 2, 3)).gt(0).long())

loader = DataLoader(dataset, batch_size=32, shuffle=True)

layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2)
model = nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}, loss: {loss.item():.4f}")

torch.save(model.state_dict(), "model.pt")
