# /// cell
# cause = "healthy"
# because = "a small transformer: 3 MB of gradients behind a step of much compute, the same in both ranks"
# cohort = "2026-11-25a"
# written_ms = 299.9
# without_ms = 296.0
# clock = "exchange alone"
#
# [[without]]
# old = "model = DistributedDataParallel(NextLetter(len(letters)))\n"
# new = "model = DistributedDataParallel(NextLetter(len(letters)))\nmodel.require_backward_grad_sync = False\n"
# ///
"""The next letter of a text, by a small transformer."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LENGTH, WIDTH = 96, 128


class NextLetter(nn.Module):
    """Embedding, encoder with a causal mask, head."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(alphabet, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, alphabet)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, text):
        return self.head(self.encoder(self.letters(text) + self.places, mask=self.mask, is_causal=True))


dist.init_process_group("gloo")
rank = dist.get_rank()
text = "".join(load().DESCR for load in (load_breast_cancer, load_diabetes, load_wine))
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])
torch.manual_seed(0)
model = DistributedDataParallel(NextLetter(len(letters)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(rank)
for step in range(90):
    begins = torch.randint(0, len(codes) - LENGTH - 1, (20,), generator=generator)
    windows = torch.stack([codes[b : b + LENGTH + 1] for b in begins])
    logits = model(windows[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 30 == 0:
        print(f"step {step}: {loss.item():.3f}")
dist.destroy_process_group()
