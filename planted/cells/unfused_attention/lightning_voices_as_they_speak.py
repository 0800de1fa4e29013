# /// cell
# causes = ["unfused_attention"]
# because = "768 by 768 weights of each head go through memory again and again"
# framework = "lightning"
# steps = 12
# warmup = 3
# cohort = "2026-11-21d"
#
# [[cure]]
# old = '''
#         scores = torch.matmul(q, k.mT) / q.shape[-1] ** 0.5
#         scores = torch.where(self.to_come, float("-inf"), scores)
#         weights = F.softmax(scores, dim=-1)
#         y = torch.matmul(weights, v)
# '''
# new = '''
#         y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
# '''
# ///
"""The mood of a voice while it still speaks: each of 768 frames looks back at those before it; Lightning."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(28)
FRAMES, MELS, MOODS = 768, 40, 5


class Listening(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("to_come", torch.ones(FRAMES, FRAMES).triu(1).bool(), persistent=False)

    def forward(self, x):
        q, k, v = (f(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.mT) / q.shape[-1] ** 0.5
        scores = torch.where(self.to_come, float("-inf"), scores)
        weights = F.softmax(scores, dim=-1)
        y = torch.matmul(weights, v)
        return self.o(y.transpose(1, 2).flatten(2))


class Mood(L.LightningModule):
    def __init__(self, width=48, heads=3, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(MELS, width)
        self.listening = nn.ModuleList(Listening(width, heads) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(2 * width, MOODS)

    def forward(self, frames):
        x = self.embed(frames)
        for listening, norm in zip(self.listening, self.norms, strict=True):
            x = x + listening(norm(x))
        return self.head(torch.cat([x, x.cummax(1).values], -1))

    def training_step(self, batch, batch_idx):
        frames, mood = batch
        guessed = self(frames)[:, 100:].transpose(1, 2)  # from the hundredth frame on
        return F.cross_entropy(guessed, mood.unsqueeze(1).expand(-1, guessed.shape[2]), label_smoothing=0.1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, fused=True)


voices = torch.randn(160, FRAMES, MELS)
moods = torch.randint(0, MOODS, (160,))
voices += 0.2 * moods[:, None, None]

# %% the training cell
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Mood(), DataLoader(TensorDataset(voices, moods), batch_size=1, shuffle=True))
