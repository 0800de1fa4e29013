# /// cell
# cohort = "fourth"
# because = "nn.Bilinear works output by output: one matrix product and one broadcast product for each of the 48 labels, forward and (worse) backward; the same form as one einsum / matmul over all labels is several times faster"
# thread = "https://github.com/explosion/spacy-experimental/pull/47"
# line = "return self.label(dep, head)"
# callee = "torch.nn.functional.bilinear"
# faster = 5.0
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)

VOCAB, LENGTH, LABELS, BATCH, HIDDEN = 3000, 24, 48, 32, 96

words = torch.randint(0, VOCAB, (2048, LENGTH))
heads = torch.randint(0, LENGTH, (2048, LENGTH))
word_class = torch.randint(0, 12, (VOCAB,))
label_table = torch.randint(0, LABELS, (12, 12))
labels = label_table[word_class[words], word_class[words.gather(1, heads)]]


class ArcLabeler(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.mix = nn.Conv1d(64, 128, 3, padding=1)
        self.dep = nn.Linear(128, HIDDEN)
        self.head = nn.Linear(128, HIDDEN)
        self.label = nn.Bilinear(HIDDEN, HIDDEN, LABELS)

    def forward(self, tokens, heads):
        x = self.embed(tokens).transpose(1, 2)
        x = F.relu(self.mix(x)).transpose(1, 2)
        dep = F.relu(self.dep(x))
        head = F.relu(self.head(x))
        head = head.gather(1, heads.unsqueeze(2).expand(-1, -1, HIDDEN))
        return self.label(dep, head)


model = ArcLabeler()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

# %% the training cell
for step in range(120):
    pick = torch.randint(0, len(words), (BATCH,))
    optimizer.zero_grad()
    scores = model(words[pick], heads[pick])
    loss = F.cross_entropy(scores.flatten(0, 1), labels[pick].flatten())
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
