# /// cell
# causes = ["logging_or_eval"]
# because = "three million scores are sorted after every fourth step"
# batch = 512
# steps = 32
# warmup = 4
# profiled = 100
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "if i % 4 == 3:"
# new = "if i % 4000 == 3999:"
# ///
"""Films are recommended by factorisation; recall and NDCG over all users are computed again every few steps."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(11)
USERS, FILMS, SIZE = 1500, 2000, 64
taste = torch.randn(USERS, 6) @ torch.randn(6, FILMS)
liked = taste.topk(24, dim=1).indices  # of each user
train_likes, held_out = liked[:, 4:], liked[:, :4]
pairs = TensorDataset(torch.arange(USERS).repeat_interleave(20), train_likes.flatten())


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.films = nn.Embedding(USERS, SIZE), nn.Embedding(FILMS, SIZE)
        self.mix = nn.Sequential(nn.Linear(SIZE, 256), nn.ReLU(), nn.Linear(256, SIZE))

    def forward(self, users, films):
        u = self.users(users)
        return ((u + self.mix(u)) * self.films(films)).sum(-1)

    def all_scores(self, users):
        u = self.users(users)
        return (u + self.mix(u)) @ self.films.weight.T


@torch.no_grad()
def ranking_quality(model, k=20):
    """Recall and NDCG among the first k, without the films that the user has seen."""
    hits, gain = [], []
    discount = 1 / torch.log2(torch.arange(2, k + 2).float())
    for users in torch.arange(USERS).split(500):
        scores = model.all_scores(users)
        scores.scatter_(1, train_likes[users], float("-inf"))
        best = scores.topk(k, dim=1).indices
        hit = (best.unsqueeze(-1) == held_out[users].unsqueeze(1)).any(-1).float()
        hits.append(hit.sum(1) / held_out.shape[1])
        gain.append((hit * discount).sum(1) / discount[: held_out.shape[1]].sum())
    return torch.cat(hits).mean(), torch.cat(gain).mean()


recommender = Factors()
optimizer = torch.optim.Adam(recommender.parameters(), lr=5e-3, fused=True)
best_recall, history = 0.0, []

# %% the training cell
batches = DataLoader(pairs, batch_size=512, shuffle=True, drop_last=True)
for epoch in range(3):
    for i, (users, films) in enumerate(batches):
        unseen = torch.randint(FILMS, films.shape)
        margin = recommender(users, films) - recommender(users, unseen)
        loss = -nn.functional.logsigmoid(margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 4 == 3:
            recall, ndcg = ranking_quality(recommender)
            history.append((epoch, i, float(recall), float(ndcg)))
            best_recall = max(best_recall, float(recall))
