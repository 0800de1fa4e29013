"""Training cells, as text: MODELS to measure, FITS whose batch size (a top-level literal) may be changed."""

MODELS: dict[str, str] = {
    "mlp_adam": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(1024, 784), torch.randint(0, 10, (1024,)))
loader = DataLoader(data, batch_size=128, shuffle=True)

model = nn.Sequential(
    nn.Linear(784, 512),
    nn.ReLU(),
    nn.Linear(512, 512),
    nn.ReLU(),
    nn.Linear(512, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
""",
    "cnn_sgd_norms": """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
images = torch.rand(192, 3, 32, 32)
labels = torch.randint(0, 10, (192,))
loader = DataLoader(TensorDataset(images, labels), batch_size=24, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 24, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(24)
        self.conv2 = nn.Conv2d(24, 24, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, 24)
        self.conv3 = nn.Conv2d(24, 48, 3, padding=1)
        self.norm3 = nn.BatchNorm2d(48)
        self.fc = nn.Linear(48 * 8 * 8, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)), inplace=True)
        x = F.max_pool2d(F.silu(self.norm2(self.conv2(x))), 2)
        x = F.max_pool2d(F.relu(self.norm3(self.conv3(x))), 2)
        return self.fc(F.dropout(x.flatten(1), 0.2, self.training))


net = Net().train()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
for images_b, labels_b in loader:
    loss = F.cross_entropy(net(images_b), labels_b)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("final loss", float(loss))
""",
    "tied_lm": """\
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(2)
VOCAB, DIM, T = 2000, 128, 32
tokens = torch.randint(0, VOCAB, (128, T + 1))
loader = DataLoader(tokens, batch_size=16)


class TiedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.zeros(1, T, DIM))
        self.block = nn.TransformerEncoderLayer(DIM, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, VOCAB, bias=False)
        self.out.weight = self.embed.weight  # tied
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, ids):
        h = self.embed(ids) * DIM**-0.5 + self.pos
        h = self.block(h, src_mask=self.mask, is_causal=True)
        return self.out(self.norm(h))


lm = TiedLM()
optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-4)
for batch in loader:
    inputs, targets = batch[:, :-1], batch[:, 1:]
    logits = lm(inputs)
    loss = nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(f"perplexity {loss.exp().item():.1f}")
""",
    "view_buffers": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)


class Lookup(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        table = torch.randn(8192, dim)  # one 4 MB storage behind three buffers
        self.register_buffer("table", table)
        self.register_buffer("head_rows", table[:1024])
        self.register_buffer("every_other", table[1::2, : dim // 2])
        self.register_buffer("offset", torch.linspace(-1, 1, dim).expand(4096, dim))
        self.flat = nn.Parameter(torch.randn(2 * dim * dim + dim) * 0.05)  # weights packed in one vector
        self.dim = dim
        self.out = nn.Linear(dim, 1)

    def forward(self, idx):
        w1, w2, bias = self.flat.split([self.dim**2, self.dim**2, self.dim])
        h = self.table[idx] + self.head_rows[idx % 1024] + self.offset[: idx.shape[0]].unsqueeze(1)
        h = torch.tanh(h @ w1.view(self.dim, self.dim) + bias)
        left, right = h.chunk(2, dim=-1)
        h = torch.cat([left * self.every_other[idx % 4096], right], dim=-1)
        h = torch.relu(h @ w2.view(self.dim, self.dim).t())
        return self.out(h).squeeze(-1)


idx = torch.randint(0, 8192, (512, 24))
loader = DataLoader(TensorDataset(idx, torch.randn(512, 24)), batch_size=64)
model = Lookup()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for rows, target in loader:
    opt.zero_grad()
    loss = (model(rows) - target).pow(2).mean()
    loss.backward()
    opt.step()
print(loss.item())
""",
    "frozen_backbone": """\
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
x = torch.randn(256, 3, 48, 48)
y = torch.randint(0, 5, (256,))
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True)

backbone = nn.Sequential(
    nn.Conv2d(3, 32, 4, stride=4),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64 * 6 * 6, 512),
    nn.ReLU(),
)
backbone.requires_grad_(False)
backbone.eval()
head = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 5))
model = nn.Sequential(backbone, head)
optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)

for xb, yb in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(xb), yb, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(trainable, "trainable, loss", loss.item())
""",
    "compiled_aot_eager": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


