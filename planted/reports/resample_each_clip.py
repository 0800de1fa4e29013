# /// cell
# because = "resample() rebuilds the windowed-sinc kernel (a Python loop over 160 phases) for each clip although the rates never change; the kernel is to be computed once."
# thread = "https://github.com/pytorch/audio/issues/2359"
# line = "kernel, width = sinc_kernel(orig // g, new // g)"
# callee = "sinc_kernel"
# faster = 6.87
# ///
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def sinc_kernel(orig, new, lowpass_width=6, rolloff=0.99):
    base = min(orig, new) * rolloff
    width = math.ceil(lowpass_width * orig / base)
    idx = torch.arange(-width, width + orig, dtype=torch.float64)
    kernels = []
    for i in range(new):
        t = (-i / new + idx / orig) * base
        t = t.clamp(-lowpass_width, lowpass_width) * math.pi
        window = torch.cos(t / lowpass_width / 2) ** 2
        k = torch.where(t == 0, torch.ones_like(t), torch.sin(t) / t)
        kernels.append(k * window * base / orig)
    return torch.stack(kernels).view(new, 1, -1).float(), width


def resample(wave, orig, new):
    g = math.gcd(orig, new)
    kernel, width = sinc_kernel(orig // g, new // g)
    padded = F.pad(wave[None, None], (width, width + orig // g))
    out = F.conv1d(padded, kernel, stride=orig // g)
    return out[0].t().reshape(-1)[: math.ceil(new * wave.numel() / orig)]


clips = [(torch.sin(torch.arange(22_050) * (0.01 + 0.02 * (k % 5))) + 0.1 * torch.randn(22_050), k % 5) for k in range(80)]
net = nn.Sequential(nn.Conv1d(1, 32, 80, 4), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(32, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 5))
optim = torch.optim.Adam(net.parameters(), lr=1e-3)
# %% the training cell
for step in range(60):
    picks = torch.randint(len(clips), (8,)).tolist()
    batch = torch.stack([resample(clips[i][0], 44_100, 16_000) for i in picks]).unsqueeze(1)
    target = torch.tensor([clips[i][1] for i in picks])
    optim.zero_grad()
    loss = F.cross_entropy(net(batch), target)
    loss.backward()
    optim.step()
    if step % 10 == 0:
        print(step, f"{loss.item():.3f}")
