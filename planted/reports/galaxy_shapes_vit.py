# /// cell
# cohort = "third"
# because = "healthy"
# ///
import torch
from transformers import ViTConfig, ViTForImageClassification, get_cosine_schedule_with_warmup

torch.manual_seed(0)
STEPS = 40
yy, xx = torch.meshgrid(torch.linspace(-1, 1, 48), torch.linspace(-1, 1, 48), indexing="ij")
shapes = torch.arange(600) % 3
angle = torch.rand(600, 1, 1) * 6.28
radius, theta = (xx ** 2 + yy ** 2).sqrt(), torch.atan2(yy, xx)
arms = torch.stack([torch.ones_like(xx), 1 + torch.cos(2 * theta), 1 + torch.cos(2 * theta - 8 * radius)])[shapes]
turned = arms * (1 + 0.2 * torch.cos(theta - angle))
galaxies = (turned * torch.exp(-2.5 * radius))[:, None].repeat(1, 3, 1, 1) + 0.15 * torch.randn(600, 3, 48, 48)

config = ViTConfig(image_size=48, patch_size=6, hidden_size=192, num_hidden_layers=4, num_attention_heads=3,
                   intermediate_size=768, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
model = ViTForImageClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.05)
scheduler = get_cosine_schedule_with_warmup(optimizer, 10, STEPS)
order = torch.cat([torch.randperm(600) for _ in range(5)])

# %% the training cell
for step in range(40):
    rows = order[step * 32:(step + 1) * 32]
    loss = model(pixel_values=galaxies[rows], labels=shapes[rows]).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print("last", loss.item())
