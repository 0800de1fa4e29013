# /// cell
# causes = ["cpu_preprocessing"]
# because = "two workers count k-mers of each sequence letter by letter in Python, which the training waits for"
# also = ["data_starved"]
# batch = 16
# steps = 30
# warmup = 10
# cohort = "2026-11-23"
#
# [[cure]]
# old = "return slow_spectrum(seq)"
# new = "return fast_spectrum(seq)"
# ///
# enhancer / not enhancer, gapped k-mer spectra (like gkm-SVM, but with a net on top)
import itertools

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

K = 6
GAPPED = [(0, 1, 2, 3), (0, 1, 2, 4), (0, 1, 3, 5), (0, 2, 3, 5), (0, 2, 4, 5), (0, 1, 4, 5)]  # positions kept of 6
KMER_ID = {"".join(p): i for i, p in enumerate(itertools.product("ACGT", repeat=4))}
comp = str.maketrans("ACGT", "TGCA")


def revcomp(s):
    return s.translate(comp)[::-1]


def slow_spectrum(seq):
    # readable version, straight from the supplement of the paper
    counts = np.zeros((len(GAPPED), 256), dtype=np.float32)
    for strand in (seq, revcomp(seq)):
        for start in range(len(strand) - K + 1):
            window = strand[start : start + K]
            for g, keep in enumerate(GAPPED):
                counts[g, KMER_ID["".join(window[j] for j in keep)]] += 1
    return counts.ravel() / np.float32(np.sqrt(len(seq)))


def fast_spectrum(seq):
    # same numbers with numpy. TODO(mira): switch over after the review
    code = np.zeros(128, dtype=np.int64)
    code[[ord(c) for c in "ACGT"]] = np.arange(4)
    out = []
    strands = [code[np.frombuffer(s.encode(), dtype=np.uint8)] for s in (seq, revcomp(seq))]
    for keep in GAPPED:
        both = np.zeros(256, dtype=np.float32)
        for b in strands:
            n = len(b) - K + 1
            ids = sum(b[j : j + n] * 4 ** (3 - r) for r, j in enumerate(keep))
            both += np.bincount(ids, minlength=256)
        out.append(both)
    return np.concatenate(out) / np.sqrt(np.float32(len(seq)))


def spectrum(seq):
    return slow_spectrum(seq)


class EnhancerSet(Dataset):
    def __init__(self, n, seed):
        r = np.random.RandomState(seed)
        self.seqs = ["".join(r.choice(list("ACGT"), 200, p=p)) for p in r.dirichlet([20] * 4, n)]
        self.y = np.array([s.count("GC") + s.count("CG") > 25 for s in self.seqs], dtype=np.float32)

    def __getitem__(self, i):
        return spectrum(self.seqs[i]), self.y[i]

    def __len__(self):
        return len(self.seqs)


torch.manual_seed(1)
train_set = EnhancerSet(1280, seed=1)

# %% the training cell
dl = DataLoader(train_set, batch_size=16, shuffle=True, num_workers=2, persistent_workers=True)
net = nn.Sequential(nn.Linear(6 * 256, 768), nn.ReLU(), nn.Dropout(0.2), nn.Linear(768, 1))
optim = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
bce = nn.BCEWithLogitsLoss()
for e in range(2):
    tot = 0
    for x, y in dl:
        optim.zero_grad()
        l1 = bce(net(x)[:, 0], y)
        l1.backward()
        optim.step()
        tot += l1.item() * len(y)
    print("epoch", e, "bce", tot / len(train_set))
