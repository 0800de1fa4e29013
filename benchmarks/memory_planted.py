"""Planted truth about who holds the tensor memory of a kernel: owners, re-run leaks, and controls. Pure data.

How to run a case. Every case wants a fresh IPython shell in a fresh process: some cells leave a `sys.last_traceback`,
a module in `sys.modules`, a running (daemon) thread, or `gc.disable()`. The first of `cells` must be In [1], for the
numbers in `Out[3]` count from there, and every cell must be run with `store_history=True`; a cell that raises counts
too. All is on the CPU.

`owner`: an answer is right if one of these strings is contained in the name told for the largest holder.

`bytes` and `per_run_bytes`: the bytes of tensor storages, each storage counted once, which come back when the owner
alone goes and `gc.collect()` has run. So what the owner merely shares with a name that lives on (the weights of a live
model in an autograd graph, say: 1.6 % in the first case, 3.8 % in the second) is not in it. `bytes` is None where no
one number is fair; the note says why.

`LEAKS`: the setup once, then the cell once and 20 times more. `CONTROLS` are of the same shape, with no owner and
0 bytes: the cell is to be run as often, and nothing is to be said.
"""

from typing import NamedTuple


class Owner(NamedTuple):
    name: str
    cells: tuple[str, ...]
    owner: tuple[str, ...]
    bytes: int | None
    note: str


class Leak(NamedTuple):
    name: str
    setup: tuple[str, ...]
    cell: str
    owner: tuple[str, ...]
    per_run_bytes: int
    note: str


IMPORTS = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.manual_seed(0)
"""

OWNERS: tuple[Owner, ...] = (
    Owner(
        name="validation_losses_with_graph",
        cells=(
            IMPORTS,
            """\