net = nn.Sequential(nn.Linear(64, 256), Residual(256), Residual(256), nn.Linear(256, 8))
compiled = torch.compile(net, backend="aot_eager")
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
data = TensorDataset(torch.randn(2048, 64), torch.randn(2048, 8))
loader = DataLoader(data, batch_size=256)

for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(compiled(x), y)
    loss.backward()
    optimizer.step()
print("loss", loss.item())
""",
    "checkpoint_blocks": """\
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.SiLU(), nn.Linear(3 * dim, dim))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.net(x))


class Stack(nn.Module):
    def __init__(self, dim=96, depth=6):
        super().__init__()
        self.stem = nn.Linear(16, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(dim=1))


model = Stack()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(256, 24, 16), torch.randint(0, 4, (256,))), batch_size=32)
for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(step + 1, "steps", loss.item())
""",
    "checkpoint_reentrant": """\
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)


def conv_block(channels):
    return nn.Sequential(
        nn.Conv1d(channels, channels, 5, padding=2),
        nn.GroupNorm(4, channels),
        nn.ReLU(),
        nn.Conv1d(channels, channels, 1),
        nn.ReLU(),
    )


stem = nn.Conv1d(1, 32, 7, padding=3)
blocks = nn.ModuleList([conv_block(32) for _ in range(4)])
head = nn.Linear(32, 3)
params = [*stem.parameters(), *blocks.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, nesterov=True)

signals = torch.randn(128, 1, 512)
loader = DataLoader(TensorDataset(signals, signals.std(dim=(1, 2)).mul(3).long() % 3), batch_size=16)
for x, y in loader:
    optimizer.zero_grad()
    h = stem(x)
    for block in blocks:
        h = h + checkpoint(block, h, use_reentrant=True)
    loss = nn.functional.cross_entropy(head(h.mean(-1)), y)
    loss.backward()
    optimizer.step()
print("loss", loss.item())
""",
    "lightning_regressor": """\
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(8)
torch.manual_seed(8)


class Regressor(L.LightningModule):
    def __init__(self, width=384):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(100, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.out = nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.huber_loss(self.out(self.net(x)), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


x = torch.randn(2048, 100)
y = x[:, :5].sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=256)
trainer = L.Trainer(
    max_steps=8,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    gradient_clip_val=1.0,
)
model = Regressor()
trainer.fit(model, loader)
print(trainer.callback_metrics["train_loss"].item())
""",
    "hf_bert_trainer": """\
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(9)


class Sentences(Dataset):
    def __init__(self, n, length=32):
        self.ids = torch.randint(5, 1000, (n, length))
        self.labels = self.ids[:, 0] % 3

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self.labels[i]}


config = BertConfig(
    vocab_size=1000,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=64,
    num_labels=3,
)
model = BertForSequenceClassification(config)
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=8,
    per_device_train_batch_size=16,
    learning_rate=5e-4,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    seed=9,
)
trainer = Trainer(model=model, args=args, train_dataset=Sentences(128))
result = trainer.train()
print(result.global_step, round(result.training_loss, 4))
""",
    "gpt2_accumulation": """\
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(10)
config = GPT2Config(vocab_size=800, n_positions=48, n_embd=96, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, amsgrad=True)
loader = DataLoader(torch.randint(0, 800, (128, 32)), batch_size=4, shuffle=True)

