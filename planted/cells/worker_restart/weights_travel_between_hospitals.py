# /// cell
# causes = ["worker_restart"]
# because = "at each stop two worker processes are started for six batches"
# batch = 20
# steps = 48
# warmup = 6
# profiled = 72
# cohort = "2026-11-23"
#
# [[cure]]
# old = '''
#     def loader(self):
#         return DataLoader(self.data, batch_size=20, shuffle=True, num_workers=2)
# '''
# new = '''
#     def loader(self):
#         if not hasattr(self, "_loader"):
#             self._loader = DataLoader(self.data, 20, shuffle=True, num_workers=2, persistent_workers=True)
#         return self._loader
# '''
# ///
"""
Cyclic weight transfer (simulation on one machine)
--------------------------------------------------
Patient data stay where they are; the model travels: hospital A -> B -> C -> A -> ...
At each stop it sees the local data once. Outcome: readmission within 30 days from 24 labs + vitals.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

N_FEATURES = 24


class Hospital:
    def __init__(self, name, patients, shift):
        self.name = name
        x = torch.randn(patients, N_FEATURES) + shift
        risk = x[:, :6].sum(1) * 0.4 - shift + 0.5 * torch.randn(patients)
        self.data = TensorDataset(x, (risk > 0.8).float())
        self.losses = []

    def loader(self):
        return DataLoader(self.data, batch_size=20, shuffle=True, num_workers=2)

    def visit(self, model, optimizer):
        for x, readmitted in self.loader():
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), readmitted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item())


torch.manual_seed(30)
model = nn.Sequential(
    nn.Linear(N_FEATURES, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
)

# %% the training cell
hospitals = [Hospital("A", 120, 0.0), Hospital("B", 120, 0.3), Hospital("C", 120, -0.2)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for cycle in range(6):
    for hospital in hospitals:
        hospital.visit(model, optimizer)
    print("cycle", cycle, {h.name: round(sum(h.losses[-6:]) / 6, 3) for h in hospitals})
