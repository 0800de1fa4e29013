# /// cell
# causes = ["cpu_preprocessing"]
# because = "each window has 24 lines of a log taken apart by a regular expression, again in every epoch"
# batch = 32
# cohort = "2026-11-23"
#
# [[cure]]
# old = "        self.lines = lines\n"
# new = "        self.rows = torch.tensor([featurize(line) for line in lines])\n"
#
# [[cure]]
# old = "        rows = torch.tensor([featurize(line) for line in self.lines[start : start + WINDOW]])\n"
# new = "        rows = self.rows[start : start + WINDOW]\n"
#
# [[cure]]
# old = "len(self.lines)"
# new = "len(self.rows)"
# ///
# access-log scanner detection, v2
# (v1 was the random forest; see wiki. this one looks at the sequence of requests instead of single ones)
import random
import re
from datetime import datetime

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

WINDOW = 24
LOG_LINE = re.compile(
    r'^(?P<ip>\d+\.\d+\.\d+\.\d+) - (?P<user>\S+) \[(?P<ts>[^\]]+)\] "(?P<verb>[A-Z]+) (?P<path>[^ ?]+)'
    r'(?:\?(?P<query>\S*))? HTTP/\d\.\d" (?P<status>\d{3}) (?P<size>\d+) "(?P<referer>[^"]*)" "(?P<agent>[^"]*)"$'
)
VERBS = ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"]
AGENTS = [
    "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0",
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/127.0 Safari/537.36",
    "curl/8.5.0",
    "python-requests/2.32",
]


def fake_line(rng, t):
    """We can't put production logs into the notebook, so these look like them."""
    ip = ".".join(str(rng.randint(1, 254)) for _ in range(4))
    path = "/" + "/".join(rng.choice(["api", "static", "admin", "v1", "img", "login", "wp-admin"]) for _ in range(3))
    query = f"?id={rng.randint(1, 9999)}&page={rng.randint(1, 9)}" if rng.random() < 0.5 else ""
    ts = datetime.fromtimestamp(t).strftime("%d/%b/%Y:%H:%M:%S +0000")
    verb, status = rng.choice(VERBS), rng.choice([200, 200, 200, 301, 404, 500])
    return (
        f'{ip} - - [{ts}] "{verb} {path}{query} HTTP/1.1" {status} {rng.randint(100, 90000)} "-" "{rng.choice(AGENTS)}"'
    )


def featurize(line):
    m = LOG_LINE.match(line)
    ts = datetime.strptime(m["ts"], "%d/%b/%Y:%H:%M:%S %z")
    feats = [ts.hour / 23, ts.minute / 59, int(m["size"]) / 1e5, int(m["status"]) / 600]
    feats += [float(m["verb"] == v) for v in VERBS]
    feats += [float(m["path"].count(s)) for s in ("admin", "login", "static", "api", "..")]
    feats += [len(m["path"]) / 64, len(m["query"] or "") / 64, float("Mozilla" in m["agent"])]
    feats += [sum(map(int, m["ip"].split(".")[:2])) / 510]
    return feats


class RequestWindows(Dataset):
    def __init__(self, lines, labels):
        self.lines = lines
        self.labels = labels

    def __len__(self):
        return len(self.lines) - WINDOW

    def __getitem__(self, start):
        rows = torch.tensor([featurize(line) for line in self.lines[start : start + WINDOW]])
        return rows, self.labels[start + WINDOW - 1]


rng = random.Random(1306)
torch.manual_seed(1306)
log = [fake_line(rng, 1_700_000_000 + 3 * i) for i in range(3000)]
is_scan = torch.tensor([float("wp-admin" in line or " 404 " in line) for line in log])

# %% the training cell
train_dl = DataLoader(RequestWindows(log, is_scan), batch_size=32, shuffle=True)

model = nn.Sequential(
    nn.Flatten(), nn.Linear(WINDOW * 19, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loss_fn = nn.BCEWithLogitsLoss()

for epoch in range(2):
    running = 0.0
    for x, y in train_dl:
        opt.zero_grad()
        loss = loss_fn(model(x).squeeze(1), y)
        loss.backward()
        opt.step()
        running += loss.item()
    print(f"epoch {epoch}  loss {running / len(train_dl):.4f}")
