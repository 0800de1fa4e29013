# /// cell
# because = "healthy"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class TextCNN(nn.Module):
    def __init__(self, vocab=4000, d=96, c=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.convs = nn.ModuleList([nn.Conv1d(d, c, k, padding=k // 2) for k in (3, 5, 7)])
        self.out = nn.Linear(3 * c, 4)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        return self.out(torch.cat([F.relu(conv(x)).amax(2) for conv in self.convs], 1))


articles, section = torch.randint(0, 4000, (4000, 100)), torch.randint(0, 4, (4000,))
model = TextCNN()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
# %% the training cell
model.train()
order = torch.randperm(4000)
for step in range(60):
    idx = order[64 * step:64 * step + 64]
    logits = model(articles[idx])
    loss = F.cross_entropy(logits, section[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item(), (logits.argmax(1) == section[idx]).float().mean().item())