X, y = torch.randn(8192, 64), torch.randint(0, 10, (8192,))
loader = DataLoader(TensorDataset(X, y), batch_size=512, shuffle=True)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
            """\
train_losses, train_values = [], []


def train_epoch():
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train_losses.append(loss)
        train_values.append(loss.item())


train_epoch()
""",
            """\
history = []


def validate():
    model.eval()
    for xb, yb in loader:
        history.append(F.cross_entropy(model(xb), yb))
    return sum(h.item() for h in history) / len(history)


print(f"{validate():.3f}")
""",
        ),
        owner=("history",),
        bytes=16 * (512 * 64 * 4 + 512 * 512 * 4 + 512 * 10 * 4 + 512 * 8 + 4 + 4),
        note="validation without no_grad: each loss keeps its graph; backward freed those of train_losses",
    ),
    Owner(
        name="index_with_graph",
        cells=(
            IMPORTS,
            """\
class Encoder(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.up = nn.Linear(32, width)
        self.down = nn.Linear(width, 16)

    def forward(self, x):
        return F.normalize(self.down(torch.tanh(self.up(x))), dim=-1)


encoder = Encoder()
documents = torch.randn(6000, 32)
""",
            """\
def embed_all(batch=500):
    parts = [encoder(documents[i : i + batch]) for i in range(0, len(documents), batch)]
    return torch.cat(parts)


index = embed_all()
print(index.shape, index.element_size() * index.nelement())
""",
            """\
query = encoder(torch.randn(1, 32)).detach()
top = (index.detach() @ query.T).topk(5, dim=0).indices
""",
        ),
        owner=("index",),
        bytes=6000 * 1024 * 4 + 2 * 6000 * 16 * 4 + 2 * 6000 * 4,
        note="index is 384 kB of vectors, but embedding without no_grad keeps 25 MB of activations behind its grad_fn",
    ),
    Owner(
        name="slice_keeps_all",
        cells=(
            IMPORTS,
            """\
net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
photos = torch.rand(32, 3, 64, 64)
""",
            """\
with torch.no_grad():
    maps = net(photos).repeat(2, 1, 1, 1)
preview = maps[:10, 0, :8, :8]
""",
            """\
del maps
print(preview.shape, preview.nelement() * 4, "bytes")
""",
        ),
        owner=("preview",),
        bytes=64 * 16 * 64 * 64 * 4,
        note="a view of 10 x 8 x 8 numbers keeps the 16.8 MB storage of the deleted maps alive",
    ),
    Owner(
        name="views_counted_once",
        cells=(
            IMPORTS,
            """\
signal = torch.randn(1_000_000)
frames = signal.unfold(0, 1024, 16)
windows = {start: signal[start : start + 900_000] for start in range(0, 100_000, 2_500)}
left, right, flat = signal[:500_000], signal[500_000:], signal.view(1000, 1000)
""",
            """\
mask = torch.ones(1, 1, 256, 256).expand(64, 16, 256, 256)
print(mask.nelement() * 4 / 1e6, "MB")
""",
            """\
table = torch.randn(6000, 1024)
rows = table[torch.tensor([1, 5, 9])]
""",
        ),
        owner=("table",),
        bytes=6000 * 1024 * 4,
        note="windows and frames add up to hundreds of MB, but are views of 4 MB; mask is an expand of 0.26 MB",
    ),
    Owner(
        name="tied_weights",
        cells=(
            IMPORTS,
            """\
class TinyLM(nn.Module):
    def __init__(self, vocab=10_000, dim=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens).mean(dim=1))


lm = TinyLM()
""",
            """\
tokens = torch.randint(0, 10_000, (8, 16))
with torch.no_grad():
    best = lm(tokens).argmax(dim=-1)
""",
            """\
small = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
print(sum(p.numel() for p in small.parameters()))
""",
        ),
        owner=("lm",),
        bytes=10_000 * 512 * 4,
        note="embedding and head are one weight: 20.5 MB, not 41 MB",
    ),
    Owner(
        name="traceback_keeps_locals",
        cells=(
            IMPORTS,
            """\
classifier = nn.Linear(32, 1000)
inputs, labels = torch.randn(4096, 32), torch.randint(0, 1000, (4000,))
""",
            """\
def evaluate(net, data, target):
    outputs = []
    with torch.no_grad():
        for chunk in data.split(512):
            outputs.append(net(chunk))
    scores = torch.cat(outputs)
    return F.cross_entropy(scores, target)


evaluate(classifier, inputs, labels)
""",
            """\
inputs = inputs[:4000].clone()
print(inputs.shape, labels.shape)
""",
            """\
spare = torch.zeros(100, 100)
""",
        ),
        owner=("last_traceback", "last_value", "last_exc", "last exception", "InteractiveTB", "evaluate"),
        bytes=2 * 4096 * 1000 * 4 + 4096 * 32 * 4,
        note="the failed call's frame keeps outputs, scores (and the old inputs, as data) through sys.last_traceback",
    ),
    Owner(
        name="displayed_tensor",
        cells=(
            IMPORTS,
            """\
encoder = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1024))
X = torch.randn(3000, 64)
""",
            """\
with torch.no_grad():
    features = encoder(X)
features
""",
            """\
mean = features.mean(dim=0)
del features
mean[:3]
""",
            """\
X.shape
""",
            """\
mean.norm()
""",
            """\
len(X)
""",
        ),
        owner=("Out[3]", "_3", "_oh[3]"),
        bytes=3000 * 1024 * 4,
        note="del features does not free what cell 3 displayed; three later outputs have moved _, __ and ___ on",
    ),
    Owner(
        name="underscore_after_clear",
        cells=(
            IMPORTS,
            """\
net = nn.Linear(128, 2048)
batch = torch.randn(1500, 128)
""",
            """\
with torch.no_grad():
    logits = net(batch)
logits
""",
            """\
del logits
Out.clear()
""",
            """\
import gc

collected = gc.collect()
""",
        ),
        owner=("_",),
        bytes=1500 * 2048 * 4,
        note="Out.clear() leaves _ and _3; no other name in this notebook has an underscore, so any of _, _3 is right",
    ),
    Owner(
        name="leftover_loop_variable",
        cells=(
            IMPORTS,
            """\
class Synthetic(Dataset):
    def __len__(self):
        return 192

    def __getitem__(self, i):
        return torch.full((3, 128, 128), float(i)), i % 10


loader = DataLoader(Synthetic(), batch_size=64)
net = nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
""",
            """\
correct = 0
with torch.no_grad():
    for images, labels in loader:
        output = net(images)
        correct += (output.argmax(dim=1) == labels).sum().item()
print(correct / len(loader.dataset))
""",
            """\
prototypes = torch.randn(10, 4096)
""",
        ),
        owner=("images",),
        bytes=64 * 3 * 128 * 128 * 4,
        note="the loop variable of a cell that is done keeps the last batch",
    ),
    Owner(
        name="gradients_of_frozen_backbone",
        cells=(
            IMPORTS,
            """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(1024, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU())
        self.head = nn.Linear(1024, 10)

    def forward(self, x):
        return self.head(self.backbone(x))


model = Net()
X, y = torch.randn(64, 1024), torch.randint(0, 10, (64,))
""",
            """\
warmup = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(2):
    warmup.zero_grad()
    F.cross_entropy(model(X), y).backward()
    warmup.step()
del warmup
""",
            """\
for p in model.backbone.parameters():
    p.requires_grad_(False)
del p
finetune = torch.optim.Adam(model.head.parameters(), lr=1e-3)
for step in range(3):
    finetune.zero_grad()
    F.cross_entropy(model(X), y).backward()
    finetune.step()
""",
        ),
        owner=("model",),
        bytes=2 * (2 * 1024 * 1536 + 1536 + 1024) * 4,
        note="the frozen backbone's .grad stay beside its weights: half of the bytes are weights, half gradients",
    ),
    Owner(
        name="optimizer_of_deleted_model",
        cells=(
            IMPORTS,
            """\
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randn(128, 512)
""",
            """\
for step in range(3):
    optimizer.zero_grad()
    F.mse_loss(model(data), data).backward()
    optimizer.step()
""",
            """\
del model
student = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 512))
""",
            """\
student_opt = torch.optim.SGD(student.parameters(), lr=0.1)
F.mse_loss(student(data), data).backward()
student_opt.step()
""",
        ),
        owner=("optimizer",),
        bytes=4 * (2 * 512 * 1024 + 1024 + 512) * 4 + 4 * 4,
        note="AdamW keeps the deleted model's weights, gradients and both moments (a quarter each)",
    ),
    Owner(
        name="hook_stores_activations",
        cells=(
            IMPORTS,
            """\
cnn = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
)
""",
            """\
activations = {}


def save(name):
    def hook(module, inputs, output):
        activations.setdefault(name, []).append(output.detach())

    return hook


for name, layer in cnn.named_children():
    layer.register_forward_hook(save(name))
""",
            """\
with torch.no_grad():
    for step in range(6):
        cnn(torch.rand(16, 3, 32, 32))
print({name: len(kept) for name, kept in activations.items()})
""",
            """\
filters = cnn[0].weight.detach().clone()
""",
        ),
        owner=("activations",),
        bytes=6 * (4 * 16 * 8 * 32 * 32 * 4 + 16 * 10 * 4),
        note="forward hooks append to a global dict; Flatten's output is a view of the last ReLU's, counted once",
    ),
    Owner(
        name="closure_cell",
        cells=(
            IMPORTS,
            """\
def make_augment(strength):
    bank = torch.randn(512, 3, 64, 64)[:256] * strength

    def augment(x):
        pick = torch.randint(0, len(bank), (len(x),))
        return x + bank[pick]

    return augment
""",
            """\
jitter = make_augment(0.1)
x = jitter(torch.rand(8, 3, 64, 64))
""",
            """\
net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 20))
out = net(x).detach()
""",
        ),
        owner=("jitter",),
        bytes=256 * 3 * 64 * 64 * 4,
        note="the returned function's closure holds the noise bank; no variable does",
    ),
    Owner(
        name="replay_of_slots",
        cells=(
            IMPORTS,
            """\
from collections import deque


class Transition:
    __slots__ = ("action", "next_state", "reward", "state")

    def __init__(self, state, action, reward, next_state):
        self.state, self.action, self.reward, self.next_state = state, action, reward, next_state


replay = deque(maxlen=500)
policy = nn.Sequential(nn.Flatten(0), nn.Linear(4 * 84 * 84, 6))
""",
            """\
@torch.no_grad()
def rollout(steps):
    state = torch.rand(4, 84, 84)
    for _step in range(steps):
        action = policy(state).argmax().item()
        next_state = torch.rand(4, 84, 84)
        replay.append(Transition(state, action, 1.0, next_state))
        state = next_state


rollout(200)
""",
            """\
target_net = nn.Sequential(nn.Flatten(0), nn.Linear(4 * 84 * 84, 6))
target_net.load_state_dict(policy.state_dict())
del Transition
""",
        ),
        owner=("replay",),
        bytes=201 * 4 * 84 * 84 * 4,
        note="objects with __slots__ in a deque; a next_state is the following state, so 22.7 MB, not 45 MB",
    ),
    Owner(
        name="nested_dataclass",
        cells=(
            IMPORTS,
            """\
from dataclasses import dataclass, field


@dataclass
class Experiment:
    lr: float
    results: dict = field(default_factory=dict)


experiments = {"sweep": [Experiment(lr) for lr in (0.1, 0.01, 0.001)]}
""",
            """\
X = torch.randn(1000, 64)


def run(experiment):
    net = nn.Linear(64, 1000)
    with torch.no_grad():
        logits = net(X)
    experiment.results["val"] = {"logits": (logits, logits.argmax(dim=1)), "net": net}


for e in experiments["sweep"]:
    run(e)
""",
            """\
del e
best = min(experiments["sweep"], key=lambda e: e.lr).lr
baseline = nn.Linear(64, 1000)
""",
        ),
        owner=("experiments",),
        bytes=3 * (1000 * 1000 * 4 + 1000 * 8 + (64 * 1000 + 1000) * 4),
        note="dict > list > dataclass > dict > dict > tuple",
    ),
    Owner(
        name="garbage_cycle",
        cells=(
            IMPORTS,
            """\
import gc

gc.disable()  # steadier step times


class Probe:
    def __init__(self, net):
        self.net = net
        self.outputs = []
        self.handle = net.register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.outputs.append(output.detach())
""",
            """\
X = torch.randn(1024, 64)


def probe_once():
    net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU())
    probe = Probe(net)
    with torch.no_grad():
        for _step in range(4):
            net(X)
    return sum(o.mean().item() for o in probe.outputs)


print(f"{probe_once():.3f}")
""",
            """\
validation = torch.randn(400, 1024)
""",
        ),
        owner=("garbage", "cycle", "gc.collect", "unreachable", "uncollected", "not collected", "validation"),
        bytes=None,
        note="net > hook > probe > net: 17 MB that no name reaches, until gc.collect(); a tool that collects before it "
        "looks has freed it, and then says validation (1.6 MB)",
    ),
    Owner(
        name="suspended_generator",
        cells=(
            IMPORTS,
            """\
def load_batches(n, batch_size):
    data = torch.randn(n, 3, 32, 32)
    while True:
        order = torch.randperm(n)
        for start in range(0, n, batch_size):
            batch = data[order[start : start + batch_size]]
            yield batch
""",
            """\
stream = load_batches(1500, 250)
first = next(stream).mean(dim=0)
""",
            """\
net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 100))
out = net(first[None]).detach()
""",
        ),
        owner=("stream",),
        bytes=1500 * 3 * 32 * 32 * 4 + 250 * 3 * 32 * 32 * 4 + 1500 * 8,
        note="the locals data, order and batch of a generator that waits at its yield",
    ),
    Owner(
        name="lru_cache",
        cells=(
            IMPORTS,
            """\
from functools import lru_cache


@lru_cache(maxsize=None)
def load_volume(patient):
    return torch.rand(1, 64, 64, 128)
""",
            """\
means = [load_volume(patient).mean().item() for patient in range(10)]
again = [load_volume(patient).mean().item() for patient in range(5)]
""",
            """\
unet = nn.Sequential(nn.Conv3d(1, 8, 3), nn.ReLU(), nn.Conv3d(8, 8, 3))
crop = torch.rand(1, 1, 32, 32, 32)
""",
        ),
        owner=("load_volume",),
        bytes=10 * 64 * 64 * 128 * 4,
        note="an unbounded lru_cache keeps every volume that was ever loaded",
    ),
    Owner(
        name="class_attribute",
        cells=(
            IMPORTS,
            """\
class FeatureBank:
    memory = []

    def __init__(self, net):
        self.net = net

    @torch.no_grad()
    def update(self, x):
        self.memory.append(F.normalize(self.net(x), dim=-1))
""",
            """\
def warm_up():
    for _epoch in range(3):
        bank = FeatureBank(nn.Linear(64, 512))
        for _step in range(4):
            bank.update(torch.randn(512, 64))


warm_up()
""",
            """\
head = nn.Linear(512, 512)
""",
        ),
        owner=("FeatureBank",),
        bytes=12 * 512 * 512 * 4,
        note="memory = [] in the class body is shared by all instances, and outlives them",
    ),
    Owner(
        name="global_of_another_module",
        cells=(
            IMPORTS
            + """
import sys
import types

source = '''
_kept = {}


def remember(key, tensor):
    _kept[key] = tensor
    return tensor
'''
store = types.ModuleType("feature_store")
exec(source, store.__dict__)
sys.modules["feature_store"] = store
del store
""",
            """\
from feature_store import remember

net = nn.Linear(64, 768)
""",
            """\
with torch.no_grad():
    for step in range(8):
        remember(step, net(torch.randn(500, 64)))
""",
            """\
labels = torch.randint(0, 10, (4000,))
""",
        ),
        owner=("feature_store", "remember.__globals__"),
        bytes=8 * 500 * 768 * 4,
        note="the dict is a global of an imported module, of which the notebook has but a function",
    ),
    Owner(
        name="sparse_adjacency",
        cells=(
            IMPORTS,
            """\
def random_graph(nodes, edges):
    index = torch.randint(0, nodes, (2, edges))
    keep = torch.unique(index[0] * nodes + index[1])
    index = torch.stack((keep // nodes, keep % nodes))[:, :600_000]
    return torch.sparse_coo_tensor(index, torch.ones(600_000), (nodes, nodes)).coalesce()


adjacency = random_graph(20_000, 700_000)
""",
            """\
features = torch.randn(20_000, 16)
weight = nn.Linear(16, 16)
""",
            """\
with torch.no_grad():
    hidden = torch.relu(weight(torch.sparse.mm(adjacency, features)))
print(hidden.shape, adjacency._nnz())
""",
        ),
        owner=("adjacency",),
        bytes=600_000 * (2 * 8 + 4),
        note="a sparse COO tensor has no storage of its own: int64 indices (9.6 MB) and float32 values (2.4 MB)",
    ),
    Owner(
        name="real_part_of_complex",
        cells=(
            IMPORTS,
            """\
waves = torch.randn(256, 4000)
""",
            """\
spectra = torch.fft.fft(waves)
low = spectra.real[:, :8]
""",
            """\
del spectra
denoise = nn.Conv1d(1, 16, 9)
""",
            """\
energy = low.square().sum(dim=1)
""",
        ),
        owner=("low",),
        bytes=256 * 4000 * 8,
        note=".real is a view: it keeps the complex64 storage of the deleted spectra; waves has half as much",
    ),
    Owner(
        name="numpy_shares_storage",
        cells=(
            IMPORTS
            + """
import numpy as np
""",
            """\
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2000))
X = torch.randn(2000, 64)
""",
            """\
def predict(x):
    with torch.no_grad():
        return net(x).softmax(dim=1).numpy()


scores = predict(X)
hits = scores.argmax(axis=1)
""",
            """\
raw = np.zeros((500, 500))
truth = torch.from_numpy(np.arange(2000))
""",
        ),
        owner=("scores",),
        bytes=2000 * 2000 * 4,
        note="a numpy array whose base is a tensor that has no other name",
    ),
    Owner(
        name="local_of_running_thread",
        cells=(
            IMPORTS
            + """
import threading
""",
            """\
stop, ready = threading.Event(), threading.Event()


def prefetch():
    staged = [torch.rand(32, 3, 96, 96) for _ in range(4)]
    ready.set()
    stop.wait()
    return len(staged)


worker = threading.Thread(target=prefetch, name="prefetch-0", daemon=True)
worker.start()
""",
            """\
ready.wait()
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
x = torch.rand(4, 3, 96, 96)
""",
        ),
        owner=("prefetch", "staged", "worker"),
        bytes=4 * 32 * 3 * 96 * 96 * 4,
        note="a local variable of a function that another thread is still in",
    ),
    Owner(
        name="dataset_cache",
        cells=(
            IMPORTS,
            """\
class CachedImages(Dataset):
    def __init__(self, n):
        self.n = n
        self.cache = {}

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i not in self.cache:
            self.cache[i] = torch.rand(3, 64, 64)
        return self.cache[i], i % 10


train_loader = DataLoader(CachedImages(300), batch_size=50, shuffle=True)
""",
            """\
net = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
optimizer = None
for xb, yb in train_loader:
    loss = F.cross_entropy(net(xb), yb)
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
            """\
print(f"{loss.item():.2f}")
""",
        ),
        owner=("train_loader",),
        bytes=300 * 3 * 64 * 64 * 4,
        note="the dataset behind the loader caches each image on first use",
    ),
    Owner(
        name="mutable_default_argument",
        cells=(
            IMPORTS
            + """
import weakref
""",
            """\
registry = weakref.WeakValueDictionary()


def collect(step, prediction, kept=[]):
    registry[step] = prediction
    kept.append(prediction)
    return torch.stack([p.mean() for p in kept]).mean()
""",
            """\
net = nn.Linear(32, 640)
with torch.no_grad():
    for step in range(10):
        mean = collect(step, net(torch.randn(640, 32)))
print(len(registry))
""",
            """\
anchors = torch.rand(1000, 64)
""",
        ),
        owner=("collect",),
        bytes=10 * 640 * 640 * 4,
        note="kept=[] is the function's default for ever; registry has only weak references and holds nothing",
    ),
    Owner(
        name="kv_cache_in_module",
        cells=(
            IMPORTS,
            """\
class CachedAttention(nn.Module):
    def __init__(self, dim, max_len, batch):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.register_buffer("keys", torch.zeros(batch, max_len, dim), persistent=False)
        self.values = []

    def forward(self, x, t):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        self.keys[:, t] = k
        self.values.append(v.clone())
        past = torch.stack(self.values, dim=1)
        return (torch.softmax((self.keys[:, : t + 1] @ q[..., None]).squeeze(-1), dim=1)[..., None] * past).sum(dim=1)


decoder = nn.ModuleList(CachedAttention(64, 512, 32) for _ in range(4))
""",
            """\
@torch.no_grad()
def generate(steps):
    x = torch.randn(32, 64)
    for t in range(steps):
        for layer in decoder:
            x = layer(x, t)
    return x


x = generate(16)
""",
            """\
embedding = nn.Embedding(5000, 64)
prompt = embedding(torch.arange(32)).detach()
""",
        ),
        owner=("decoder",),
        bytes=4 * (32 * 512 * 64 * 4 + 16 * 32 * 64 * 4 + 3 * 64 * 64 * 4),
        note="a non-persistent buffer (not in the state_dict) and a plain list in each layer; 1 % is weights",
    ),
    Owner(
        name="snapshots_not_aliases",
        cells=(
            IMPORTS,
            """\
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
X = torch.randn(64, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
            """\
import copy

checkpoints, snapshots = [], []
for epoch in range(12):
    optimizer.zero_grad(set_to_none=True)
    F.mse_loss(model(X), X).backward()
    optimizer.step()
    checkpoints.append(model.state_dict())
    if epoch % 2:
        snapshots.append(copy.deepcopy(model.state_dict()))
""",
            """\
print(len(checkpoints), len(snapshots))
reference = torch.randn(256, 256)
""",
        ),
        owner=("snapshots",),
        bytes=6 * (2 * 256 * 1024 + 1024 + 256) * 4,
        note="12 state_dicts in checkpoints all alias the live weights (0 bytes more); the 6 deep copies are real",
    ),
    Owner(
        name="bound_method_of_old_trainer",
        cells=(
            IMPORTS,
            """\
class Trainer:
    def __init__(self, width):
        self.net = nn.Linear(64, width)
        self.outputs = []

    def on_batch_end(self, output):
        self.outputs.append(output)

    @torch.no_grad()
    def fit(self, steps, callbacks):
        for _step in range(steps):
            output = self.net(torch.randn(512, 64))
            for callback in callbacks:
                callback(output)


trainer = Trainer(1000)
hooks = [trainer.on_batch_end]
trainer.fit(6, hooks)
""",
            """\
trainer = Trainer(50)
hooks.append(trainer.on_batch_end)
trainer.fit(4, hooks[1:])
""",
            """\
target = torch.randn(512, 50)
""",
        ),
        owner=("hooks",),
        bytes=6 * 512 * 1000 * 4 + (64 * 1000 + 1000) * 4,
        note="hooks[0] is a bound method of the trainer whose name was given to a smaller one",
    ),
    Owner(
        name="custom_function_ctx",
        cells=(
            IMPORTS,
            """\
class NoisyReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.noise = torch.rand_like(x)
        ctx.save_for_backward(x)
        return x.clamp(min=0) * ctx.noise

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.noise * (x > 0)
""",
            """\
scale = nn.Parameter(torch.ones(1))


def regularizer(n):
    return NoisyReLU.apply(torch.randn(n, 1024) * scale).mean()


penalty = regularizer(2000)
print(penalty.detach())
""",
            """\
net = nn.Linear(1024, 100)
batch = torch.randn(64, 1024)
""",
        ),
        owner=("penalty",),
        bytes=3 * 2000 * 1024 * 4 + 4,
        note="a scalar; in its graph are a saved tensor, an attribute of the ctx, and what the product saved",
    ),
)

