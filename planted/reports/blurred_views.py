# /// cell
# cohort = "second"
# because = "The Gaussian blur of the augmentation is one depthwise convolution with a full 31 x 31 kernel; the Gaussian is separable, two passes with 31 x 1 and 1 x 31 give the same."
# thread = "https://github.com/pytorch/vision/issues/7413"
# line = "return F.conv2d(F.pad(x, (p, p, p, p), mode=\"reflect\"), k2.expand(x.shape[1], 1, -1, -1), groups=x.shape[1])"
# callee = "torch.nn.functional.conv2d"
# faster = 1.44
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)


class RandomBlur:
    def __init__(self, kernel_size=31, sigma=(0.5, 4.0)):
        self.kernel_size, self.sigma = kernel_size, sigma

    def kernel(self, sigma):
        t = torch.arange(self.kernel_size) - self.kernel_size // 2
        k = torch.exp(-t.float() ** 2 / (2 * sigma ** 2))
        return k / k.sum()

    def __call__(self, x):
        k = self.kernel(torch.empty(1).uniform_(*self.sigma))
        k2 = torch.outer(k, k)
        p = self.kernel_size // 2
        return F.conv2d(F.pad(x, (p, p, p, p), mode="reflect"), k2.expand(x.shape[1], 1, -1, -1), groups=x.shape[1])


class Augment:
    def __init__(self):
        self.blur = RandomBlur()

    def __call__(self, x):
        if torch.rand(()) < 0.5:
            x = x.flip(-1)
        x = x * torch.empty(len(x), 1, 1, 1).uniform_(0.7, 1.3)
        return self.blur(x)


encoder = nn.Sequential(nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
                        nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten())
projector = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48))
predictor = nn.Sequential(nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 48))
model = nn.Sequential(encoder, projector)
photos = F.interpolate(torch.rand(400, 3, 9, 9), size=64, mode="bilinear")
augment = Augment()
optimizer = torch.optim.SGD([*model.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9, weight_decay=1e-4)


def D(p, z):
    return -F.cosine_similarity(p, z.detach(), dim=1).mean()


# %% the training cell
for step in range(90):
    x = photos[torch.randint(0, 400, (24,))]
    x1, x2 = augment(x), augment(x)
    z1, z2 = model(x1), model(x2)
    loss = 0.5 * D(predictor(z1), z2) + 0.5 * D(predictor(z2), z1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, f"{loss.item():.4f}")
