# /// cell
# because = "The model is trained in bfloat16 on a CPU without bf16 instructions (AVX2 only): all products are emulated; float32 is faster."
# thread = "https://github.com/pytorch/pytorch/issues/146508"
# line = "model = model.to(torch.bfloat16)"
# callee = "torch.nn.functional.linear (aten::addmm in bf16)"
# faster = 4.63
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
spectra = torch.randn(8000, 128)
kinds = spectra[:, :10].argmax(1)
# %% the training cell
model = model.to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
dtype = next(model.parameters()).dtype
for step in range(120):
    idx = torch.randint(8000, (128,))
    logits = model(spectra[idx].to(dtype))
    loss = nn.functional.cross_entropy(logits.float(), kinds[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