DATA = """\
X, y = torch.randn(640, 64), torch.randint(0, 10, (640,))
train_data = TensorDataset(X, y)
"""

LEAKS: tuple[Leak, ...] = (
    Leak(
        name="losses_with_retained_graph",
        setup=(IMPORTS, DATA, "losses = []\n"),
        cell="""\
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(train_data, batch_size=128, shuffle=True)
for xb, yb in loader:
    loss = F.cross_entropy(model(xb), yb)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    losses.append(loss)
print(f"{sum(l.item() for l in losses[-5:]) / 5:.3f}")
""",
        owner=("losses",),
        per_run_bytes=5 * (128 * (64 + 512 + 10) * 4 + 128 * 8 + 8) + 2 * (64 * 512 + 512 + 512 * 10 + 10) * 4,
        note="retain_graph=True and a list of losses: 5 graphs per run, and with them that run's weights, gradients",
    ),
    Leak(
        name="hook_registered_each_run",
        setup=(
            IMPORTS,
            DATA,
            """\
captured = []
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
""",
        ),
        cell="""\
model[0].register_forward_hook(lambda module, inputs, output: captured.append(output.detach()))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for xb, yb in DataLoader(train_data, batch_size=128, shuffle=True):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(xb), yb)
    loss.backward()
    optimizer.step()
print(f"{loss.item():.3f}")
""",
        owner=("captured",),
        per_run_bytes=5 * 128 * 512 * 4,
        note="run k has k hooks that each append the same storage: entries grow as the square, bytes in proportion",
    ),
    Leak(
        name="cache_keyed_by_run",
        setup=(IMPORTS, DATA, "feature_cache = {}\n"),
        cell="""\
run = f"run-{len(feature_cache)}"
encoder = nn.Sequential(nn.Linear(64, 700), nn.Tanh())
head = nn.Linear(700, 10)
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
for xb, yb in DataLoader(train_data, batch_size=160, shuffle=True):
    optimizer.zero_grad()
    F.cross_entropy(head(encoder(xb)), yb).backward()
    optimizer.step()
with torch.no_grad():
    feature_cache[run] = {"features": encoder(X), "labels": y}
""",
        owner=("feature_cache",),
        per_run_bytes=640 * 700 * 4,
        note="a new key per run, so nothing is ever replaced; labels are shared with y",
    ),
    Leak(
        name="displayed_at_end_of_cell",
        setup=(IMPORTS, DATA),
        cell="""\
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 500))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for xb, yb in DataLoader(train_data, batch_size=128, shuffle=True):
    optimizer.zero_grad()
    F.cross_entropy(model(xb), yb).backward()
    optimizer.step()
with torch.no_grad():
    predictions = model(X).softmax(dim=1)
predictions
""",
        owner=("Out", "_oh"),
        per_run_bytes=640 * 500 * 4,
        note="each run's displayed tensor stays in Out; predictions itself is replaced",
    ),
    Leak(
        name="param_group_added_each_run",
        setup=(
            IMPORTS,
            DATA,
            """\
backbone = nn.Sequential(nn.Linear(64, 256), nn.ReLU())
optimizer = torch.optim.Adam(backbone.parameters(), lr=1e-3)
""",
        ),
        cell="""\
head = nn.Linear(256, 512)
optimizer.add_param_group({"params": head.parameters()})
for xb, yb in DataLoader(train_data, batch_size=128, shuffle=True):
    optimizer.zero_grad()
    loss = F.cross_entropy(head(backbone(xb)), yb)
    loss.backward()
    optimizer.step()
print(f"{loss.item():.3f}")
""",
        owner=("optimizer",),
        per_run_bytes=3 * (256 * 512 + 512) * 4 + 2 * 4,
        note="the old heads' weights and Adam moments stay in the optimizer (their gradients go with zero_grad)",
    ),
    Leak(
        name="models_in_a_list",
        setup=(IMPORTS, DATA, "runs = []\n"),
        cell="""\
lr = 0.01 / (1 + len(runs))
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=lr)
for xb, yb in DataLoader(train_data, batch_size=128, shuffle=True):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(xb), yb)
    loss.backward()
    optimizer.step()
runs.append({"lr": lr, "loss": loss.item(), "model": model, "optimizer": optimizer})
""",
        owner=("runs",),
        per_run_bytes=4 * (64 * 1024 + 1024 + 1024 * 10 + 10) * 4 + 4 * 4,
        note="every run's model and Adam: weights, gradients and two moments",
    ),
    Leak(
        name="logger_keeps_tensors",
        setup=(
            IMPORTS,
            DATA,
            """\
from collections import defaultdict


class MetricLogger:
    def __init__(self):
        self.series = defaultdict(list)
        self.step = 0

    def log(self, **metrics):
        for name, value in metrics.items():
            self.series[name].append((self.step, value))
        self.step += 1


logger = MetricLogger()
""",
        ),
        cell="""\
model = nn.Sequential(nn.Linear(64, 800), nn.GELU())
head = nn.Linear(800, 10)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
for xb, yb in DataLoader(train_data, batch_size=160, shuffle=True):
    optimizer.zero_grad()
    hidden = model(xb)
    loss = F.cross_entropy(head(hidden), yb)
    loss.backward()
    optimizer.step()
    logger.log(loss=loss.detach(), hidden=hidden.detach())
""",
        owner=("logger",),
        per_run_bytes=4 * (160 * 800 * 4 + 4),
        note="a logger made for numbers is given the hidden layer, detached but whole",
    ),
    Leak(
        name="callback_added_each_run",
        setup=(
            IMPORTS,
            DATA,
            """\
class KeepBest:
    def __init__(self):
        self.best = None

    def on_step(self, net, loss):
        if self.best is None or loss < self.best[0]:
            self.best = (loss, {name: p.detach().clone() for name, p in net.named_parameters()})


class Trainer:
    def __init__(self):
        self.callbacks = []

    def fit(self, net, loader):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(xb), yb)
            loss.backward()
            optimizer.step()
            for callback in self.callbacks:
                callback.on_step(net, loss.item())


trainer = Trainer()
""",
        ),
        cell="""\
net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 600), nn.ReLU(), nn.Linear(600, 10))
trainer.callbacks.append(KeepBest())
trainer.fit(net, DataLoader(train_data, batch_size=128, shuffle=True))
""",
        owner=("trainer", "callbacks"),
        per_run_bytes=(64 * 512 + 512 + 512 * 600 + 600 + 600 * 10 + 10) * 4,
        note="the trainer lives on and has one more KeepBest per run, each with its own copy of weights",
    ),
    Leak(
        name="closure_list",
        setup=(
            IMPORTS,
            DATA,
            """\
def make_step():
    seen = []

    def step(model, optimizer, xb, yb):
        optimizer.zero_grad()
        out = model(xb)
        loss = F.cross_entropy(out, yb)
        loss.backward()
        optimizer.step()
        seen.append(out.detach())
        return loss.item()

    return step


train_step = make_step()
""",
        ),
        cell="""\
model = nn.Linear(64, 450)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(train_data, batch_size=128, shuffle=True)
values = [train_step(model, optimizer, xb, yb) for xb, yb in loader]
""",
        owner=("train_step",),
        per_run_bytes=640 * 450 * 4,
        note="the list is a closure variable of the step function, which was made once",
    ),
    Leak(
        name="dataset_cache_by_epoch",
        setup=(
            IMPORTS,
            """\
class Augmented(Dataset):
    def __init__(self, n):
        self.n, self.epoch, self.cache = n, 0, {}

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        key = (self.epoch, i)
        if key not in self.cache:
            self.cache[key] = torch.rand(3, 24, 24)
        return self.cache[key], i % 10


train_set = Augmented(240)
""",
        ),
        cell="""\
train_set.epoch += 1
model = nn.Sequential(nn.Conv2d(3, 8, 5, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(train_set, batch_size=48)
for xb, yb in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(xb), yb)
    loss.backward()
    optimizer.step()
""",
        owner=("train_set", "loader"),
        per_run_bytes=240 * 3 * 24 * 24 * 4,
        note="the cache's key has the epoch in it, so it never hits (loader.dataset is train_set: both are right)",
    ),
    Leak(
        name="exceptions_kept",
        setup=(
            IMPORTS,
            DATA,
            """\
failures = []


def check_shapes(model, target):
    with torch.no_grad():
        wide = model(X).repeat(1, 40)
    return F.mse_loss(wide, target.float()[None, :, None].expand(1, -1, 7))
""",
        ),
        cell="""\
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for xb, yb in DataLoader(train_data, batch_size=128, shuffle=True):
    optimizer.zero_grad()
    F.cross_entropy(model(xb), yb).backward()
    optimizer.step()
try:
    check_shapes(model, y)
except RuntimeError as error:
    failures.append(error)
""",
        owner=("failures",),
        per_run_bytes=640 * 400 * 4 + 640 * 4 + 2 * (64 * 64 + 64 + 64 * 10 + 10) * 4,
        note="a kept exception keeps its traceback, whose frames keep wide, the target and that run's model",
    ),
    Leak(
        name="ema_copies",
        setup=(
            IMPORTS
            + """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
""",
            DATA,
            """\
ema_models = {}
""",
        ),
        cell="""\
net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
ema_models[len(ema_models)] = ema
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for xb, yb in DataLoader(train_data, batch_size=128, shuffle=True):
    optimizer.zero_grad()
    F.cross_entropy(net(xb), yb).backward()
    optimizer.step()
    ema.update_parameters(net)
""",
        owner=("ema_models",),
        per_run_bytes=(64 * 1024 + 1024 + 1024 * 256 + 256 + 256 * 10 + 10) * 4 + 8,
        note="one averaged copy of the weights per run (no gradients); ema itself is only the last of them",
    ),
)

