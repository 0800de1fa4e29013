# /// cell
# causes = ["small_batch"]
# because = "gradients are gathered over sixteen rounds of a single clause each"
# batch = 16
# rounds = 16
# steps = 8
# warmup = 2
# cohort = "2026-11-23"
#
# [[cure]]
# old = '"micro_batch": 1'
# new = '"micro_batch": 16'
#
# [[cure]]
# old = '"grad_accum": 16'
# new = '"grad_accum": 1'
# ///
"""clause-type tagger for contracts (41 types as in CUAD). settings were tuned for the 4 GB card of my old laptop"""

import itertools
import json

import torch
import torch.nn as nn

config = json.loads("""
{
    "vocab": 8000, "d_model": 64, "layers": 3, "heads": 4, "types": 41, "length": 24,
    "lr": 5e-4, "clip": 1.0, "micro_batch": 1, "grad_accum": 16, "updates": 70
}
""")


class Tagger(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c["vocab"], c["d_model"])
        nn.init.normal_(self.embed.weight, std=0.05)
        self.position = nn.Parameter(torch.zeros(c["length"], c["d_model"]))
        layer = nn.TransformerEncoderLayer(
            c["d_model"], c["heads"], 2 * c["d_model"], dropout=0.0, activation="relu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, c["layers"], enable_nested_tensor=False)
        self.classify = nn.Linear(c["d_model"], c["types"])

    def forward(self, tokens):
        return self.classify(self.encoder(self.embed(tokens) + self.position).mean(1))


torch.manual_seed(41)
n_clauses = 2400
clause_type = torch.randint(0, config["types"], (n_clauses,))
clauses = (torch.randint(0, 190, (n_clauses, config["length"])) + 195 * clause_type[:, None]) % config["vocab"]


def forever(n):
    while True:
        yield from torch.randperm(n).tolist()


def take(indices, n):
    rows = list(itertools.islice(indices, n))
    return clauses[rows], clause_type[rows]


# %% the training cell
tagger = Tagger(config)
opt = torch.optim.AdamW(tagger.parameters(), lr=config["lr"], fused=True)
indices = forever(n_clauses)
for update in range(config["updates"]):
    opt.zero_grad()
    total = 0.0
    for _ in range(config["grad_accum"]):
        tokens, kind = take(indices, config["micro_batch"])
        loss = nn.functional.cross_entropy(tagger(tokens), kind) / config["grad_accum"]
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(tagger.parameters(), config["clip"])
    opt.step()
    if update % 20 == 0:
        print(json.dumps({"update": update, "loss": round(total, 4)}))
