# /// cell
# cohort = "second"
# because = "RetrievalNormalizedDCG is called at each training step; it splits the batch by query and loops over the queries in Python, which takes much longer than the model; compute it rarely, or for all lists at once."
# thread = "https://github.com/Lightning-AI/torchmetrics/issues/2287"
# line = "ndcg = metric(scores.detach().flatten(), clicks.flatten(), indexes=query_of.flatten())"
# callee = "torchmetrics.retrieval.RetrievalNormalizedDCG.forward"
# faster = 7.61
# ///
import torch
import torch.nn as nn
from torchmetrics.retrieval import RetrievalNormalizedDCG

torch.manual_seed(0)
queries, items = torch.randn(2000, 24), torch.randn(3000, 24)
shown = torch.randint(3000, (2000, 20))
clicked = (torch.einsum("qd,qid->qi", queries, items[shown]) + torch.randn(2000, 20) > 3).long()
scorer = nn.Sequential(nn.Linear(72, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(scorer.parameters(), lr=2e-3)
metric = RetrievalNormalizedDCG(top_k=10)


def train_step(rows):
    q = queries[rows][:, None].expand(-1, 20, -1)
    d = items[shown[rows]]
    clicks = clicked[rows]
    scores = scorer(torch.cat([q, d, q * d], -1)).squeeze(-1)
    wanted = clicks / clicks.sum(1, keepdim=True).clamp(min=1)
    loss = -(wanted * scores.log_softmax(1)).sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    query_of = torch.arange(len(rows))[:, None].expand(-1, 20)
    ndcg = metric(scores.detach().flatten(), clicks.flatten(), indexes=query_of.flatten())
    metric.reset()
    return loss.item(), ndcg.item()


# %% the training cell
for step in range(160):
    loss, ndcg = train_step(torch.randint(2000, (96,)))
    if step % 20 == 0:
        print(f"{step} loss {loss:.4f} ndcg@10 {ndcg:.3f}")
print("last", loss)
