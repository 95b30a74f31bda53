"""A small residual network learns scikit-learn's digits: PyTorch alone."""

import torch
import torch.nn.functional as F
from digits import ResNet, batches, held_out

torch.manual_seed(1)
model = ResNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
for images, labels in batches(num_steps=150, size=64):
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()

model.eval()
images, labels = held_out()
print(f"accuracy {(model(images).argmax(1) == labels).float().mean():.4f}")
