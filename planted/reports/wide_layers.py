# /// cell
# because = "healthy"
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
expression = torch.randn(6000, 1000)
response = torch.tanh(expression @ torch.randn(1000, 20) / 30)
model = nn.Sequential(nn.Linear(1000, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
# %% the training cell
step = 0
for epoch in range(2):
    for idx in torch.randperm(6000).split(256):
        loss = nn.functional.mse_loss(model(expression[idx]), response[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    print(epoch, step, loss.item())
