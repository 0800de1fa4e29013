# /// cell
# cohort = "third"
# because = "BinaryAUROC without thresholds keeps every prediction, and compute() is called at each step, so it concatenates and sorts the whole history each time; give it thresholds (binned, constant state) or compute it once per epoch."
# thread = "https://github.com/ludwig-ai/ludwig/pull/1758"
# line = "print_auc = auroc.compute().item()"
# callee = "torchmetrics.classification.BinaryAUROC.compute"
# faster = 1.7
# ///
import torch
import torch.nn as nn
from torchmetrics.classification import BinaryAUROC

torch.manual_seed(0)
fields = [2000, 500, 300, 120, 60, 24, 12, 7]
offsets = torch.tensor([0] + fields[:-1]).cumsum(0)
rows = torch.stack([torch.randint(n, (120_000,)) for n in fields], 1)
dense = torch.randn(120_000, 6)
secret = torch.randn(sum(fields))
clicked = (secret[rows + offsets].sum(1) + dense[:, 0] * dense[:, 1] + torch.randn(120_000) > 2).float()


class ClickModel(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.table = nn.Embedding(sum(fields), width)
        self.linear = nn.Embedding(sum(fields), 1)
        self.deep = nn.Sequential(
            nn.Linear(len(fields) * width + 6, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, categories, numbers):
        at = categories + offsets
        e = self.table(at)
        pairwise = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1)
        deep = self.deep(torch.cat([e.flatten(1), numbers], 1)).squeeze(1)
        return self.linear(at).sum((1, 2)) + pairwise + deep


model = ClickModel()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.BCEWithLogitsLoss()
auroc = BinaryAUROC()

# %% the training cell
history = []
for epoch in range(3):
    auroc.reset()
    for picked in torch.randperm(len(rows)).split(512):
        logits = model(rows[picked], dense[picked])
        loss = criterion(logits, clicked[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auroc.update(logits.detach().sigmoid(), clicked[picked].long())
        print_auc = auroc.compute().item()
        history.append((loss.item(), print_auc))
    print(f"epoch {epoch} loss {loss.item():.4f} auc {print_auc:.4f}")
