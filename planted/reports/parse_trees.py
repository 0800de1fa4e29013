# /// cell
# cohort = "second"
# because = "The Tree-LSTM recurses through each tree on its own, one node per call with vectors of one row; nodes of the same height of all trees in the batch can be computed together."
# thread = "https://github.com/dasguptar/treelstm.pytorch/pull/33"
# line = "tree.state = self.node_forward(inputs[tree.idx:tree.idx + 1], child_c, child_h)"
# callee = "ChildSumTreeLSTM.forward"
# faster = 8.48
# ///
import random
import torch
import torch.nn as nn

random.seed(2)
torch.manual_seed(2)


class Tree:
    def __init__(self, idx):
        self.idx, self.children, self.state = idx, [], None


class ChildSumTreeLSTM(nn.Module):
    def __init__(self, in_dim, mem_dim):
        super().__init__()
        self.mem_dim = mem_dim
        self.ioux, self.iouh = nn.Linear(in_dim, 3 * mem_dim), nn.Linear(mem_dim, 3 * mem_dim)
        self.fx, self.fh = nn.Linear(in_dim, mem_dim), nn.Linear(mem_dim, mem_dim)

    def node_forward(self, x, child_c, child_h):
        i, o, u = torch.split(self.ioux(x) + self.iouh(child_h.sum(0, keepdim=True)), self.mem_dim, 1)
        f = torch.sigmoid(self.fh(child_h) + self.fx(x))
        c = torch.sigmoid(i) * torch.tanh(u) + (f * child_c).sum(0, keepdim=True)
        return c, torch.sigmoid(o) * torch.tanh(c)

    def forward(self, tree, inputs):
        for child in tree.children:
            self.forward(child, inputs)
        if not tree.children:
            child_c = child_h = inputs.new_zeros(1, self.mem_dim)
        else:
            child_c, child_h = (torch.cat(s, 0) for s in zip(*[c.state for c in tree.children]))
        tree.state = self.node_forward(inputs[tree.idx:tree.idx + 1], child_c, child_h)
        return tree.state


def random_tree(n):
    nodes = [Tree(i) for i in range(n)]
    for i in range(1, n):
        nodes[random.randrange(max(0, i - 6), i)].children.append(nodes[i])
    return nodes[0]


sentences = []
for _ in range(300):
    n = random.randint(8, 18)
    tokens = torch.randint(0, 500, (n,))
    sentences.append((random_tree(n), tokens, int((tokens < 250).sum() * 2 > n)))


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(500, 64)
        self.tree = ChildSumTreeLSTM(64, 96)
        self.out = nn.Linear(96, 2)

    def forward(self, batch):
        roots = []
        for tree, tokens, _ in batch:
            _, h = self.tree(tree, self.emb(tokens))
            roots.append(h)
        return self.out(torch.cat(roots))


model = Sentiment()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
criterion = nn.CrossEntropyLoss()
# %% the training cell
model.train()
for step in range(1, 51):
    batch = random.sample(sentences, 12)
    target = torch.tensor([label for _, _, label in batch])
    loss = criterion(model(batch), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
