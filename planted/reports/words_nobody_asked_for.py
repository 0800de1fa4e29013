# /// cell
# because = "The MLM head computes logits over the whole vocabulary for all positions, though the loss only uses the 15 % that are masked."
# thread = "https://github.com/huggingface/transformers/issues/3830"
# line = "logits = head(hidden)"
# callee = "nn.Linear (vocabulary projection) and cross_entropy"
# faster = 1.98
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
VOCAB, D = 6_000, 96
text = torch.randint(5, VOCAB, (800, 64))
embed, position = nn.Embedding(VOCAB, D), nn.Parameter(torch.zeros(64, D))
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 192, dropout=0.0, batch_first=True), 2)
head = nn.Linear(D, VOCAB)
optimizer = torch.optim.SGD([*embed.parameters(), position, *encoder.parameters(), *head.parameters()], lr=0.1)
# %% the training cell
for step in range(70):
    ids = text[torch.randint(800, (8,))]
    masked = torch.rand(ids.shape) < 0.15
    labels = ids.masked_fill(~masked, -100)
    hidden = encoder(embed(ids.masked_fill(masked, 4)) + position)
    logits = head(hidden)
    loss = nn.functional.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