accumulate = 4
for i, ids in enumerate(loader):
    out = model(input_ids=ids, labels=ids)
    loss = out.loss / accumulate
    loss.backward()
    if (i + 1) % accumulate == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {(i + 1) // accumulate}: {out.loss.item():.4f}")
""",
    "bf16_autocast": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(11)
model = nn.Sequential(
    nn.Linear(256, 384),
    nn.LayerNorm(384),
    nn.ReLU(),
    nn.Linear(384, 384),
    nn.LayerNorm(384),
    nn.ReLU(),
    nn.Linear(384, 20),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(torch.randn(1536, 256), torch.randint(0, 20, (1536,))), batch_size=192)

losses = []
for x, y in loader:
    optimizer.zero_grad(set_to_none=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses[0], "->", losses[-1], logits.dtype)
""",
    "gan_two_optimizers": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(12)
latent = 64
G = nn.Sequential(
    nn.Linear(latent, 256),
    nn.ReLU(),
    nn.BatchNorm1d(256),
    nn.Linear(256, 512),
    nn.ReLU(),
    nn.Linear(512, 784),
    nn.Tanh(),
)
D = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(256, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.RMSprop(D.parameters(), lr=1e-4)
bce = nn.BCEWithLogitsLoss()
loader = DataLoader(TensorDataset(torch.rand(512, 784) * 2 - 1), batch_size=64)

for (real,) in loader:
    n = real.size(0)
    fake = G(torch.randn(n, latent))

    opt_d.zero_grad()
    d_loss = bce(D(real), torch.ones(n, 1)) + bce(D(fake.detach()), torch.zeros(n, 1))
    d_loss.backward()
    opt_d.step()

    opt_g.zero_grad()
    g_loss = bce(D(fake), torch.ones(n, 1))
    g_loss.backward()
    opt_g.step()
print(f"D {d_loss.item():.3f} G {g_loss.item():.3f}")
""",
    "lstm_then_gru": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(13)
x = torch.randn(128, 24, 20).cumsum(1)
y = x[:, -1].argmax(-1)
loader = DataLoader(TensorDataset(x, y), batch_size=32)


class Tagger(nn.Module):
    def __init__(self, cell, hidden=96):
        super().__init__()
        self.rnn = cell(20, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(hidden, 20)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


def train(model, epochs):
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for xb, yb in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            opt.step()
    return loss.item()


lstm, gru = Tagger(nn.LSTM), Tagger(nn.GRU)
print("lstm", train(lstm, 2))
print("gru", train(gru, 2))
""",
    "custom_function": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(14)


class SoftGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        gate = torch.sigmoid(scale * x)
        ctx.save_for_backward(x, scale, gate)
        ctx.mask = x.abs() < 6.0  # kept on ctx, outside save_for_backward
        return x * gate

    @staticmethod
    def backward(ctx, grad_out):
        x, scale, gate = ctx.saved_tensors
        slope = gate * (1 - gate)
        grad_x = grad_out * torch.where(ctx.mask, gate + x * scale * slope, gate)
        grad_scale = (grad_out * x * x * slope).sum(0)
        return grad_x, grad_scale


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return SoftGate.apply(self.linear(x), self.scale)


model = nn.Sequential(nn.Linear(40, 320), Gated(320), Gated(320), Gated(320), nn.Linear(320, 2))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(1600, 40), torch.randint(0, 2, (1600,))), batch_size=200)
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
print("loss", loss.item())
""",
    "sparse_embedding": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(15)
n_items, dim = 30_000, 48


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.EmbeddingBag(n_items, dim, mode="mean", sparse=True)
        self.tower = nn.Sequential(nn.Linear(dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, bags):
        return self.tower(self.items(bags)).squeeze(1)


model = Recommender()
sparse_opt = torch.optim.SparseAdam(model.items.parameters(), lr=1e-2)
dense_opt = torch.optim.Adam(model.tower.parameters(), lr=1e-3)
bags = torch.randint(0, n_items, (4096, 20))
clicks = torch.randint(0, 2, (4096,)).float()

for bag, click in DataLoader(TensorDataset(bags, clicks), batch_size=512):
    sparse_opt.zero_grad()
    dense_opt.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(bag), click)
    loss.backward()
    sparse_opt.step()
    dense_opt.step()
print(loss.item(), model.items.weight.grad.is_sparse)
""",
    "fft_complex": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(16)


class SpectralConv(nn.Module):
    def __init__(self, channels, modes):
        super().__init__()
        self.modes = modes
        weight = torch.randn(channels, channels, modes, dtype=torch.cfloat) / channels
        self.weight = nn.Parameter(weight)
        self.skip = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], self.weight)
        return torch.nn.functional.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.skip(x))


