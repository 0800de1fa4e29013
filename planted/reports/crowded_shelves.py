# /// cell
# cohort = "third"
# because = "The matcher computes the cost of each query against the objects of ALL images of the batch (B*Q x sum of targets) and throws away everything off the diagonal; compute it per image, with the targets padded to the largest count."
# thread = "https://github.com/ultralytics/ultralytics/pull/26150"
# line = "cost_giou = -generalized_iou(out_bbox, tgt_bbox)"
# callee = "generalized_iou"
# faster = 1.83
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment

torch.manual_seed(0)
N, SIZE, QUERIES, BATCH = 256, 64, 80, 16


def draw_shelf(count):
    picture = torch.rand(3, SIZE, SIZE) * 0.2
    centres = torch.rand(count, 2) * 0.8 + 0.1
    sizes = torch.rand(count, 2) * 0.08 + 0.05
    for (cx, cy), (w, h) in zip(centres.tolist(), sizes.tolist()):
        x0, x1 = int((cx - w / 2) * SIZE), int((cx + w / 2) * SIZE) + 1
        y0, y1 = int((cy - h / 2) * SIZE), int((cy + h / 2) * SIZE) + 1
        picture[:, max(y0, 0):y1, max(x0, 0):x1] = torch.rand(3, 1, 1) * 0.7 + 0.3
    return picture, torch.cat([centres, sizes], 1)


counts = torch.randint(30, 60, (N,)).tolist()
shelves = [draw_shelf(c) for c in counts]
pictures = torch.stack([p for p, _ in shelves])
objects = [b for _, b in shelves]


class SetDetector(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 32, 5, 2, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(64, d, 3, 2, 1), nn.ReLU())
        self.where = nn.Parameter(torch.randn(1, 64, d) * 0.02)
        self.queries = nn.Parameter(torch.randn(1, QUERIES, d) * 0.1)
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(d, 4, 192, dropout=0.0, batch_first=True), 2)
        self.score, self.box = nn.Linear(d, 1), nn.Linear(d, 4)

    def forward(self, x):
        memory = self.backbone(x).flatten(2).transpose(1, 2) + self.where
        h = self.decoder(self.queries.expand(len(x), -1, -1), memory)
        return self.score(h).squeeze(-1), self.box(h).sigmoid()


def corners(b):
    return torch.cat([b[..., :2] - b[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2], -1)


def generalized_iou(a, b):
    a, b = corners(a).unsqueeze(-2), corners(b).unsqueeze(-3)
    area_a = (a[..., 2:] - a[..., :2]).prod(-1)
    area_b = (b[..., 2:] - b[..., :2]).prod(-1)
    inter = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    union = area_a + area_b - inter
    hull = (torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2])).prod(-1)
    return inter / union - (hull - union) / hull


@torch.no_grad()
def match(logits, boxes, targets):
    bs, queries = logits.shape
    out_prob = logits.flatten().sigmoid()
    out_bbox = boxes.flatten(0, 1)
    tgt_bbox = torch.cat(targets)
    cost_class = -out_prob[:, None]
    cost_bbox = torch.cdist(out_bbox, tgt_bbox, p=1)
    cost_giou = -generalized_iou(out_bbox, tgt_bbox)
    cost = (5 * cost_bbox + cost_class + 2 * cost_giou).view(bs, queries, -1)
    sizes = [len(t) for t in targets]
    return [linear_sum_assignment(c[i].numpy()) for i, c in enumerate(cost.split(sizes, -1))]


model = SetDetector()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

# %% the training cell
for step in range(50):
    rows = torch.randint(N, (BATCH,)).tolist()
    targets = [objects[r] for r in rows]
    logits, boxes = model(pictures[rows])
    pairs = match(logits, boxes, targets)
    found = torch.zeros_like(logits)
    chosen, wanted = [], []
    for i, (q, t) in enumerate(pairs):
        found[i, q] = 1
        chosen.append(boxes[i, q])
        wanted.append(targets[i][t])
    loss = F.binary_cross_entropy_with_logits(logits, found) + 5 * F.l1_loss(torch.cat(chosen), torch.cat(wanted))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print("last", loss.item())
