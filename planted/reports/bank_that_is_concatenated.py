# /// cell
# because = "The memory bank grows by torch.cat at each step, which copies all that is there each time; fill a tensor allocated beforehand instead."
# thread = "https://github.com/ulissigroup/amptorch/issues/12"
# line = "bank = torch.cat([bank, z.detach()])"
# callee = "torch.cat"
# faster = 3.58
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
STEPS, BATCH = 330, 256
views = torch.randn(30_000, 48)
encoder = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 64))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9)
# %% the training cell
bank = F.normalize(torch.randn(512, 64), dim=1)
for step in range(STEPS):
    x = views[torch.randint(len(views), (BATCH,))]
    z = F.normalize(encoder(x + 0.1 * torch.randn_like(x)), dim=1)
    z2 = F.normalize(encoder(x + 0.1 * torch.randn_like(x)), dim=1)
    negatives = bank[torch.randint(len(bank), (256,))]
    logits = torch.cat([(z * z2).sum(1, keepdim=True), z @ negatives.t()], 1) / 0.1
    loss = F.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    bank = torch.cat([bank, z.detach()])
    if step % 66 == 0:
        print(step, loss.item(), len(bank))
