# /// cell
# causes = ["memory_bound_ops"]
# because = "a loss of ten operations on 3.5 million numbers, each of which goes through memory, forward and backward"
# batch = 24
# warmup = 10
# cohort = "2026-11-22c"
# looked_at = true
#
# [[cure]]
# old = "criterion = LabelSmoothing(MODERN, padding=PAD, smoothing=0.1)"
# new = '''
# smooth = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
#
#
# def criterion(logits, target):
#     return smooth(logits.flatten(0, 1), target.flatten())
#
#
# '''
# ///
"""Old ballads into modern words, line by line: a recurrent encoder and decoder; targets that are not too certain."""

import torch
from torch import nn

torch.manual_seed(1103)
OLD, MODERN, PAD, BOS = 3000, 12000, 0, 1


def ballads(lines, longest=12):
    """Word for word, by a dictionary that is made up, with lines of different lengths."""
    dictionary = torch.randint(2, MODERN, (OLD,))
    old = (torch.rand(lines, longest) ** 2 * (OLD - 2)).long() + 2
    modern = dictionary[old]
    ends = torch.arange(longest) >= torch.randint(8, longest + 1, (lines, 1))
    return old.masked_fill(ends, PAD), modern.masked_fill(ends, PAD)


class Translator(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.old, self.modern = nn.Embedding(OLD, dim, PAD), nn.Embedding(MODERN, dim, PAD)
        self.reader, self.writer = nn.GRU(dim, dim, batch_first=True), nn.GRU(2 * dim, dim, batch_first=True)
        self.words = nn.Linear(dim, MODERN)

    def forward(self, old, modern):
        read, last = self.reader(self.old(old))
        said = torch.cat([torch.full_like(modern[:, :1], BOS), modern[:, :-1]], dim=1)
        written, _ = self.writer(torch.cat([self.modern(said), read], dim=-1), last)
        return self.words(written)


class LabelSmoothing(nn.Module):
    """Part of the probability goes to all the other words."""

    def __init__(self, size, padding, smoothing):
        super().__init__()
        self.size, self.padding, self.smoothing = size, padding, smoothing

    def forward(self, logits, target):
        logits, target = logits.reshape(-1, self.size), target.reshape(-1)
        log_p = torch.log(torch.softmax(logits, dim=-1) + 1e-12)
        wanted = torch.full_like(log_p, self.smoothing / self.size)
        wanted.scatter_add_(1, target[:, None], torch.full_like(log_p[:, :1], 1 - self.smoothing))
        wanted[target == self.padding] = 0
        return -(wanted * log_p).sum() / (target != self.padding).sum()


old, modern = ballads(4000)
translator = Translator()
optimizer = torch.optim.SGD(translator.parameters(), lr=0.5, momentum=0.9, fused=True)

# %% the training cell
criterion = LabelSmoothing(MODERN, padding=PAD, smoothing=0.1)
total = torch.zeros(())
for step in range(180):
    some = torch.randint(0, len(old), (24,))
    loss = criterion(translator(old[some], modern[some]), modern[some])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.detach()
print(f"mean loss {total / 180:.3f}")
