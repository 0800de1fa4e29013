# /// cell
# because = "The Gram matrices of the fixed style image are recomputed by a pass through the feature network in every iteration."
# thread = "https://github.com/ProofByConstruction/texture-networks/issues/5"
# line = "style_grams = [gram(f) for f in features(style)]"
# callee = "features (conv2d)"
# faster = 1.38
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()),
                        nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
                        nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU())])
blocks.requires_grad_(False)


def features(x):
    maps = []
    for block in blocks:
        x = block(x)
        maps.append(x)
    return maps


def gram(f):
    b, c, h, w = f.shape
    f = f.view(b, c, h * w)
    return f @ f.transpose(1, 2) / (c * h * w)


style, content = torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)
content_map = features(content)[-1]
picture = content.clone().requires_grad_()
optimizer = torch.optim.Adam([picture], lr=0.02)
# %% the training cell
for it in range(100):
    maps = features(picture)
    style_grams = [gram(f) for f in features(style)]
    style_loss = sum((gram(f) - g).pow(2).sum() for f, g in zip(maps, style_grams))
    content_loss = (maps[-1] - content_map).pow(2).mean()
    loss = content_loss + 1e3 * style_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 20 == 0:
        print(it, loss.item())