model = nn.Sequential(
    nn.Conv1d(1, 24, 1), SpectralConv(24, 32), SpectralConv(24, 32), SpectralConv(24, 32), nn.Conv1d(24, 1, 1)
)
u0 = torch.randn(256, 1, 256)
u1 = torch.roll(u0, 7, dims=-1) * 0.9
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for a, b in DataLoader(TensorDataset(u0, u1), batch_size=32):
    optimizer.zero_grad()
    error = torch.fft.rfft(model(a) - b, norm="ortho")
    loss = error.abs().square().mean()
    loss.backward()
    optimizer.step()
print(loss.item())
""",
    "slicing_kept_loss": """\
import torch
from torch import nn

torch.manual_seed(17)
X = torch.randn(1200, 300)
Y = (X @ torch.randn(300, 1)).tanh()
model = nn.Sequential(nn.Linear(300, 400), nn.ELU(), nn.Linear(400, 400), nn.ELU(), nn.Linear(400, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9, centered=True)

bs = 150
perm = torch.randperm(len(X))
best = None
history = []
for start in range(0, len(X), bs):
    rows = perm[start : start + bs]
    xb, yb = X[rows], Y[rows]
    loss = nn.functional.mse_loss(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss)  # not .item(): graph nodes stay, their saved tensors are gone
    probe = nn.functional.mse_loss(model(X[:bs]), Y[:bs])  # never backpropagated, so its graph is whole
    if best is None or probe < best:
        best = probe
last_loss = loss
print(len(history), last_loss.item(), best.item())
""",
    "ema_copy": """\
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(18)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(16 * 14 * 14, 192),
    nn.ReLU(),
    nn.Linear(192, 10),
)
ema = copy.deepcopy(model).eval()
for p in ema.parameters():
    p.requires_grad_(False)


@torch.no_grad()
def update_ema(decay=0.99):
    for slow, fast in zip(ema.parameters(), model.parameters()):
        slow.lerp_(fast, 1 - decay)
    for slow, fast in zip(ema.buffers(), model.buffers()):
        slow.copy_(fast)


opt = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.rand(512, 1, 28, 28), torch.randint(0, 10, (512,))), batch_size=64)
for x, y in loader:
    with torch.no_grad():
        teacher = ema(x).softmax(-1)
    logits = model(x)
    loss = nn.functional.cross_entropy(logits, y) + 0.1 * nn.functional.kl_div(
        logits.log_softmax(-1), teacher, reduction="batchmean"
    )
    opt.zero_grad()
    loss.backward()
    opt.step()
    update_ema()
print("loss", loss.item())
""",
    "per_sample_grads": """\
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(19)
model = nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def sample_loss(params, x, y):
    logits = functional_call(model, params, (x.unsqueeze(0),))
    return nn.functional.cross_entropy(logits, y.unsqueeze(0))


