# /// cell
# because = "The memory in use is logged at every step by starting a process (ps, as the report's nvidia-smi) and waiting for it."
# thread = "https://github.com/Lightning-AI/pytorch-lightning/issues/189"
# line = "out = subprocess.run([\"ps\", \"-o\", \"rss=\", \"-p\", str(os.getpid())], capture_output=True, text=True)"
# callee = "subprocess.run"
# faster = 3.62
# ///
import os, subprocess
import torch
import torch.nn as nn

torch.manual_seed(0)


def memory_mb():
    out = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True)
    return int(out.stdout) / 1024


x_train = torch.randn(20_000, 40)
y_train = (x_train[:, :5].sum(1) > 0).long()
classifier = nn.Sequential(nn.Linear(40, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 2))
optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-3)
history = []
# %% the training cell
for step in range(400):
    idx = torch.randint(len(x_train), (128,))
    logits = classifier(x_train[idx])
    loss = nn.functional.cross_entropy(logits, y_train[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append({"step": step, "loss": loss.item(), "memory": memory_mb()})
    if step % 100 == 0:
        print(history[-1])
