# /// cell
# causes = ["logging_or_eval"]
# because = "the character error rate of each training batch is computed by an edit distance in Python"
# batch = 24
# cohort = "2026-11-23"
#
# [[cure]]
# old = "cer = character_error_rate(log_probs, targets)\n"
# new = "cer = character_error_rate(log_probs, targets) if it % 200 == 199 else cer\n"
# ///
"""OCR of telex slips (fixed pitch, so no CTC needed). Port of our TF1 code, hence the style."""

import torch
import torch.nn.functional as F

CHARSET = " 0123456789ABCDEFGHJKLMNPRSTUVWXYZ"
N_CHARS = 48
HEIGHT, WIDTH = 16, 384


def glyphs():
    g = torch.Generator().manual_seed(12)
    return (torch.rand(len(CHARSET), HEIGHT, WIDTH // N_CHARS, generator=g) > 0.5).float()


def render_slips(n, font):
    text = torch.randint(0, len(CHARSET), (n, N_CHARS))
    image = font[text].permute(0, 2, 1, 3).reshape(n, 1, HEIGHT, WIDTH)
    return image + 0.2 * torch.randn_like(image), text


def greedy_decode(log_probs):
    return ["".join(CHARSET[c] for c in path) for path in log_probs.argmax(2).tolist()]


def levenshtein(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        diag, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            diag, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diag + (ca != cb))
    return row[-1]


def character_error_rate(log_probs, targets):
    truth = ["".join(CHARSET[c] for c in t) for t in targets.tolist()]
    guess = greedy_decode(log_probs.detach())
    return sum(levenshtein(g, t) for g, t in zip(guess, truth, strict=True)) / sum(map(len, truth))


class Reader(torch.nn.Module):
    def __init__(self, depth=96):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 64, (HEIGHT, 8), stride=(1, 8))
        self.conv2 = torch.nn.Conv1d(64, depth, 3, padding=1)
        self.head = torch.nn.Linear(depth, len(CHARSET))

    def forward(self, x):
        x = F.relu(self.conv1(x)).squeeze(2)
        x = F.relu(self.conv2(x))
        return self.head(x.transpose(1, 2)).log_softmax(2)


torch.manual_seed(12)
font = glyphs()
slips, strings = render_slips(1200, font)

# %% the training cell
reader = Reader()
optimizer = torch.optim.Adam(reader.parameters(), lr=2e-3, fused=True)
cer = 1.0
summary = []
for it in range(200):
    pick = torch.randint(0, len(slips), (24,))
    images, targets = slips[pick], strings[pick]
    log_probs = reader(images)
    loss = F.nll_loss(log_probs.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    cer = character_error_rate(log_probs, targets)
    summary.append({"it": it, "loss": loss.item(), "cer": cer})
    if it % 100 == 0:
        print(summary[-1])