per_sample = vmap(grad(sample_loss), in_dims=(None, 0, 0))
loader = DataLoader(TensorDataset(torch.randn(256, 128), torch.randint(0, 6, (256,))), batch_size=32)
for x, y in loader:
    params = {name: p.detach() for name, p in model.named_parameters()}
    grads = per_sample(params, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    clip = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for name, p in model.named_parameters():
        total = torch.einsum("n...,n->...", grads[name], clip)
        p.grad = (total + 0.5 * torch.randn_like(total)) / len(x)
    optimizer.step()
    optimizer.zero_grad()
print("mean gradient norm", norms.mean().item())
""",
}

FITS: dict[str, str] = {
    "ray_mlp": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

batch_size = 64
torch.manual_seed(0)


class Rays(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, i):
        t = torch.linspace(0, 1, 64)
        angle = torch.tensor([1.0, 2.0, 4.0]) * (i % 997) * 0.01
        return torch.sin(t[:, None] * angle + angle), torch.cos(angle)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.nn.functional.gelu(self.linear(self.norm(x)))


width = 128
model = nn.Sequential(nn.Linear(3, width), *[Block(width) for _ in range(14)], nn.Linear(width, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
loader = DataLoader(Rays(), batch_size=batch_size)
for step, (points, colour) in enumerate(loader):
    if step == 12:
        break
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(points).mean(dim=1), colour)
    loss.backward()
    optimizer.step()
print("loss", loss.item())
""",
    "resnet_64px": """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

batch_size = 32
torch.manual_seed(1)
pool = torch.rand(64, 3, 64, 64)


class Pictures(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, i):
        return pool[i % 64], i % 10


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.norm2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(h)))


net = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2, padding=1),
    nn.Sequential(*[Block(16) for _ in range(5)]),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 10),
)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step, (x, y) in zip(range(12), DataLoader(Pictures(), batch_size=batch_size)):
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
""",
    "transformer_encoder": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

batch_size = 48
torch.manual_seed(2)


class Sequences(Dataset):
    def __init__(self):
        self.ids = torch.randint(0, 500, (4096,))

    def __len__(self):
        return 10_000_000

    def __getitem__(self, i):
        start = i * 31 % 4000
        return self.ids[start : start + 64], i % 4


class Classifier(nn.Module):
    def __init__(self, dim=64, depth=5):
        super().__init__()
        self.embed = nn.Embedding(500, dim)
        self.pos = nn.Parameter(torch.randn(64, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, dim_feedforward=192, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(dim, 4)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids) + self.pos).mean(1))


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Sequences(), batch_size=batch_size)
for step, (ids, label) in zip(range(12), loader):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(ids), label)
    loss.backward()
    optimizer.step()
print("loss", loss.item())
""",
    "stacked_lstm": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

batch_size = 64
torch.manual_seed(3)


class Waves(Dataset):
    time = torch.arange(64) * 0.1

    def __len__(self):
        return 10_000_000

    def __getitem__(self, i):
        phase = (i % 1009) * 0.05
        wave = torch.stack([torch.sin(self.time * k + phase) for k in (1, 2, 3, 5)], dim=-1)
        return wave[:-1], wave[1:, 0]


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x):
        return self.norm(x + self.lstm(x)[0])


class Forecaster(nn.Module):
    def __init__(self, hidden=80, depth=4):
        super().__init__()
        self.inp = nn.Linear(4, hidden)
        self.layers = nn.ModuleList([Layer(hidden) for _ in range(depth)])
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x).squeeze(-1)


model = Forecaster()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step, (x, y) in enumerate(DataLoader(Waves(), batch_size=batch_size)):
    if step >= 12:
        break
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
""",
    "small_unet": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

batch_size = 16
torch.manual_seed(4)
scenes = torch.rand(128, 1, 48, 48)


class Scenes(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, i):
        image = scenes[i % 128]
        return image, (image > 0.5).float()


def double_conv(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1),
        nn.GroupNorm(2, cout),
        nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.mid = double_conv(1, 8), double_conv(8, 16), double_conv(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.dec2, self.dec1 = double_conv(32, 16), double_conv(16, 8)
        self.out = nn.Conv2d(8, 1, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.mid(self.pool(b))
        b = self.dec2(torch.cat([b, self.up2(c)], dim=1))
        return self.out(self.dec1(torch.cat([a, self.up1(b)], dim=1)))


net = UNet()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step, (x, mask) in zip(range(12), DataLoader(Scenes(), batch_size=batch_size)):
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(net(x), mask)
    loss.backward()
    optimizer.step()
print("loss", loss.item())
""",
    "plain_attention_128": """\
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

batch_size = 32
torch.manual_seed(5)
bank = torch.randn(2048, 12)


class Windows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, i):
        start = i * 17 % (2048 - 128)
        window = bank[start : start + 128]
        return window, window.mean(0)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)).softmax(dim=-1)
        return x + self.proj((scores @ v).transpose(1, 2).reshape(b, t, d))


