# /// cell
# because = "The profiler, with shapes and stacks, is open over the entire run instead of a few scheduled steps."
# thread = "https://github.com/AnswerDotAI/fsdp_qlora/pull/67"
# line = "with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True) as prof:"
# callee = "torch.profiler.profile"
# faster = 4.15
# ///
import torch
import torch.nn as nn
from torch.profiler import ProfilerActivity, profile

torch.manual_seed(0)
tokens = torch.randint(0, 500, (2000, 24))


class Tagger(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb = nn.Embedding(500, d)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(d, 4, 96, batch_first=True) for _ in range(3)])
        self.out = nn.Linear(d, 12)

    def forward(self, x):
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return self.out(h)


tagger = Tagger()
opt = torch.optim.AdamW(tagger.parameters(), lr=1e-3)
# %% the training cell
with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True) as prof:
    for step in range(80):
        batch = tokens[torch.randint(2000, (16,))]
        loss = nn.functional.cross_entropy(tagger(batch).flatten(0, 1), (batch % 12).flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(step, loss.item())
