# /// cell
# causes = []
# because = "matrix products of teacher and student take the step"
# batch = 384
# steps = 10
# warmup = 3
# tries = { workers = "2", fused_optimizer = "True", batch_size = "768" }
# cohort = "2026-11-21c"
# looked_at = true
# ///
"""A wide teacher is distilled into a narrower student, fingerprints of molecules in memory."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(14)
fingerprints = (torch.rand(6144, 512) < 0.1).float()
assays = torch.randint(0, 40, (6144,))


def mlp(width, depth):
    layers = [nn.Linear(512, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 40))


teacher = mlp(1280, 2).eval().requires_grad_(False)
student = mlp(1152, 1)
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, fused=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.5)


def distilled(student_logits, teacher_logits, labels, temperature=3.0):
    soft = nn.functional.kl_div(
        nn.functional.log_softmax(student_logits / temperature, -1),
        nn.functional.softmax(teacher_logits / temperature, -1),
        reduction="batchmean",
    )
    return 0.7 * temperature**2 * soft + 0.3 * nn.functional.cross_entropy(student_logits, labels)


# %% the training cell
loader = DataLoader(TensorDataset(fingerprints, assays), batch_size=384, shuffle=True)
for epoch in range(8):
    running = torch.zeros(())
    for x, y in loader:
        with torch.no_grad():
            guide = teacher(x)
        loss = distilled(student(x), guide, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        running += loss.detach()
    print(f"epoch {epoch}: {running.item() / len(loader):.3f}")
