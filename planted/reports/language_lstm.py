# /// cell
# because = "healthy"
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
stream = torch.randint(0, 80, (32, 65 * 48))


class CharModel(nn.Module):
    def __init__(self, d=192):
        super().__init__()
        self.emb, self.lstm, self.out = nn.Embedding(80, 128), nn.LSTM(128, d, batch_first=True), nn.Linear(d, 80)

    def forward(self, x, state):
        y, state = self.lstm(self.emb(x), state)
        return self.out(y), state


model = CharModel()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
# %% the training cell
state = (torch.zeros(1, 32, 192), torch.zeros(1, 32, 192))
for k in range(48):
    chunk = stream[:, 65 * k:65 * k + 65]
    state = tuple(s.detach() for s in state)
    logits, state = model(chunk[:, :-1], state)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if k % 12 == 0:
        print(k, loss.item())
