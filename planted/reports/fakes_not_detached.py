# /// cell
# because = "The discriminator's loss on the fakes is propagated back through the generator, too, because fake isn't detached; those gradients are thrown away."
# thread = "https://github.com/pytorch/examples/issues/116"
# line = "err_fake.backward(retain_graph=True)"
# callee = "autograd backward through netG"
# faster = 1.36
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
netG = nn.Sequential(nn.ConvTranspose2d(64, 128, 4, 1, 0), nn.BatchNorm2d(128), nn.ReLU(),
                     nn.ConvTranspose2d(128, 96, 4, 2, 1), nn.BatchNorm2d(96), nn.ReLU(),
                     nn.Conv2d(96, 96, 3, 1, 1), nn.ReLU(),
                     nn.ConvTranspose2d(96, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
                     nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(),
                     nn.ConvTranspose2d(64, 1, 4, 2, 1), nn.Tanh())
netD = nn.Sequential(nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64 * 64, 1), nn.Flatten(0))
optG, optD = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999)), torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
reals = torch.tanh(torch.randn(512, 1, 8, 8)).repeat_interleave(4, 2).repeat_interleave(4, 3)
# %% the training cell
ones, zeros = torch.ones(8), torch.zeros(8)
for i in range(50):
    netD.zero_grad()
    err_real = criterion(netD(reals[torch.randint(512, (8,))]), ones)
    err_real.backward()
    fake = netG(torch.randn(8, 64, 1, 1))
    err_fake = criterion(netD(fake), zeros)
    err_fake.backward(retain_graph=True)
    optD.step()

    netG.zero_grad()
    err_g = criterion(netD(fake), ones)
    err_g.backward()
    optG.step()
    if i % 10 == 0:
        print(i, (err_real + err_fake).item(), err_g.item())
