# /// cell
# because = "The hardest negative is selected in a Python loop over all anchor-positive pairs of the batch, with one small tensor calculation per pair."
# thread = "https://github.com/adambielski/siamese-triplet/pull/54"
# line = "for (anchor, positive), ap in zip(pairs, ap_distances):"
# callee = "get_triplets"
# faster = 7.23
# ///
from itertools import combinations
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0); np.random.seed(0)
MARGIN = 1.0


def get_triplets(embeddings, labels):
    d = torch.cdist(embeddings, embeddings).pow(2)
    labels = labels.numpy()
    triplets = []
    for label in set(labels):
        same = labels == label
        idx, negatives = np.where(same)[0], np.where(~same)[0]
        pairs = np.array(list(combinations(idx, 2)))
        ap_distances = d[pairs[:, 0], pairs[:, 1]]
        for (anchor, positive), ap in zip(pairs, ap_distances):
            loss_values = ap - d[torch.LongTensor([anchor]), torch.LongTensor(negatives)] + MARGIN
            loss_values = loss_values.cpu().numpy()
            hardest = int(np.argmax(loss_values))
            if loss_values[hardest] > 0:
                triplets.append([anchor, positive, negatives[hardest]])
    return torch.LongTensor(np.array(triplets))


prototypes = torch.randn(40, 64)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 32))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
# %% the training cell
for it in range(100):
    classes = torch.randperm(40)[:16]
    labels = classes.repeat_interleave(8)
    x = prototypes[labels] + 1.5 * torch.randn(128, 64)
    emb = net(x)
    with torch.no_grad():
        t = get_triplets(emb, labels)
    ap = (emb[t[:, 0]] - emb[t[:, 1]]).pow(2).sum(1)
    an = (emb[t[:, 0]] - emb[t[:, 2]]).pow(2).sum(1)
    loss = F.relu(ap - an + MARGIN).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 40 == 0:
        print(it, loss.item(), len(t))
