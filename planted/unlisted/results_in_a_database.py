# /// cell
# because = "SQLAlchemy inserts the step's rows and commits"
# callee = "sqlalchemy"
# ///
"""Fares of a bus company; each step's errors go to a database, in a function of the notebook."""

import torch
from sqlalchemy import Column, Float, Integer, MetaData, Table, create_engine
from torch import nn

torch.manual_seed(8)
engine = create_engine("sqlite:///:memory:")
meta = MetaData()
errors = Table("errors", meta, Column("id", Integer, primary_key=True), Column("step", Integer), Column("error", Float))
meta.create_all(engine)
net = nn.Sequential(nn.Linear(80, 640), nn.ReLU(), nn.Linear(640, 320), nn.ReLU(), nn.Linear(320, 1))
optimizer = torch.optim.Adam(net.parameters())
fares, paid = torch.randn(4096, 80), torch.randn(4096, 1)


def remember(connection, step, values):
    for value in values:
        connection.execute(errors.insert().values(step=step, error=value))  # HOT


# %% the training cell
with engine.connect() as connection:
    for step in range(300):
        rows = torch.randint(4096, (128,))
        difference = net(fares[rows]) - paid[rows]
        loss = difference.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        remember(connection, step, difference.detach()[:64, 0].tolist())