CONTROLS: tuple[Leak, ...] = (
    Leak(
        name="lazy_optimizer_state",
        setup=(
            IMPORTS,
            DATA,
            """\
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
history = []
""",
        ),
        cell="""\
for xb, yb in DataLoader(train_data, batch_size=128, shuffle=True):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(xb), yb)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
""",
        owner=(),
        per_run_bytes=0,
        note="gradients and Adam moments (4 MB) come with the first run; history has numbers only",
    ),
    Leak(
        name="caches_that_fill",
        setup=(
            IMPORTS,
            """\
from collections import deque


class CachedImages(Dataset):
    def __init__(self, n):
        self.n, self.cache = n, {}

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i not in self.cache:
            self.cache[i] = torch.rand(3, 32, 32)
        return self.cache[i], i % 10


train_set = CachedImages(200)
recent = deque(maxlen=2)
""",
        ),
        cell="""\
model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for xb, yb in DataLoader(train_set, batch_size=50, shuffle=True):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(xb), yb)
    loss.backward()
    optimizer.step()
recent.append(model.state_dict())
""",
        owner=(),
        per_run_bytes=0,
        note="the dataset's cache is full after run 1, the deque of state_dicts after run 2",
    ),
    Leak(
        name="replaced_each_run",
        setup=(IMPORTS, DATA),
        cell="""\
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 500))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
outputs, losses = [], []
for xb, yb in DataLoader(train_data, batch_size=128, shuffle=True):
    optimizer.zero_grad()
    out = model(xb)
    loss = F.cross_entropy(out, yb)
    loss.backward()
    optimizer.step()
    outputs.append(out)
    losses.append(loss)
predictions = torch.cat(outputs)
""",
        owner=(),
        per_run_bytes=0,
        note="10 MB of new model, Adam state and outputs in each run, under the same names as before",
    ),
    Leak(
        name="batch_size_changed_once",
        setup=(
            IMPORTS,
            DATA,
            """\
history = []
model = nn.Sequential(nn.Linear(64, 1500), nn.ReLU(), nn.Linear(1500, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
""",
        ),
        cell="""\
batch_size = 128 if len(history) < 2 else 640  # small batches while the loss is unsteady
for step, (xb, yb) in zip(range(5), (batch for _ in range(5) for batch in DataLoader(train_data, batch_size))):
    optimizer.zero_grad()
    hidden = model[:2](xb)
    loss = F.cross_entropy(model[2](hidden), yb)
    loss.backward()
    optimizer.step()
history.append(loss.item())
""",
        owner=(),
        per_run_bytes=0,
        note="the leftover hidden is 0.8 MB in runs 1 and 2, and 3.8 MB from run 3 on",
    ),
    Leak(
        name="garbage_cycles",
        setup=(
            IMPORTS,
            DATA,
            """\
class Trainer:
    def __init__(self, net):
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net.register_forward_hook(self.on_forward)
        self.last = None

    def on_forward(self, module, inputs, output):
        self.last = output.detach()

    def fit(self, loader):
        for xb, yb in loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(xb), yb).backward()
            self.optimizer.step()
""",
        ),
        cell="""\
trainer = Trainer(nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 100)))
trainer.fit(DataLoader(train_data, batch_size=128, shuffle=True))
""",
        owner=(),
        per_run_bytes=0,
        note="net > hook > trainer > net: the old trainer (2 MB) is garbage until the collector comes by, then flat",
    ),
    Leak(
        name="displayed_views",
        setup=(
            IMPORTS,
            DATA,
            """\
model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
        ),
        cell="""\
for xb, yb in DataLoader(train_data, batch_size=128, shuffle=True):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(xb), yb)
    loss.backward()
    optimizer.step()
model[2].weight.detach()[:200]
""",
        owner=(),
        per_run_bytes=0,
        note="Out gets one more entry per run, but all are views (of 1.6 MB) of the one live weight",
    ),
)