dim = 48
embed, head = nn.Linear(12, dim), nn.Linear(dim, 12)
blocks = nn.ModuleList([Attention(dim, heads=3) for _ in range(4)])
model = nn.ModuleDict({"embed": embed, "blocks": blocks, "head": head})
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, (x, y) in zip(range(12), DataLoader(Windows(), batch_size=batch_size)):
    h = embed(x)
    for block in blocks:
        h = block(h)
    loss = nn.functional.mse_loss(head(h[:, -1]), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
""",
    "conv_autoencoder": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

batch_size = 64
torch.manual_seed(6)
base = torch.randn(4096).cumsum(0) / 30


class Signals(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, i):
        start = i * 13 % 3072
        return base[start : start + 1024].unsqueeze(0)


def down(cin, cout):
    return nn.Sequential(nn.Conv1d(cin, cout, 5, stride=2, padding=2), nn.BatchNorm1d(cout), nn.LeakyReLU(0.1))


def up(cin, cout):
    return nn.Sequential(nn.ConvTranspose1d(cin, cout, 4, stride=2, padding=1), nn.BatchNorm1d(cout), nn.SiLU())


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        stem = nn.Conv1d(1, 16, 5, padding=2)
        self.encoder = nn.Sequential(stem, nn.Tanh(), down(16, 24), down(24, 32), down(32, 48))
        self.decoder = nn.Sequential(up(48, 32), up(32, 24), up(24, 16), nn.Conv1d(16, 1, 5, padding=2))

    def forward(self, x):
        return self.decoder(self.encoder(x))


model = AutoEncoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, signal in enumerate(DataLoader(Signals(), batch_size=batch_size)):
    if step == 12:
        break
    noisy = signal + 0.05 * torch.randn_like(signal)
    loss = nn.functional.l1_loss(model(noisy), signal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
""",
    "tied_lm_logits": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

batch_size = 24
torch.manual_seed(7)
VOCAB, T, DIM = 6000, 32, 64


class Text(Dataset):
    def __init__(self):
        self.tokens = torch.randint(0, VOCAB, (20_000,))

    def __len__(self):
        return 10_000_000

    def __getitem__(self, i):
        start = i * 7 % (20_000 - T - 1)
        return self.tokens[start : start + T], self.tokens[start + 1 : start + T + 1]


class CausalConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3)

    def forward(self, x):
        h = nn.functional.pad(self.norm(x).transpose(1, 2), (2, 0))
        return x + torch.relu(self.conv(h)).transpose(1, 2)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.layers = nn.ModuleList([CausalConv() for _ in range(6)])
        self.out = nn.Linear(DIM, VOCAB, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        return self.out(h)


lm = LM()
opt = torch.optim.SGD(lm.parameters(), lr=0.1)
for step, (ids, target) in zip(range(12), DataLoader(Text(), batch_size=batch_size)):
    loss = nn.functional.cross_entropy(lm(ids).flatten(0, 1), target.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
""",
    "bf16_mixer": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

batch_size = 64
torch.manual_seed(8)
patches = torch.randn(256, 64, 48)


class Patches(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, i):
        return patches[i % 256], i % 8


class Mixer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.Sequential(nn.Linear(tokens, tokens), nn.GELU(), nn.Linear(tokens, tokens))
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x):
        x = x + self.mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        self.embed = nn.Linear(48, dim)
        self.blocks = nn.Sequential(*[Mixer(64, dim) for _ in range(9)])
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)).mean(1))


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, (x, y) in zip(range(12), DataLoader(Patches(), batch_size=batch_size)):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
print("loss", loss.item())
""",
    "checkpointed_stack": """\
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

batch_size = 32
torch.manual_seed(9)
series = torch.randn(8192, 8)


class Chunks(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, i):
        start = i * 29 % (8192 - 129)
        return series[start : start + 128], series[start + 128]


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.a = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        h = self.norm(x)
        return x + self.out(nn.functional.silu(self.a(h)) * torch.tanh(h))


class Stack(nn.Module):
    def __init__(self, dim=64, depth=24):
        super().__init__()
        self.inp = nn.Linear(8, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.out = nn.Linear(dim, 8)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x.mean(1))


model = Stack()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(DataLoader(Chunks(), batch_size=batch_size)):
    if step == 12:
        break
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
print("loss", loss.item())
""",
}
