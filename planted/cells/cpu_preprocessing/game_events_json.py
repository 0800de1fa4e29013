# /// cell
# causes = ["cpu_preprocessing"]
# because = "the JSON of a session is parsed, and its events are gone through in Python, each time it is asked for"
# batch = 64
# cohort = "2026-11-23"
#
# [[cure]]
# old = 'self.payloads = df["payload"].values'
# new = 'self.decoded = [decode(p) for p in df["payload"].values]'
#
# [[cure]]
# old = "x_seq, x_cnt = decode(self.payloads[i])"
# new = "x_seq, x_cnt = self.decoded[i]"
# ///
# ====================================================
# Will the player finish the level?   GRU baseline, CV 0.68
# ====================================================
import json
import os
import random

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm


class CFG:
    seed = 42
    epochs = 5
    bs = 64
    lr = 1e-3
    hidden = 48
    max_events = 40
    rooms = ("kohlcenter", "capitol", "library", "stacks", "frontdesk", "basement")
    kinds = ("click", "hover", "notebook", "map", "checkpoint", "cutscene")


def seed_everything(seed):
    random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


seed_everything(CFG.seed)


# ---------------------------------------------------- data
def make_session():
    t, events = 0, []
    for n in range(random.randint(40, 90)):
        t += random.randint(50, 4000)
        events.append(
            {
                "index": n,
                "elapsed_time": t,
                "event_name": random.choice(CFG.kinds),
                "room_fqid": "tunic." + random.choice(CFG.rooms) + ".hall",
                "coor": {"x": random.random() * 800, "y": random.random() * 600},
                "hq": random.random() > 0.5,
                "text": "Meetings are BORING! " * random.randint(0, 3),
            }
        )
    return json.dumps({"session": random.getrandbits(48), "events": events})


train = pd.DataFrame({"payload": [make_session() for _ in range(1600)]})
train["correct"] = train["payload"].str.count("checkpoint").ge(11).astype("float32")


def decode(payload):
    events = json.loads(payload)["events"]
    seq = np.zeros((CFG.max_events, 5), dtype="float32")
    cnt = np.zeros(len(CFG.kinds) + len(CFG.rooms), dtype="float32")
    last = 0
    for j, e in enumerate(events):
        cnt[CFG.kinds.index(e["event_name"])] += 1
        cnt[len(CFG.kinds) + CFG.rooms.index(e["room_fqid"].split(".")[1])] += 1
        if j < CFG.max_events:
            seq[j] = [
                np.log1p(e["elapsed_time"] - last),
                e["coor"]["x"] / 800,
                e["coor"]["y"] / 600,
                e["hq"],
                len(e["text"]) / 60,
            ]
        last = e["elapsed_time"]
    return seq, cnt


class TrainDataset(Dataset):
    def __init__(self, df):
        self.payloads = df["payload"].values
        self.y = df["correct"].values

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x_seq, x_cnt = decode(self.payloads[i])
        return x_seq, x_cnt, self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(5, CFG.hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(CFG.hidden + 12, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, s, c):
        h = self.gru(s)[1][0]
        return self.head(torch.cat([h, c], 1)).squeeze(1)


# %% the training cell
loader = DataLoader(TrainDataset(train), batch_size=CFG.bs, shuffle=True, drop_last=True)
net = Net()
optim = torch.optim.AdamW(net.parameters(), lr=CFG.lr, fused=True)
crit = nn.BCEWithLogitsLoss()
for ep in range(CFG.epochs):
    net.train()
    losses = []
    for s, c, y in tqdm(loader, leave=False, disable=True):
        loss = crit(net(s, c), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    print(f"[{ep + 1}/{CFG.epochs}] train bce = {np.mean(losses):.5f}")
