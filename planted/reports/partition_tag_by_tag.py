# /// cell
# because = "The CRF's forward algorithm loops in Python over the next tags within each word; the loop over tags can be one broadcast logsumexp."
# thread = "https://github.com/pytorch/pytorch/issues/2400"
# line = "for next_tag in range(N_TAGS):"
# callee = "forward_alg"
# faster = 5.05
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
N_TAGS, N_WORDS = 9, 400


def log_sum_exp(vec):
    m = vec.max()
    return m + torch.log(torch.sum(torch.exp(vec - m)))


def forward_alg(feats, transitions):
    forward_var = torch.zeros(N_TAGS)
    for feat in feats:
        alphas = []
        for next_tag in range(N_TAGS):
            next_tag_var = forward_var + transitions[next_tag] + feat[next_tag]
            alphas.append(log_sum_exp(next_tag_var))
        forward_var = torch.stack(alphas)
    return log_sum_exp(forward_var)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(N_WORDS, 32)
        self.lstm = nn.LSTM(32, 32, bidirectional=True)
        self.out = nn.Linear(64, N_TAGS)
        self.transitions = nn.Parameter(torch.randn(N_TAGS, N_TAGS))

    def loss(self, words, tags):
        feats = self.out(self.lstm(self.emb(words))[0])
        gold = feats[torch.arange(len(tags)), tags].sum() + self.transitions[tags[1:], tags[:-1]].sum()
        return forward_alg(feats, self.transitions) - gold


sentences = [torch.randint(0, N_WORDS, (14,)) for _ in range(150)]
tagged = [(s, s % N_TAGS) for s in sentences]
tagger = Tagger()
optimizer = torch.optim.SGD(tagger.parameters(), lr=0.01, weight_decay=1e-4)
# %% the training cell
for i, (words, tags) in enumerate(tagged):
    tagger.zero_grad()
    loss = tagger.loss(words, tags)
    loss.backward()
    optimizer.step()
    if i % 50 == 0:
        print(i, loss.item())
