# /// cell
# cohort = "second"
# because = "The attention projects the encoder's outputs (the keys) with the same Linear at each decoding step although they don't change; project them once before the loop."
# thread = "https://github.com/odashi/chainer_examples/issues/2"
# line = "energy = self.v(torch.tanh(self.query(h).unsqueeze(1) + self.key(memory))).squeeze(-1)"
# callee = "torch.nn.Linear.forward"
# faster = 1.4
# ///
import torch
import torch.nn as nn

torch.manual_seed(7)
V, T, L = 40, 48, 24


class Attention(nn.Module):
    def __init__(self, d, a):
        super().__init__()
        self.query, self.key, self.v = nn.Linear(d, a, bias=False), nn.Linear(2 * d, a), nn.Linear(a, 1, bias=False)

    def forward(self, h, memory):
        energy = self.v(torch.tanh(self.query(h).unsqueeze(1) + self.key(memory))).squeeze(-1)
        w = energy.softmax(-1)
        return torch.bmm(w.unsqueeze(1), memory).squeeze(1)


class Transliterator(nn.Module):
    def __init__(self, d=128):
        super().__init__()
        self.src, self.tgt = nn.Embedding(V, d), nn.Embedding(V + 1, d)
        self.encoder = nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.attention = Attention(d, 64)
        self.cell = nn.GRUCell(3 * d, d)
        self.out = nn.Linear(3 * d, V)

    def forward(self, src, tgt):
        memory, _ = self.encoder(self.src(src))
        h = memory.new_zeros(len(src), self.cell.hidden_size)
        y = torch.cat([torch.full((len(src), 1), V), tgt[:, :-1]], 1)
        logits = []
        for emb in self.tgt(y).unbind(1):
            context = self.attention(h, memory)
            h = self.cell(torch.cat([emb, context], 1), h)
            logits.append(self.out(torch.cat([h, context], 1)))
        return torch.stack(logits, 1)


model = Transliterator()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
source = torch.randint(0, V, (2000, T))
target = (source[:, ::2] + source[:, 1::2]) % V
# %% the training cell
for it in range(60):
    pick = torch.randint(0, 2000, (24,))
    logits = model(source[pick], target[pick])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target[pick].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    if it % 20 == 19:
        print(it + 1, "loss", loss.item())
