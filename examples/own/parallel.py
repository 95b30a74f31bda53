"""The same on four processes: phalanx run --ranks 4 examples/own/parallel.py"""

import torch
import torch.nn.functional as F
from digits import ResNet, batches, held_out

import phalanx

torch.manual_seed(1)
model = ResNet()
optimizer = phalanx.OptimizerSpec(lr=1e-2, schedule="cosine", clip_norm=1.0)
job = phalanx.JobSpec(global_batch=64, seq_len=1, num_steps=150, precision="fp32", optimizer=optimizer)
step = phalanx.prepare(model, phalanx.ModulePlan(job=job, layout=phalanx.Layout(data=4, zero=1, micro_batch=16)))
for batch in batches(num_steps=150, size=64):
    step.forward_backward(step.share(batch), lambda output, batch: F.cross_entropy(output, batch[1]))
    step.update()

model.eval()
images, labels = held_out()
step.say(f"accuracy {(model(images).argmax(1) == labels).float().mean():.4f}")
