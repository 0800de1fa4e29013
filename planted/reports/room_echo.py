# /// cell
# cohort = "second"
# because = "The room's impulse response of 1500 taps is applied with conv1d, directly in the time domain (forward and backward); multiplying the spectra (rfft / irfft) gives the same much faster."
# thread = "https://github.com/pytorch/audio/issues/2469"
# line = "wet = F.conv1d(F.pad(dry, (self.taps - 1, 0)), self.response.flip(-1))"
# callee = "torch.nn.functional.conv1d"
# faster = 6.18
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Echo(nn.Module):
    def __init__(self, taps=1500):
        super().__init__()
        self.taps = taps
        tail = torch.randn(taps) * torch.exp(-torch.arange(taps) / 400.0) * 0.05
        tail[0] = 1.0
        self.response = nn.Parameter(tail.view(1, 1, -1))

    def forward(self, dry):
        wet = F.conv1d(F.pad(dry, (self.taps - 1, 0)), self.response.flip(-1))
        return wet


class Amp(nn.Module):
    def __init__(self):
        super().__init__()
        self.drive = nn.Sequential(nn.Conv1d(1, 8, 15, padding=7), nn.Tanh(), nn.Conv1d(8, 8, 15, padding=7), nn.Tanh(), nn.Conv1d(8, 1, 1))
        self.room = Echo()

    def forward(self, x):
        return self.room(self.drive(x))


dry_tracks = torch.randn(24, 1, 3000) * 0.3
with torch.no_grad():
    torch.manual_seed(7)
    real_room = Echo()
    wet_tracks = real_room(torch.tanh(3 * dry_tracks))
torch.manual_seed(1)
amp = Amp()
optimizer = torch.optim.Adam(amp.parameters(), lr=1e-3)
# %% the training cell
for step in range(100):
    take = torch.randint(24, (4,))
    optimizer.zero_grad()
    out = amp(dry_tracks[take])
    loss = F.l1_loss(out, wet_tracks[take])
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
print("last", loss.item())
