# /// cell
# causes = ["unfused_optimizer"]
# because = "Adam passes over a table of four million numbers once for each of its operations"
# framework = "accelerate"
# batch = 64
# cohort = "2026-11-22b"
#
# [[cure]]
# old = "foreach=False"
# new = "fused=True"
# ///
"""In which of 40 languages is a line? Hashed n-grams in one large table, averaged as in fastText."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(77)
BUCKETS, DIM, LANGUAGES, GRAMS = 160_000, 24, 40, 60


def hashed_lines(count):
    """N-grams are frequent and rare as they are in texts, and each language has its own frequent ones."""
    language = torch.randint(0, LANGUAGES, (count,))
    rank = (torch.rand(count, GRAMS) ** 4 * BUCKETS).long()
    return (rank * 2_654_435 + language[:, None] * 7_919) % BUCKETS, language


class LineClassifier(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.table = nn.EmbeddingBag(BUCKETS, DIM, mode="mean")
        self.hidden = nn.Linear(DIM, hidden)
        self.out = nn.Linear(hidden, LANGUAGES)

    def forward(self, grams):
        return self.out(torch.relu(self.hidden(self.table(grams))))


lines = TensorDataset(*hashed_lines(9600))

# %% the training cell
accelerator = Accelerator(cpu=True)
classifier = LineClassifier()
adam = torch.optim.Adam(classifier.parameters(), lr=5e-3, foreach=False)
loader = DataLoader(lines, batch_size=64, shuffle=True, drop_last=True)
classifier, adam, loader = accelerator.prepare(classifier, adam, loader)

for epoch in range(2):
    for grams, language in loader:
        loss = nn.functional.cross_entropy(classifier(grams), language)
        accelerator.backward(loss)
        adam.step()
        adam.zero_grad()
    accelerator.print(epoch, loss.item())
