# /// cell
# causes = ["slow_collate"]
# because = "the collate function makes Python lists of NumPy spectra, and of these, number by number, a tensor"
# batch = 32
# cohort = "2026-11-23"
#
# [[cure]]
# old = '''torch.tensor([s["flux"].tolist() for s in samples])'''
# new = '''torch.from_numpy(np.stack([s["flux"] for s in samples]))'''
# ///
"""
Taxonomic classes of asteroids (C, S, X, D, V) from reflectance spectra
=======================================================================
Simplified from the notebook that goes with the proceedings paper.
"""

import numpy as np
import torch

CLASSES = "CSXDV"
N_LAMBDA = 4096
wavelength = np.linspace(0.45, 2.45, N_LAMBDA)


def synthetic_spectrum(cls, noise, rs):
    """slope + 1 um and 2 um absorption bands; parameters roughly after DeMeo"""
    slope = {"C": 0.02, "S": 0.25, "X": 0.15, "D": 0.6, "V": 0.2}[cls]
    band1 = {"S": 0.15, "V": 0.4}.get(cls, 0.0) * np.exp(-(((wavelength - 0.95) / 0.12) ** 2))
    band2 = {"S": 0.08, "V": 0.3}.get(cls, 0.0) * np.exp(-(((wavelength - 1.95) / 0.2) ** 2))
    flux = (1 + slope * (wavelength - 0.55)) * (1 - band1 - band2)
    return (flux + noise * rs.standard_normal(N_LAMBDA)).astype(np.float32)


rs = np.random.RandomState(433)  # Eros
catalogue = []
for number in range(1500):
    cls = CLASSES[rs.randint(5)]
    catalogue.append({"number": number, "class": CLASSES.index(cls), "flux": synthetic_spectrum(cls, 0.03, rs)})


def collate(samples):
    x = torch.tensor([s["flux"].tolist() for s in samples])
    y = torch.tensor([s["class"] for s in samples])
    return x, y


class SpectralNet(torch.nn.Module):
    def __init__(self, n_classes=5):
        super().__init__()
        self.conv = torch.nn.Conv1d(1, 8, 16, stride=8)
        self.fc1 = torch.nn.Linear(8 * 511, 300)
        self.fc2 = torch.nn.Linear(300, 100)
        self.fc3 = torch.nn.Linear(100, n_classes)

    def forward(self, x):
        x = torch.relu(self.conv(x.unsqueeze(1))).flatten(1)
        x = torch.tanh(self.fc1(x))
        x = torch.tanh(self.fc2(x))
        return self.fc3(x)


# %% the training cell
torch.manual_seed(433)
net = SpectralNet()
sgd = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-4)
loader = torch.utils.data.DataLoader(catalogue, batch_size=32, shuffle=True, collate_fn=collate)
history = []
for epoch in range(4):
    for spectra, cls in loader:
        sgd.zero_grad()
        J = torch.nn.functional.cross_entropy(net(spectra), cls)
        J.backward()
        sgd.step()
        history.append(float(J))
    print(f"epoch {epoch + 1:2d}   J = {np.mean(history[-len(loader) :]):.4f}")
